"""The state of one worker: its blocks, its rows, its steps in flight, and the parts of the features that its rows use.

The scheduler is ahead of the worker by the steps in flight. All that follows from one fact: what is planned now is
computed later, in the order of the step ids, and its answer is applied later still, in the same order.

    planned        `StepPlanner` advances rows and takes blocks; `add_in_flight`
    sent           the caller sends the message; up to `pipeline_depth` messages are in flight
    answered       `pop_in_flight`, then tokens, commits and ends are applied (`Scheduler.update`)

A row ends between two of these points
    Steps in flight may still read and write the blocks of a closed row. Its blocks are added to `releases` of the
    newest step in flight and become free when that step is answered; blocks that only steps before it used wait a
    little longer than they must, and no block is ever reused too early. The row itself is free at once: the next step
    carries the close before the open of its next sequence. Every step in flight, and the step whose answer is being
    applied, remembers the row in `closed`, so that the answer for the previous sequence never reaches the next one.

Order of blocks
    Blocks are freed from the tail of a table to its head, so that heads, which more sequences can share, are evicted
    last. Rows with an attention window free blocks before they end; `windows.py` keeps the order for them.

Refusals
    A sequence that does not fit gets a `Refusal`, so that neither it nor any sequence that needs as much is checked
    again in each step. The refusal holds while `room_version` is unchanged, which grows whenever rows or blocks become
    free. The first sequence of the queue is also checked again after as many steps as the projected peak may need to
    fall below the limit (`retry_at`).
    Admission looks ahead: a sequence is admitted only if it and all rows that are at least as urgent fit at their
    projected peak (`policy.py`). That keeps preemption rare, but does not exclude it, because lengths are guesses.

Forks and gangs
    A sequence with forks reserves a row for each (`num_reserved_rows`), so that nothing is admitted into them while the
    prompt is computed. The sequences of a gang are admitted together or not at all, and closed together.

Parts
    A feature that keeps state per row has a `WorkerPart` here. The worker gets it with the first request that uses it;
    from then on each hook is one call per step. A part must forget a row in `close`, which is called for every row: row
    numbers are reused at once.

Invariants
    - ref counts equal the tables of open rows plus `releases` of the steps in flight.
    - `num_reserved_rows` equals the forks of open rows.
    - the newest step in flight is the last one of its message, and at most `pipeline_depth` messages are in flight.
    - a block is committed at most once per content, and only after the answer to the step that filled it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np

from prefix_index.hashing import NO_KEYS, block_bytes, chained, extend_digests, root_digest, token_bytes
from prefix_index.index import Holder, PrefixChanges
from request_fields.fields import LAST_PRIORITY
from request_fields.sizes import MAX_INPUT_BYTES
from scheduler_svc.core.block_manager import BlockManager, Fill
from scheduler_svc.core.messages import CachedBlock, Deltas, MovedExtra, RowAssignment, WorkerCapacity
from scheduler_svc.core.policy import excess_blocks, steps_to_retry
from scheduler_svc.core.rows import Members, RowTable
from scheduler_svc.core.sequence import NEVER, Completion, QueueEntry, Refusal, Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.speculation import Accepted, Speculation
from scheduler_svc.core.windows import Windows
from step_protocol.columns import EMPTY, I64, U32, Bools
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.types import RowError


@dataclass(slots=True)
class StepPlan:
    """A step that is being planned. Each row is added at most once."""

    budget: int  # tokens that can still be added
    now: float
    joins_message: bool = False  # the step is sent in the message of the previous step
    run: Members | None = None  # its rows precede all other rows
    run_blocks: I64 | None = None  # for the rows of the run whose block is full, the following one
    decodes: I64 | None = None  # other rows that compute one token
    drafts: tuple[I64, I64] | None = None  # rows that speculate, with their numbers of drafts; they precede the chunks
    chunks: list[tuple[int, int]] = field(default_factory=list)  # (row, number of prompt tokens)
    opens: list[RowAssignment] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)  # (row, parent)
    tables: list[tuple[I64, I64, I64]] = field(default_factory=list)  # columns: row, index, block
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to)
    fills: list[tuple[int, list[Fill]]] = field(default_factory=list)  # per row, the blocks that its chunk completes
    long_row: int | None = None  # a row with more prompt tokens left than a step holds, which is planned last
    kept: int = 0  # tokens that are kept for it, besides the budget
    spare: int = 0  # tokens beyond the budget, for positions that one chunk must have
    background: int | None = None  # tokens of background work that the step may compute; None: not known yet
    background_rows: Seq[int] = ()  # rows with background work left, whose chunks are planned last
    num_prompt_tokens: int = 0  # in chunks of several tokens
    num_bytes: int = 0  # data that opened rows carry
    has_part_work: bool = False  # a part of the worker computes something, even if no token is planned
    num_refused: int = 0  # waiting sequences that did not fit

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether the message of the step has room for data of this size. The data of the first row always fits."""
        return not self.num_bytes or self.num_bytes + num_bytes <= MAX_INPUT_BYTES

    def has_tokens_for(self, num_head_tokens: int) -> bool:
        """Whether a row can begin. `num_head_tokens`: the first positions, if one chunk must have all of them; they may
        take what is kept for a long prompt.
        """
        return self.budget + (self.kept + self.spare if num_head_tokens else 0) >= max(1, num_head_tokens)


