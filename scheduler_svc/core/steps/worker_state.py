"""One worker as the scheduler sees it: its blocks, its rows, its steps in flight, and the making of its next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from prefix_index.hashing import block_bytes, chained, root_digest, token_bytes
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.messages import EMPTY, CachedBlock, RowOpen, StepBatch, WorkerCapacity
from scheduler_svc.core.policy import ceil_div
from scheduler_svc.core.queue_entry import QueueEntry
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.steps.admission import Need, fits_beside
from scheduler_svc.core.steps.decode_run import DecodeRun
from scheduler_svc.core.steps.rows import RowTable
from scheduler_svc.core.steps.step_plan import (
    I64,
    NO_ROWS,
    U32,
    Bools,
    InFlightStep,
    StepPlan,
    concatenated,
    make_batch,
    slot_mapping,
    with_forks,
)

MAX_BURST = 16  # steps of one message
DECODE_WEIGHT = 0.2  # of the newest message in the running mean of what a steady step takes


class WorkerState:
    """Books of one worker. The Scheduler decides who comes; this class knows how a step is made and undone."""

    def __init__(
        self,
        capacity: WorkerCapacity,
        root_salt: bytes,
        next_step_id: int,
        *,
        prefix_caching: bool = True,
        reuse_bonus: float = 0.0,
        keeps_events: bool = True,
    ) -> None:
        self.capacity = capacity
        self.pool = BlockManager(
            capacity.num_blocks,
            capacity.block_size,
            prefix_caching=prefix_caching,
            reuse_bonus=reuse_bonus,
            keeps_events=keeps_events,
        )
        self.rows = RowTable(capacity)
        self.in_flight: deque[InFlightStep] = deque()
        self.num_messages = 0  # in flight; each carries one step, or a burst of them
        self.answered_at = 0.0
        self.decode_s: float | None = None  # running mean of what a steady step takes
        self.is_draining = False
        self.may_go_on = True  # something may be left to compute after the step planned last, before its answer
        self.num_reserved_rows = 0  # for samples that will fork off a running prompt
        self._refused: tuple[int, Need] | None = None  # who found no room most recently, at which room_version
        self.room_version = 0  # +1 whenever rows or blocks may have become free: asks again whom it refused
        self._root_salt = root_salt
        self._next_step_id = next_step_id
        self._run: DecodeRun | None = None
        self._prefilling: set[int] = set()  # rows that had more than their newest token to compute, at the last look
        self._closed: list[int] = []

    @property
    def can_send(self) -> bool:
        return self.num_messages < self.capacity.pipeline_depth

    @property
    def num_free_rows(self) -> int:
        return self.rows.num_free - self.num_reserved_rows

    @property
    def has_news(self) -> bool:
        """There is something to tell the worker besides what to compute."""
        return bool(self._closed or self.pool.commits)

    def unreserve_row(self) -> None:
        """A sample that was to fork off a running prompt has ended before."""
        self.num_reserved_rows -= 1
        self.room_version += 1

    @property
    def backlog(self) -> int:
        """Prompt tokens that are admitted and not answered."""
        in_flight = sum(int(f.query_lens[f.query_lens > 1].sum()) for f in self.in_flight)
        return self.pending_prefill + in_flight

    @property
    def pending_prefill(self) -> int:
        """Prompt tokens that are admitted and not yet part of a step."""
        if not self._prefilling:
            return 0
        r = self.rows
        todo = {row: r.todo_of(row) for row in self._prefilling if r.sequences[row] is not None}
        self._prefilling = {row for row, count in todo.items() if count > 1}
        return sum(todo[row] - 1 for row in self._prefilling)

    @property
    def num_pending_free(self) -> int:
        """Blocks that become free when steps in flight are answered."""
        return sum(len(blocks) for step in self.in_flight for blocks in step.releases)

    def has_space(self, num_rows: int, num_blocks: int) -> bool:
        """So many rows and blocks are free, or will be when the steps in flight are answered."""
        return num_rows <= self.num_free_rows and num_blocks <= self.pool.num_free + self.num_pending_free

    def adopt(self, blocks: Iterable[CachedBlock]) -> None:
        """Take over what the worker's pool already holds, listed in the order of the commits.

        A head is committed before what continues it: the reverse makes tails the first to go.
        """
        listed = list(blocks)[::-1]
        for block in listed:
            if not 0 <= block.block_id < self.capacity.num_blocks or len(block.token_ids) != self.capacity.block_size:
                raise ValueError(f"worker {self.capacity.worker_id} lists block {block.block_id}, which it cannot have")
        if listed:
            ids = np.array([block.block_id for block in listed], dtype=np.int64)
            self.pool.adopt(ids, [block.digest for block in listed], np.array([block.token_ids for block in listed]))

    def num_cached(self, digests: Seq[bytes], num_tokens: int) -> int:
        """How many leading tokens of these are cached here, at most all but one."""
        bs = self.capacity.block_size
        return bs * self.pool.match_len(digests, (num_tokens - 1) // bs)

    def _root(self, seq: Sequence) -> bytes:
        return root_digest(self._root_salt, self.capacity.block_size, seq.group.root_key)

    # -- admission ----------------------------------------------------------------------------------------------------

    def admit(self, entry: QueueEntry, plan: StepPlan, watermark: float, mean_output: float) -> bool:
        """Give a waiting sequence a row, its blocks and its first tokens of this step; False if there is no room."""
        seq, bs = entry.seq, self.capacity.block_size
        if self.num_free_rows < entry.num_rows or self.refuses(entry):
            return False
        token_ids = seq.data.token_ids()
        hits = self.pool.match(seq.digests, token_ids, (len(token_ids) - 1) // bs)
        needed = ceil_div(len(token_ids), bs) - len(hits)
        unused = self.pool.num_unused(hits)
        saved = len(hits) - unused
        if needed + unused > self.pool.num_free:
            return self._refuse(seq, saved)
        limit = len(seq.group.prompt) + seq.group.stop.max_tokens
        if not self._fits(seq, hits, watermark, mean_output):
            entry.crowded_by[self.capacity.worker_id] = self.room_version
            return self._refuse(seq, saved)
        self.pool.hit(hits)
        blocks = np.concatenate((hits, self.pool.allocate(needed)), dtype=np.uint32, casting="unsafe")
        row = self._open_row(seq, token_ids, blocks, len(hits) * bs, limit, plan)
        self.num_reserved_rows += len(seq.forks)
        seq.count_cached(len(hits) * bs)
        self._plan_chunk(row, plan)
        return True

    def _fits(self, seq: Sequence, hits: I64, watermark: float, mean_output: float) -> bool:
        """Beside rows that are no less urgent, once all have grown."""
        num_blocks = self.capacity.num_blocks
        max_blocks = num_blocks - int(num_blocks * watermark)  # whole blocks: a small pool leaves none free
        return fits_beside(self.rows, self.pool, seq, hits, mean_output, max_blocks)

    def would_fit_beside_urgent(self, seq: Sequence, watermark: float, mean_output: float) -> bool:
        """It would find room if all rows that are less urgent left."""
        r, token_ids = self.rows, seq.data.token_ids()
        rows = r.active()
        rows = rows[r.priority[rows] <= seq.group.priority]
        is_held = r.are_held(rows, self.capacity.num_blocks)
        hits = self.pool.match(seq.digests, token_ids, (len(token_ids) - 1) // self.capacity.block_size)
        saved = int(np.count_nonzero(is_held[hits]))
        num_blocks = ceil_div(len(token_ids), self.capacity.block_size) - saved + int(np.count_nonzero(is_held))
        num_rows = sum(1 + len(r.sequence(row).forks) for row in rows.tolist()) + 1 + len(seq.forks)
        has_space = num_rows <= self.capacity.max_num_seqs and num_blocks <= self.capacity.num_blocks
        return has_space and self._fits(seq, hits, watermark, mean_output)

    def _refuse(self, seq: Sequence, saved: int) -> bool:
        self._refused = self.room_version, Need.of(seq, seq.data.num_tokens - saved * self.capacity.block_size)
        return False

    def refuses(self, entry: QueueEntry) -> bool:
        """It was refused, or somebody was who needed no more, and no row or block has become free since."""
        seq, version = entry.seq, self.room_version
        if entry.refused_by.get(self.capacity.worker_id) == version:
            return True
        if self._refused is None or self._refused[0] != version or not seq.digests:
            return False
        num_tokens = seq.data.num_tokens
        if not self._refused[1].is_covered_by(Need.of(seq, num_tokens - self.num_cached(seq.digests, num_tokens))):
            return False
        entry.refused_by[self.capacity.worker_id] = version
        return True

    def _open_row(
        self, seq: Sequence, token_ids: U32, blocks: U32, num_computed: int, limit: int, plan: StepPlan
    ) -> int:
        row = self.rows.open(seq, token_ids, blocks, num_computed, limit)
        self._prefilling.add(row)
        seq.move_to(SequenceStatus.RUNNING)
        seq.worker_id, seq.row = self.capacity.worker_id, row
        plan.opens.append(
            RowOpen(
                row=row,
                group=seq.group,
                sample_index=seq.sample_index,
                token_ids=token_ids,
                prompt_len=len(seq.group.prompt),
                block_table=blocks,
                num_computed_tokens=num_computed,
            )
        )
        return row

    # -- planning a step ----------------------------------------------------------------------------------------------

    def begin_step(self) -> StepPlan:
        return StepPlan(budget=self.capacity.max_num_batched_tokens)

    def continue_run(self, plan: StepPlan, *, may_begin: bool = True) -> bool:
        """Plan one token more for every row, if that is all there is to do; False if the step needs more thought.

        `may_begin`: also where that begins a run, which costs what a step costs and pays only if more steps follow.
        """
        run = self._run = self._living_run() or (self._new_run() if may_begin else None)
        if run is None:
            return False
        if len(run.full) > self.pool.num_free:
            self._run = None
            return False
        if len(run.full):
            self._append_blocks(run.rows[run.full], plan)
        plan.add(run.rows, run.query_lens, len(run.rows))
        plan.run, plan.num_decode = run, len(run.rows)
        return True

    def _living_run(self) -> DecodeRun | None:
        """The run of the step before, without the rows that have left it; None where rows came since."""
        run = self._run
        if run is None or run.num_opened != self.rows.num_opened:
            return None
        if run.steps_left and run.generation is self.rows.generation:
            return run
        return run.without_gone(self.rows)

    def _new_run(self) -> DecodeRun | None:
        """A run may begin wherever every row that has something to compute has its newest token to compute, and a block
        of its own to write it to, or needs the next one.
        """
        if self.pending_prefill or self.num_reserved_rows:
            return None
        r = self.rows
        rows, _ = self.split_by_stage()
        ends = r.computed[rows]
        samples = r.num_tokens[rows] + r.pending[rows] < r.limit[rows]
        needy, at_border = self.rows_that_need_a_block(rows), rows[ends % r.block_size == 0]
        if not len(rows) or not samples.all() or needy.tobytes() != at_border.tobytes():
            return None
        return DecodeRun.after(r, rows, ends - 1, r.slots(rows, ends - 1))

    def plan_burst(self, first: StepBatch, burst_s: float) -> None:
        """Let as many more steps of the same run follow `first` in its message as the worker decodes in that time."""
        head = self.in_flight[-1]
        num_steps = min(MAX_BURST, int(burst_s / self.decode_s)) if self.decode_s else 1
        while len(first.then) + 1 < num_steps and self.in_flight[-1].run is not None:
            plan = self.begin_step()
            batch = self.finish_plan(plan) if self.continue_run(plan) else None
            if batch is None:
                break
            first.then.append(batch)
            self.in_flight[-1].sent_at = head.sent_at
            self.in_flight[-1].burst_len, self.in_flight[-2].burst_len = 1 + len(first.then), 0
            self.num_messages -= 1

    def note_answer(self, step: InFlightStep, now: float) -> None:
        """All steps of a message are answered: the pipeline takes another, and what took how long is known."""
        self.num_messages -= 1
        if step.run is not None:
            took = (now - max(step.sent_at, self.answered_at)) / step.burst_len
            self.decode_s = took if self.decode_s is None else self.decode_s + DECODE_WEIGHT * (took - self.decode_s)
        self.answered_at = now

    def plan_running(self, plan: StepPlan, decode: I64, prefill: I64) -> None:
        """Decodes first, then chunks of prefills, in the same step."""
        if len(decode):
            plan.add(decode, np.ones(len(decode), dtype=np.int64), len(decode))
            plan.num_decode = len(decode)
            if self.num_reserved_rows:  # a prompt whose last token alone was uncached completes here
                for row in decode.tolist():
                    self._fork_if_complete(row, 1, plan)
        for row in prefill.tolist():
            self._plan_chunk(row, plan)

    def split_by_stage(self) -> tuple[I64, I64]:
        """Rows with one token to compute, and rows with more."""
        rows = self.rows.active()
        if not len(rows):
            return NO_ROWS, NO_ROWS
        todo = self.rows.todo(rows)
        if (todo == 1).all():
            return rows, NO_ROWS
        return rows[todo == 1], rows[todo > 1]

    def rows_that_need_a_block(self, decode: I64) -> I64:
        """Decoding rows that open a new block, or would write into one that they share (copy on write)."""
        r = self.rows
        index = r.computed[decode] // self.capacity.block_size
        opens = index >= r.num_blocks[decode]
        tail = r.table[decode, np.minimum(index, r.num_blocks[decode] - 1)]
        return decode[opens | (self.pool.refs[tail] > 1)]

    def lacks_blocks_for(self, needy: I64) -> bool:
        """The pool has too few for these rows, even when the steps in flight are answered."""
        num_free = self.pool.num_free + self.num_pending_free
        return len(needy) > num_free and len(needy) - self._num_kept(needy) > num_free

    def _num_kept(self, needy: I64) -> int:
        """Shared blocks that the last of the rows keeps, when all others have taken copies."""
        r = self.rows
        index = r.computed[needy] // self.capacity.block_size
        copies = index < r.num_blocks[needy]
        shared, num_rows = np.unique(r.table[needy[copies], index[copies]], return_counts=True)
        return int(np.count_nonzero(self.pool.refs[shared] == num_rows))

    def give_blocks(self, rows: I64, plan: StepPlan) -> None:
        """Append a block to each row's table, or replace a shared one by a copy. The pool has as many."""
        r = self.rows
        opens = r.computed[rows] // self.capacity.block_size >= r.num_blocks[rows]
        if opens.all():
            self._append_blocks(rows, plan)
            return
        self._append_blocks(rows[opens], plan)
        for row in rows[~opens].tolist():
            self._copy_block(row, plan)

    def _append_blocks(self, rows: I64, plan: StepPlan) -> None:
        r = self.rows
        indices = r.num_blocks[rows]
        blocks = self.pool.allocate(len(rows))
        r.table[rows, indices] = blocks
        r.num_blocks[rows] = indices + 1
        plan.tables.append((rows, indices, blocks))

    def _copy_block(self, row: int, plan: StepPlan) -> None:
        r = self.rows
        index = int(r.computed[row]) // self.capacity.block_size
        shared = int(r.table[row, index])
        if self.pool.refs[shared] == 1:
            return  # the others took copies: it is ours
        block = int(self.pool.allocate(1)[0])
        plan.copies.append((shared, block))
        self.pool.free(np.array([shared]))  # others hold it: it cannot become free here
        r.table[row, index] = block
        plan.tables.append((np.array([row]), np.array([index]), np.array([block])))

    def _plan_chunk(self, row: int, plan: StepPlan) -> None:
        count = min(self.rows.todo_of(row), plan.budget)
        if count < 1:
            return
        plan.add(np.array([row]), np.array([count]), count)
        self._register_fills(row, count, plan)
        if self.num_reserved_rows:
            self._fork_if_complete(row, count, plan)

    def _register_fills(self, row: int, count: int, plan: StepPlan) -> None:
        """Blocks of known tokens that this chunk completes may be shared from now on."""
        r, bs = self.rows, self.capacity.block_size
        first, digests = int(r.computed[row]) // bs, r.sequence(row).digests
        end = min((int(r.computed[row]) + count) // bs, len(digests))
        if first >= end:
            return
        tokens = r.tokens[row, first * bs : end * bs].reshape(-1, bs)
        plan.fills.append((row, self.pool.register(r.table[row, first:end], digests[first:end], tokens)))

    def _fork_if_complete(self, row: int, count: int, plan: StepPlan) -> None:
        """When a prompt completes, the other samples of its group start from it: same blocks, own first token."""
        r, seq = self.rows, self.rows.sequence(row)
        if not seq.forks or r.computed[row] + count < r.num_tokens[row]:
            return
        prompt, blocks = seq.group.prompt, r.table[row, : r.num_blocks[row]].astype(np.int64)
        table = blocks.astype(np.uint32)
        for sample in seq.forks:
            sample.digests = list(seq.digests)
            self.pool.share(blocks)
            child = r.open(sample, prompt, table, len(prompt), int(r.limit[row]))
            r.pending[child] = 1 if r.limit[row] > len(prompt) else 0
            sample.move_to(SequenceStatus.RUNNING)
            sample.worker_id, sample.row, sample.is_admitted_before = self.capacity.worker_id, child, True
            plan.opens.append(
                RowOpen(child, seq.group, sample.sample_index, EMPTY, len(prompt), table, len(prompt), fork_of_row=row)
            )
            plan.forks.append((child, row))
        self.num_reserved_rows -= len(seq.forks)
        seq.forks = []

    # -- sending ------------------------------------------------------------------------------------------------------

    def finish_plan(self, plan: StepPlan) -> StepBatch | None:
        """Turn a plan into the batch to send and remember it as in flight; None if there is nothing to tell."""
        if not plan.rows and (self.in_flight or not self.has_news):
            return None
        if plan.run is not None and len(plan.rows) == 1:
            return self._finish_run(plan, plan.run)
        r = self.rows
        rows, query_lens = concatenated(plan.rows, NO_ROWS), concatenated(plan.query_lens, NO_ROWS)
        context_lens = r.computed[rows]
        slots = slot_mapping(r, rows, query_lens, context_lens, plan.num_decode)
        pending, ends = r.pending[rows], context_lens + query_lens
        known = r.num_tokens[rows] + pending
        left = r.limit[rows] - known
        reaches_end = ends == known
        sample_mask = reaches_end & (left > 0)
        r.computed[rows] = ends
        r.pending[rows] = pending + sample_mask
        num_sampled, num_ends = np.count_nonzero(sample_mask), np.count_nonzero(reaches_end)
        prompt_only = rows[reaches_end & ~sample_mask].tolist() if num_sampled < num_ends else []
        self.may_go_on = bool(plan.budget < 1 or plan.forks or num_ends < len(rows) or np.count_nonzero(left > 1))
        sampling_forks = [(row, parent) for row, parent in plan.forks if parent not in prompt_only]
        step = InFlightStep(
            step_id=self._next_step_id,
            rows=rows,
            context_lens=context_lens.astype(np.uint32),
            query_lens=query_lens.astype(np.uint32),
            sampled=with_forks(rows[sample_mask], sampling_forks).astype(np.uint32),
            generation=r.generation,
            full=r.fills_block(context_lens[: plan.num_decode]) if plan.num_decode else NO_ROWS,
            run=None,
            may_reach_limit=True,
            fills=plan.fills,
            forks=plan.forks,
            prompt_only=prompt_only + [row for row, parent in plan.forks if parent in prompt_only],
            is_full=plan.budget < 1,
        )
        plan.forks = sampling_forks
        return self._send(plan, step, sample_mask, slots)

    def _finish_run(self, plan: StepPlan, run: DecodeRun) -> StepBatch:
        """The step that consists of the run and nothing else: everything is one further than it was."""
        r = self.rows
        self.may_go_on = True
        run.advance(plan.tables[0][2] if plan.tables else None, r.block_size)
        r.computed += run.is_member
        r.pending += run.is_member
        step = InFlightStep(
            step_id=self._next_step_id,
            rows=run.rows,
            context_lens=run.context_lens,
            query_lens=run.query_lens,
            sampled=run.sampled,
            generation=r.generation,
            full=run.full,
            run=run,
            may_reach_limit=not run.steps_left,
            fills=[],
            forks=[],
            prompt_only=[],
            is_full=False,
        )
        return self._send(plan, step, run.sample_mask, run.slots)

    def _send(self, plan: StepPlan, step: InFlightStep, sample_mask: Bools, slots: U32) -> StepBatch:
        news = self._closed, self.pool.take_commits() if self.pool.commits else []
        batch = make_batch(self.capacity.worker_id, plan, step, sample_mask, slots, news)
        self._closed = []
        self.in_flight.append(step)
        self.num_messages += 1
        self._next_step_id += 1
        return batch

    # -- after an answer ----------------------------------------------------------------------------------------------

    def commit_fills(self, step: InFlightStep) -> None:
        """The step is acknowledged: what it completed is a cached prefix from now on."""
        for _, fills in step.fills:
            self.pool.commit(fills)
        if not len(step.full):
            return
        rows, ends = step.rows[step.full], step.context_lens[step.full] + 1
        if step.generation is not self.rows.generation:
            is_open = step.generation[rows] == self.rows.generation[rows]
            rows, ends = rows[is_open], ends[is_open]
        if len(rows):
            self._commit_decoded(rows, ends)

    def _commit_decoded(self, rows: I64, ends: U32) -> None:
        """Each of these rows has filled the block before `ends`, mostly with tokens that were unknown until now."""
        r, bs = self.rows, self.capacity.block_size
        tokens = r.last_tokens(rows, ends)
        indices = ends // bs - 1
        blocks, digests = block_bytes(token_bytes(tokens), bs), []
        for row, index, block in zip(rows.tolist(), indices.tolist(), blocks, strict=True):
            known = r.digests[row]
            if index == len(known):  # its last token was sampled: unknown until now
                known.append(chained((known[-1] if known else self._root(r.sequence(row))) + block))
            digests.append(known[index])
        self.pool.commit(self.pool.register(r.table[rows, indices], digests, tokens))

    def free_released(self, step: InFlightStep) -> None:
        """Blocks that this step was the last to name."""
        for blocks in step.releases:
            self.pool.free(blocks)
        self.room_version += bool(step.releases)

    # -- rows end -----------------------------------------------------------------------------------------------------

    def preempt(self, row: int) -> Sequence:
        """Back to waiting with its tokens; its blocks are free once the steps that name them are answered."""
        seq = self.rows.sequence(row)
        seq.data.output = self.rows.output_tokens(row)
        seq.num_computed_peak = max(seq.num_computed_peak, int(self.rows.computed[row]))
        seq.num_preemptions += 1
        seq.move_to(SequenceStatus.WAITING)
        self._close(row)
        return seq

    def finish(self, row: int) -> Sequence:
        """The sequence's last step: its row and blocks are given back."""
        seq = self.rows.sequence(row)
        seq.data.output = self.rows.output_tokens(row)
        seq.move_to(SequenceStatus.FINISHED)
        self._close(row)
        return seq

    def _close(self, row: int) -> None:
        seq = self.rows.sequence(row)
        self.num_reserved_rows -= len(seq.forks)
        seq.worker_id = seq.row = None
        self._release(self.rows.table[row, : self.rows.num_blocks[row]][::-1].astype(np.int64))
        self.rows.close(row)
        self.room_version += 1
        self._closed.append(row)

    def _release(self, blocks: I64) -> None:
        if self.in_flight:
            self.in_flight[-1].releases.append(blocks)
        else:
            self.pool.free(blocks)
