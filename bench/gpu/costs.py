"""Constants of the model of a step (step_model.py) for several GPUs.

Sources: memory bandwidth, bfloat16 rate (dense), multiprocessors and clock come from the vendor's data sheets.
ACHIEVED_* is what a large copy and a matrix product of 8192 reach of them, measured once through torch 2.11 on an H200:
4.3 of 4.8 TB/s, 790 of 989 TFLOP/s. Times of launches and products are from sections `ceilings` and `linear_tiles`
on an H200, `chain_us` from its profile. All other constants are estimates; the benchmark's rows show which are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from worker_svc.engine.gpu.attention.tiles import Processors

ACHIEVED_BANDWIDTH, ACHIEVED_FLOPS = 4.3 / 4.8, 790 / 989
# Passes over the logits, and instructions per logit: the maximum alone; with noise; with thresholds as well.
SAMPLER = {"greedy": (1.1, 12.0), "plain": (1.2, 45.0), "filtered": (3.3, 75.0)}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU and the costs on it."""

    sheet_bandwidth: float  # bytes/s
    sheet_flops: float  # of bfloat16, dense
    processors: int
    clock_hz: float
    l2_bandwidth: float  # bytes/s
    has_pdl: bool = True  # programmatic dependent launch
    launch_us: float = 1.3  # in a graph, from the end of a short kernel to the end of the next
    pdl_launch_us: float = 0.8
    eager_us: float = 12.0  # host time of a launch without a graph
    step_gap_us: float = 15.0  # upload, deltas, download
    host_ms: float = 0.15  # a launch of a step on the host; hidden behind the previous step if that takes longer
    host_row_us: float = 0.8
    lanes: int = 128  # of a multiprocessor
    chain_us: float = 5.0  # of attention: loads that depend on each other before the first keys, about 0.6 us each
    merge_us: float = 0.1  # of a split: its arithmetic; 7 loads overlap, one alone would take 0.25 us
    arrive_us: float = 1.0  # a fenced counter, before the merge
    sum_us: float = 5.5  # a sum over ranks of one row
    exact_of_copy: float = 0.8  # attention's bandwidth with the tiles of exact mode, of a copy's
    load_us: float = 1.0  # until a weight arrives; a program of the own linear layer has a few tiles on the way
    own_product_us: float = 1.9  # of the own linear layer, beside its launch, its bytes and its arithmetic
    product_us: float = 3.0  # of cuBLAS
    most_share: float = 3.0  # of bandwidth that a program gets when the others have ended, relative to an equal share
    prefill_of_matmul: float = 0.5  # of a matrix product's rate, for attention of prompts
    sampler: dict[str, tuple[float, float]] = field(default_factory=lambda: SAMPLER)

    @property
    def bandwidth(self) -> float:
        return self.sheet_bandwidth * ACHIEVED_BANDWIDTH

    @property
    def flops(self) -> float:
        return self.sheet_flops * ACHIEVED_FLOPS

    @property
    def counts(self) -> Processors:
        """For the simulation of the work distribution."""
        return Processors(self.processors)


GPUS: dict[str, Gpu] = {
    "H200": Gpu(4.8e12, 989e12, 132, 1.98e9, 5.5e12),
    "H100": Gpu(3.35e12, 989e12, 132, 1.98e9, 5.5e12),
    "A100": Gpu(2.039e12, 312e12, 108, 1.41e9, 4.0e12, has_pdl=False),
    "L40S": Gpu(0.864e12, 362e12, 142, 2.52e9, 3.5e12, has_pdl=False),
    "B200": Gpu(8.0e12, 2250e12, 148, 1.96e9, 8.0e12),
}