# Changes since the previous step that the next step carries: rows closed, blocks committed.
Changes = tuple[list[int], list[Fill]]


@dataclass(slots=True)
class InFlightStep:
    """A step that was sent but not answered yet, with all data to check and apply its answer."""

    step_id: int
    rows: U32
    context_lens: U32
    query_lens: U32
    sampled: U32  # rows whose tokens the answer must contain, in this order
    full: I64  # indices of the decoding rows that fill a block (prompt chunks are in `fills`)
    run: Members | None  # its rows, if all of them are in the decode run
    may_reach_limit: bool
    fills: list[tuple[int, list[Fill]]]  # per row
    forks: list[tuple[int, int]]  # (row, parent)
    prompt_only: tuple[int, ...]  # rows with max_tokens 0 whose prompt this step completes
    is_full: bool  # the step uses the whole token budget
    burst_len: int = 1  # steps of the message that this step ends; 0: more steps follow in the message
    num_prompt_tokens: int = 0  # in chunks of several tokens
    max_query_lens: U32 | None = None  # of `rows`; None: no row speculates
    accepted: Accepted | None = None  # of the answer, if rows speculate
    has_awaiting: bool = False  # the scheduler chooses the tokens of some rows
    sent_at: float = 0.0
    closed: set[int] = field(default_factory=set)  # rows closed since the step was sent: their answers are ignored
    releases: list[I64] = field(default_factory=list)  # block tables of ended rows, freed when the step is answered


class Advance(NamedTuple):
    """What a part finds in the answer to a step."""

    failures: list[RowError]
    advanced: list[int]  # rows that got what chooses their next token
    completed: list[tuple[SequenceGroup, list[Completion]]]  # requests that end, with their outputs, the best first


class WorkerPart:
    """The state that one feature keeps of its rows on one worker, as an object with hooks. The defaults do nothing.

    The hooks in the order of a row's life: `check`, `could_run`, `usable_hits`, `is_ready` (admit); `open`,
    `plan_chunk`, `fill` (plan); `read`, `advance` (answer); `close` (the row ends, or its sequence moves). A worker
    gets the part with the first request that asks for it, so that steps of workers without such requests cost nothing.
    A part that the model needs is there from the start, for all rows (`WorkerState.add_part`). Only these parts have
    blocks of their own: `adopt`, `num_free_rows`, `commit` and `take_over` are theirs.
    """

    def __init__(self, worker: WorkerState) -> None:
        self.worker = worker

    @classmethod
    def check(cls, group: SequenceGroup, workers: Seq[WorkerState]) -> None:
        """Raises a SchedulerError if none of these workers could ever run the request."""

    def could_run(self, group: SequenceGroup) -> bool:
        """Whether the worker could run the request if it were idle. Asked if the pool is large enough."""
        return True

    def adopt(self, blocks: list[CachedBlock]) -> None:
        """Adopt those of the cached blocks that a worker lists which are the part's own, in this order."""

    def usable_hits(self, digests: Seq[bytes], num_blocks: int, token_ids: U32 | None = None) -> int:
        """Number of leading blocks from which a row can start, if `num_blocks` with these digests are cached. Asked of
        parts for all rows. Without `token_ids` it is an estimate."""
        return num_blocks

    @property
    def max_rows(self) -> int:
        """The most rows that an idle worker could open."""
        return self.worker.capacity.max_num_seqs

    def num_free_rows(self, *, when_answered: bool = False) -> int:
        """The most rows that could be opened. `when_answered`: once the steps in flight are answered."""
        return self.max_rows

    def is_ready(self, group: SequenceGroup) -> bool:
        """Whether the worker could open a row of the request now."""
        return True

    def prepare(self, group: SequenceGroup, *, is_starved: bool) -> bool:
        """Make the worker ready: a waiting request should run here, whose sequence may be starved. Returns whether that
        is under way already.
        """
        return False

    def open(self, seq: Sequence, opened: RowAssignment, plan: StepPlan) -> None:
        """A sequence gets a row, also as a fork of another row."""

    def plan_chunk(self, row: int, count: int, plan: StepPlan) -> int:
        """Called for the rows in `WorkerState.chunk_parts`, until the part removes the row from there, and of parts for
        all rows. Returns how many of the next `count` tokens of the row this step computes.
        """
        return count

    @property
    def has_changes(self) -> bool:
        """Whether the next message has something to carry."""
        return False

    def fill(self, batch: StepBatch) -> None:
        """Add columns to the message of a step."""

    def read(self, step: InFlightStep, output: StepOutput, is_open: Bools | None, deltas: Deltas) -> list[RowError]:
        """Add results of an answer to `deltas`, before rows end. `is_open`: see `WorkerState.commit_fills`."""
        return []

    def commit(self, step: InFlightStep, is_open: Bools | None) -> None:
        """The blocks that an answered step has filled are cached prefixes from now on; see `WorkerState`."""

    def keep_cached(self, row: int) -> None:
        """The row ends, and its blocks are evicted later than others."""

    def forget_all(self) -> None:
        """Nothing that is cached can be hit any more. No step is in flight."""

    # A part whose rows start only where it holds something besides the blocks, an *extra*, has the following hooks, by
    # which extras move with blocks (block_moves.py).

    def extras_at(self, num_blocks: int) -> range:
        """The blocks, by index, whose extras a row needs to start after `num_blocks`."""
        return range(0)

    def holds(self, digest: bytes) -> bool:
        """Whether it holds the extra of the block with this digest."""
        return False

    def name_in_tier(self, digest: bytes) -> bytes:
        """The digest of the extra of a block in a tier."""
        return digest

    def name_extra(self, seq: Sequence, token_ids: U32, digest: bytes) -> tuple[bytes, U32]:
        """Of the extra after these tokens of a sequence, which end with the block of `digest`: the digest by which a
        worker finds it, and its words.
        """
        return digest, token_ids

    def blocks_worth(self, num_extras: int) -> float:
        """The number of blocks with as many bytes."""
        return num_extras

    def reserve(self, num_extras: int, num_tokens: int) -> list[int]:
        """Ids for extras that are on their way, which save the computing of `num_tokens`; none if there is no room."""
        return []

    def receive(self, extras: Seq[MovedExtra], num_arrived: int) -> None:
        """The leading ones of these extras, whose ids are from `reserve`, have arrived; the others have not."""

    def lend(self, digests: Seq[bytes]) -> list[int]:
        """The ids of these extras, which it holds and keeps until `take_back`; none if it has no room to keep them."""
        return []

    def take_back(self, ids: Seq[int]) -> None:
        """These extras are not read any more."""

    def take_over(self, rows: I64, parents: I64) -> None:
        """Beams take over the computed tokens of other beams. No step in flight computes these rows."""

    def advance(self, step: InFlightStep, output: StepOutput) -> Advance | None:
        """Choose tokens from an answer, after rows have ended and their blocks are free."""
        return None

    def close(self, row: int) -> None:
        """A row of this worker was closed, perhaps of a request without this feature."""


