"""Background work: prompts of requests at the lowest priority, such as lines of batches and copies for shadows.

They get tokens of a step last. While other rows run on the worker, they take `SLOWDOWN` of its time: each step adds
to a credit, and chunks spend it. For `QUIET_S` after that, the chunks of a step take at most as long as a decode step,
because the next request waits for the steps in flight. Then background prompts have whole steps.
"""

from __future__ import annotations

import math

import numpy as np

from request_fields.fields import LAST_PRIORITY
from scheduler_svc.core.worker_state import StepPlan, WorkerState

SLOWDOWN = 0.02
QUIET_S = 10.0


class Background:
    """How many tokens of background prompts each step of a worker may compute."""

    def __init__(self, worker: WorkerState) -> None:
        self._worker = worker
        self._credit_s = 0.0
        self._others_at = -math.inf  # when other rows ran last

    def left(self, plan: StepPlan) -> int:
        """The tokens that are left in the step."""
        if plan.background is None:
            plan.background = self._allowed(plan)
        return min(plan.budget, plan.background)

    def spend(self, count: int, plan: StepPlan) -> None:
        """A chunk of background work is planned."""
        plan.background = self.left(plan) - count
        self._credit_s = max(0.0, self._credit_s - count * (self._worker.prompt_token_s or 0.0))

    def _allowed(self, plan: StepPlan) -> int:
        worker = self._worker
        decode_s, token_s, least = worker.decode_s, worker.prompt_token_s, worker.capacity.block_size
        has_others = bool(np.count_nonzero(worker.rows.priority[worker.rows.active()] < LAST_PRIORITY))
        if has_others:
            self._others_at = plan.now
        elif plan.now - self._others_at > QUIET_S:
            return plan.budget
        count = 0  # while the times are unknown, which steps of decodes alone show
        if decode_s and token_s and has_others:
            self._credit_s = min(self._credit_s + SLOWDOWN * decode_s, max(decode_s, least * token_s))
            count = int(self._credit_s / token_s)
        elif decode_s and token_s:
            count = int(decode_s / token_s)
        is_idle = not (worker.in_flight or plan.chunks) and plan.run is None and plan.decodes is None
        return count if count >= least else least * is_idle
