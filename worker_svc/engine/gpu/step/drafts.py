"""The host's half of drafts that the device proposes and verifies (kernels/drafts.py).

A step is launched before the host knows how many tokens the step before it has made of a row with drafts. Until that
step settles, the row's columns count the most that is possible:

    |<---- known, and one per step ---->|<- reserved by steps in flight ->|
    |<---------------------------- num_tokens --------------------------->|

The device begins where the row really is, which is at one of these positions. When a step settles, what did not become
a token is taken back. How many drafts a row should have follows from the steps that have settled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from prefix_index.hashing import FIRST_CONTENT_ID
from step_protocol.columns import I64, U32, Bools
from step_protocol.messages import RowOpen, StepBatch
from worker_svc.engine.gpu.kernels.drafts import HAS_DRAFT, HISTORY, IS_RIGHT, NO_TOKEN, DraftTables
from worker_svc.engine.gpu.kernels.prepare import DRAFT
from worker_svc.engine.gpu.uploads import to_device
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.speculation.draft_len import LEAST_CHANCE
from worker_svc.engine.speculation.drafts import ACCEPTANCE_WEIGHT, LEAST_USE, PATIENCE, SHARED_WEIGHT, RowDrafts
from worker_svc.engine.step import CheckedStep, RowErrors

PENDING = FIRST_CONTENT_ID - 1  # in the history: a token that the host does not know yet


class DeviceSuffixes:
    """The proposer of a device, which the host does not call."""

    name = "suffix"
    draft_s = 0.0

    def propose(self, rows: I64, counts: I64) -> list[list[int]]:
        return [[] for _ in rows]

    def close(self, row: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Verified:
    """The rows of a step that speculate, V of them."""

    rows: I64  # [V]
    lines: I64  # [V] the first sample of each
    lens: I64  # [V] tokens that it computes, and samples
    firsts: I64  # [V] the smallest position that its newest token may have
    slots: I64  # [V, n] of the positions from there on


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """What a step needs to start and to settle, of a worker that computes drafts."""

    plan: CheckedStep
    verified: Verified
    nth: I64  # [S] of each sample in its row
    has_more: Bools  # [S] a draft behind it is computed
    least_positions: I64  # [S] the smallest that the sampled token may have
    is_unknown: Bools  # [B] rows whose newest token's position is known on the device only
    wanted: U32  # [S] drafts wanted next, for the row of each sample
    is_timed: bool  # no row has a prompt

    def on_device(self, plan: CheckedStep, known: I64) -> tuple[I64, I64]:
        """The contexts and known tokens of the step, as the prepare kernel reads them."""
        if not len(self.verified.rows):
            return plan.context_lens, known
        lens = plan.ends - plan.context_lens
        nth = np.arange(len(known)) - np.repeat(plan.starts[:-1], lens)
        is_verified = np.isin(plan.token_rows, self.verified.rows)
        known = np.where(is_verified & (nth > 0), DRAFT + 1 - nth, known)
        known = np.where(np.repeat(self.is_unknown, lens) & (nth == 0), -1, known)
        return np.where(self.is_unknown, -1, plan.context_lens), known


@dataclass(frozen=True, slots=True)
class Settled:
    """A step that has ended."""

    slots: I64  # of the tokens that its rows with drafts have computed
    token_ids: I64  # the tokens
    is_token: Bools  # [S] of the samples, those that are tokens
    is_verified: Bools  # [S] those of rows with drafts
    positions: I64  # [S] sequence positions of these


class DeviceDrafts(RowDrafts):
    """Owns what the host knows of drafts. A RowPart; called by the model thread."""

    def __init__(
        self, rows: OpenRows, max_drafts: int, most_drafts: int, max_samples: int, max_tokens: int, tables: DraftTables
    ) -> None:
        """`most_drafts`: of a step."""
        super().__init__(rows, max_drafts, lambda _: DeviceSuffixes())
        self._max_samples, self._max_tokens = max_samples, max_tokens
        self._tables, self._most_in_step = tables, most_drafts
        self._reserved: I64 = np.zeros(len(rows.is_open), np.int64)  # tokens of steps in flight, the most possible
        self._budget = 0  # drafts that the step may still have
        self._ended_at = 0.0

    def open(self, item: RowOpen) -> None:
        super().open(item)
        self._reserved[item.row] = 0
        self._speculates[item.row] &= item.grammar is None  # its masks need tokens that the host does not have
        if not self._speculates[item.row]:
            return
        (history, drafts), end = self._tables, int(self._rows.num_tokens[item.row])
        positions = np.arange(max(end - HISTORY, 0), end)
        tokens = self._rows.tokens_of(item.row)[positions].astype(np.int32)  # content ids become negative: no drafts
        device = history.device
        history[item.row].index_copy_(0, to_device(positions % HISTORY, device), to_device(tokens, device))
        drafts[item.row] = -1

    # A step

    def begin(self, batch: StepBatch, errors: RowErrors) -> StepBatch:
        num_samples, num_tokens = len(batch.rows) + len(batch.fork_rows), len(batch.slot_mapping)
        self._budget = min(self._max_samples - num_samples, self._max_tokens - num_tokens, self._most_in_step)
        step = super().begin(batch, errors)
        if step.draft_lens is not None or not len(self._speculating(batch)):
            return step
        return replace(step, draft_lens=np.zeros_like(step.rows))  # positions may be unknown without drafts too

    def _speculating(self, batch: StepBatch) -> U32:
        """The rows of a step that speculate, or are in a step in flight in which they do."""
        are = (batch.rows < len(self._reserved)) & (self._reserved[np.minimum(batch.rows, len(self._reserved) - 1)] > 0)
        return batch.rows[are if batch.max_query_lens is None else are | (batch.max_query_lens > 0)]

    def _drafts_of(self, row: int, most: int) -> list[int]:
        """Places for drafts that the device has."""
        count = max(min(most, self._budget), 0)
        self._budget -= count
        return [PENDING] * count

    def begin_step(self, batch: StepBatch, plan: CheckedStep) -> StepDrafts:
        """The drafts of a step that began and was checked."""
        nth, rows = plan.nth, plan.sampling_rows
        verified = self._verified(batch, plan, nth)
        has_more = np.zeros(len(rows), np.bool_) if plan.num_after is None else plan.num_after > 0
        is_unknown = np.isin(plan.rows, verified.rows) & (self._reserved[plan.rows] > 0)
        wanted = np.zeros(len(rows), np.uint32)
        wanted[nth == 0] = self._wanted_by(rows[nth == 0])
        is_timed = not batch.opens and int(plan.starts[-1]) == len(rows)
        least = plan.sampled_positions - self._reserved[rows]
        return StepDrafts(plan, verified, nth, has_more, least, is_unknown, wanted, is_timed)

    def _verified(self, batch: StepBatch, plan: CheckedStep, nth: I64) -> Verified:
        if plan.num_after is None:
            none: I64 = np.empty(0, np.int64)
            return Verified(none, none, none, none, none.reshape(0, 0))
        lines = np.flatnonzero((nth == 0) & np.isin(plan.sampling_rows, self._speculating(batch)))
        rows, sources = plan.sampling_rows[lines], plan.sources[lines]
        contexts, ends = plan.context_lens[sources], plan.ends[sources]
        firsts = contexts - self._reserved[rows]
        width = np.arange((ends - firsts).max(initial=0))
        positions = np.minimum(firsts[:, None] + width, ends[:, None] - 1)
        slots = self._rows.expected_slots(np.repeat(rows, len(width)), positions.reshape(-1))
        return Verified(rows, lines, ends - contexts, firsts, slots.reshape(positions.shape))

    def _wanted_by(self, rows: I64) -> I64:
        """The drafts that each of these rows should have in its next step."""
        num_outputs, cost = self._outputs_per_row * len(rows), self._times.token_cost(len(rows))
        speculates = self._speculates[rows] & (self._num_missed[rows] < PATIENCE)
        if not speculates.any() or num_outputs * cost > LEAST_USE or self._times.is_stale(len(rows)):
            return np.zeros_like(rows)
        chances = self._acceptance[rows, None] ** np.arange(1, self._most + 1)
        wanted = np.where(speculates, (chances > max(num_outputs * cost, LEAST_CHANCE)).sum(1), 0)  # as `draft_len`
        return np.where(np.cumsum(wanted) <= self._max_samples - len(self._speculates), wanted, 0)

    def reserve(self, verified: Verified) -> None:
        """The step is launched."""
        self._reserved[verified.rows] += verified.lens

    # After a step

    def settle(
        self, step: StepDrafts, rows: I64, is_same: Bools, tokens: U32, statuses: I64, times: tuple[float, float]
    ) -> Settled:
        """Ends a step, of whose samples `is_same` are of rows with the history that it was launched with. `times`: its
        start and its end."""
        is_token = (statuses & NO_TOKEN) == 0
        self._learn_from(step, rows, is_same & is_token, statuses)
        self._measure(step, is_token, times[1] - max(times[0], self._ended_at))
        self._ended_at = times[1]
        return self._take_back(step.verified, is_same, is_token, tokens)

    def _take_back(self, of: Verified, is_same: Bools, is_token: Bools, tokens: U32) -> Settled:
        """Ends what the rows have reserved."""
        kept = is_same[of.lines]
        rows, lines, lens, slots = of.rows[kept], of.lines[kept], of.lens[kept], of.slots[kept]
        nth = np.arange(of.slots.shape[1])
        samples = lines[:, None] + np.minimum(nth, lens[:, None] - 1)
        exists = is_token[samples] & (nth < lens[:, None])  # [V, n]
        starts = self._rows.num_tokens[rows] - self._reserved[rows] - 1  # of the newest token
        self._rows.take_back(rows, lens - exists.sum(1))
        self._reserved[rows] -= lens
        newest = self._rows.token_ids(rows, starts)[:, None]
        computed = np.concatenate((newest, tokens[samples].astype(np.int64)), axis=1)[:, : len(nth)]
        places = np.minimum((starts - of.firsts[kept])[:, None] + nth, max(len(nth) - 1, 0))
        is_verified = np.zeros(len(is_token), np.bool_)
        for line, count in zip(of.lines.tolist(), of.lens.tolist(), strict=True):
            is_verified[line : line + count] = True
        positions = np.zeros(len(is_token), np.int64)
        positions[samples[exists]] = (starts[:, None] + 1 + nth)[exists]
        return Settled(
            np.take_along_axis(slots, places, 1)[exists], computed[exists], is_token & (is_same | ~is_verified),
            is_verified, positions,
        )  # fmt: skip

    def _learn_from(self, step: StepDrafts, rows: I64, is_token: Bools, statuses: I64) -> None:
        has_draft, is_right = (statuses & HAS_DRAFT) > 0, (statuses & IS_RIGHT) > 0
        np.add.at(self.counts.drafted, step.nth[has_draft & step.has_more], 1)
        np.add.at(self.counts.accepted, step.nth[is_right & is_token & step.has_more], 1)
        is_first = is_token & (step.nth == 0)
        self._num_missed[rows[is_first]] = np.where(has_draft[is_first], 0, self._num_missed[rows[is_first]] + 1)
        compared = is_token & has_draft & (step.has_more | (step.nth == 0))
        for nth in range(int(step.nth[compared].max(initial=-1)) + 1):
            found = compared & (step.nth == nth)  # each row once
            if found.any():
                self._learn_together(rows[found], is_right[found])

    def _learn_together(self, rows: I64, is_right: Bools) -> None:
        self._acceptance[rows] += ACCEPTANCE_WEIGHT * (is_right - self._acceptance[rows])
        weight = 1 - (1 - SHARED_WEIGHT) ** len(rows)
        self._shared_acceptance += weight * (float(is_right.mean()) - self._shared_acceptance)

    def _measure(self, step: StepDrafts, is_token: Bools, seconds: float) -> None:
        num_rows = int((step.nth == 0).sum())
        if not num_rows:
            return
        self._outputs_per_row += 0.1 * (int(is_token.sum()) / num_rows - self._outputs_per_row)
        if step.is_timed:
            self._times.observe(len(is_token), seconds)
