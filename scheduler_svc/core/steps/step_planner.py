"""Plans the steps of one worker: which rows compute which tokens, in which blocks.

A step is planned in eight chapters, and each row is in one of them at most:

    the decode run     rows that decode as in the previous step (`DecodeRun`): their part of the step is their part
                       of the previous one, advanced by one token, without a Python object per row
    other decodes      rows with one token left that cannot join the run: they would write to a shared block, wait for
                       the scheduler's choice of their token, or were put out of the run for lack of blocks
    drafts             rows that speculate (`speculation.py`)
    chunks             rows with several tokens left: as much of their prompts as the budget allows, the most urgent
                       and then the oldest row first
    late forks         forks that are computed again (`forks.py`)
    admissions         waiting sequences, from the scan of the queue; the caller admits them one by one
    the long prompt    the row with more tokens left than a step holds: half of the budget, and what the others leave
    background         chunks of rows of the lowest priority, as many tokens as `background.py` allows

The order matters. A decode costs one token and delays a client's stream if it is skipped, so all decodes come before
the first chunk, and admissions get what is left of the budget. A worker accepts no fewer tokens per step than it has
rows, so decodes always fit.

Blocks
    A row writes to the block at `num_computed_tokens // block_size` of its table. A decoding row takes a block when
    that index is new, or replaces the block by a copy when other rows use it (copy on write). An admitted row gets the
    blocks of its whole prompt at once, so chunks never take one; with attention windows they take them as they go,
    because the prompt may be longer than the window.
    Every block that the step needs is counted before the first one is taken. If the pool has too few, in this order:
    rows of the run that need a block leave it, blocks behind attention windows are freed, and the least urgent rows are
    preempted until the blocks that are free now or after the steps in flight suffice. Until those steps are answered,
    the least urgent of the rows that need a block skip steps: a block may be reused only when no step in flight reads
    it.

Tokens in flight
    `num_computed_tokens` includes the tokens of steps in flight and `num_planned` their samples. A row whose newest
    token is not known yet is planned all the same: the worker continues with its own sample. So several steps are in
    flight at once. Rows whose tokens the scheduler chooses (`is_awaiting`) are planned when it has chosen.
    A row that will reach its limit with a step in flight has nothing left to compute and is in no further step.

Prefixes
    Blocks that a chunk fills are registered when the chunk is planned, and may be shared from then on: the worker
    computes steps in order and stores keys and values before it attends. They are announced and kept as cached prefixes
    only when the step is answered (`WorkerState.commit_fills`), because it may fail.

Bursts
    While a step holds only the run, needs no block beyond the free ones and no sequence waits for this worker, further
    steps are planned into the same message, as many as the worker decodes in `burst_s`. Only the last one frees the
    message's place in the pipeline.

Changes
    Closed rows and commits travel with the next step. An idle worker gets a step without rows for them after
    `changes_wait_s`, because on an idle system a step of their own would compete with the next request.

Invariants (tests/invariants.py checks them after every step)
    - A row never writes into a block that another row uses.
    - No row has computed beyond its blocks, its known and planned tokens, or its limit.
    - A row with tokens to compute is either in the run or outside, never both.
    - Every batch that `finish_plan` returns is in flight, and is sent once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from request_fields.fields import LAST_PRIORITY
from request_fields.sizes import MAX_BURST
from scheduler_svc.core.rows import (
    NO_COLUMNS,
    NO_ROWS,
    DecodeRun,
    RowColumns,
    columns_of_decodes,
    columns_of_drafts,
    columns_of_run,
    concatenated,
    with_chunks,
)
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.steps.background import Background
from scheduler_svc.core.steps.forks import Forks
from scheduler_svc.core.worker_state import Changes, InFlightStep, StepPlan, WorkerState
from step_protocol.columns import EMPTY, I64, U32, Bools
from step_protocol.messages import StepBatch

NO_PAIRS = (EMPTY, EMPTY)
DECODE_WEIGHT = 0.2  # weight of the newest message in the running mean of the duration of a decode step


class StepPlanner:
    """Plans one step of one worker at a time: `begin_step`, then decodes, prompt chunks and admissions, then
    `finish_plan`, which makes the message and reports the step to the worker.
    """

    def __init__(
        self, worker: WorkerState, next_step_id: int, changes_wait_s: float = 0.0, max_step_s: float = 0.0
    ) -> None:
        self.worker = worker
        self.answered_at = 0.0  # time of the newest answer
        self.changes_due_at: float | None = None  # when a step without rows carries the changes of an idle worker
        self._changes_wait_s = changes_wait_s
        self._max_step_s = max_step_s
        self.may_continue = True  # the next step may have tokens to compute, even before an answer arrives
        self._capacity = worker.capacity
        self._rows = worker.rows
        self._pool = worker.pool
        self._next_step_id = next_step_id
        self._run = DecodeRun(worker.rows)
        self._forks = Forks(worker)
        self._background = Background(worker)

    def begin_step(self, now: float, *, joins_message: bool = False) -> StepPlan:
        """An empty plan. `joins_message`: the step is sent in the message of the previous step."""
        plan = StepPlan(self._capacity.max_num_batched_tokens, now, joins_message)
        if self._max_step_s and self.worker.prompt_token_s and self._rows.num_used > len(self.worker.prefilling):
            chunks_s = self._max_step_s - (self.worker.decode_s or 0.0)
            most = self._rows.num_used + max(self._capacity.block_size, int(chunks_s / self.worker.prompt_token_s))
            plan.spare = max(0, plan.budget - most)
            plan.budget -= plan.spare
        return plan

    def plan_running(self, plan: StepPlan, preempt: Callable[[], None]) -> bool:
        """Plan the running rows. Returns True if some were preempted; `preempt` closes the least urgent row.

        Each decoding row gets the block to which it writes next. Rows are preempted until there are enough blocks.
        While steps in flight still use a preempted row's blocks, rows without a block skip the step.
        """
        worker = self.worker
        if not worker.rows.num_used:
            return False
        if worker.speculation.is_on:
            worker.speculation.update()
        num_for_run, windows = self.update_run(), worker.windows
        num_free = worker.pool.num_free
        if num_for_run <= num_free and not worker.rows.outside:
            self.plan_run(plan)
            if worker.speculation.is_on:
                self._plan_drafts(plan)
            return False
        has_preempted = False
        while True:
            decode, prefill = self._split_by_stage()
            needy = self._rows_that_need_a_block(decode) if len(decode) else decode
            num_needed = self._num_blocks_for(needy)
            if windows is not None:
                num_needed += windows.num_without_block(prefill)
            if worker.late_forks:
                num_needed += self._forks.num_blocks_for_late()
            if num_for_run and num_needed + num_for_run > num_free:
                self._run.leave()
                num_for_run = len(self._run.full)
                continue
            if num_needed <= worker.pool.num_free + worker.num_pending_free:
                break
            if windows is not None and windows.free_unneeded(worker.rows.active()):
                continue
            has_preempted = True
            preempt()
            self._run.update([])
        self.plan_run(plan)
        self._plan_outside(plan, decode, prefill, needy, num_needed)
        return has_preempted

    def _plan_outside(self, plan: StepPlan, decode: I64, prefill: I64, needy: I64, num_needed: int) -> None:
        """Plan the rows outside the run. If the pool has too few blocks, the most urgent rows get them."""
        num_free = self._pool.num_free
        if num_needed > num_free:
            by_urgency = sorted(needy.tolist(), key=lambda row: self._rows.sequence(row).order)
            needy = np.array(by_urgency[:num_free], dtype=np.int64)
            decode = decode[~np.isin(decode, by_urgency[num_free:])]
        if len(needy):
            self._give_blocks(needy, plan)
        self._plan_others(plan, decode, prefill)
        if self.worker.late_forks:
            self._forks.open_late(plan, self.admit)

    def update_run(self) -> int:
        """Remove rows that have ended from the run, and add rows that decode now. Returns the number of blocks that the
        run needs for its next step.
        """
        run = self._run
        run.update(self._joining() if self._rows.outside else [])
        if self.worker.windows is not None and run.members is not None:
            self.worker.windows.free_unneeded(run.members.rows[run.full])
        return len(run.full)

    def plan_run(self, plan: StepPlan) -> None:
        """Plan one more token for every row of the run. The pool has enough blocks."""
        run, members = self._run, self._run.members
        if members is None:
            return
        if len(run.full):
            append = self._append_missing if run.may_have_spare else self._append_blocks
            plan.run_blocks = append(members.rows[run.full], plan)
        plan.run = members
        plan.budget -= len(members.rows)

    def _joining(self) -> list[int]:
        """Rows outside the run that may join it."""
        prefilling = self.worker.prefilling
        return [row for row in self._rows.outside if row not in prefilling and self._may_join(row)]

    def _may_join(self, row: int) -> bool:
        """Whether the row has one token left to compute, its newest, and owns the block to which it writes or needs a
        new block. Beams are not pipelined, and samples fork from a row before it joins.
        """
        r, bs = self._rows, self._capacity.block_size
        planned, end = r.num_planned.item(row), r.num_computed_tokens.item(row)
        if planned - end != 1 or planned >= r.limit.item(row) or r.is_awaiting[row] or not end or r.sequence(row).forks:
            return False
        index = end // bs
        return index == r.num_blocks.item(row) or self._pool.refs.item(r.table.item(row, index)) == 1

    def plan_burst(self, first: StepBatch, burst_s: float, now: float) -> None:
        """Add steps of the run to the message of `first`, up to the number that the worker decodes in `burst_s`."""
        decode_s = self.worker.decode_s
        num_steps = min(MAX_BURST, int(burst_s / decode_s)) if decode_s else 1
        while len(first.then) + 1 < num_steps and self.worker.in_flight[-1].run is not None:
            if self.update_run() > self._pool.num_free or self._rows.outside or self.worker.speculation.is_on:
                break
            plan = self.begin_step(now, joins_message=True)
            self.plan_run(plan)
            batch = self.finish_plan(plan)
            if batch is None:
                break
            first.then.append(batch)

    def end_message(self, step: InFlightStep, now: float) -> None:
        """Record that all steps of a message are answered. `step` is the last step of the message."""
        if step.run is not None:
            took = (now - max(step.sent_at, self.answered_at)) / step.burst_len
            mean = self.worker.decode_s or took
            self.worker.decode_s = mean + DECODE_WEIGHT * (took - mean)
        elif step.num_prompt_tokens:
            self.worker.note_prompts(step.num_prompt_tokens, now - max(step.sent_at, self.answered_at))
        self.answered_at = now

    def _plan_others(self, plan: StepPlan, decode: I64, prefill: I64) -> None:
        """Add the decodes outside the run, then chunks of prompts."""
        if len(decode):
            plan.decodes = decode
            plan.budget -= len(decode)
            if self.worker.num_reserved_rows:  # a prompt with a single uncached token completes here
                for row in decode.tolist():
                    self._forks.open_if_complete(row, 1, plan)
        if self.worker.speculation.is_on:
            self._plan_drafts(plan)
        if len(prefill):
            is_background = self._rows.priority[prefill] == LAST_PRIORITY
            plan.background_rows, prefill = prefill[is_background].tolist(), prefill[~is_background]
        if len(prefill) and self.worker.has_long_prompt:
            is_long = self._rows.todo(prefill) > self._capacity.max_num_batched_tokens
            self._keep_for(prefill[is_long].item(0), plan)
            prefill = prefill[~is_long]
        for row in prefill[np.argsort(self._rows.priority[prefill], kind="stable")].tolist():
            self._plan_chunk(row, plan)

    def _keep_for(self, row: int, plan: StepPlan) -> None:
        """Plan a long prompt last, with half of the budget and what other prompts leave of the rest."""
        plan.long_row, plan.kept = row, plan.budget - plan.budget // 2
        plan.budget -= plan.kept

    def _plan_drafts(self, plan: StepPlan) -> None:
        """Add the rows that speculate."""
        reserve = self.worker.speculation.reserve
        rows, num_drafts = reserve(plan.budget, lambda rows: self._append_blocks(rows, plan))
        if len(rows):
            plan.drafts = rows, num_drafts
            plan.budget -= len(rows) + int(num_drafts.sum())

    def _split_by_stage(self) -> tuple[I64, I64]:
        """Of the rows outside the run: those that compute their newest token, and those that compute their prompts."""
        outside = self._rows.outside
        if not outside:
            return NO_ROWS, NO_ROWS
        rows = np.fromiter(outside, dtype=np.int64, count=len(outside))
        decodes, prefilling = self._rows.todo(rows) == 1, self.worker.prefilling
        if not prefilling:
            return rows[decodes], NO_ROWS
        is_prefill = np.fromiter((row in prefilling for row in outside), dtype=np.bool_, count=len(outside))
        return rows[decodes & ~is_prefill], rows[is_prefill]

    def _rows_that_need_a_block(self, decode: I64) -> I64:
        """Decoding rows that open a new block or would write to a shared one (copy on write)."""
        r = self._rows
        index = r.num_computed_tokens[decode] // self._capacity.block_size
        opens = index >= r.num_blocks[decode]
        if self.worker.windows is not None:
            self.worker.windows.free_unneeded(decode[opens])
        tail = r.table[decode, np.minimum(index, r.num_blocks[decode] - 1)]
        return decode[opens | (self._pool.refs[tail] > 1)]

    def _num_blocks_for(self, needy: I64) -> int:
        """Number of blocks that these rows take. The last of the rows that share a block keeps it."""
        if len(needy) <= self._pool.num_free:
            return len(needy)  # an upper bound, and the pool has this many blocks
        r = self._rows
        index = r.num_computed_tokens[needy] // self._capacity.block_size
        copies = index < r.num_blocks[needy]
        shared, num_rows = np.unique(r.table[needy[copies], index[copies]], return_counts=True)
        return len(needy) - int(np.count_nonzero(self._pool.refs[shared] == num_rows))

    def _give_blocks(self, rows: I64, plan: StepPlan) -> None:
        """Append a block to each row's table, or replace a shared block by a copy. The pool has enough."""
        r = self._rows
        opens = r.num_computed_tokens[rows] // self._capacity.block_size >= r.num_blocks[rows]
        if opens.all():
            self._append_blocks(rows, plan)
            return
        self._append_blocks(rows[opens], plan)
        for row in rows[~opens].tolist():
            self._copy_block(row, plan)

    def _append_missing(self, rows: I64, plan: StepPlan) -> I64:
        """The blocks to which these rows write next: new ones for rows that have none."""
        r = self._rows
        indices = r.num_computed_tokens[rows] // self._capacity.block_size
        lacks = indices == r.num_blocks[rows]
        if np.count_nonzero(lacks):
            self._append_blocks(rows[lacks], plan)
        return r.table[rows, indices].astype(np.int64)

    def _append_blocks(self, rows: I64, plan: StepPlan) -> I64:
        r = self._rows
        indices = r.num_blocks[rows]
        blocks = self._pool.allocate(len(rows))
        r.table[rows, indices] = blocks
        r.num_blocks[rows] = indices + 1
        plan.tables.append((rows, indices, blocks))
        return blocks

    def _copy_block(self, row: int, plan: StepPlan) -> None:
        r = self._rows
        index = int(r.num_computed_tokens[row]) // self._capacity.block_size
        shared = int(r.table[row, index])
        if self._pool.refs[shared] == 1:
            return  # all other rows have taken copies
        block = int(self._pool.allocate(1)[0])
        plan.copies.append((shared, block))
        self._pool.free(np.array([shared]))  # it stays in use: other rows hold it
        r.table[row, index] = block
        plan.tables.append((np.array([row]), np.array([index]), np.array([block])))

    def _plan_chunk(self, row: int, plan: StepPlan, num_head_tokens: int = 0) -> None:
        """Plan the next tokens of a row. `num_head_tokens`: the first positions, if one chunk must have all of them."""
        todo = self._rows.todo_of(row)
        count, is_last = num_head_tokens or min(todo, plan.budget), self._rows.priority.item(row) == LAST_PRIORITY
        if is_last and not num_head_tokens:
            count = min(count, self._background.left(plan))
        if row in self.worker.chunk_parts:
            count = self.worker.chunk_parts[row].plan_chunk(row, count, plan)
        if self.worker.windows is not None:
            count = self.worker.windows.give_prompt_blocks(row, count, plan.tables)
        for part in self.worker.parts_of_all:
            count = part.plan_chunk(row, count, plan)
        if count < 1:
            return
        plan.chunks.append((row, count))
        if is_last:
            self._background.spend(count, plan)
        plan.budget -= count
        if count > 1:
            plan.num_prompt_tokens += count
        if count >= todo - 1 and row not in self.worker.chunk_parts:
            self.worker.prefilling.discard(row)
        self._register_fills(row, count, plan)
        if self.worker.num_reserved_rows:
            self._forks.open_if_complete(row, count, plan)

    def plan_background(self, plan: StepPlan) -> None:
        """Plan the chunks of background work that runs, after those of all other rows."""
        rows, plan.background_rows = plan.background_rows, ()
        for row in rows:
            self._plan_chunk(row, plan)

    def takes_background(self, plan: StepPlan) -> bool:
        """Whether the step has room for more background work than what runs."""
        self.plan_background(plan)
        return self._background.left(plan) > 0

    def _register_fills(self, row: int, count: int, plan: StepPlan) -> None:
        """Register the blocks that this chunk fills with known tokens: they may be shared from now on."""
        r, bs, seq = self._rows, self._capacity.block_size, self._rows.sequence(row)
        if r.is_private[row]:
            return  # nothing of it stays in the pool
        start, digests = r.num_computed_tokens.item(row), seq.digests
        first, end = start // bs, min((start + count) // bs, len(digests))
        if first >= end:
            return
        fills = self._pool.register(r.table[row, first:end], digests[first:end], r.token_blocks[row, first:end])
        plan.fills.append((row, fills))

    # -- sending ------------------------------------------------------------------------------------------------------

    def finish_plan(self, plan: StepPlan) -> StepBatch | None:
        """Make the message of the planned step and count it as in flight; None if there is nothing to send yet."""
        if plan.long_row is not None:
            plan.budget += plan.kept
            self._plan_chunk(plan.long_row, plan)
        if plan.background_rows:
            self.plan_background(plan)
        has_decodes = plan.run is not None or plan.decodes is not None or plan.drafts is not None
        is_empty = not (has_decodes or plan.chunks or plan.has_part_work)
        if is_empty and (self.worker.in_flight or not self.worker.has_changes or self._may_wait(plan.now)):
            return None
        columns = self._make_columns(plan)
        is_run = plan.run is not None and len(columns.rows) == len(plan.run.rows)
        self.may_continue = bool(columns.continues or plan.budget < 1 or plan.forks or plan.has_part_work)
        prompt_only, forks = columns.prompt_only, plan.forks
        if prompt_only and forks:
            plan.forks = [(row, parent) for row, parent in forks if parent not in prompt_only]
            prompt_only += tuple(row for row, parent in forks if parent in prompt_only)
        step = InFlightStep(
            step_id=self._next_step_id,
            rows=columns.rows,
            context_lens=columns.context_lens,
            query_lens=columns.query_lens,
            sampled=columns.rows if is_run else _sampled(columns, plan.forks),
            full=columns.full,
            run=plan.run if is_run else None,
            may_reach_limit=columns.may_reach_limit,
            fills=plan.fills,
            forks=forks,
            prompt_only=prompt_only,
            is_full=plan.budget < 1,
            num_prompt_tokens=plan.num_prompt_tokens,
            max_query_lens=columns.max_query_lens,
            has_awaiting=self._rows.num_awaiting > 0,
            sent_at=plan.now,
        )
        return self._send(plan, step, columns.sample_mask, columns.slots)

    def _may_wait(self, now: float) -> bool:
        """Whether the changes may wait for a step that computes something. On an idle system a step of their own would
        compete with the next request. A draining worker may leave at any time.
        """
        if self.changes_due_at is None:
            self.changes_due_at = now + self._changes_wait_s
        return now < self.changes_due_at and not self.worker.is_draining

    def _make_columns(self, plan: StepPlan) -> RowColumns:
        """Advance the planned rows: those of the run, other decoding rows, rows that speculate, then prompts."""
        r, columns = self._rows, NO_COLUMNS
        if plan.run is not None:
            columns = columns_of_run(r, self._run, plan.run, plan.run_blocks)
        if plan.decodes is not None:
            columns = concatenated(columns, columns_of_decodes(r, plan.decodes))
        if plan.drafts is not None:
            columns = concatenated(columns, columns_of_drafts(r, *plan.drafts))
        return with_chunks(r, columns, plan.chunks) if plan.chunks else columns

    def _send(self, plan: StepPlan, step: InFlightStep, sample_mask: Bools, slots: U32) -> StepBatch:
        batch = make_batch(self._capacity.worker_id, plan, step, sample_mask, slots, self.worker.take_changes())
        for part in self.worker.parts:
            part.fill(batch)
        self.worker.add_in_flight(step, joins_message=plan.joins_message)
        self.changes_due_at = None
        self._next_step_id += 1
        return batch

    # -- admission ----------------------------------------------------------------------------------------------------

    def admit(self, seq: Sequence, hits: I64, plan: StepPlan) -> None:
        """Give a waiting sequence a row and blocks after the cached `hits`, and plan its first tokens in this step."""
        bs, token_ids, num_hits = self._capacity.block_size, seq.data.token_ids(), len(hits)
        num_tokens = len(token_ids)
        first, end = self._rows.opening_blocks(num_tokens, num_hits * bs)
        if num_hits:
            self._pool.hit(hits[first:])
        blocks = self._pool.allocate(end - num_hits).astype(np.uint32)
        if num_hits:
            blocks = np.concatenate((hits.astype(np.uint32), blocks))
        row = self.worker.open_row(seq, token_ids, blocks, num_hits * bs, plan)
        self._rows.first_block[row] = first
        self.worker.prefilling.add(row)
        self.worker.num_reserved_rows += len(seq.forks)
        seq.count_cached(num_hits * bs)
        num_head_tokens = 0 if num_hits else seq.group.features.num_head_tokens
        is_long = num_tokens - num_hits * bs > self._capacity.max_num_batched_tokens
        is_long &= seq.group.priority < LAST_PRIORITY
        if is_long and plan.long_row is None and not num_head_tokens:
            self._keep_for(row, plan)
        else:
            self._plan_chunk(row, plan, num_head_tokens)


