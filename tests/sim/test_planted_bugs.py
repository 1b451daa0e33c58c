"""Tests of the simulation: each bug is planted into the real core and must be caught with the named complaint.

The core's own invariants are switched off where the symbolic workers and the gateways' journals must suffice.
The seed that caught a bug is then run once more on the core as it is, and passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from prefix_index import hashing
from prefix_index.hashing import FIRST_CONTENT_ID
from scheduler_svc.core import prompt_digests, scheduler, windows, worker_state
from scheduler_svc.core.admission import admission_control
from scheduler_svc.core.admission.barrier import Barrier, Hold, HoldState
from scheduler_svc.core.admission.placement import Placement
from scheduler_svc.core.admission.requests import Requests
from scheduler_svc.core.block_manager import BlockManager, FreeList, LruQueue
from scheduler_svc.core.features import beams, block_moves, cache_groups
from scheduler_svc.core.features.adapters import AdapterSlots
from scheduler_svc.core.features.beam_search import BeamSearch
from scheduler_svc.core.features.beams import BeamRows
from scheduler_svc.core.features.block_moves import BlockMoves
from scheduler_svc.core.features.cache_groups import WindowGroup
from scheduler_svc.core.features.inputs import InputRows, Inputs
from scheduler_svc.core.features.public_prefix import PublicPrefix
from scheduler_svc.core.features.snapshots import Kept, Snapshots, Taken
from scheduler_svc.core.messages import MigrationReason
from scheduler_svc.core.rows import BlockTables, DecodeRun, RowTable
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import QueueEntry, Sequence
from scheduler_svc.core.speculation import MAX_DRAFTS, Speculation
from scheduler_svc.core.steps import answers, step_planner
from scheduler_svc.core.steps.answers import Untrusted, untrusted_after
from scheduler_svc.core.steps.forks import Forks
from scheduler_svc.core.steps.step_planner import StepPlanner
from scheduler_svc.core.waiting_queue import FairShare, WaitingQueue
from scheduler_svc.core.windows import Windows
from scheduler_svc.core.worker_state import InFlightStep, StepPlan, WorkerState
from step_protocol.features import BeamMoves, PooledRows
from step_protocol.messages import StepBatch
from tests.sim import tiers
from tests.sim.cluster import Cluster
from tests.sim.simulation import run_seed
from tests.sim.symbolic_worker import SymbolicWorker
from tests.sim.tiers import Tier, is_sound

MAX_SEEDS = 200
KINDS = (  # systems
    "has_moves", "has_groups", "has_windows", "has_slow_links", "has_fast_links", "has_slow_disks", "has_operators",
    "has_turns", "has_public",
)  # fmt: skip

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Bug:
    """`plant` breaks the core; `complaint` is what the failure must say (a regular expression)."""

    plant: Callable[[Patch], None]
    complaint: str
    checks_invariants: bool = False
    failure_rate: float | None = None  # for bugs that show only if rows fail in rare states
    has_moves: bool = False  # for bugs in moves of blocks
    has_groups: bool = False  # for bugs in cache groups
    first_seed: int = 0  # the first one that showed it
    has_windows: bool = False  # with has_moves
    has_slow_links: bool = False  # with has_moves
    has_fast_links: bool = False  # with has_moves
    has_slow_disks: bool = False  # with has_moves
    has_operators: bool = False  # for bugs in holds of the barrier
    has_turns: bool = False  # for bugs in conversations and states
    has_public: bool = False  # for bugs in public prefixes

    @property
    def changes(self) -> dict[str, float]:
        changes = {} if self.failure_rate is None else {"failure_rate": self.failure_rate}
        return changes | {name: True for name in KINDS if getattr(self, name)}


BUGS: dict[str, Bug] = {}


def bug(complaint: str, **options: Any) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Add a planted bug to the list under its function's name."""

    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS[plant.__name__] = Bug(plant, complaint, **options)
        return plant

    return add


