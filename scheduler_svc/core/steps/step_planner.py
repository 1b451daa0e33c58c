"""Plans the steps of one worker: which rows compute which tokens, in which blocks."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.messages import RowAssignment
from scheduler_svc.core.policy import ceil_div
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.steps.decode_run import DecodeRun
from scheduler_svc.core.steps.step_plan import (
    NO_COLUMNS,
    NO_ROWS,
    Columns,
    InFlightStep,
    StepPlan,
    columns_of_decodes,
    columns_of_run,
    concatenated,
    make_batch,
    with_chunks,
)
from scheduler_svc.core.steps.worker_state import WorkerState
from step_protocol.columns import I64, U32, Bools
from step_protocol.messages import EMPTY, ImageWork, StepBatch

MAX_BURST = 16  # maximum number of steps in one message
DECODE_WEIGHT = 0.2  # weight of the newest message in the running mean of the duration of a decode step


class StepPlanner:
    """Plans one step of one worker at a time: `begin_step`, then decodes, prompt chunks and admissions, then
    `finish_plan`, which makes the message and reports the step to the worker.
    """

    def __init__(self, worker: WorkerState, next_step_id: int, changes_wait_s: float = 0.0) -> None:
        self.worker = worker
        self.answered_at = 0.0  # time of the newest answer
        self.changes_due_at: float | None = None  # when a step without rows carries the changes of an idle worker
        self._changes_wait_s = changes_wait_s
        self.may_continue = True  # the next step may have tokens to compute, even before an answer arrives
        self._capacity = worker.capacity
        self._rows = worker.rows
        self._pool = worker.pool
        self._next_step_id = next_step_id
        self._decode_s: float | None = None  # running mean of the duration of a decode step
        self._run = DecodeRun(worker.rows)

    def begin_step(self, now: float, *, joins_message: bool = False) -> StepPlan:
        """An empty plan. `joins_message`: the step is sent in the message of the previous step."""
        return StepPlan(self._capacity.max_num_batched_tokens, now, joins_message)

    def update_run(self) -> int:
        """Remove rows that have ended from the run, and add rows that decode now. Returns the number of blocks that the
        run needs for its next step.
        """
        run = self._run
        run.update(self._joining() if self._rows.outside else [])
        if self._rows.blocks_before is not None and run.members is not None:
            self.worker.free_unneeded(run.members.rows[run.full])
        return len(run.full)

    def leave_run(self) -> int:
        """Take the rows that need a block out of the run, because the pool has too few blocks. Returns the number of
        blocks that the run needs without them.
        """
        self._run.leave()
        return len(self._run.full)

    def shrink_run(self) -> None:
        """Remove preempted rows from the run."""
        self._run.update([])

    def plan_run(self, plan: StepPlan) -> None:
        """Plan one more token for every row of the run. The pool has enough blocks."""
        run, members = self._run, self._run.members
        if members is None:
            return
        if len(run.full):
            self._append_blocks(members.rows[run.full], plan)
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
        if planned - end != 1 or planned >= r.limit.item(row) or r.is_beam[row] or not end or r.sequence(row).forks:
            return False
        num_spare = r.num_blocks.item(row) * bs - end
        return num_spare == 0 or (num_spare < bs and self._pool.refs.item(r.table.item(row, end // bs)) == 1)

    def plan_burst(self, first: StepBatch, burst_s: float, now: float) -> None:
        """Add steps of the run to the message of `first`, up to the number that the worker decodes in `burst_s`."""
        num_steps = min(MAX_BURST, int(burst_s / self._decode_s)) if self._decode_s else 1
        while len(first.then) + 1 < num_steps and self.worker.in_flight[-1].run is not None:
            if self.update_run() > self._pool.num_free or self._rows.outside:
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
            mean = took if self._decode_s is None else self._decode_s
            self._decode_s = mean + DECODE_WEIGHT * (took - mean)
        self.answered_at = now

    def plan_running(self, plan: StepPlan, decode: I64, prefill: I64) -> None:
        """Add the decodes, then chunks of prompts."""
        if len(decode):
            plan.decodes = decode
            plan.budget -= len(decode)
            if self.worker.num_reserved_rows:  # a prompt with a single uncached token completes here
                for row in decode.tolist():
                    self._fork_if_complete(row, 1, plan)
        for row in prefill.tolist():
            self._plan_chunk(row, plan)

    def split_by_stage(self) -> tuple[I64, I64]:
        """Of the rows outside the run: those with one token to compute, and those with several."""
        outside = self._rows.outside
        if not outside:
            return NO_ROWS, NO_ROWS
        rows = np.fromiter(outside, dtype=np.int64, count=len(outside))
        todo = self._rows.todo(rows)
        if (todo == 1).all():
            return rows, NO_ROWS
        return rows[todo == 1], rows[todo > 1]

    def rows_that_need_a_block(self, decode: I64) -> I64:
        """Decoding rows that open a new block or would write to a shared one (copy on write)."""
        r = self._rows
        index = r.num_computed_tokens[decode] // self._capacity.block_size
        opens = index >= r.num_blocks[decode]
        if r.blocks_before is not None:
            self.worker.free_unneeded(decode[opens])
        tail = r.table[decode, np.minimum(index, r.num_blocks[decode] - 1)]
        return decode[opens | (self._pool.refs[tail] > 1)]

    def num_without_block(self, prefill: I64) -> int:
        """Number of rows with a part of their prompt left that have no block for its next token. Each of them needs one
        block at least. They exist only with attention windows: other rows get all blocks of their prompt at once.
        """
        r = self._rows
        if r.blocks_before is None:
            return 0
        waiting = prefill[r.num_computed_tokens[prefill] >= r.num_blocks[prefill] * self._capacity.block_size]
        self.worker.free_unneeded(waiting)
        return len(waiting)

    def num_blocks_for(self, needy: I64) -> int:
        """Number of blocks that these rows take. The last of the rows that share a block keeps it."""
        if len(needy) <= self._pool.num_free:
            return len(needy)  # an upper bound, and the pool has this many blocks
        r = self._rows
        index = r.num_computed_tokens[needy] // self._capacity.block_size
        copies = index < r.num_blocks[needy]
        shared, num_rows = np.unique(r.table[needy[copies], index[copies]], return_counts=True)
        return len(needy) - int(np.count_nonzero(self._pool.refs[shared] == num_rows))

    def give_blocks(self, rows: I64, plan: StepPlan) -> None:
        """Append a block to each row's table, or replace a shared block by a copy. The pool has enough."""
        r = self._rows
        opens = r.num_computed_tokens[rows] // self._capacity.block_size >= r.num_blocks[rows]
        if opens.all():
            self._append_blocks(rows, plan)
            return
        self._append_blocks(rows[opens], plan)
        for row in rows[~opens].tolist():
            self._copy_block(row, plan)

    def _append_blocks(self, rows: I64, plan: StepPlan) -> None:
        r = self._rows
        indices = r.num_blocks[rows]
        blocks = self._pool.allocate(len(rows))
        r.table[rows, indices] = blocks
        r.num_blocks[rows] = indices + 1
        plan.tables.append((rows, indices, blocks))

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

    def _plan_chunk(self, row: int, plan: StepPlan, num_encoder_tokens: int = 0) -> None:
        """Plan the next tokens of a row. `num_encoder_tokens`: the encoder positions, if the row begins with them."""
        todo = self._rows.todo_of(row)
        count = num_encoder_tokens or min(todo, plan.budget)
        if row in self.worker.image_work:
            count = self._plan_images(row, count, plan)
        if self._rows.blocks_before is not None:
            count = self._give_prompt_blocks(row, count, plan)
        if count < 1:
            return
        plan.chunks.append((row, count))
        plan.budget -= count
        if count > 1:
            plan.num_prompt_tokens += count
        if count >= todo - 1:
            self.worker.prefilling.discard(row)
        self._register_fills(row, count, plan)
        if self.worker.num_reserved_rows:
            self._fork_if_complete(row, count, plan)

    def _give_prompt_blocks(self, row: int, count: int, plan: StepPlan) -> int:
        """Append the blocks for the next `count` tokens of a row's prompt to its table. Returns the number of tokens
        that have a block: fewer than `count` if the pool has too few. Leaves one block for each other row if it can.
        """
        r, bs = self._rows, self._capacity.block_size
        start, num_blocks = int(r.num_computed_tokens[row]), int(r.num_blocks[row])
        num_missing = ceil_div(start + count, bs) - num_blocks
        if num_missing < 1:
            return count
        self.worker.free_unneeded(np.array([row]))
        num_free = self._pool.num_free
        num_new = min(num_missing, max(num_free - r.num_used, min(1, num_free)))
        if num_new:
            indices, blocks = np.arange(num_blocks, num_blocks + num_new), self._pool.allocate(num_new)
            r.table[row, indices] = blocks
            r.num_blocks[row] += num_new
            plan.tables.append((np.full(num_new, row), indices, blocks))
        return min(count, (num_blocks + num_new) * bs - start)

    def _plan_images(self, row: int, count: int, plan: StepPlan) -> int:
        """Plan the work on images that begin among the next `count` tokens of a row. Returns how many of these tokens
        the step computes: a token of an image waits until all work on the image is planned.
        """
        begin, waiting = int(self._rows.num_computed_tokens[row]), self.worker.image_work[row]
        while waiting and count > 0:
            image = waiting[0]
            if image.start > begin:
                return min(count, image.start - begin)
            part = min(image.total - image.done, plan.budget)
            plan.budget -= part
            waiting[0] = image._replace(done=image.done + part)
            plan.images.append(waiting[0])
            if waiting[0].done < image.total:
                return 0
            waiting.pop(0)
            count = min(count, plan.budget)
        return count

    def _register_fills(self, row: int, count: int, plan: StepPlan) -> None:
        """Register the blocks that this chunk fills with known tokens: they may be shared from now on."""
        r, bs, seq = self._rows, self._capacity.block_size, self._rows.sequence(row)
        if r.is_pooled[row]:
            return  # nothing of it stays in the pool
        start, digests = r.num_computed_tokens.item(row), seq.digests
        first, end = start // bs, min((start + count) // bs, len(digests))
        if first >= end:
            return
        fills = self._pool.register(r.table[row, first:end], digests[first:end], r.token_blocks[row, first:end])
        plan.fills.append((row, fills))

    def _fork_if_complete(self, row: int, count: int, plan: StepPlan) -> None:
        """If this chunk completes the prompt, open the other samples of the group. They share its blocks, and each
        samples its own first token.
        """
        r, seq = self._rows, self._rows.sequence(row)
        if not seq.forks or r.num_computed_tokens[row] + count < r.num_tokens[row]:
            return
        if len(seq.data.output):  # the forks are beams that are computed again
            self.worker.beams_to_open.add(row)
            return
        prompt, blocks = seq.group.prompt, r.held_blocks(row)
        table = r.table[row, : r.num_blocks[row]].copy()
        for sample in seq.forks:
            sample.digests = list(seq.digests)
            self._pool.share(blocks)
            child = r.open(sample, prompt, table, len(prompt), int(r.limit[row]))
            r.first_block[child] = r.first_block[row]
            r.num_planned[child] += 1 if r.limit[row] > len(prompt) and not r.is_beam[child] else 0
            sample.move_to(SequenceStatus.RUNNING)
            sample.worker_id, sample.row, sample.is_admitted_before = self._capacity.worker_id, child, True
            plan.opens.append(
                RowAssignment(
                    row=child,
                    group=seq.group,
                    sample_index=sample.sample_index,
                    token_ids=EMPTY,
                    prompt_len=len(prompt),
                    block_table=table,
                    num_computed_tokens=len(prompt),
                    fork_of_row=row,
                    num_candidates=self._num_candidates(sample),
                )
            )
            plan.forks.append((child, row))
        self.worker.num_reserved_rows -= len(seq.forks)
        seq.forks = []

    # -- beams that are computed again --------------------------------------------------------------------------------

    def num_blocks_to_open(self) -> int:
        """Number of blocks that the waiting beams need. Their first beams are computed."""
        return sum(self._num_unshared(beam) for beam in self._waiting_beams())

    def open_beams(self, plan: StepPlan) -> None:
        """Admit waiting beams while the pool has blocks and the step has tokens left. A beam shares the blocks of the
        tokens that it has in common with the first beam.
        """
        for beam in self._waiting_beams():
            hits = self._hits(beam)
            num_first = 1 if len(hits) else max(1, beam.group.num_encoder_tokens)
            if plan.budget < num_first or not plan.has_room_for(beam.group.num_input_bytes):
                return
            if self._num_unshared(beam) > self._pool.num_free:
                return
            first = beam.group.sequences[0]
            first.forks.remove(beam)
            self.worker.num_reserved_rows -= 1
            if not first.forks and first.row is not None:
                self.worker.beams_to_open.discard(first.row)
            self.admit(beam, hits, plan)

    def _waiting_beams(self) -> list[Sequence]:
        return [beam for row in self.worker.beams_to_open for beam in self._rows.sequence(row).forks]

    def _hits(self, seq: Sequence) -> I64:
        token_ids = seq.data.token_ids()
        self.worker.extend_digests(seq)
        bs = self._capacity.block_size
        return self._pool.match(seq.digests, token_ids, (len(token_ids) - 1) // bs, seq.group.num_encoder_tokens // bs)

    def _num_unshared(self, seq: Sequence) -> int:
        return self.worker.num_missing(seq.data.num_tokens, self._hits(seq))

    def _num_candidates(self, seq: Sequence) -> int:
        search = seq.group.search
        return 0 if search is None else min(search.num_candidates, self._capacity.vocab_size)

    # -- sending ------------------------------------------------------------------------------------------------------

    def finish_plan(self, plan: StepPlan) -> StepBatch | None:
        """Make the message of the planned step and count it as in flight; None if there is nothing to send yet."""
        is_empty = plan.run is None and plan.decodes is None and not (plan.chunks or plan.images)
        if is_empty and (self.worker.in_flight or not self.worker.has_changes or self._may_wait(plan.now)):
            return None
        columns = self._make_columns(plan)
        is_run = plan.run is not None and len(columns.rows) == len(plan.run.rows)
        self.may_continue = bool(columns.continues or plan.budget < 1 or plan.forks or plan.images)
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
            has_beams=self._rows.num_beams > 0,
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

    def _make_columns(self, plan: StepPlan) -> Columns:
        """Advance the planned rows: those of the run, then other decoding rows, then prompts."""
        r, columns = self._rows, NO_COLUMNS
        if plan.run is not None:
            columns = columns_of_run(r, self._run, plan.run, plan.tables[0][2] if len(self._run.full) else None)
        if plan.decodes is not None:
            decodes = columns_of_decodes(r, plan.decodes)
            columns = decodes if plan.run is None else concatenated(columns, decodes)
        return with_chunks(r, columns, plan.chunks) if plan.chunks else columns

    def _send(self, plan: StepPlan, step: InFlightStep, sample_mask: Bools, slots: U32) -> StepBatch:
        batch = make_batch(self._capacity.worker_id, plan, step, sample_mask, slots, self.worker.take_changes())
        self.worker.add_in_flight(step, joins_message=plan.joins_message)
        self.changes_due_at = None
        self._next_step_id += 1
        return batch

    # -- admission ----------------------------------------------------------------------------------------------------

    def admit(self, seq: Sequence, hits: I64, plan: StepPlan) -> None:
        """Give a waiting sequence a row and blocks after the cached `hits`, and plan its first tokens in this step."""
        bs, token_ids, num_hits = self._capacity.block_size, seq.data.token_ids(), len(hits)
        first, end = self._rows.opening_blocks(len(token_ids), num_hits * bs)
        if num_hits:
            self._pool.hit(hits[first:])
        blocks = self._pool.allocate(end - num_hits).astype(np.uint32)
        if num_hits:
            blocks = np.concatenate((hits.astype(np.uint32), blocks))
        row = self._open_row(seq, token_ids, blocks, num_hits * bs, plan)
        self._rows.first_block[row] = first
        self.worker.num_reserved_rows += len(seq.forks)
        seq.count_cached(num_hits * bs)
        self._plan_chunk(row, plan, 0 if num_hits else seq.group.num_encoder_tokens)

    def _open_row(self, seq: Sequence, token_ids: U32, blocks: U32, num_computed: int, plan: StepPlan) -> int:
        limit = len(seq.group.prompt) + seq.group.stop.max_tokens
        row = self._rows.open(seq, token_ids, blocks, num_computed, limit)
        inputs = seq.group.inputs_after(num_computed) if seq.group.num_input_bytes else ()
        plan.num_input_bytes += seq.group.num_input_bytes if inputs else 0
        if seq.group.image_work and inputs:
            starts = {carried.start for carried in inputs}
            work = [ImageWork(row, start, 0, total) for start, total in seq.group.image_work if start in starts]
            self.worker.image_work[row] = work
        self.worker.prefilling.add(row)
        seq.move_to(SequenceStatus.RUNNING)
        seq.worker_id, seq.row = self._capacity.worker_id, row
        plan.opens.append(
            RowAssignment(
                row=row,
                group=seq.group,
                sample_index=seq.sample_index,
                token_ids=token_ids,
                prompt_len=len(seq.group.prompt),
                block_table=blocks,
                num_computed_tokens=num_computed,
                num_candidates=self._num_candidates(seq),
                prompt_logprobs=seq.group.pending_prompt_logprobs,
                inputs=inputs,
            )
        )
        return row


def _sampled(columns: Columns, forks: list[tuple[int, int]]) -> U32:
    """The rows that sample, then the rows that fork from them."""
    mask = columns.sample_mask
    rows = columns.rows if np.count_nonzero(mask) == len(mask) else columns.rows[mask]
    return np.append(rows, np.array([row for row, _ in forks], dtype=np.uint32)) if forks else rows
