"""The GPU benchmark keeps to its time budget, continues where it stopped, and survives failing sections."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import triton

from bench.gpu import exact_bits, model
from bench.gpu.blocks import blocks
from bench.gpu.parts import PARTS, chosen_sections
from bench.gpu.report import Report
from bench.gpu.run import END_S, make_parser
from bench.gpu.sections import Section, run_all
from tests.cpu_limit import limited

ROOT = Path(__file__).resolve().parents[2]


def fine(report):
    report.figures["found"] = 7
    report.row("fine", "a row", ok=True, ms=1.0)


def fails(report):
    raise RuntimeError(f"no device, but {report.figures['found']}")


def hangs(report):
    report.row("hangs", "before")
    signal.pause()


def dies(report):
    os._exit(3)


def takes_long(report):
    report.ends_at = 0.0
    report.row("takes_long", "first")
    report.row("takes_long", "second")


def section(function, limit_s: float = 60.0, name: str = "") -> Section:
    return Section(name or function.__name__, limit_s, f"{__name__}:{function.__name__}")


def run(report: Report, sections: list[Section], budget_s: float = 100.0) -> list[tuple]:
    run_all(sections, report, budget_s, lambda: None)
    return [(row["section"], row["name"], row["ok"]) for row in report.rows]


def test_a_failing_section_does_not_affect_the_others(tmp_path):
    report = Report(is_smoke=True)
    sections = [section(f) for f in (fine, fails, dies, takes_long)]
    sections += [section(hangs, 1.0), section(fine, 9000.0, "late"), section(fine, name="again")]
    assert run(report, sections) == [
        ("fine", "a row", True), ("fails", "failed", False), ("dies", "died", False), ("takes_long", "first", None),
        ("takes_long", "remaining rows", None), ("hangs", "before", None), ("hangs", "killed", False),
        ("late", "skipped", None), ("fine", "a row", True),
    ]  # fmt: skip
    assert report.rows[1]["note"] == "RuntimeError: no device, but 7"
    assert report.done == ["fine", "fails", "dies", "again"]
    assert report.cuts == ["takes_long", "hangs"]


def test_a_later_command_continues(tmp_path):
    first = Report(is_smoke=True)
    run(first, [section(fine, 2.0), section(hangs, 5.0)], budget_s=3.0)
    first.write(tmp_path, "gpu")
    second = Report(is_smoke=True)
    second.restore(tmp_path / "gpu.json")
    assert second.done == ["fine"]
    assert second.figures["found"] == 7
    assert second.cuts == ["hangs"]
    assert [row["name"] for row in second.rows] == ["a row", "before", "killed"]
    assert run(second, [section(fine, name="hangs")])[-1] == ("fine", "a row", True)
    assert len(second.rows) == 2  # the rows of the earlier attempt are gone


@pytest.mark.parametrize("part", PARTS)
def test_the_sections_of_a_part_fit_its_budget(part):
    starting = 10.0  # imports
    budget = make_parser().get_default("budget")
    for left_out in ("wrong", "right"):
        limits = [section.limit_s for section in PARTS[part] if section.when != left_out]
        assert sum(limits) + starting + END_S <= budget <= 600 - 30


def test_moved_blocks_pass_their_checks(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "SMOKE_SETTINGS", model.SMOKE_SETTINGS | {"kernels": "torch"})
    report = Report(is_smoke=True, scratch=tmp_path)
    blocks(report)
    verdicts = {row["name"]: row["ok"] for row in report.rows if row["ok"] is not None}
    names = ("row from moved blocks = computed, bits", "8 tokens, copies = blocks, bits")
    assert verdicts == dict.fromkeys(names, True)


def compiles(report):
    report.row("compiles", "a row")
    for name, is_hit in (("cached_kernel", True), ("late_kernel", False), ("late_kernel", False)):
        triton.knobs.compilation.listener(src=SimpleNamespace(name=name), cache_hit=is_hit, metadata={})


def names(*arguments, **fields) -> list[str]:
    return [found.name for found in chosen_sections(*arguments, **fields)]


def test_bits_are_compared(tmp_path, monkeypatch):
    """All rows with a verdict hold, in torch; a runner that samples other tokens without graphs is found."""
    monkeypatch.setattr(model, "SMOKE_SETTINGS", model.SMOKE_SETTINGS | {"kernels": "torch"})
    report = Report(is_smoke=True, scratch=tmp_path)
    exact_bits.exact_bits(report)
    verdicts = {row["name"]: row["ok"] for row in report.rows if row["ok"] is not None}
    assert verdicts == dict.fromkeys(
        ["linear: a row at every line", "attention: a query at every line", "graph = eager",
         "early starts = without", "prompt = decode at 40 tokens"], True,
    )  # fmt: skip
    exact_bits._compare(report, "other", ([1, 2], [np.ones(2), np.ones(2)]), ([1, 2], [np.ones(2), np.zeros(2)]))
    assert (report.rows[-1]["ok"], report.rows[-1]["note"]) == (False, "tokens whose log probabilities differ: [1]")


def test_all_sections_exist():
    for found in chosen_sections(None, ""):
        assert callable(found.load())
    with pytest.raises(ValueError, match="unknown section decode_step; known are compile, "):
        chosen_sections(None, "decode_step")


BLOCK = """
import importlib.util, runpy, sys
missing = {"xxhash", "redis", "uvloop"}
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name in missing else find_spec(name, *args)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def smoke(tmp_path: Path, *flags: str) -> list[str]:
    run_py = str(ROOT / "bench/gpu/run.py")
    return [sys.executable, "-c", BLOCK, run_py, "--smoke", "--out", str(tmp_path), *flags]


def test_a_smoke_run_writes_its_results_without_small_packages(tmp_path):
    only = "environment,ceilings,prefill_attention,without_early_starts"
    done = subprocess.run(limited(smoke(tmp_path, "--only", only), cpu_s=100), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == []
    assert summary["device"] == "cpu (smoke)"
    assert "without_early_starts_ms_b3_ctx30" in summary
    assert "prefill_attention" in (tmp_path / "gpu.md").read_text()
    assert "replaced for the engine's sections: xxhash" in done.stdout
