"""Settings of the scheduler core."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BURST_S = 1.0
LOWEST = {
    "max_waiting": 1, "max_waiting_tokens": 1, "max_input_bytes": 0, "placement_alpha": 0, "placement_slack": 0,
    "leave_fraction": 0, "max_pending_prefill_steps": 1, "burst_s": 0, "max_step_s": 0, "changes_wait_s": 0,
    "worker_patience_s": 0, "reuse_bonus": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Policy of one scheduler. An invalid setting raises ValueError with its name."""

    max_waiting: int = 1024  # sequences that may wait before new requests are refused
    max_waiting_tokens: int = 4 << 20  # tokens of prompts and expected outputs that may wait
    max_input_bytes: int = 1 << 30  # data of inputs (images, embeddings) of all open requests
    watermark: float = 0.01  # fraction of a pool that admissions leave free, rounded down to whole blocks
    aging_s: float = 2.0  # a sequence passed over for longer reserves the workers that could run it
    max_bypass: int = 16  # sequences that may be passed over in one scan of the queue
    # uncached prompt tokens that one second of waiting offsets in queue order; inf: first come, first served
    aging_tokens_per_s: float = 1000.0
    placement_alpha: float = 3.0  # weight of a request's own uncached tokens against a worker's expected prefill
    # fraction of a prompt: if the cached tokens of workers differ by less, choose the least busy one among those with
    # about the same load
    placement_slack: float = 0.1
    leave_fraction: float = 0.3  # leave a cached prefix if recomputing it takes at most this fraction of the wait saved
    max_pending_prefill_steps: int = 2  # steps of expected prefill at which a worker accepts no more
    burst_s: float = 0.0  # longest time that a worker may decode per message; 0: one step per message
    max_step_s: float = 0.0  # longest step with prompts while rows decode; 0: as long as the worker's budget takes
    # how long an idle worker's closed rows and committed blocks wait for a step that computes something; 0: not at all
    changes_wait_s: float = 0.0
    worker_patience_s: float = 60.0  # how long a sequence waits for an eligible worker to join
    expected_output_tokens: int = 256  # initial estimate of the mean output length
    eos_token_ids: frozenset[int] = frozenset()
    reuse_bonus: float = 2.0  # extra time a block that was hit stays cached, in turnovers of its pool
    prefix_caching: bool = True  # off: requests share no blocks
    borrows_prefixes: bool = False  # on: the caller asks other schedulers for prefixes
    publishes_prefixes: bool = True  # off: there is no prefix index, and no events are collected
    root_salt: bytes = b""  # part of the root of every digest chain: model revision, dtype

    def __post_init__(self) -> None:
        for name, low in LOWEST.items():
            if not (value := getattr(self, name)) >= low:
                raise ValueError(f"{name} is {value}; must be at least {low}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}; must be from 0 to below 1")
        if not self.aging_tokens_per_s > 0:
            raise ValueError(f"aging_tokens_per_s is {self.aging_tokens_per_s}; must be above 0")
        if not self.burst_s <= MAX_BURST_S:
            raise ValueError(f"burst_s is {self.burst_s}; must be at most {MAX_BURST_S:g}")