def wrap(patch: Patch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace owner.name by a function that gets the original as its first argument."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def keep_number(patch: Patch, owner: Any, name: str, number: str) -> None:
    """Let owner.name leave an attribute unchanged."""

    def around(original: Callable[..., Any], self: Any, *args: Any) -> Any:
        before = copy(getattr(self, number))
        found = original(self, *args)
        setattr(self, number, before)
        return found

    wrap(patch, owner, name, around)


def change_batches(patch: Patch, change: Callable[[StepBatch], StepBatch]) -> None:
    """Change the batches that are sent, not the decisions."""
    wrap(patch, StepPlanner, "_send", lambda send, *args: change(send(*args)))


def trust_digests(patch: Patch) -> None:
    """Disable the comparisons of digests, so that only the content of slots can reveal the bug."""
    change_batches(patch, lambda b: replace(b, commit_blocks=b.commit_blocks[:0], commit_digests=[]))
    patch.setattr(Cluster, "_check_published", lambda *args: None)
    patch.setattr(Cluster, "_check_worker_end", lambda *args: None)


# -- adapters ----------------------------------------------------------------------------------------------------------


@bug("reads the wrong content|differs|digest", first_seed=20)
def adapter_missing_in_the_root(patch: Patch) -> None:
    trust_digests(patch)
    wrap(patch, hashing, "root_key", lambda root_key, **parts: root_key(**(parts | {"adapter": b""})))


@bug("opens with an adapter that is not resident")
def adapter_used_before_its_swap_ends(patch: Patch) -> None:
    patch.setattr(AdapterSlots, "is_ready", lambda self, digest: self.has(digest))


@bug("opens with an adapter that is not resident|has no place")
def adapter_evicted_and_still_ready(patch: Patch) -> None:
    def take_swap(original: Callable[..., Any], self: AdapterSlots, in_use: set[bytes]) -> Any:
        before = dict(self._resident)
        found = original(self, in_use)
        self._resident |= {digest: None for digest in before if digest not in self._resident}
        return found

    wrap(patch, AdapterSlots, "take_swap", take_swap)


# -- slots and tables --------------------------------------------------------------------------------------------------


@bug("slot_mapping .* disagrees with the tables")
def wrong_slot(patch: Patch) -> None:
    wrap(patch, RowTable, "slots", lambda slots, table, rows, positions: slots(table, rows, positions ^ 1))


@bug("disagrees with the tables|which another open row has|opens with a bad table|reads the wrong content")
def wrong_table_sent(patch: Patch) -> None:
    def swap(batch: StepBatch) -> StepBatch:
        return replace(batch, opens=[replace(o, block_table=o.block_table[::-1]) for o in batch.opens])

    change_batches(patch, swap)


@bug("beyond their tables|disagrees with the tables")
def off_by_one_at_a_block_border(patch: Patch) -> None:
    def needy(original: Any, planner: StepPlanner, decode: np.ndarray) -> np.ndarray:
        r, bs = planner.worker.rows, planner.worker.capacity.block_size
        opens = (r.num_computed_tokens[decode] - 1) // bs >= r.num_blocks[decode]
        tail = r.table[decode, np.minimum(r.num_computed_tokens[decode] // bs, r.num_blocks[decode] - 1)]
        return decode[opens | (planner.worker.pool.refs[tail] > 1)]

    wrap(patch, StepPlanner, "_rows_that_need_a_block", needy)


@bug("beyond their tables|disagrees with the tables|computed tokens in")
def last_partial_block_not_allocated(patch: Patch) -> None:
    patch.setattr(windows, "ceil_div", lambda a, b: max(1, a // b))


@bug("evicts a block before|not that of its chain|wrong content|digest", first_seed=36)
def adopted_blocks_in_another_order(patch: Patch) -> None:
    def adopt(original: Any, pool: BlockManager, blocks: Any, digests: Any, tokens: Any) -> int:
        return int(original(pool, blocks, digests[::-1], tokens))

    wrap(patch, BlockManager, "adopt", adopt)


# -- drafts ------------------------------------------------------------------------------------------------------------


@bug("tokens are rejected|reads the wrong content|at offset")
def position_off_by_one_after_rejected_drafts(patch: Patch) -> None:
    def take_back(original: Any, table: RowTable, rows: np.ndarray, reserved: np.ndarray, lens: np.ndarray) -> None:
        original(table, rows, reserved, lens + (lens < reserved - 1))

    wrap(patch, answers, "take_back", take_back)


@bug("which another open row has|leaks|reads the wrong content|beyond their tables", first_seed=40)
def reserved_block_given_back_before_its_step_is_answered(patch: Patch) -> None:
    def columns(original: Any, table: RowTable, rows: np.ndarray, num_drafts: np.ndarray) -> Any:
        found = original(table, rows, num_drafts)
        for row in rows[num_drafts > 0].tolist():
            early.append(int(table.table[row, table.num_blocks[row] - 1]))
        return found

    def begin(original: Any, planner: StepPlanner, now: float, **options: Any) -> StepPlan:
        while early:
            planner._pool.free(np.array([early.pop()]))
        return original(planner, now, **options)

    early: list[int] = []
    wrap(patch, step_planner, "columns_of_drafts", columns)
    wrap(patch, StepPlanner, "begin_step", begin)


@bug("which is not full|not that of its chain|before step|published a prefix")
def block_committed_with_rejected_drafts(patch: Patch) -> None:
    def commit(original: Any, worker: WorkerState, accepted: Any) -> None:
        original(worker, accepted._replace(ends=accepted.ends + 1))

    wrap(patch, WorkerState, "_commit_accepted", commit)


@bug("the oracle has|after the end", first_seed=163)
def drafts_behind_the_end_delivered(patch: Patch) -> None:
    wrap(patch, answers.Stops, "num_before_end", lambda original, self, table, rows, lens, ids: lens)


@bug("beyond their tables")
def drafts_without_blocks(patch: Patch) -> None:
    def reserve(original: Any, speculation: Speculation, *args: Any) -> Any:
        r, (rows, _) = speculation._table, original(speculation, *args)
        return rows, np.minimum(r.draft_lens[rows], r.limit[rows] - r.num_planned[rows] - 1)

    wrap(patch, Speculation, "reserve", reserve)


@bug(
    "computes rows|max_query_lens|more tokens than its limit|beyond max_model_len|the oracle has|out of bounds",
    checks_invariants=True,
    first_seed=11,
)
def drafts_beyond_the_limit(patch: Patch) -> None:
    def reserve(original: Any, speculation: Speculation, *args: Any) -> Any:
        limit = speculation._table.limit
        speculation._table.limit = limit + 3
        try:
            return original(speculation, *args)
        finally:
            speculation._table.limit = limit

    wrap(patch, Speculation, "reserve", reserve)


@bug("may be at|at offset|compute tokens that do not exist|context_lens")
def row_joins_the_run_with_unknown_tokens(patch: Patch) -> None:
    def update(original: Any, speculation: Speculation) -> None:
        unknown = speculation._table.num_unknown
        speculation._table.num_unknown = np.zeros_like(unknown)
        original(speculation)
        speculation._table.num_unknown = unknown

    wrap(patch, Speculation, "update", update)


@bug("beyond their tables")
def drafts_in_a_full_pool_without_room_for_the_row(patch: Patch) -> None:
    wrap(patch, Speculation, "_room", lambda original, speculation, rows: np.maximum(original(speculation, rows), 0))


@bug("beyond their tables", first_seed=81)
def drafts_in_a_full_pool_beyond_the_blocks_of_the_row(patch: Patch) -> None:
    def room(original: Any, speculation: Speculation, rows: np.ndarray) -> Any:
        found = original(speculation, rows)
        is_full = speculation._is_short_of_blocks
        return np.where(found < 0, found, found + MAX_DRAFTS) if is_full else found

    wrap(patch, Speculation, "_room", room)


# -- blocks ------------------------------------------------------------------------------------------------------------


@bug("which another open row has|which other rows share|reads the wrong content|leaks|which is in use")
def block_freed_while_one_user_is_left(patch: Patch) -> None:
    def free(original: Any, pool: BlockManager, blocks: Any) -> None:
        for block in blocks:
            pool.refs[block] -= 1
            if pool.refs[block] <= 1:
                pool.refs[block] = 0
                pool._put_back(np.array([block]))

    wrap(patch, BlockManager, "free", free)


@bug("which another open row has|writes into|evicts a block before|leaks", first_seed=10)
def hit_stays_in_the_free_list(patch: Patch) -> None:
    def share(original: Any, pool: BlockManager, blocks: np.ndarray) -> None:
        pool.refs[blocks] += 1

    wrap(patch, BlockManager, "share", share)


@bug("leaks|which another open row has|which other rows share|written to one slot|did not end within", first_seed=1)
def fork_takes_no_reference(patch: Patch) -> None:
    def fork(original: Any, forks: Forks, row: int, count: int, plan: StepPlan) -> None:
        num_opens = len(plan.opens)
        original(forks, row, count, plan)
        for opened in plan.opens[num_opens:]:
            forks._worker.pool.refs[opened.block_table] -= 1

    wrap(patch, Forks, "open_if_complete", fork)


@bug("ref counts disagree", checks_invariants=True)
def fork_takes_two_references(patch: Patch) -> None:
    def fork(original: Any, forks: Forks, row: int, count: int, plan: StepPlan) -> None:
        num_opens = len(plan.opens)
        original(forks, row, count, plan)
        for opened in plan.opens[num_opens:]:
            forks._worker.pool.refs[opened.block_table] += 1

    wrap(patch, Forks, "open_if_complete", fork)


@bug("leaks|no progress")
def released_blocks_never_come_back(patch: Patch) -> None:
    wrap(patch, WorkerState, "free_released", lambda original, worker, flight: None)


@bug("which other rows share|written to one slot")
def copy_on_write_skipped(patch: Patch) -> None:
    def needy(original: Any, planner: StepPlanner, decode: np.ndarray) -> np.ndarray:
        r = planner.worker.rows
        return decode[r.num_computed_tokens[decode] // planner.worker.capacity.block_size >= r.num_blocks[decode]]

    wrap(patch, StepPlanner, "_rows_that_need_a_block", needy)


@bug("is replaced by .* without a copy")
def copy_not_sent(patch: Patch) -> None:
    change_batches(patch, lambda b: replace(b, copy_src=b.copy_src[:0], copy_dst=b.copy_dst[:0]))


@bug("neither its parent's nor a copy|without a copy|which is in use")
def copy_in_the_wrong_direction(patch: Patch) -> None:
    change_batches(patch, lambda b: replace(b, copy_src=b.copy_dst, copy_dst=b.copy_src))


@bug("which another open row has|which is in use|leaks|written to one slot|which other rows share|are free")
def list_of_empty_blocks_does_not_wrap(patch: Patch) -> None:
    def put(self: FreeList, numbers: Any) -> None:
        start = (self._head + self.size) % len(self._slots)
        self.size += len(numbers)
        self._slots[start : start + len(numbers)] = numbers[: len(self._slots) - start]

    patch.setattr(FreeList, "put", put)


@bug("two changes in a row|leaks", first_seed=11)
def adopted_blocks_stay_empty(patch: Patch) -> None:
    patch.setattr(FreeList, "remove", lambda self, numbers: None)


@bug("leaks|are free|no progress|which another open row has|evicts a block before", first_seed=38)
def cached_blocks_lost_when_their_queue_is_compacted(patch: Patch) -> None:
    def remove(original: Any, self: LruQueue) -> None:
        original(self)
        self._tail = max(0, self._tail - 1)

    wrap(patch, LruQueue, "_remove_stale", remove)


# -- cache groups ------------------------------------------------------------------------------------------------------


@bug(
    "group .: (row .*(reads|gets new block|replaced|starts)|writes into|two tokens)|cache group lost|leaks",
    has_groups=True,
)
def group_freed_early(patch: Patch) -> None:
    def free(original: Any, tables: BlockTables, pool: Any, rows: Any, num_computed: np.ndarray, release: Any) -> int:
        return original(tables, pool, rows, num_computed + tables.block_size, release)

    wrap(patch, cache_groups, "free_behind", free)


@bug(
    "opens with a bad table|copies blocks of another group|is replaced by|commits block|with . blocks|which another",
    has_groups=True,
)
def block_of_another_group_sent(patch: Patch) -> None:
    patch.setattr(WindowGroup, "_sent", lambda self, blocks: blocks + np.uint32(self.worker.capacity.num_blocks - 1))


@bug(
    "group .: row . (opens with a bad table|reads)|a cache group lost|which another open row has|beyond their tables",
    has_groups=True,
)
def table_of_a_group_not_reset_at_reuse(patch: Patch) -> None:
    def open_row(original: Any, group: WindowGroup, seq: Sequence, opened: Any, plan: StepPlan) -> None:
        tables, row = group.tables, opened.row
        before = tables.first_block.item(row), tables.num_blocks.item(row)
        original(group, seq, opened, plan)
        if before[1] > tables.num_blocks[row]:
            tables.first_block[row], tables.num_blocks[row] = before

    wrap(patch, WindowGroup, "open", open_row)


@bug("reads what a failed row has written|commits block|whose step is not answered", failure_rate=0.3, has_groups=True)
def group_commits_what_a_failed_row_wrote(patch: Patch) -> None:
    wrap(patch, WindowGroup, "commit", lambda original, group, step, is_open: original(group, step, None))


@bug("group .: (writes into blocks that other rows share|two tokens of one step)", has_groups=True)
def copy_of_a_group_skipped(patch: Patch) -> None:
    patch.setattr(WindowGroup, "_copy", lambda self, row, index: None)


@bug(
    "a cache group lost|group .: row . starts from|group .: row . reads the wrong content",
    has_groups=True,
    first_seed=26,
)
def hit_without_its_window_in_the_group(patch: Patch) -> None:
    patch.setattr(WindowGroup, "usable_hits", lambda self, digests, num_blocks, token_ids=None: num_blocks)


@bug("leaks . blocks of a group|leaks .. blocks of a group|no progress|did not end", has_groups=True)
def blocks_of_a_group_never_come_back(patch: Patch) -> None:
    patch.setattr(WindowGroup, "advance", lambda self, step, output: None)


@bug(
    "beam|is replaced by|reads the wrong content|writes into|which another open row has", has_groups=True, first_seed=5
)
def beam_keeps_its_blocks_of_a_group(patch: Patch) -> None:
    patch.setattr(WindowGroup, "take_over", lambda self, rows, parents: None)


@bug("blocks were requested, but .* are free|no progress|bug in the scheduler", has_groups=True, first_seed=90)
def search_admitted_without_rows_of_its_group(patch: Patch) -> None:
    patch.setattr(WindowGroup, "could_run", lambda self, group: True)


@bug("group .: row . (reads|starts)|leaks|holds the wrong content|a cache group lost", has_groups=True, first_seed=18)
def group_adopts_its_neighbours_blocks(patch: Patch) -> None:
    def adopt(original: Any, self: WindowGroup, blocks: list[Any]) -> None:
        first, size = self._first_id, self.pool.num_blocks
        moved = [
            replace(one, block_id=first + (one.block_id - first + 1) % size) if one.block_id >= first else one
            for one in blocks
        ]
        original(self, moved)

    wrap(patch, WindowGroup, "adopt", adopt)


@bug("group .: row . reads|leaks . blocks of a group", has_groups=True, first_seed=31)
def group_frees_behind_drafts_that_may_be_rejected(patch: Patch) -> None:
    def give(original: Any, self: WindowGroup, rows: Any, least: Any, lasts: Any) -> None:
        original(self, rows, lasts, lasts)

    wrap(patch, WindowGroup, "_give_blocks", give)


# -- the prefix cache --------------------------------------------------------------------------------------------------


@bug("reads the wrong content|opens with a bad table|which another open row has", first_seed=38)
def digest_without_parent(patch: Patch) -> None:
    def extend(
        original: Any, digests: list[bytes], root: bytes, tokens: np.ndarray, block_size: int, keys: Any = ()
    ) -> None:
        while (len(digests) + 1) * block_size <= len(tokens):
            start = len(digests) * block_size
            digests.append(hashing.chained(root + hashing.token_bytes(tokens[start : start + block_size])))

    wrap(patch, prompt_digests, "extend_digests", extend)
    trust_digests(patch)


@bug("reads the wrong content", first_seed=18)
def salt_ignored(patch: Patch) -> None:
    for module in (prompt_digests, worker_state):
        wrap(patch, module, "root_digest", lambda root, salt, block_size, key: root(salt, block_size, b""))
    trust_digests(patch)


@bug("not that of its chain")
def wrong_digest_committed(patch: Patch) -> None:
    change_batches(patch, lambda b: replace(b, commit_digests=[digest[::-1] for digest in b.commit_digests]))


@bug("reads the wrong content|the oracle has|two changes in a row|evicts a block before the blocks that continue it")
def shared_before_its_step_was_sent(patch: Patch) -> None:
    def register(original: Any, planner: StepPlanner, row: int, count: int, plan: StepPlan) -> None:
        original(
            planner,
            row,
            len(planner.worker.rows.known_tokens(row)) - int(planner.worker.rows.num_computed_tokens[row]),
            plan,
        )

    wrap(patch, StepPlanner, "_register_fills", register)
    trust_digests(patch)


@bug("commits block .* before step|which is not full|no acknowledged step has computed")
def committed_before_the_answer(patch: Patch) -> None:
    def finish(original: Any, planner: StepPlanner, plan: StepPlan) -> StepBatch | None:
        batch = original(planner, plan)
        if batch is not None:
            planner.worker.commit_fills(replace_rows(planner.worker.in_flight[-1]), None)
        return batch

    def replace_rows(flight: InFlightStep) -> InFlightStep:
        return replace(flight, full=flight.full[:0])

    wrap(patch, StepPlanner, "finish_plan", finish)


@bug("opens with nothing to compute|was never opened for it|leaks", first_seed=11)
def whole_prompt_taken_from_the_cache(patch: Patch) -> None:
    def match(original: Any, pool: BlockManager, digests: list[bytes], tokens: np.ndarray, *limits: int) -> list[int]:
        return original(pool, digests, tokens, len(tokens) // pool.block_size)

    wrap(patch, BlockManager, "match", match)


@bug("evicts a block before the blocks that continue it", first_seed=10)
def heads_evicted_before_tails(patch: Patch) -> None:
    wrap(patch, BlockManager, "free", lambda free, pool, blocks: free(pool, blocks[::-1]))


@bug("opens with a bad table|evicts a block before the blocks that continue it", first_seed=10)
def most_recently_used_evicted_first(patch: Patch) -> None:
    def take(original: Any, line: LruQueue, count: int, until: int) -> np.ndarray:
        places = line._live(line._head, line._tail)
        if not len(places):
            line._head = line._tail
        return line._blocks[places[::-1][:count]]

    wrap(patch, LruQueue, "take", take)


@bug("two changes in a row|do not add up|still published|no acknowledged step")
def evictions_not_announced(patch: Patch) -> None:
    def forget(original: Any, pool: BlockManager, blocks: list[int]) -> None:
        num_events = len(pool._events)
        original(pool, blocks)
        while len(pool._events) > num_events:
            pool._events.pop()

    wrap(patch, BlockManager, "forget", forget)


@bug("which another open row has|reads the wrong content|which other rows share|opens with a bad table", first_seed=13)
def window_frees_one_block_early(patch: Patch) -> None:
    def free(original: Any, kept: Windows, rows: np.ndarray) -> None:
        before = kept._rows.blocks_before
        kept._rows.blocks_before = before and before - 1
        original(kept, rows)
        kept._rows.blocks_before = before

    wrap(patch, Windows, "free_unneeded", free)


@bug("two changes in a row|no acknowledged step|not that of its chain|which is not full", first_seed=16)
def lost_digest_announced(patch: Patch) -> None:
    def commit(original: Any, pool: BlockManager, fills: Any) -> None:
        pool._announce([fill for fill in fills if not pool._committed[fill[0]]])

    wrap(patch, BlockManager, "commit", commit)


@bug("two changes in a row", first_seed=11)
def newest_block_holds_a_prefix_that_another_one_holds(patch: Patch) -> None:
    def register(original: Any, pool: BlockManager, blocks: Any, digests: Any, tokens: Any) -> Any:
        for digest in digests:
            if pool._prefix_caching:
                pool.held.pop(digest, None)
        return original(pool, blocks, digests, tokens)

    wrap(patch, BlockManager, "register", register)


# -- rows and answers --------------------------------------------------------------------------------------------------


@bug("the oracle has|a token after the end|token at offset|Error")
def late_answer_of_a_closed_row_accepted(patch: Patch) -> None:
    def append(original: Any, table: RowTable, flight: InFlightStep, output: Any, is_open: Any) -> Any:
        return original(table, flight, output, None)

    wrap(patch, scheduler, "append_tokens", append)


@bug("UnexpectedStepError|the oracle has|token at offset|a token after the end")
def stale_epoch_accepted(patch: Patch) -> None:
    """A bug of the shell: an answer from before the worker's restart reaches the core."""
    left: dict[str, list[Any]] = {}

    def lose(original: Any, cluster: Cluster, worker: SymbolicWorker) -> None:
        left[worker.capacity.worker_id] = [worker.answer() for _ in list(worker.queue)]
        original(cluster, worker)

    def answer(original: Any, cluster: Cluster, worker: SymbolicWorker) -> None:
        for output in left.pop(worker.capacity.worker_id, []):
            cluster._absorb(cluster.scheduler.update(output, cluster.now))
        original(cluster, worker)

    wrap(patch, Cluster, "lose", lose)
    wrap(patch, Cluster, "answer", answer)


@bug("opens row .* which is open|was not asked to close|which another open row has")
def closed_row_not_reported(patch: Patch) -> None:
    change_batches(patch, lambda b: replace(b, close_rows=b.close_rows[:0]))


@bug("token at offset|the oracle has|reports .* tokens, delivered")
def newest_token_lost_in_preemption(patch: Patch) -> None:
    def preempt(original: Any, worker: WorkerState, row: int) -> Sequence:
        seq = original(worker, row)
        seq.data.output = seq.data.output[:-1]
        return seq

    wrap(patch, WorkerState, "preempt", preempt)


@bug("the oracle has", first_seed=3)
def fork_samples_the_noise_of_its_parent(patch: Patch) -> None:
    def same_noise(batch: StepBatch) -> StepBatch:
        return replace(batch, opens=[replace(o, sample_index=0) for o in batch.opens])

    change_batches(patch, same_noise)


@bug("the oracle has|a token after the end")
def stop_ids_ignored(patch: Patch) -> None:
    def open_row(original: Any, table: RowTable, *args: Any) -> int:
        row = original(table, *args)
        table.may_end_anywhere[row] = False
        return row

    wrap(patch, RowTable, "open", open_row)


@bug("the oracle has|sample beyond max_model_len")
def one_token_more_than_asked(patch: Patch) -> None:
    def open_row(original: Any, table: RowTable, seq: Any, tokens: Any, blocks: Any, computed: int, limit: int) -> int:
        more = limit if seq.group.stop.max_tokens == 0 else min(limit + 1, table.tokens.shape[1])
        return original(table, seq, tokens, blocks, computed, more)

    wrap(patch, RowTable, "open", open_row)


@bug("exceed max_num_seqs or max_num_batched_tokens")
def budget_ignored(patch: Patch) -> None:
    def begin(original: Any, planner: StepPlanner, now: float, **options: Any) -> StepPlan:
        return StepPlan(10**6, now, **options)

    wrap(patch, StepPlanner, "begin_step", begin)


@bug("beyond|rows are at|closed|not open|has no sequence|must be distinct|with .* blocks")
def ended_row_stays_in_the_decode_run(patch: Patch) -> None:
    def close(original: Any, table: RowTable, row: int) -> None:
        in_run = table.in_run[row]
        original(table, row)
        table.in_run[row] = in_run

    wrap(patch, RowTable, "close", close)


@bug("beyond|rows are at|more tokens than its limit|the oracle has")
def row_at_its_limit_stays_in_the_decode_run(patch: Patch) -> None:
    def renew(original: Any, run: DecodeRun) -> None:
        original(run)
        run.steps_left = 1 << 30

    wrap(patch, DecodeRun, "_renew", renew)


@bug("written to one slot|beyond their tables|rows are at|share|disagrees with the tables", first_seed=10)
def row_joins_the_decode_run_without_a_check_of_its_blocks(patch: Patch) -> None:
    def may_join(original: Any, planner: StepPlanner, row: int) -> bool:
        r = planner.worker.rows
        planned, end = r.num_planned[row], r.num_computed_tokens[row]
        return bool(planned - end == 1 and planned < r.limit[row] and end and not r.is_awaiting[row])

    wrap(patch, StepPlanner, "_may_join", may_join)


@bug("the oracle has|commits block|no acknowledged step has computed", first_seed=23)
def failed_row_keeps_its_blocks_trusted(patch: Patch) -> None:
    wrap(patch, scheduler, "untrusted_after", lambda original, worker, failed, step: Untrusted([], []))


@bug("the oracle has", failure_rate=0.2, first_seed=9)
def forks_of_a_failed_prompt_trusted(patch: Patch) -> None:
    wrap(patch, answers, "_forks_of", lambda original, bad, steps: set())


@bug("no progress")
def refused_once_and_never_checked_again(patch: Patch) -> None:
    def refusal(original: Any, worker: WorkerState, entry: QueueEntry) -> Any:
        return entry.refusals.get(worker.capacity.worker_id)

    wrap(patch, WorkerState, "refusal", refusal)


@bug("is draining and gets a new row", first_seed=26)
def draining_worker_gets_sequences(patch: Patch) -> None:
    def assign(original: Any, placement: Placement, *args: Any, **options: Any) -> Any:
        draining = [worker for worker in placement.workers if worker.is_draining]
        for worker in draining:
            worker.is_draining = False
        placed = original(placement, *args, **options)
        for worker in draining:
            worker.is_draining = True
        return placed

    wrap(patch, Placement, "assign", assign)


@bug("no acknowledged step has computed|the oracle has|did not end", first_seed=23)
def row_without_a_token_goes_on(patch: Patch) -> None:
    wrap(patch, answers, "_failures", lambda original, step, output: list(output.errors))


# -- beams -------------------------------------------------------------------------------------------------------------


@bug("which other rows share|written to one slot")
def last_block_of_a_beam_not_copied(patch: Patch) -> None:
    def copy(original: Any, planner: StepPlanner, row: int, plan: StepPlan) -> None:
        if not planner.worker.rows.is_awaiting[row]:
            original(planner, row, plan)

    wrap(patch, StepPlanner, "_copy_block", copy)


@bug("pools all states, but .* of them are cached|the oracle has", first_seed=93)
def mean_pooling_with_a_prefix_hit(patch: Patch) -> None:
    patch.setattr(Sequence, "max_cached_tokens", property(lambda seq: seq.data.num_tokens - 1))


@bug("commits block .*, which is not full|no acknowledged step has computed")
def blocks_of_a_pooled_row_stay(patch: Patch) -> None:
    def open_row(original: Any, table: RowTable, *args: Any) -> int:
        row: int = original(table, *args)
        table.num_private -= int(table.is_private[row])
        table.is_private[row] = False
        return row

    wrap(patch, RowTable, "open", open_row)


@bug("the oracle has", first_seed=37)
def numbers_of_another_request(patch: Patch) -> None:
    def of_row(original: Any, pooled: PooledRows) -> dict[int, np.ndarray]:
        found = original(pooled)
        return dict(zip(found, reversed(found.values()), strict=True))

    wrap(patch, PooledRows, "of_row", of_row)


@bug("reads the wrong content|which other rows share", first_seed=5)
def beam_keeps_its_own_blocks(patch: Patch) -> None:
    wrap(patch, beams, "take_tables", lambda original, *args: {})


@bug("which another open row has|neither its parent's nor a copy|which other rows share|written to one slot")
def beam_takes_no_reference(patch: Patch) -> None:
    def take(original: Any, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockManager, "share", lambda pool, blocks: None)
            return original(*args)

    wrap(patch, beams, "take_tables", take)


@bug("reads the wrong content|no candidate of row|the oracle has|opens with a prompt")
def beam_keeps_its_own_tokens(patch: Patch) -> None:
    wrap(patch, BeamRows, "_take_tokens", lambda original, beams, rows, parents: None)
    trust_digests(patch)


@bug("not that of its chain|no acknowledged step has computed", first_seed=45)
def beam_keeps_its_own_digests(patch: Patch) -> None:
    def take(original: Any, beams: BeamRows, rows: np.ndarray, parents: np.ndarray) -> None:
        known = {row: list(beams.worker.rows.digests[row]) for row in rows.tolist()}
        original(beams, rows, parents)
        for row, digests in known.items():
            beams.worker.rows.digests[row][:] = digests

    wrap(patch, BeamRows, "_take_tokens", take)


@bug("the oracle has", first_seed=6)
def scores_lost_at_a_preemption(patch: Patch) -> None:
    def forget(original: Any, search: BeamSearch) -> None:
        original(search)
        search.scores[:] = 0

    wrap(patch, BeamSearch, "forget_candidates", forget)


@bug(
    "belongs to another request|no candidate of row|the oracle has|reads the wrong content|no progress"
    "|published a prefix|without a copy"
)
def moves_not_sent(patch: Patch) -> None:
    change_batches(patch, lambda b: replace(b, parts=tuple(p for p in b.parts if not isinstance(p, BeamMoves))))


@bug("did not end within|no progress", first_seed=271)
def late_beams_copy_the_prompt_without_a_prefix_cache(patch: Patch) -> None:
    """Admission counts the blocks of the prompt once, so the pool is too small for the search, which starts again."""

    def hits(original: Any, forks: Forks, row: int, fork: Sequence) -> np.ndarray:
        forks._worker.extend_digests(fork)
        return forks._worker.find_hits(fork, fork.data.token_ids())

    wrap(patch, Forks, "_hits", hits)


@bug("did not end within", first_seed=52)
def failed_gang_retried_without_end(patch: Patch) -> None:
    """The rows that read the blocks of a failed leader move first, and the failure is not counted."""

    def fail_rows(original: Any, core: Scheduler, worker: WorkerState, step: InFlightStep, failures: Any) -> Any:
        failed = {failure.row for failure in failures if failure.row not in step.closed}
        for row in untrusted_after(worker, failed, step).rows:
            if worker.rows.sequences[row] is not None:
                core._requests.requeue(worker.preempt(row), MigrationReason.FAILED)
        return original(core, worker, step, failures)

    wrap(patch, Scheduler, "_fail_rows", fail_rows)


# -- updates of the weights --------------------------------------------------------------------------------------------


@bug("the weights change while a step is in flight", first_seed=12)
def weights_of_two_versions_in_a_step(patch: Patch) -> None:
    patch.setattr(Barrier, "take_reached", lambda barrier: list(barrier.holders))


@bug("reads the wrong content|published a prefix", first_seed=12)
def blocks_of_the_old_weights_hit(patch: Patch) -> None:
    """The weights are not part of the keys, and cached blocks stay."""

    def change(original: Any, barrier: Barrier, root_salt: bytes, *, keeps_kv: bool) -> int:
        return barrier.retract(MigrationReason.UPDATE)

    wrap(patch, Barrier, "change_weights", change)


@bug("plans a step behind a closed barrier", first_seed=44)
def steps_behind_the_barrier(patch: Patch) -> None:
    patch.setattr(Barrier, "_note", lambda barrier: None)


# -- encoder positions -------------------------------------------------------------------------------------------------


@bug(
    "which (another open row has|other rows share)|reads the wrong content|evicts a block before|no LRU queue|leaks",
    first_seed=10,
)
def encoder_blocks_freed_with_the_first_sample(patch: Patch) -> None:
    def close(original: Any, worker: WorkerState, row: int, *others: Any) -> None:
        group = worker.rows.sequence(row).group
        blocks = worker.rows.table[row, : group.features.num_head_tokens // worker.capacity.block_size].astype(np.int64)
        if len(blocks):
            worker.pool.refs[blocks] = 1
        original(worker, row, *others)

    wrap(patch, WorkerState, "_close", close)


@bug("its encoder has", first_seed=10)
def encoder_computed_in_chunks(patch: Patch) -> None:
    def chunk(original: Any, planner: StepPlanner, row: int, plan: StepPlan, num_head_tokens: int = 0) -> None:
        original(planner, row, plan)

    wrap(patch, StepPlanner, "_plan_chunk", chunk)


@bug("starts from .* encoder positions", first_seed=40)
def part_of_the_encoder_positions_hit(patch: Patch) -> None:
    def match(original: Any, pool: BlockManager, digests: list[bytes], tokens: np.ndarray, *limits: int) -> Any:
        return original(pool, digests, tokens, limits[0])

    wrap(patch, BlockManager, "match", match)


# -- inputs besides tokens --------------------------------------------------------------------------------------------


@bug("reads the wrong content", first_seed=195)
def inputs_missing_in_the_digest(patch: Patch) -> None:
    """All inputs have the same placeholder id, so that another image hits the blocks of the first one."""

    def sent(original: Any, cluster: Cluster, request: Any) -> np.ndarray:
        ids = original(cluster, request)
        return np.where(ids >= FIRST_CONTENT_ID, np.uint32(FIRST_CONTENT_ID), ids)

    wrap(patch, Cluster, "_sent_ids", sent)
    patch.setattr(Inputs, "block_keys", lambda inputs, block_size: {})
    trust_digests(patch)


@bug("not that of its chain|no acknowledged step has computed", first_seed=45)
def extra_keys_of_the_last_prompt_block_forgotten(patch: Patch) -> None:
    """The digest of the block that the first output tokens complete: an input may begin in it."""

    def open_row(original: Any, table: RowTable, *args: Any) -> int:
        row: int = original(table, *args)
        table.extra_keys.pop(row, None)
        return row

    wrap(patch, RowTable, "open", open_row)


@bug("reads the wrong content", has_public=True)
def salt_missing_after_a_public_prefix(patch: Patch) -> None:
    patch.setattr(PublicPrefix, "block_keys", lambda prefix, block_size: {})
    trust_digests(patch)


@bug("reads the wrong content", has_public=True)
def salt_a_block_after_the_border(patch: Patch) -> None:
    def late(original: Any, prefix: PublicPrefix, block_size: int) -> dict[int, bytes]:
        return {index + 1: key for index, key in original(prefix, block_size).items()}

    wrap(patch, PublicPrefix, "block_keys", late)
    trust_digests(patch)


@bug("compute an input that they do not have")
def inputs_lost_when_a_row_is_computed_again(patch: Patch) -> None:
    def without(batch: StepBatch) -> StepBatch:
        opens = [replace(o, inputs=() if len(o.token_ids) > o.prompt_len else o.inputs) for o in batch.opens]
        return replace(batch, opens=opens)

    change_batches(patch, without)


@bug("compute an input that they do not have", first_seed=45)
def inputs_lost_when_a_hit_ends_inside(patch: Patch) -> None:
    def after(original: Any, inputs: Inputs, num_computed: int) -> Any:
        return [item for item in inputs.items if item.start >= num_computed]

    wrap(patch, Inputs, "after", after)


@bug("gets an input whose positions are computed", first_seed=27)
def all_inputs_sent_after_a_hit(patch: Patch) -> None:
    wrap(patch, Inputs, "after", lambda original, inputs, num_computed: inputs.items)


@bug("pending_prefill is wrong|todo", checks_invariants=True, first_seed=27)
def last_token_of_a_prompt_planned_as_a_decode(patch: Patch) -> None:
    def split(original: Any, planner: StepPlanner) -> Any:
        rows = np.fromiter(planner.worker.rows.outside, dtype=np.int64)
        todo = planner.worker.rows.todo(rows)
        return rows[todo == 1], rows[todo > 1]

    wrap(patch, StepPlanner, "_split_by_stage", split)


@bug("beyond their tables|are not computed|before", first_seed=14)
def tokens_of_an_image_computed_before_it(patch: Patch) -> None:
    def plan_chunk(original: Any, self: InputRows, row: int, count: int, plan: StepPlan) -> int:
        original(self, row, count, plan)
        return count

    wrap(patch, InputRows, "plan_chunk", plan_chunk)


@bug("was never opened", first_seed=45)
def step_with_work_on_images_alone_not_sent(patch: Patch) -> None:
    def plan_chunk(original: Any, self: InputRows, row: int, count: int, plan: StepPlan) -> int:
        count = original(self, row, count, plan)
        plan.has_part_work = False
        return count

    wrap(patch, InputRows, "plan_chunk", plan_chunk)


@bug("gets an input whose positions are computed", first_seed=3)
def forks_carry_the_inputs_of_their_prompt(patch: Patch) -> None:
    def open_row(original: Any, self: InputRows, seq: Sequence, opened: Any, plan: StepPlan) -> None:
        original(self, seq, opened, plan)
        found = seq.group.features.find(Inputs)
        if found is not None and opened.fork_of_row is not None:
            opened.inputs = found.after(0)

    wrap(patch, InputRows, "open", open_row)


# -- snapshots ---------------------------------------------------------------------------------------------------------


@bug("starts after .* tokens from the snapshot|sample from a state|takes snapshots in slots", first_seed=35)
def snapshot_of_another_position(patch: Patch) -> None:
    shifted: set[int] = set()

    def take(original: Any, self: Snapshots, row: int, plan: Any, context: int, end: int, **how: Any) -> list[Taken]:
        taken = original(self, row, plan, context, end, **how)
        for one in taken:
            if one.position > context + 1:
                one.position -= 1
                shifted.add(id(one))
        return taken

    def keep(original: Any, self: Snapshots, taken: Taken) -> None:
        taken.position += id(taken) in shifted
        original(self, taken)

    wrap(patch, Snapshots, "_take", take)
    wrap(patch, Snapshots, "_keep", keep)


@bug("starts after .* tokens from the snapshot|sample from a state", first_seed=60)
def snapshot_of_another_prefix(patch: Patch) -> None:
    def hit(original: Any, self: Snapshots, digest: bytes) -> int:
        original(self, digest)
        return next(iter(self.kept.values())).slot

    wrap(patch, Snapshots, "_hit", hit)


@bug("starts after .* tokens from the snapshot None", first_seed=35)
def hit_without_a_snapshot(patch: Patch) -> None:
    wrap(patch, Snapshots, "usable_hits", lambda original, self, digests, num_blocks, *_: num_blocks)
    wrap(
        patch, Snapshots, "_hit", lambda original, self, digest: original(self, digest) if digest in self.kept else None
    )


@bug("starts after .* tokens from the snapshot|sample from a state|takes snapshots in slots")
def slot_of_a_kept_snapshot_given_away(patch: Patch) -> None:
    def keep(original: Any, self: Snapshots, taken: Taken) -> None:
        original(self, taken)
        self._free.append(taken.slot)

    wrap(patch, Snapshots, "_keep", keep)


@bug("starts after .* tokens from the snapshot|sample from a state|takes snapshots in slots")
def snapshot_used_before_its_step_is_answered(patch: Patch) -> None:
    def take(original: Any, self: Snapshots, row: int, plan: Any, *args: Any, **how: Any) -> list[Taken]:
        taken = original(self, row, plan, *args, **how)
        for one in taken:
            index = one.position // self._block_size - 1
            if index < len(plan.digests):
                self.kept.setdefault(plan.digests[index], Kept(one.slot, 1, 0.0))
        return taken

    wrap(patch, Snapshots, "_take", take)


@bug("the oracle has", failure_rate=0.3, first_seed=261)
def snapshot_of_a_failed_row_kept(patch: Patch) -> None:
    def read(original: Any, self: Snapshots, step: InFlightStep, output: Any, is_open: Any, deltas: Any) -> Any:
        found = original(self, step, output, is_open, deltas)
        for taken in self._answered:
            taken.digests = self.worker.rows.digests[taken.row]
        return found

    wrap(patch, Snapshots, "read", read)


@bug("sample from a state")
def state_not_reset_at_reuse(patch: Patch) -> None:
    def start(original: Any, self: SymbolicWorker, opened: Any, root: int) -> None:
        original(self, opened, root if not self.state[opened.row] else int(self.state[opened.row]))

    wrap(patch, SymbolicWorker, "_start_state", start)


@bug("a cache group lost", has_groups=True, has_turns=True, first_seed=77)
def groups_not_asked_on_workers_with_states(patch: Patch) -> None:
    def usable(original: Any, group: WindowGroup, digests: Any, num_blocks: int, token_ids: Any = None) -> int:
        has_states = group.worker.capacity.num_snapshots is not None
        return num_blocks if has_states else original(group, digests, num_blocks, token_ids)

    wrap(patch, WindowGroup, "usable_hits", usable)


@bug(
    "the oracle has|sample from a state|starts after .* tokens from the snapshot",
    failure_rate=0.3,
    has_turns=True,
    first_seed=49,
)
def digests_of_a_snapshot_taken_when_it_is_planned(patch: Patch) -> None:
    """A row that fails in that step has them too."""

    def take(original: Any, self: Snapshots, row: int, plan: Any, *args: Any, **how: Any) -> list[Taken]:
        taken = original(self, row, plan, *args, **how)
        for one in taken:
            one.digests = plan.digests
        return taken

    wrap(patch, Snapshots, "_take", take)


@bug("KeyError|starts after .* tokens from the snapshot", has_groups=True, first_seed=35)
def states_not_asked_on_workers_with_groups(patch: Patch) -> None:
    def usable(original: Any, self: Snapshots, digests: Any, num_blocks: int, token_ids: Any = None) -> int:
        return num_blocks if self.worker.capacity.groups else original(self, digests, num_blocks, token_ids)

    wrap(patch, Snapshots, "usable_hits", usable)


# -- moves of blocks ---------------------------------------------------------------------------------------------------


@bug("was given away while it is read", has_moves=True, has_slow_links=True, first_seed=6)
def source_freed_during_a_read(patch: Patch) -> None:
    def begin(original: Any, moves: BlockMoves, *args: Any) -> Any:
        move = original(moves, *args)
        if move is not None and move.source is not None:
            one = moves._open[move.move_id]
            one.source.worker.pool.free(one.pinned[::-1])
            one.pinned = one.pinned[:0]
        return move

    wrap(patch, BlockMoves, "_begin", begin)


@bug(
    "(reads|has|holds) the wrong content|under a digest that is not|commits block .* not full|published prefixes",
    has_moves=True,
)
def fetched_into_the_wrong_block(patch: Patch) -> None:
    def deposit(original: Any, worker: SymbolicWorker, block: int, *content: Any) -> None:
        original(worker, (block + 1) % worker.capacity.num_blocks, *content)

    wrap(patch, SymbolicWorker, "deposit", deposit)


@bug("reads the wrong content", has_moves=True, first_seed=3)
def tier_serves_another_salt(patch: Patch) -> None:
    """The record of a block with the same tokens, in another chain."""

    def find(original: Any, tier: Tier, digest: bytes, tokens: np.ndarray) -> Any:
        others = (record for record in tier.values() if np.array_equal(record.tokens, tokens) and is_sound(record))
        return next(others, None)

    wrap(patch, tiers, "find_in_tier", find)


@bug("reads the wrong content", has_moves=True, has_slow_disks=True)
def checksum_ignored(patch: Patch) -> None:
    patch.setattr(tiers, "is_sound", lambda record: True)


@bug("from files that take years", has_moves=True, has_slow_disks=True)
def price_ignored(patch: Patch) -> None:
    patch.setattr(block_moves, "moved_tokens_gain", lambda num_tokens, *_: num_tokens)


@bug("was given away while it is read|reads the wrong content", has_moves=True, first_seed=6)
def stale_epoch_served(patch: Patch) -> None:
    patch.setattr(tiers, "is_same_process", lambda source, worker: True)


@bug("which is not full|under a digest that is not|no acknowledged step has computed|reads the wrong", has_moves=True)
def blocks_committed_that_did_not_arrive(patch: Patch) -> None:
    def settle(original: Any, moves: BlockMoves, one: Any, num_moved: int) -> None:
        original(moves, one, len(one.move.digests))

    wrap(patch, BlockMoves, "_settle", settle)


@bug(
    "reads the wrong content|which other rows share|which another open row has|opens with a bad table|are free",
    has_moves=True,
)
def target_blocks_free_during_a_fetch(patch: Patch) -> None:
    def begin(original: Any, moves: BlockMoves, *args: Any) -> Any:
        move = original(moves, *args)
        if move is not None:
            moves._open[move.move_id].target.pool.free(move.block_ids)
        return move

    def settle(original: Any, moves: BlockMoves, one: Any, num_moved: int) -> None:
        one.target.pool.share(one.move.block_ids)
        original(moves, one, num_moved)

    wrap(patch, BlockMoves, "_begin", begin)
    wrap(patch, BlockMoves, "_settle", settle)


@bug(
    "under a digest that is not|which is not full|reads the wrong content|writes into committed",
    has_moves=True,
    has_windows=True,
    has_fast_links=True,
    first_seed=10,
)
def fetched_before_the_steps_in_flight_have_run(patch: Patch) -> None:
    wrap(patch, Cluster, "_may_write", lambda original, cluster, move: move.worker_id in cluster.workers)


@bug("no progress|did not end within", has_moves=True)
def a_failed_move_is_waited_for_without_end(patch: Patch) -> None:
    def end(original: Any, moves: BlockMoves, move_id: int, *args: Any) -> Any:
        one = moves._open.get(move_id)
        changed = original(moves, move_id, *args)
        if one is not None:
            one.move.is_ended, one.move.give_up_at = False, np.inf
        return changed

    wrap(patch, BlockMoves, "end_move", end)


@bug("was given away while it is read|sample from a state", has_moves=True, first_seed=6)
def snapshot_of_another_position_moved(patch: Patch) -> None:
    def lend(original: Any, self: Snapshots, digests: Any) -> list[int]:
        return list(original(self, [next(iter(self.kept))]))

    wrap(patch, Snapshots, "lend", lend)


@bug("sample from a state", has_moves=True, first_seed=6)
def tier_serves_a_snapshot_of_another_salt(patch: Patch) -> None:
    """One after as many tokens, in another chain."""

    def find(original: Any, tier: Tier, extra: Any) -> Any:
        same = (one for one in tier.values() if len(one.tokens) == len(one.kv) == 1 and one.tokens[0] == extra.words[0])
        return next((record for record in same if is_sound(record)), None)

    wrap(patch, tiers, "find_snapshot", find)


@bug("starts after .* tokens from the snapshot|sample from a state|was given away", has_moves=True, first_seed=6)
def snapshot_kept_that_did_not_arrive(patch: Patch) -> None:
    wrap(patch, Snapshots, "receive", lambda original, self, extras, num_arrived: original(self, extras, len(extras)))


@bug("was given away while it is read|leaks . blocks of a group", has_moves=True, has_groups=True, first_seed=23)
def block_of_another_group_moved(patch: Patch) -> None:
    def lend(original: Any, self: WindowGroup, digests: Any) -> list[int]:
        return [block - self._first_id for block in original(self, digests)]

    wrap(patch, WindowGroup, "lend", lend)


@bug("group .: row . reads the wrong content", has_moves=True, has_groups=True)
def tier_serves_the_same_block_of_another_group(patch: Patch) -> None:
    def find(original: Any, tier: Tier, digest: bytes, tokens: np.ndarray) -> Any:
        named = (one for one in tier.values() if hashing.group_digest(one.digest, 1) == digest)
        return next(named, None) or original(tier, digest, tokens)

    wrap(patch, tiers, "find_in_tier", find)


@bug("a cache group lost|group .: row . (starts from|reads the wrong content)", has_moves=True, has_groups=True)
def tail_of_a_window_missing_after_a_move(patch: Patch) -> None:
    patch.setattr(WindowGroup, "extras_at", lambda self, num_blocks: range(0))
    patch.setattr(WindowGroup, "usable_hits", lambda self, digests, num_blocks, token_ids=None: num_blocks)


@bug("group .: (row . reads the wrong content|commits block .* not full)", has_moves=True, has_groups=True)
def block_of_a_group_kept_that_did_not_arrive(patch: Patch) -> None:
    wrap(patch, WindowGroup, "receive", lambda original, self, extras, num_arrived: original(self, extras, len(extras)))


@bug("moving blocks of a group", has_moves=True, has_groups=True, checks_invariants=True, first_seed=23)
def block_of_a_group_freed_during_a_read(patch: Patch) -> None:
    def lend(original: Any, self: WindowGroup, digests: Any) -> list[int]:
        ids = list(original(self, digests))
        self.take_back(ids)
        return ids

    wrap(patch, WindowGroup, "lend", lend)


@bug("was given away while it is read|sample from a state", has_moves=True, first_seed=233)
def lent_snapshot_evicted(patch: Patch) -> None:
    def take(original: Any, self: Snapshots, *args: Any) -> int | None:
        lent, self._lent = self._lent, type(self._lent)()
        try:
            return original(self, *args)
        finally:
            self._lent = lent

    wrap(patch, Snapshots, "_take_slot", take)


@bug(
    "takes snapshots in slots|sample from a state|starts after .* tokens from the snapshot",
    has_moves=True,
    first_seed=6,
)
def slot_of_a_moved_snapshot_stays_free(patch: Patch) -> None:
    def receive(original: Any, self: Snapshots, extras: Any, num_arrived: int) -> None:
        before = set(self.kept)
        original(self, extras, num_arrived)
        self._free += [self.kept[digest].slot for digest in self.kept.keys() - before]

    wrap(patch, Snapshots, "receive", receive)


@bug(
    "group .: (row . (reads|gets new block|opens)|writes into)|which is in use|ref counts|leaks",
    has_moves=True,
    has_groups=True,
)
def block_of_a_group_free_during_a_fetch(patch: Patch) -> None:
    def reserve(original: Any, self: WindowGroup, *args: Any) -> list[int]:
        ids = original(self, *args)
        self.pool.free(self._own(ids))
        return ids

    def receive(original: Any, self: WindowGroup, extras: Any, num_arrived: int) -> None:
        self.pool.share(self._own([extra.block_id for extra in extras]))
        original(self, extras, num_arrived)

    wrap(patch, WindowGroup, "reserve", reserve)
    wrap(patch, WindowGroup, "receive", receive)


# -- requests ----------------------------------------------------------------------------------------------------------


@bug("expected a DuplicateRequestError", first_seed=10)
def request_given_to_any_stream(patch: Patch) -> None:
    patch.setattr(admission_control, "_gives_way", lambda live, group: True)


@bug("tenants and live requests disagree", checks_invariants=True)
def tenant_of_an_ended_request_stays(patch: Patch) -> None:
    patch.setattr(FairShare, "leave", lambda self, slot: None)


@bug("pending_tokens is wrong", checks_invariants=True)
def tokens_of_a_request_that_left_the_queue_counted(patch: Patch) -> None:
    keep_number(patch, WaitingQueue, "remove", "pending_tokens")


@bug("unschedulable_tokens is wrong", checks_invariants=True, first_seed=1)
def tokens_of_an_unschedulable_request_not_counted(patch: Patch) -> None:
    keep_number(patch, WaitingQueue, "add_unschedulable", "unschedulable_tokens")


@bug("reserved rows disagree", checks_invariants=True, first_seed=5)
def rows_reserved_for_the_samples_of_a_closed_row(patch: Patch) -> None:
    keep_number(patch, WorkerState, "_close", "num_reserved_rows")


@bug("bytes of inputs are wrong", checks_invariants=True)
def bytes_of_an_ended_request_counted(patch: Patch) -> None:
    keep_number(patch, Requests, "_forget_if_done", "num_bytes")


@bug("priorities are wrong", checks_invariants=True)
def priority_of_an_ended_request_stays(patch: Patch) -> None:
    keep_number(patch, Requests, "_forget_if_done", "priorities")


# -- conversations -----------------------------------------------------------------------------------------------------


@bug("evicts a block before the blocks that continue it", has_operators=True, first_seed=38)
def superseded_turn_evicted_from_its_head(patch: Patch) -> None:
    def keep(original: Any, pool: BlockManager, *args: Any, **how: Any) -> None:
        pool._kept_depth *= -1
        original(pool, *args, **how)

    wrap(patch, BlockManager, "keep", keep)


@bug(
    "which another open row has|which is in use|wrong content|evicts a block before the blocks",
    has_operators=True,
    has_turns=True,
    first_seed=10,
)
def superseded_turn_freed_while_it_is_read(patch: Patch) -> None:
    def keep(original: Any, pool: BlockManager, blocks: Any, conversation: int, *, supersedes: bool) -> None:
        left = np.setdiff1d((pool._kept_by == conversation).nonzero()[0], blocks)
        before, used = pool._clock, left[pool.refs[left] > 0]
        original(pool, blocks, conversation, supersedes=supersedes)
        if supersedes and pool._clock > before and len(used):
            pool.refs[used] = 0
            pool._put_back(used)

    wrap(patch, BlockManager, "keep", keep)


# -- operators ---------------------------------------------------------------------------------------------------------


@bug(
    "blocks that were forgotten|no acknowledged step|from the snapshot",
    has_moves=True,
    has_operators=True,
    first_seed=22,
)
def late_blocks_kept_after_a_reset(patch: Patch) -> None:
    patch.setattr(BlockMoves, "cancel_all", lambda self: None)


@bug("is reached before requests that had begun have ended", has_operators=True, first_seed=38)
def finish_answered_when_another_hold_is_reached(patch: Patch) -> None:
    def take(original: Any, self: Barrier) -> list[Hold]:
        reached = original(self)
        early = [hold for hold in self._holds.values() if reached and hold.state is HoldState.FINISHING]
        for hold in early:
            hold.state = HoldState.REACHED
        return reached + early

    wrap(patch, Barrier, "take_reached", take)


@bug("is carried out, but it was released", has_operators=True)
def released_hold_carried_out_at_the_next_one(patch: Patch) -> None:
    late: list[Hold] = []

    def release(original: Any, self: Barrier, holder: str) -> Hold | None:
        hold = original(self, holder)
        if hold is not None and hold.state is not HoldState.REACHED:
            late.append(hold)
        return hold

    def take(original: Any, self: Barrier) -> list[Hold]:
        reached = original(self)
        if reached:
            reached += late
            late.clear()
        return reached

    wrap(patch, Barrier, "release", release)
    wrap(patch, Barrier, "take_reached", take)


@bug("plans a step during", has_operators=True)
def barrier_opens_with_the_first_release(patch: Patch) -> None:
    def release(original: Any, self: Barrier, holder: str) -> Hold | None:
        hold = original(self, holder)
        self.is_closed = False
        return hold

    wrap(patch, Barrier, "release", release)


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str, monkeypatch: Patch) -> None:
    planted = BUGS[name]
    with monkeypatch.context() as patch:
        planted.plant(patch)
        seed, complaint = first_failure(planted)
    assert seed is not None, f"{MAX_SEEDS} seeds ran with the bug and none failed"
    assert re.search(planted.complaint, complaint), f"seed {seed} says: {complaint}"
    run_seed(seed, **planted.changes)


def first_failure(planted: Bug) -> tuple[int | None, str]:
    """The first seed that fails, and the message of its failure."""
    for seed in range(planted.first_seed, planted.first_seed + MAX_SEEDS):
        try:
            run_seed(seed, checks_invariants=planted.checks_invariants, **planted.changes)
        except Exception as error:
            return seed, f"{type(error).__name__}: {error}"
    return None, ""
