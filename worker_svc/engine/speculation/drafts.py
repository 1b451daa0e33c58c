"""The drafts of open rows: proposed after each step, computed in the next one, accepted if they are what is sampled.

A token is a function of (logits, seed, sample, position), and in exact mode the logits of a position do not depend on
the step that computes it. So a step that computes drafts behind the newest token of a row gets, at each position, the
token that would be sampled there if all drafts before it are right. A draft is right if it equals the token that is
sampled before it: the output is the output without speculation.

    propose    after a step, for its rows: drafts that may follow the newest token; the answer asks for room
    begin      the next step with room: the drafts follow the tokens of the row, which computes 1 + n positions
    accept     after sampling: the tokens up to the first draft that is wrong, and the token sampled in its place

Acceptance is measured on each first draft, whether or not the step computed it: a row whose drafts are wrong computes
none, and begins again when they become right. If drafts are costly to propose, such a row has one now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from step_protocol.columns import I64, U32, Bools
from step_protocol.messages import RowOpen, StepBatch, StepOutput
from worker_svc.engine.row_part import RowPart
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.rows.tables import RowTables
from worker_svc.engine.speculation.draft_len import StepTimes, draft_len, probe_pause
from worker_svc.engine.speculation.old_answers import OldAnswers
from worker_svc.engine.speculation.suffix import SuffixIndex
from worker_svc.engine.step import CheckedStep, RowErrors

FIRST_ACCEPTANCE = 0.5  # of the first row
ACCEPTANCE_WEIGHT = 0.2  # of the newest draft in the mean of its row
SHARED_WEIGHT = 0.05  # of the newest draft in the mean of all rows
PATIENCE = 8  # steps without a draft after which a row asks for no more room
OLD_ANSWER = "old_answer"  # the name of the proposer where no row has another one
LEAST_USE = 0.95  # a step in which a draft must be as likely as this has none


class Proposer(Protocol):
    """Proposes drafts. What it keeps of a row is a function of the row's tokens."""

    name: str
    draft_s: float  # seconds that one more draft of one row takes; 0: too few to count

    def propose(self, rows: I64, counts: I64) -> list[list[int]]:
        """After each step: for each row, up to so many tokens that may follow its known tokens. Rows have their newest
        token."""

    def close(self, row: int) -> None:
        """The row is closed, or opened with other tokens."""


class SuffixProposer:
    """The indices of rows."""

    name = "suffix"
    draft_s = 0.0

    def __init__(self, rows: OpenRows) -> None:
        self._rows = rows
        self._indices: dict[int, SuffixIndex] = {}

    def propose(self, rows: I64, counts: I64) -> list[list[int]]:
        return [self._propose(row, most) for row, most in zip(rows.tolist(), counts.tolist(), strict=True)]

    def _propose(self, row: int, most: int) -> list[int]:
        index = self._indices.get(row)
        if index is None:
            index = self._indices[row] = SuffixIndex(self._rows.tokens_of(row))
        return index.propose(int(self._rows.num_tokens[row]), most)

    def close(self, row: int) -> None:
        self._indices.pop(row, None)


class DraftCounts:
    """Drafts by their position in a row's step, from 0. Read by metrics."""

    def __init__(self, proposer: str, most: int) -> None:
        self.proposer = proposer
        self.drafted: I64 = np.zeros(most, np.int64)
        self.accepted: I64 = np.zeros(most, np.int64)