P = TypeVar("P", bound=WorkerPart)
KEPT_ROWS = 16  # one row of so many is kept for tenants without a row
PROMPT_KEEP = 0.9  # weight of each step with prompts relative to the next one, in the mean time of a prompt token


class Admission(NamedTuple):
    """The blocks and rows that a worker has for a waiting sequence."""

    hits: I64  # cached blocks from which it starts
    num_forks: int  # number of its forks that get a row too


class WorkerState:
    """Owns the block pool, the row table and the steps in flight of one worker, and finds room for sequences.

    `StepPlanner` plans the steps and adds each one with `add_in_flight`. Steps in flight may still use the blocks of
    a row that ends. So the blocks become free when the newest step in flight at that time is answered.
    """

    def __init__(
        self,
        capacity: WorkerCapacity,
        root_salt: bytes,
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
        self.speculation = Speculation(self.rows, self.pool, is_possible=capacity.attention_window is None)
        self.in_flight: deque[InFlightStep] = deque()
        self._answered: InFlightStep | None = None  # the newest one; its answer is being applied
        self.num_messages = 0  # in flight; each carries one step, or a burst of steps
        self.is_draining = False
        self.num_reserved_rows = 0  # for samples that will fork from a running prompt
        self.room_version = 0  # +1 when rows or blocks become free; older refusals no longer hold
        self.decode_s: float | None = None  # running mean of the duration of a decode step
        self.prompt_token_s: float | None = None  # by how much a prompt token makes a step longer
        self._prompt_s = self._prompt_tokens = 0.0  # sums over the newest steps with prompts, beyond `decode_s`
        self.smallest_refused: Refusal | None = None  # refusal of the sequence that needs least
        self._num_answered = 0  # steps
        self._prefill_in_flight = 0  # prompt tokens of the steps in flight
        self._root_salt = root_salt
        self._holder = Holder(capacity.worker_id, capacity.worker_epoch)
        self._keeps_events = keeps_events
        self.prefilling: set[int] = set()  # rows whose prompts are not planned as far as their newest token
        self.windows = (
            None if self.rows.blocks_before is None else Windows(self.rows, self.pool, self._release, self._add_room)
        )
        self.late_forks: set[int] = set()  # computed rows whose forks wait for a row and blocks of their own
        self.parts: list[WorkerPart] = []  # of the features that requests of this worker have used
        self._part_of: dict[type[WorkerPart], WorkerPart] = {}
        self.parts_of_all: list[WorkerPart] = []  # the last of `parts`: of all rows, whatever their requests use
        self.chunk_parts: dict[int, WorkerPart] = {}  # by row: the part that plans its chunks too
        self._closed: list[int] = []

    def part(self, kind: type[P]) -> P:
        """The part of this kind."""
        part = self._part_of.get(kind)
        if part is None:
            part = self._part_of[kind] = kind(self)
            self.parts.insert(len(self.parts) - len(self.parts_of_all), part)
        return part  # type: ignore[return-value]

    def add_part(self, part: WorkerPart) -> None:
        """Add a part for all rows, before any is open. They fill messages after the other parts."""
        self.parts.append(part)
        self.parts_of_all.append(part)

    def parts_of(self, group: SequenceGroup) -> list[WorkerPart]:
        """The parts of the features that a request uses."""
        used = [self.part(feature.part) for feature in group.features.items if feature.part is not None]
        return self.parts_of_all + used

    def open_row(
        self, seq: Sequence, token_ids: U32, blocks: U32, num_computed: int, plan: StepPlan, parent: int | None = None
    ) -> int:
        """Open a row in this step, with what the features of the request add. A fork has the row `parent` to begin."""
        group, prompt_len = seq.group, len(seq.group.prompt)
        self.rows.now = plan.now
        row = self.rows.open(seq, token_ids, blocks, num_computed, prompt_len + group.stop.max_tokens)
        seq.move_to(SequenceStatus.RUNNING)
        seq.worker_id, seq.row = self.capacity.worker_id, row
        opened = RowAssignment(
            row=row,
            group=group,
            sample_index=seq.sample_index,
            token_ids=token_ids if parent is None else EMPTY,
            prompt_len=prompt_len,
            block_table=blocks,
            num_computed_tokens=num_computed,
            fork_of_row=parent,
        )
        if group.features.items or self.parts_of_all:
            plan.num_bytes += group.features.num_bytes if parent is None else 0
            for part in self.parts_of(group):
                part.open(seq, opened, plan)
        plan.opens.append(opened)
        return row

    def could_run(self, group: SequenceGroup) -> bool:
        """Whether this worker could run the request if it were idle."""
        fits = self.capacity.size_limits.fits(len(group.prompt), group.stop.max_tokens)
        return fits and all(part.could_run(group) for part in self.parts_of(group))

    def is_ready(self, group: SequenceGroup) -> bool:
        """Whether rows of the request can be opened now, without preparation."""
        return all(part.is_ready(group) for part in self.parts_of(group))

    def running(self) -> list[Sequence]:
        """The sequences that have a row, in order of admission."""
        return [self.rows.sequence(row) for row in self.rows.active().tolist()]

    @property
    def can_send(self) -> bool:
        return self.num_messages < self.capacity.pipeline_depth

    @property
    def num_free_rows(self) -> int:
        return self._num_free_rows() if self.parts_of_all else self.rows.num_free - self.num_reserved_rows

    def _num_free_rows(self, *, when_answered: bool = False) -> int:
        count = self.rows.num_free - self.num_reserved_rows
        return min([count, *(part.num_free_rows(when_answered=when_answered) for part in self.parts_of_all)])

    @property
    def has_changes(self) -> bool:
        """Whether the next step has changes to carry."""
        if self._closed or self.pool.commits:
            return True
        return any(part.has_changes for part in self.parts) if self.parts else False

    def take_changes(self) -> Changes:
        """Rows closed and blocks committed since the last call."""
        closed, self._closed = self._closed, []
        return closed, self.pool.take_commits() if self.pool.commits else []

    def unreserve_row(self) -> None:
        """Release the row of a sample that ended before it forked from its running prompt."""
        self.num_reserved_rows -= 1
        self.room_version += 1

    def is_long(self, num_tokens: int) -> bool:
        """Whether one step does not hold this many prompt tokens."""
        return num_tokens > self.capacity.max_num_batched_tokens

    @property
    def has_long_prompt(self) -> bool:
        """Whether a row, except of background work, has more prompt tokens left than a step holds."""
        return any(self.is_long(self.rows.todo_of(row)) for row in self._prefilling_before_background())

    def _prefilling_before_background(self) -> list[int]:
        return [row for row in self.prefilling if self.rows.priority.item(row) < LAST_PRIORITY]

    @property
    def expected_prefill(self) -> int:
        """Number of prompt tokens of admitted sequences that are not computed yet: on average, half of the steps in
        flight. All of a long prompt counts as one step, because others need not wait for it. They wait
        for no background work.
        """
        in_flight = self._prefill_in_flight // 2
        if not self.prefilling:
            return in_flight
        todos = [self.rows.todo_of(row) - 1 for row in self._prefilling_before_background()]
        if (pending := sum(todos)) < self.capacity.max_num_batched_tokens or not self.has_long_prompt:
            return pending + in_flight
        return sum(todo for todo in todos if not self.is_long(todo + 1)) + self.capacity.max_num_batched_tokens

    @property
    def pending_prefill(self) -> int:
        """Number of prompt tokens of admitted sequences that are not in any step yet."""
        return sum(self.rows.todo_of(row) - 1 for row in self.prefilling) if self.prefilling else 0

    def note_prompts(self, num_prompt_tokens: int, took_s: float) -> None:
        """Record how long a step with chunks of prompts took."""
        decode_s = self.decode_s or 0.0
        self._prompt_s += took_s - decode_s if took_s > decode_s else 0.0
        self._prompt_tokens += num_prompt_tokens
        self.prompt_token_s = self._prompt_s / self._prompt_tokens
        self._prompt_s, self._prompt_tokens = PROMPT_KEEP * self._prompt_s, PROMPT_KEEP * self._prompt_tokens

    @property
    def num_pending_free(self) -> int:
        """Number of blocks that become free when the steps in flight are answered."""
        return sum(len(blocks) for step in self.in_flight for blocks in step.releases)

    def has_space(self, num_rows: int, num_blocks: int) -> bool:
        """Whether the rows are free, and the blocks are free or become free when the steps in flight are answered."""
        has_rows = num_rows <= self._num_free_rows(when_answered=True)
        return has_rows and num_blocks <= self.pool.num_free + self.num_pending_free

    def adopt(self, blocks: Iterable[CachedBlock]) -> None:
        """Adopt the cached blocks of the worker's pool, listed in the order of their commits.

        The head of a prefix is committed before its tail. Blocks are adopted in reverse order, so that tails are
        evicted first.
        """
        listed, num_blocks = list(blocks)[::-1], self.capacity.num_all_blocks
        for block in listed:
            if not 0 <= block.block_id < num_blocks or len(block.token_ids) != self.capacity.block_size:
                raise ValueError(
                    f"worker {self.capacity.worker_id} lists block {block.block_id} with "
                    f"{len(block.token_ids)} tokens, but its pool has {num_blocks} blocks of "
                    f"{self.capacity.block_size} tokens"
                )
        adopt_listed(self.pool, listed)
        for part in self.parts_of_all:
            part.adopt(listed)

    def num_cached(self, digests: Seq[bytes], max_tokens: int, before: int = 0, min_tokens: int = 0) -> int:
        """Number of leading tokens of a sequence that are cached here: at most `max_tokens`, and 0 if below
        `min_tokens`. `before`: the result of an earlier call.
        """
        bs = self.capacity.block_size
        count = bs * self.usable_hits(digests, self.pool.match_len(digests, max_tokens // bs, before // bs))
        return count if count >= min_tokens else 0

    def usable_hits(self, digests: Seq[bytes], num_blocks: int, token_ids: U32 | None = None) -> int:
        """Number of leading blocks from which a row can start, if `num_blocks` with these digests are cached. Without
        `token_ids` it is an estimate.
        """
        usable = -1
        while usable != num_blocks:  # each part may need a shorter hit than the parts before it
            usable = num_blocks
            for part in self.parts_of_all:
                num_blocks = part.usable_hits(digests, num_blocks, token_ids)
        return num_blocks

    def extend_digests(self, seq: Sequence) -> None:
        """Compute the missing digests of a waiting sequence that is not in the queue."""
        bs = self.capacity.block_size
        extend_digests(seq.digests, self._root(seq), seq.data.token_ids(), bs, seq.group.features.block_keys(bs))

    def change_root(self, root_salt: bytes) -> None:
        """The digests of all sequences start from this salt. The pool has no digest."""
        self._root_salt = root_salt

    def make_private(self) -> int:
        """The blocks of the running rows, and of their forks, become no prefixes. Returns the number of rows."""
        rows = self.rows.active()
        for seq in self.running():
            seq.group.keeps_kv = True
        self.rows.make_private(rows)
        return len(rows)

    def _root(self, seq: Sequence) -> bytes:
        return root_digest(self._root_salt, self.capacity.block_size, seq.group.root_key)

    # -- the prefix index ---------------------------------------------------------------------------------------------

    def take_prefix_changes(self) -> list[PrefixChanges]:
        """Changes of this pool's cached prefixes since the last call; empty if there are none or no index is used."""
        events = self.pool.take_events() if self._keeps_events else []
        return [PrefixChanges(self._holder, events)] if events else []

    def leave_index(self) -> list[PrefixChanges]:
        """The last changes of a worker that leaves: every prefix is evicted."""
        if not self._keeps_events:
            return []
        events = self.pool.take_events() + [(digest, False) for digest in self.pool.cached_digests()]
        return [PrefixChanges(self._holder, events)] if events else []

    def cached_prefixes(self) -> PrefixChanges:
        """All cached prefixes, to fill an index that has lost its data."""
        return PrefixChanges(self._holder, [(digest, True) for digest in self.pool.cached_digests()])

    # -- admission ----------------------------------------------------------------------------------------------------

    def num_kept_rows(self, seq: Sequence, has_others: bool) -> int:
        """Number of free rows that are kept for tenants without a row, and that this sequence does not get: its request
        has several samples, or its tenant has half of all rows and is not the only one (`has_others`). None are kept
        from a gang that could not run beside them, and from a sequence for which rows could be preempted.
        """
        rows, most, tenant = self.rows, self.capacity.max_num_seqs, seq.group.tenant_slot
        num_kept = min(most // KEPT_ROWS, most - 1 - num_forks_needed(seq))
        if num_kept < 1 or self.num_free_rows - len(seq.forks) > num_kept:
            return 0
        is_large = seq.group.num_sequences > 1 or (has_others and 2 * self.num_rows_of(tenant) >= most)
        return num_kept if is_large and not (rows.priority[rows.active()] > seq.group.priority).any() else 0

    def num_rows_of(self, tenant_slot: int) -> int:
        """Number of rows of a tenant."""
        return int(np.count_nonzero(self.rows.tenant[self.rows.active()] == tenant_slot))

    def try_admit(
        self, entry: QueueEntry, watermark: float, mean_output: float, num_kept_rows: int = 0
    ) -> Admission | Refusal:
        """Rows and blocks for a waiting sequence with as many forks as there are free rows, else for the sequence
        alone, else a refusal. For a gang: rows and blocks for all its sequences, else a refusal. `num_kept_rows`: free
        rows that only the first row of a tenant may take.
        """
        seq, num_free = entry.seq, self.num_free_rows
        num_needed = num_forks_needed(seq)
        if num_kept_rows and num_needed < num_free <= num_kept_rows + num_needed:
            if self.num_rows_of(seq.group.tenant_slot):
                return self.refuse(of_tenant=True)
            num_kept_rows = num_free - 1 - num_needed
        num_forks = min(len(seq.forks), num_free - num_kept_rows - 1)
        if num_forks < num_needed:  # -1: no row is free
            return self.refuse()
        hits = self.find_hits(seq, seq.data.token_ids(), entry.max_cached)
        if self.num_missing(entry.num_tokens, hits) > self.pool.num_free:
            return self.refuse()
        num_excess = self._excess_blocks(seq, hits, num_forks, watermark, mean_output)
        if num_excess and num_forks > num_forks_needed(seq):
            num_forks, num_excess = 0, self._excess_blocks(seq, hits, 0, watermark, mean_output)
        return self._refuse_for(num_excess) if num_excess else Admission(hits, num_forks)

    def find_hits(self, seq: Sequence, token_ids: U32, num_expected: int = 0) -> I64:
        """The cached blocks from which a waiting sequence can start. `num_expected`: perhaps the number of tokens."""
        bs = self.capacity.block_size
        min_blocks = seq.group.features.num_head_tokens // bs
        hits = self.pool.match(seq.digests, token_ids, seq.max_cached_tokens // bs, min_blocks, num_expected // bs)
        return hits[: self.usable_hits(seq.digests, len(hits), token_ids)] if self.parts_of_all else hits

    def num_missing(self, num_tokens: int, hits: I64) -> int:
        """Number of free blocks that a sequence takes when it opens a row with so many tokens and these cached blocks:
        new ones, and those of the hits that no sequence uses.
        """
        first, end = self.rows.opening_blocks(num_tokens, len(hits) * self.capacity.block_size)
        needed = hits[first:]
        return end - first - len(needed) + (self.pool.num_unused(needed) if len(needed) else 0)

    def check_preempting(self, seq: Sequence, watermark: float, mean_output: float) -> Refusal | None:
        """A refusal if the sequence, without its forks, would not fit even after preempting all less urgent rows."""
        r, token_ids = self.rows, seq.data.token_ids()
        rows = r.active()
        rows = rows[r.priority[rows] <= seq.group.priority]
        is_held = r.num_holders(rows, self.capacity.num_blocks) > 0
        hits = self.find_hits(seq, token_ids)
        first, end = r.opening_blocks(len(token_ids), len(hits) * self.capacity.block_size)
        num_blocks = end - first - int(np.count_nonzero(is_held[hits[first:]])) + int(np.count_nonzero(is_held))
        num_rows = sum(1 + len(r.sequence(row).forks) for row in rows.tolist())
        num_forks = num_forks_needed(seq)
        most = min([self.capacity.max_num_seqs, *(part.max_rows for part in self.parts_of_all)])
        if num_rows + num_forks >= most or num_blocks > self.capacity.num_blocks:
            return self.refuse(can_preempt=False)
        num_excess = self._excess_blocks(seq, hits, num_forks, watermark, mean_output)
        return self._refuse_for(num_excess) if num_excess else None

    def _excess_blocks(self, seq: Sequence, hits: I64, num_forks: int, watermark: float, mean_output: float) -> int:
        num_blocks = self.capacity.num_blocks
        max_blocks = num_blocks - int(num_blocks * watermark)  # rounded down to whole blocks, 0 in a small pool
        return excess_blocks(self.rows, self.pool, seq, hits, num_forks, mean_output, max_blocks)

    def _refuse_for(self, num_excess: int) -> Refusal:
        num_growing = 1 + len(self.prefilling)
        num_steps = steps_to_retry(num_excess, num_growing, self.capacity.block_size)
        return Refusal(self.room_version, self._num_answered + num_steps, can_preempt=False, num_excess=num_excess)

    def refuse(self, *, can_preempt: bool = True, of_tenant: bool = False) -> Refusal:
        """Returns a refusal that holds until rows or blocks become free."""
        return Refusal(self.room_version, NEVER, can_preempt, of_tenant=of_tenant)

    def note_refusal(self, entry: QueueEntry, refusal: Refusal) -> None:
        """The sequence has been checked and refused. Sequences that need as many blocks, or fewer by less than it had
        too many, are refused without a check.
        """
        entry.refusals[self.capacity.worker_id] = refusal
        if num_forks_needed(entry.seq) or refusal.of_tenant:
            return  # it may be short of rows that others could take
        bs, known = self.capacity.block_size, self.smallest_refused
        num_tokens = max(0, entry.num_needed_tokens // bs + 1 - refusal.num_excess) * bs
        if known is None or not self.holds(known) or num_tokens < known.num_tokens:
            self.smallest_refused = replace(refusal, num_tokens=num_tokens, priority=entry.key[0])

    def refusal(self, entry: QueueEntry) -> Refusal | None:
        """This worker's refusal that holds for the sequence; None if there is none."""
        refusal = entry.refusals.get(self.capacity.worker_id)
        if refusal is not None and self.holds(refusal):
            return refusal
        refusal = self.smallest_refused
        return refusal if refusal is not None and self.holds(refusal) and refusal.covers(entry) else None

    def holds(self, refusal: Refusal) -> bool:
        """Whether no rows or blocks of this worker have become free since the refusal."""
        return refusal.room_version == self.room_version

    def expire_refusal(self, entry: QueueEntry) -> None:
        """Remove the refusal of a sequence that may fit now, because the projected peak may have fallen."""
        refusal, smallest = entry.refusals.get(self.capacity.worker_id), self.smallest_refused
        if refusal is not None and refusal.retry_at <= self._num_answered:
            del entry.refusals[self.capacity.worker_id]
        if smallest is not None and smallest.retry_at <= self._num_answered:
            self.smallest_refused = None

    # -- steps in flight ----------------------------------------------------------------------------------------------

    def add_in_flight(self, step: InFlightStep, *, joins_message: bool) -> None:
        """Record that a step is sent, in its own message or in the message of the previous step."""
        if joins_message:
            before = self.in_flight[-1]
            step.burst_len, before.burst_len = before.burst_len + 1, 0
        else:
            self.num_messages += 1
        self.in_flight.append(step)
        self._prefill_in_flight += step.num_prompt_tokens

    def pop_in_flight(self) -> None:
        """Record that the oldest step is answered. The last step of a message frees its place in the pipeline."""
        self._answered = step = self.in_flight.popleft()
        self._num_answered += 1
        self._prefill_in_flight -= step.num_prompt_tokens
        self.num_messages -= step.burst_len > 0

    def commit_fills(self, step: InFlightStep, is_open: Bools | None) -> None:
        """Commit the blocks that an answered step has filled: they are cached prefixes from now on. `is_open`: per
        row, whether it was not closed since the step was sent; None if no row was.
        """
        for _, fills in step.fills:
            self.pool.commit(fills)
        if step.accepted is not None:
            self._commit_accepted(step.accepted)
        if len(step.full):
            rows = step.rows[step.full].astype(np.int64)
            indices = step.context_lens[step.full].astype(np.int64) // self.capacity.block_size
            if is_open is not None:
                stays = is_open[rows]
                rows, indices = rows[stays], indices[stays]
            if self.rows.num_private:
                stays = ~self.rows.is_private[rows]
                rows, indices = rows[stays], indices[stays]
            if len(rows):
                self._commit_decoded(rows, indices)
        for part in self.parts_of_all:
            part.commit(step, is_open)

    def context_bounds(self, batch: StepBatch) -> tuple[I64, I64]:
        """The least and the most tokens before the query of each row of a planned step. They differ for a row that
        speculates, whose most counts the drafts of this step too.
        """
        contexts = batch.context_lens.astype(np.int64)
        if batch.max_query_lens is None:
            return contexts, contexts
        most = contexts + np.maximum(batch.max_query_lens, 1).astype(np.int64) - 1
        return most - self.rows.num_unknown[batch.rows.astype(np.int64)], most

    def _commit_accepted(self, accepted: Accepted) -> None:
        """Commit the blocks that rows have filled with drafts that became tokens."""
        rows, starts, ends = accepted
        indices, last = (starts - 1) // self.capacity.block_size, (ends - 1) // self.capacity.block_size
        if self.rows.num_private:
            last = np.where(self.rows.is_private[rows], indices, last)
        while np.count_nonzero(is_full := indices < last):
            rows, indices, last = rows[is_full], indices[is_full], last[is_full]
            self._commit_decoded(rows, indices)
            indices += 1

    def _commit_decoded(self, rows: I64, indices: I64) -> None:
        """Commit the block at this index of each row's table. Most of its tokens were sampled."""
        r, digests, numbers, places = self.rows, [], rows.tolist(), indices.tolist()
        digests_of = r.digests
        tokens = r.token_blocks[rows, indices]
        blocks = block_bytes(token_bytes(tokens), self.capacity.block_size)
        if r.extra_keys:  # an input may begin in the prompt's last block
            keys = [r.extra_keys.get(row, NO_KEYS) for row in numbers]
            blocks = [block + of_row.get(index, b"") for block, of_row, index in zip(blocks, keys, places, strict=True)]
        for row, index, block in zip(numbers, places, blocks, strict=True):
            known = digests_of[row]
            if index == len(known):  # the digest was unknown until the block's last token was sampled
                known.append(chained((known[-1] if index else self._root(r.sequence(row))) + block))
            digests.append(known[index])
        self.pool.cache(r.table[rows, indices], digests, tokens)

    def free_released(self, step: InFlightStep) -> None:
        """Free the blocks of `step.releases`: no later step uses them."""
        self.pool.free_tables(step.releases)
        self.room_version += 1

    # -- rows end -----------------------------------------------------------------------------------------------------

    def preempt(self, row: int) -> Sequence:
        """Close the row. Returns its sequence, which keeps its tokens and waits again. The sequences of a gang are
        closed together: the first one is returned, with the others as its forks.
        """
        group = self.rows.sequence(row).group
        if not group.features.is_gang:
            return self._preempt_row(row)
        for feature in group.features:
            feature.preempted()
        for seq in group.sequences:
            if seq.row is not None:
                self._preempt_row(seq.row)
        first, *group.sequences[0].forks = group.sequences
        return first

    def _preempt_row(self, row: int) -> Sequence:
        seq = self.rows.sequence(row)
        num_computed = self.rows.num_computed_tokens.item(row) - self.rows.num_unknown.item(row)
        seq.num_computed_peak = max(seq.num_computed_peak, num_computed)
        seq.num_preemptions += 1
        self._close(row, seq, SequenceStatus.WAITING)
        return seq

    def finish(self, seq: Sequence, row: int) -> None:
        """Close the row of a sequence that is finished."""
        self._close(row, seq, SequenceStatus.FINISHED)

    def _close(self, row: int, seq: Sequence, status: SequenceStatus) -> None:
        seq.data.output = self.rows.output_tokens(row).copy()  # it outlives the row
        processor_us, block_s = self.rows.cost_of(row)
        seq.processor_us += processor_us
        seq.block_s += block_s
        seq.move_to(status)
        self.num_reserved_rows -= len(seq.forks)
        seq.worker_id = seq.row = None
        if self._answered is not None:
            self._answered.closed.add(row)
        for step in self.in_flight:
            step.closed.add(row)
        blocks = self.rows.held_blocks(row)[::-1]
        if seq.group.conversation:
            is_turn = status is SequenceStatus.FINISHED and seq.group.n == 1 and len(seq.data.output) > 0
            self.pool.keep(blocks, seq.group.conversation, supersedes=is_turn)
            for part in self.parts_of_all:
                part.keep_cached(row)
        if self.windows is not None and self.rows.first_block[row]:
            blocks = np.concatenate((blocks, self.windows.take_back(row)))
        self._release(blocks)
        self.rows.close(row)
        self.prefilling.discard(row)
        if self.speculation.is_on:
            self.speculation.close(row)
        if self.late_forks:
            self.late_forks.discard(row)
        if self.chunk_parts:
            self.chunk_parts.pop(row, None)
        for part in self.parts:
            part.close(row)
        self.room_version += 1
        self._closed.append(row)

    def _add_room(self) -> None:
        self.room_version += 1

    def _release(self, blocks: I64) -> None:
        if self.in_flight:
            self.in_flight[-1].releases.append(blocks)
        else:
            self.pool.free(blocks)


def adopt_listed(pool: BlockManager, listed: Seq[CachedBlock], first_id: int = 0) -> None:
    """Adopt those of the listed blocks whose ids are those of the pool: from `first_id` on."""
    own = [block for block in listed if first_id <= block.block_id < first_id + pool.num_blocks]
    if own:
        ids = np.array([block.block_id - first_id for block in own], dtype=np.int64)
        pool.adopt(ids, [block.digest for block in own], np.array([block.token_ids for block in own]))


def num_forks_needed(seq: Sequence) -> int:
    """Number of forks that must get a row when the sequence is admitted."""
    return len(seq.forks) if seq.group.features.is_gang else 0
