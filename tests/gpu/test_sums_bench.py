"""The benchmark of sums over ranks: its table, the limits that it finds, and a run without GPUs."""

from __future__ import annotations

import pytest

from bench.gpu.sums import COLUMNS, LIBRARY, limits, main, table_row

ROWS = {
    4096: {LIBRARY: 20.0, "one shot": 6.0, "two shot": 8.0},
    8192: {LIBRARY: 20.0, "one shot": 9.0, "two shot": 8.5},
    16384: {LIBRARY: 20.0, "one shot": 22.0, "two shot": 9.0},
    32768: {LIBRARY: 20.0},
}


def test_the_limits_are_the_last_sizes_at_which_a_method_wins():
    assert limits(ROWS).splitlines() == [
        "one shot: as fast as the library to 8192 bytes, fastest to 4096",
        "two shot: as fast as the library to 16384 bytes, fastest to 16384",
    ]
    assert limits({4096: {LIBRARY: 1.0, "one shot": 2.0}}) == "the library is the fastest at all sizes"


def test_methods_that_were_not_measured_are_marked():
    assert COLUMNS == (LIBRARY, "one shot", "two shot", "multimem")
    assert table_row(4096, ROWS[4096]) == "| 4096 | 20.0 | 6.0 | 8.0 | - |"


@pytest.mark.deep
def test_it_runs_without_gpus(capfd):
    main(["--ranks", "2", "--sizes", "4096", "8192"])
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("2 ranks, ")
    assert [line.split("|")[1].strip() for line in lines if line.startswith("|")] == ["bytes", "---", "4096", "8192"]
