"""Encoder positions: the keys and values of cross-attention at the head of a prompt.

They are a whole number of blocks. One chunk computes all of them, and a prefix hit has all of them or none
(docs/adr/0052-encoders-and-pooled-rows.md).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from scheduler_svc.core.errors import NeverFitsError
from scheduler_svc.core.sequence import Feature, SequenceGroup
from scheduler_svc.core.worker_state import WorkerPart, WorkerState


class EncoderRows(WorkerPart):
    """Which requests fit in one step of the worker. Rows need no state: the planner counts their head tokens."""

    @classmethod
    def check(cls, group: SequenceGroup, workers: Seq[WorkerState]) -> None:
        num_tokens = group.features.num_head_tokens
        limit = max(worker.capacity.max_encoder_tokens for worker in workers)
        if num_tokens > limit:
            raise NeverFitsError(
                f"the encoder input takes {num_tokens} positions; must be at most {limit}, because one step computes "
                "all of them: send less, or start the workers with a higher --max-num-batched-tokens (it must also "
                "hold a token of each other row, --max-num-seqs)",
                field="prompt",
            )

    def could_run(self, group: SequenceGroup) -> bool:
        return group.features.num_head_tokens <= self.worker.capacity.max_encoder_tokens


class EncoderPositions(Feature):
    """The first `num_head_tokens` positions of a prompt; `num_tokens` of them have no padding. 0: all of the prompt."""

    part = EncoderRows
    selects_workers = True

    def __init__(self, num_head_tokens: int, num_tokens: int = 0) -> None:
        self.num_head_tokens = num_head_tokens
        self.num_tokens = num_tokens
