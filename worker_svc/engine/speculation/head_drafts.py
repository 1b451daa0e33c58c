"""Drafts from a head of the target (heads.py).

Each step of the target leaves the states of its tokens. After it, one pass of the head makes the entries of the same
positions, and of the newest token of rows that want drafts; further passes make the entries of drafts, with the head's
own states. The next step makes the entries behind the newest token again, now from the target's states:

    tokens of a row     t0 .. tn-1   tn          tn+1 ..
    the step computed   states       (sampled)
    pass of the head    entries      entry       entries of drafts, provisional

All rows have their entries made, also those without drafts: prefixes are shared. That takes no logits and little of a
layer. A row that starts behind a cached prefix does not know the state before its first position and takes 0: one entry
of many, and drafts only.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from step_protocol.columns import I64, Bools
from worker_svc.engine.backend import Backend
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.speculation.heads import Head
from worker_svc.engine.speculation.sampler import NO_TOKENS, DraftSampler, Sampled, mean_draft_s
from worker_svc.engine.step import CheckedStep, Step, StepPart


class HeadDrafts(StepPart):
    """Proposes what a head predicts. Called by the model thread."""

    def __init__(
        self,
        name: str,
        head: Head,
        backend: Backend,
        rows: OpenRows,
        pool: KVCachePool,
        *,
        dtype: torch.dtype,
        max_len: int,
    ) -> None:
        """`max_len` of a row, with drafts."""
        self.name, self._rows, self._max_len, self._pool = name, rows, max_len, pool
        self.head: Any = head  # None while the weights sleep
        head.fuse(pool)
        self._sampler = DraftSampler(backend, rows)
        self._before = torch.zeros(len(rows.is_open), head.state_width, dtype=dtype)  # the first position to compute
        self._drafted = torch.zeros_like(self._before)  # states of the newest drafts
        self._seen: tuple[CheckedStep, torch.Tensor] | None = None
        self.draft_s = 0.0

    def use(self, weights: Any) -> None:
        self.head = None if weights is None else weights.head
        if self.head is not None:
            self.head.fuse(self._pool)

    def before(self, step: Step) -> None:
        if self.head.reads_hidden:
            step.forward.hidden_tokens = np.arange(len(step.forward.token_ids))

    def computed(self, step: Step, logits: torch.Tensor) -> None:
        self._seen = step.plan, self.head.states_of(step.model)

    def close(self, row: int) -> None:
        self._before[row] = 0
        self._sampler.kind.forget(row)

    def propose(self, rows: I64, counts: I64) -> list[list[int]]:
        self._sampler.learn(rows)
        seen, self._seen = self._seen, None
        if seen is None:  # the step has failed, or had no rows
            return [[] for _ in rows]
        plan, states = seen
        wanted = np.zeros(len(self._rows.is_open), np.int64)
        wanted[rows] = np.minimum(counts, self._room(rows))
        drafting = wanted[plan.rows] > 0  # forks begin with their own first step
        first = self._follow(plan, states, drafting)
        self._keep(plan, states)
        of_drafts = plan.rows[drafting]
        drafts = self._sampler.extend(of_drafts, wanted[of_drafts], first, self._compute_drafts)
        return [drafts.get(row, []) for row in rows.tolist()]

    def _room(self, rows: I64) -> I64:
        """How many drafts the head can compute: it reads the tokens up to the one before the last draft."""
        slots = np.minimum(self._rows.table_lens[rows] * self._rows.block_size, self._max_len)
        room: I64 = np.maximum(slots - self._rows.num_tokens[rows] + 1, 0)
        return room

    def _follow(self, plan: CheckedStep, states: torch.Tensor, drafting: Bools) -> Sampled:
        """Make the entries of a step. Returns the first drafts of the rows of the plan that want some."""
        known = self._rows.num_tokens[plan.rows]  # without wrong drafts
        lens = np.where(drafting, known, np.minimum(plan.ends, known)) - plan.context_lens
        starts = np.append(0, np.cumsum(lens))
        nth = np.arange(starts[-1]) - np.repeat(starts[:-1], lens)
        before = states[torch.from_numpy(np.repeat(plan.starts[:-1], lens) + nth - 1)]
        before[torch.from_numpy(starts[:-1])] = self._before[torch.from_numpy(plan.rows)]
        return self._compute(plan.rows, plan.context_lens, lens, before, drafting)

    def _keep(self, plan: CheckedStep, states: torch.Tensor) -> None:
        """Keep the state before the position that each row computes next."""
        self._before[torch.from_numpy(plan.rows)] = states[torch.from_numpy(plan.starts[1:] - 1)]
        is_newest = plan.sampled_positions == self._rows.num_tokens[plan.sampling_rows] - 1
        rows, tokens = plan.sampling_rows[is_newest], plan.sampled_tokens[is_newest]
        self._before[torch.from_numpy(rows)] = states[torch.from_numpy(tokens)]

    def _compute_drafts(self, rows: I64, nth: int) -> Sampled:
        """The drafts after the `nth` ones of these rows."""
        if not len(rows):
            return NO_TOKENS
        started, ones = time.perf_counter(), np.ones_like(rows)
        before = self._drafted[torch.from_numpy(rows)]
        sampled = self._compute(rows, self._rows.num_tokens[rows] + nth - 1, ones, before, ones > 0)
        self.draft_s = mean_draft_s(self.draft_s, started, len(rows))
        return sampled

    def _compute(self, rows: I64, context_lens: I64, query_lens: I64, before: torch.Tensor, drafting: Bools) -> Sampled:
        """Make entries of rows, and sample what follows the last ones of the rows that want a draft."""
        batch = self._sampler.batch(rows, context_lens, query_lens, drafting)
        has_embedding = batch.token_ids < self._rows.vocab_size  # content ids have none
        logits = self.head.forward(replace(batch, token_ids=np.where(has_embedding, batch.token_ids, 0)), before)
        rows, ends = rows[drafting], (context_lens + query_lens)[drafting]
        self._drafted[torch.from_numpy(rows)] = self.head.states
        return self._sampler.sample(logits, rows, ends)
