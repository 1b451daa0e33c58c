"""The simulated cluster of bench/cluster.py: small, on virtual time, the same on every machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.cluster import compare, mix, templates


def test_what_is_cached_is_found_more_often_than_by_a_router_in_front() -> None:
    workload = replace(templates(3.0), num_blocks=400)
    figures = compare(workload, ["ours", "least_requests"])
    assert figures["ours"]["hit"] > 1.2 * figures["least_requests"]["hit"]
    assert figures["ours"]["ttft_p90_s"] <= figures["least_requests"]["ttft_p90_s"]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(2, 8))])
def test_requests_end_almost_as_soon_as_with_all_work_known(seed: int) -> None:
    """In every second cluster one worker is ten times as slow as the others."""
    figures = compare(mix(seed, 10.0, num_slow=seed % 2), ["ours", "least_work"])
    assert figures["ours"]["end_mean_s"] <= 1.1 * figures["least_work"]["end_mean_s"]
    assert figures["ours"]["hit"] >= figures["least_work"]["hit"]