class RowDrafts(RowPart):
    """Owns the drafts of the open rows. Called by the model thread."""

    def __init__(
        self,
        rows: OpenRows,
        max_drafts: int,
        make_proposer: Callable[[OpenRows], Proposer] = SuffixProposer,
        tables: RowTables | None = None,
        *,
        is_for_all: bool = True,
    ) -> None:
        """`tables`: of the features of the rows. `is_for_all`: rows without an old answer have drafts too."""
        self._rows, self._is_for_all, self._answers = rows, is_for_all, OldAnswers(rows)
        self.in_use = is_for_all or self._answers.in_use
        self._grammars = None if tables is None else tables.grammars
        states = None if tables is None else tables.states
        self._most_in_step = rows.tokens.size if states is None else states.num_drafts
        self._most = max_drafts
        self._proposer = make_proposer(rows)
        self.counts = DraftCounts(self._proposer.name if is_for_all else OLD_ANSWER, max_drafts)
        num_rows = len(rows.is_open)
        self._speculates: Bools = np.zeros(num_rows, np.bool_)
        self._acceptance = np.zeros(num_rows, np.float64)
        self._shared_acceptance = FIRST_ACCEPTANCE
        self._num_waited: I64 = np.zeros(num_rows, np.int64)  # steps since the last proposal
        self._num_missed: I64 = np.zeros(num_rows, np.int64)  # steps since the last draft
        self._wanted: I64 = np.zeros(num_rows, np.int64)
        self._drafts: dict[int, list[int]] = {}
        self._computed: dict[int, list[int]] = {}  # of the running step
        self._room = 0  # drafts that the step may still have
        self._times = StepTimes()
        self._outputs_per_row = 1.0
        rows.add_parts(self)

    # The life of a row

    def open(self, item: RowOpen) -> None:
        row = item.row
        self._forget(row)
        self._speculates[row] = item.speculates and not item.num_candidates and item.pooling is None
        if self._speculates[row]:
            self._answers.open(item)
        has_answer, shared = row in self._answers.in_use, self._shared_acceptance
        self._speculates[row] &= self._is_for_all or has_answer
        self._acceptance[row] = max(FIRST_ACCEPTANCE, shared) if has_answer else shared
        self._num_waited[row], self._num_missed[row], self._wanted[row] = 0, PATIENCE, 0

    def close(self, rows: U32) -> None:
        for row in rows[rows < len(self._speculates)].tolist():
            self._forget(row)

    def reset(self) -> None:
        for row in np.flatnonzero(self._speculates).tolist():
            self._forget(row)

    def _forget(self, row: int) -> None:
        self._speculates[row] = False
        self._drafts.pop(row, None)
        self._answers.in_use.pop(row, None)
        self._proposer.close(row)

    # A step

    def begin(self, batch: StepBatch, errors: RowErrors) -> StepBatch:
        """The step with the positions and slots of the rows that speculate. Their drafts follow their tokens."""
        self._computed, self._room = {}, self._most_in_step
        if batch.max_query_lens is None:
            return batch
        context_lens, query_lens = batch.context_lens.copy(), batch.query_lens.copy()
        slots: list[U32 | I64] = list(np.split(batch.slot_mapping, np.cumsum(query_lens)[:-1]))
        for i in np.flatnonzero(batch.max_query_lens).tolist():
            row, most, largest = (int(column[i]) for column in (batch.rows, batch.max_query_lens, context_lens))
            message = self._refusal(row, largest, most, int(slots[i][0]))
            if message is not None:
                errors.add(row, message)
                continue
            drafts = self._drafts_of(row, most - 1)
            context_lens[i], query_lens[i] = self._rows.add_drafts(row, drafts), 1 + len(drafts)
            positions = int(context_lens[i]) + np.arange(1 + len(drafts))
            slots[i] = self._rows.expected_slots(np.full(len(positions), row), positions)
            if drafts:
                self._computed[row] = drafts
        return replace(
            batch,
            context_lens=context_lens,
            query_lens=query_lens,
            slot_mapping=np.concatenate(slots).astype(np.uint32),
            draft_lens=np.where(batch.max_query_lens > 0, query_lens - 1, 0) if self._computed else None,
        )

    def _refusal(self, row: int, largest: int, most: int, slot: int) -> str | None:
        """Why the row cannot speculate in a step that has room from position `largest` on; None if it can."""
        rows = self._rows
        if row >= len(self._speculates) or not rows.is_open[row]:
            return "row is not open"
        start, end = int(rows.num_tokens[row]) - 1, largest + most
        if start > largest:
            return f"context_len is at most {largest}, but the row has {start} tokens before its newest one"
        room = int(rows.table_lens[row]) * rows.block_size
        if end > room:
            return f"{end} tokens do not fit the {room} slots of the row's table"
        expected = int(rows.expected_slots(np.array([row]), np.array([end - 1]))[0])
        if slot != expected:
            return f"slot_mapping has slot {slot} for position {end - 1}, but the row's table has slot {expected}"
        return None

    def _drafts_of(self, row: int, most: int) -> list[int]:
        drafts = self._drafts.get(row, [])[: min(most, int(self._wanted[row]), self._room)]
        if drafts and self._grammars is not None:
            drafts = drafts[: self._grammars.num_valid(row, int(self._rows.num_tokens[row]), drafts)]
        self._room -= len(drafts)
        return drafts

    def accept(self, plan: CheckedStep, num_after: I64, token_ids: U32, is_bad: Bools) -> Bools:
        """Which of the samples are tokens: of each row those up to its first wrong draft, and before a sample of bad
        logits, except the first: it fails the row.
        """
        rows, positions, has_draft = plan.sampling_rows, plan.sampled_positions, num_after > 0
        is_right = np.ones(len(rows), np.bool_)
        is_right[has_draft] = self._rows.token_ids(rows[has_draft], positions[has_draft]) == token_ids[has_draft]
        is_first = np.append(True, rows[1:] != rows[:-1])
        firsts = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
        num_wrong: I64 = np.cumsum(~is_right) - ~is_right  # before each sample
        is_token: Bools = (num_wrong == num_wrong[firsts]) & (is_first | ~is_bad)
        nth, compared = np.arange(len(rows)) - firsts, is_token & has_draft
        np.add.at(self.counts.drafted, nth[has_draft], 1)
        np.add.at(self.counts.accepted, nth[compared & is_right], 1)
        for line in np.flatnonzero(compared).tolist():
            self._learn(int(rows[line]), is_right=bool(is_right[line]))
        return is_token

    def _learn(self, row: int, *, is_right: bool) -> None:
        self._acceptance[row] += ACCEPTANCE_WEIGHT * (is_right - self._acceptance[row])
        if row not in self._answers.in_use:
            self._shared_acceptance += SHARED_WEIGHT * (is_right - self._shared_acceptance)

    # After a step

    def propose(self, batch: StepBatch, output: StepOutput, seconds: float) -> None:
        """Propose drafts for the rows that have sampled, and ask for room for them in the answer."""
        if not self._is_for_all and self._answers.rest():
            return
        rows, pause = self._choose(batch, output, seconds)
        self._propose(rows, pause)
        wanted = self._wanted[output.rows] * (self._speculates & (self._num_missed < PATIENCE))[output.rows]
        if len(rows) and wanted.any():
            output.draft_lens = wanted.astype(np.uint32)

    def _choose(self, batch: StepBatch, output: StepOutput, seconds: float) -> tuple[I64, int]:
        """The rows that may have drafts in the next step, and how long those whose drafts do not pay wait for one."""
        num_rows, none = len(output.rows), np.empty(0, np.int64)
        if not num_rows:
            return none, 0
        self._outputs_per_row += 0.1 * (len(output.token_ids) / num_rows - self._outputs_per_row)
        num_tokens = len(batch.slot_mapping)
        num_drafts = 0 if batch.draft_lens is None else int(batch.draft_lens.sum())
        if num_tokens == len(batch.rows) + num_drafts and not batch.opens:
            self._times.observe(num_tokens, seconds)
        speculating = output.rows[self._speculates[output.rows]].astype(np.int64)
        num_outputs, token_cost = self._outputs_per_row * num_rows, self._times.token_cost(num_rows)
        if num_outputs * token_cost > LEAST_USE or self._times.is_stale(num_rows) or not len(speculating):
            self._drafts.clear()
            return none, 0
        self._learn_from_others(speculating)
        draft_cost = self._proposer.draft_s / (self._times.of_rows(num_rows) or seconds)
        self._count_drafts(speculating, num_outputs, token_cost + draft_cost)
        return speculating, probe_pause(draft_cost)

    def _learn_from_others(self, rows: I64) -> None:
        """Learn from drafts that were not computed. All drafts are before the newest token now."""
        for row in rows.tolist():
            before = self._drafts.pop(row, None)
            if before and row not in self._computed:
                self._learn(row, is_right=before[0] == self._rows.newest_token(row))

    def _count_drafts(self, rows: I64, num_outputs: float, cost: float) -> None:
        for row in rows.tolist():
            self._wanted[row] = draft_len(float(self._acceptance[row]), num_outputs, cost, self._most)

    def _propose(self, rows: I64, pause: int) -> None:
        """Propose drafts of rows whose drafts pay, and one of each other row that has waited for `pause` steps."""
        self._num_waited[rows] += 1
        rows = rows[(self._wanted[rows] > 0) | (self._num_waited[rows] >= pause)]
        self._num_waited[rows] = 0
        others, counts = self._proposer.propose if self._is_for_all else None, np.maximum(self._wanted[rows], 1)
        for row, drafts in zip(rows.tolist(), self._answers.propose(rows, counts, others), strict=True):
            drafts = self._rows.in_vocabulary(drafts)
            if drafts:
                self._drafts[row] = drafts
            self._num_missed[row] = 0 if drafts else self._num_missed[row] + 1