def make_batch(
    worker_id: str,
    plan: StepPlan,
    step: InFlightStep,
    sample_mask: Bools,
    slots: U32,
    changes: Changes,
) -> StepBatch:
    """The message of a step, without what the worker's parts add."""
    closed, commits = changes
    fork_rows, fork_parents = _columns(plan.forks) if plan.forks else NO_PAIRS
    copy_src, copy_dst = _columns(plan.copies) if plan.copies else NO_PAIRS
    table_rows, table_indices, table_blocks = _joined(plan.tables)
    return StepBatch(
        worker_id=worker_id,
        step_id=step.step_id,
        rows=step.rows,
        query_lens=step.query_lens,
        context_lens=step.context_lens,
        sample_mask=sample_mask,
        is_decode=step.run is not None,
        slot_mapping=slots,
        max_query_lens=step.max_query_lens,
        fork_rows=fork_rows,
        fork_parents=fork_parents,
        close_rows=np.array(closed, dtype=np.uint32) if closed else EMPTY,
        opens=plan.opens,
        table_rows=table_rows,
        table_indices=table_indices,
        table_blocks=table_blocks,
        copy_src=copy_src,
        copy_dst=copy_dst,
        commit_blocks=np.array([block for block, _ in commits], dtype=np.uint32) if commits else EMPTY,
        commit_digests=[digest for _, digest in commits] if commits else [],
    )


def _columns(pairs: list[tuple[int, int]]) -> tuple[U32, U32]:
    first, second = np.array(pairs, dtype=np.uint32).T
    return first, second


def _joined(tables: list[tuple[I64, I64, I64]]) -> tuple[U32, U32, U32]:
    if not tables:
        return EMPTY, EMPTY, EMPTY
    rows, indices, blocks = tables[0] if len(tables) == 1 else map(np.concatenate, zip(*tables, strict=True))
    return rows.astype(np.uint32), indices.astype(np.uint32), blocks.astype(np.uint32)


def _sampled(columns: RowColumns, forks: list[tuple[int, int]]) -> U32:
    """The rows that sample, then the rows that fork from them."""
    mask = columns.sample_mask
    rows = columns.rows if np.count_nonzero(mask) == len(mask) else columns.rows[mask]
    return np.append(rows, np.array([row for row, _ in forks], dtype=np.uint32)) if forks else rows
