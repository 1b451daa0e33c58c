"""Moves of cached blocks into a worker's pool: from its own tiers, or from the pool of another worker, which may be a
worker of another scheduler.

A move fills blocks of the target with the blocks that continue what it has cached of a sequence. When it has ended,
they are cached prefixes like any others, and the sequence hits them when it is admitted. So a move is a matter of the
cache alone: whatever becomes of it, the tokens are the same, and what did not arrive is computed.

    decided      `wait_for`: placement has chosen a worker with room for a waiting sequence. `leave`: a running sequence
                 should leave its worker
    taken        by `take_moves`; the caller has the target fetch the blocks
    ended        `end_move`, with the number of leading blocks that arrived

Extras
    Rows of some models start only where a part of the worker holds something besides the blocks: a snapshot, the window
    before the row's first token in each cache group. A move of such a model ends at the deepest block for which the
    target, or the source, holds all extras, and brings those that the target lacks, after the blocks. Its price counts
    their bytes, and what it gains is from where the target could start before.

Ownership of blocks
    The target's blocks have a reference of the move, so that no row gets them. They are written only after the steps
    that were in flight when the move took them (`after_step_id`): such a step may carry a commit of their old content.
    The source's blocks have a reference too, so that they are not evicted while they are read, and so have the blocks
    of the target that the moved ones continue. A move ends without effect on a worker that has left the scheduler, and
    if all prefixes were forgotten meanwhile (`cancel_all`): the memory of the pool, or the weights, may be others.

Waiting
    A sequence whose blocks are on their way stays in the queue, and others pass it. It waits at most until
    `give_up_at`, when computing the tokens would have been done as well. It moves once per stay in the queue, so a
    source that always fails costs one attempt. Sequences with the same prefix wait for the same move.

Other schedulers
    If no block that this scheduler knows of is worth a move, a sequence waits for a search (`BlockSearch`): the caller
    looks for a worker of another scheduler and has that one keep the blocks (loans.py). One search per stay in the
    queue, and only if a move of all its blocks would pay for the search too. Searches that find something are
    measured as moves are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.block_manager import NO_BLOCKS
from scheduler_svc.core.features.block_sources import BlockSource, ExtrasSource, LentBlocks, OwnSource, Source
from scheduler_svc.core.messages import Counts, MovedExtra
from scheduler_svc.core.policy import MoveSpeed, Throughput, TierKind, moved_tokens_gain
from scheduler_svc.core.sequence import QueueEntry, Refusal, Sequence
from scheduler_svc.core.worker_state import WorkerPart, WorkerState
from step_protocol.columns import I64, U32

MAX_SEARCHES = 32
PATIENCE = 2.0  # a sequence waits for its blocks at most this many times as long as computing them would take
MIN_PATIENCE_S = 0.5
UNKNOWN_PACE = 1000.0  # tokens per second, to limit the wait while the pace of prefill is unknown


@dataclass(eq=False, slots=True)
class BlockMove:
    """The order for a worker: which blocks of its pool get what content. They continue each other. N may be 0."""

    move_id: int
    worker_id: str
    after_step_id: int  # 0: no step is in flight
    block_ids: I64  # [N]
    digests: list[bytes]  # [N]
    token_blocks: U32  # [N, block_size]
    source: BlockSource | None  # None: the worker's own tiers
    extras: list[MovedExtra] = field(default_factory=list)  # they follow the blocks
    num_saved_tokens: int = 0
    is_ended: bool = False  # no sequence waits for it; while it is open: it was cancelled
    give_up_at: float = 0.0  # no sequence waits longer

    @property
    def num_items(self) -> int:
        """Blocks and extras."""
        return len(self.digests) + len(self.extras)


@dataclass(eq=False, slots=True)
class BlockSearch:
    """The order to find a worker of another scheduler that holds more of these blocks than the first `num_held`."""

    worker_id: str  # would get them
    layout: bytes
    num_held: int
    digests: list[bytes]
    token_ids: U32
    began_at: float
    give_up_at: float
    lent: LentBlocks | None = None
    is_ended: bool = False


class _Option(NamedTuple):
    """What a move could bring."""

    gain: int  # in tokens
    start: int  # the number of blocks after which a row could start without it
    first: int  # the first block that moves
    end: int  # the number of blocks after which a row can start with it
    source: Source | None  # None: the tiers
    missing: list[list[int]]  # of each part for all rows, the blocks whose extras move


@dataclass(slots=True)
class _PartExtras:
    """The extras of one part, on their way."""

    part: WorkerPart
    source: ExtrasSource | None
    extras: list[MovedExtra]


@dataclass(slots=True)
class _Open:
    """A move under way, with what it holds."""

    move: BlockMove
    target: WorkerState
    prefix: I64  # blocks of the target that the moved ones continue
    source: Source | None
    pinned: I64  # blocks of the source
    extras: list[_PartExtras]
    speeds: list[tuple[MoveSpeed, float]]  # of each block and extra: of its place, and as how many blocks it counts


@dataclass(slots=True)
class _Mover:
    """What the scheduler knows of a worker whose blocks move."""

    tier_speeds: dict[TierKind, MoveSpeed]
    transfer_speed: MoveSpeed
    tiers: dict[bytes, TierKind] = field(default_factory=dict)  # the fastest tier of each block and extra
    arriving: dict[bytes, BlockMove] = field(default_factory=dict)

    def reads(self, digests: Seq[bytes]) -> Iterator[int]:
        """How many of these blocks its tiers hold, up to each change of tier."""
        count = 0
        for kind, run in groupby(map(self.tiers.get, digests)):
            if kind is None:
                return
            count += len(list(run))
            yield count


class BlockMoves:
    """Decides which blocks move. Without workers that can move blocks, `is_on` is false and nothing is called."""

    def __init__(
        self,
        workers: Mapping[str, WorkerState],
        throughput: Throughput,
        counts: Counts,
        watermark: float,
        on_change: Callable[[WorkerState], None],
        *,
        borrows: bool = False,
    ) -> None:
        self._workers = workers
        self._throughput = throughput
        self._counts = counts
        self._watermark = watermark
        self._on_change = on_change  # the placements on a worker may change
        self._movers: dict[str, _Mover] = {}
        self.is_on = False  # some worker can move blocks, or lent ones are to be given back
        self._open: dict[int, _Open] = {}
        self._new: list[BlockMove] = []
        self._leaving: dict[Sequence, BlockMove] = {}  # running sequences whose blocks go ahead of them
        self._losses_s: list[float] = []
        self._num_moves = 0
        self._borrows = borrows
        self._searches: dict[bytes, BlockSearch] = {}  # under way, by the first block that they look for
        self._new_searches: list[BlockSearch] = []
        self._search_speed = MoveSpeed(0)
        self._read: list[LentBlocks] = []

    # -- workers ------------------------------------------------------------------------------------------------------

    def join(self, worker: WorkerState) -> None:
        """A worker joins."""
        movement = worker.capacity.movement
        if movement is not None:
            size = movement.block_bytes
            tiers = {
                TierKind.MEMORY: MoveSpeed(size, MoveSpeed.GUESS_MEMORY_BYTES_PER_S), TierKind.DISK: MoveSpeed(size)
            }  # fmt: skip
            self._movers[worker.capacity.worker_id] = _Mover(tiers, MoveSpeed(size))
            self.is_on = True

    def forget(self, worker: WorkerState) -> None:
        """A worker has left, with the moves into it."""
        self._movers.pop(worker.capacity.worker_id, None)
        for move_id in [move_id for move_id, one in self._open.items() if one.target is worker]:
            self.end_move(move_id, 0)
        self.is_on = bool(self._movers or self._read)
        self._new = [move for move in self._new if not move.is_ended]

    def change_tiers(self, worker_id: str, tiers: Mapping[bytes, TierKind | None]) -> None:
        """The fastest tier of a worker that holds each of these blocks has changed."""
        mover = self._movers.get(worker_id)
        if mover is None:
            return
        for digest, kind in tiers.items():
            if kind is None:
                mover.tiers.pop(digest, None)
            else:
                mover.tiers[digest] = kind

    def num_in_tiers(self, worker_id: str) -> int:
        """Number of blocks in the tiers of a worker."""
        return len(self._movers[worker_id].tiers) if worker_id in self._movers else 0

    def is_source(self, worker_id: str) -> bool:
        """Whether blocks of this worker are being read."""
        return any(one.source is not None and one.source.worker_id == worker_id for one in self._open.values())

    # -- waiting sequences --------------------------------------------------------------------------------------------

    def gains(self, workers: Seq[WorkerState], entry: QueueEntry) -> I64:
        """For each worker, how many fewer tokens than uncached ones it computes in the time that a move leaves."""
        return np.array([self._gain(worker, entry, workers) for worker in workers], dtype=np.int64)

    def _gain(self, worker: WorkerState, entry: QueueEntry, workers: Seq[WorkerState]) -> int:
        move = entry.move
        if move is not None:
            is_coming = not move.is_ended and move.worker_id == worker.capacity.worker_id
            return int(move.num_saved_tokens) if is_coming else 0
        found = self._best(worker, entry, workers)
        return 0 if found is None else found.gain

    def _best(self, worker: WorkerState, entry: QueueEntry, workers: Iterable[WorkerState]) -> _Option | None:
        """The best move for a waiting sequence."""
        mover = self._movers.get(worker.capacity.worker_id)
        if mover is None:
            return None
        seq = entry.seq
        digests, lent = seq.digests, None if entry.search is None else entry.search.lent
        end = min(seq.max_cached_tokens // worker.capacity.block_size, len(digests))
        first = worker.pool.match_len(digests, end)
        found: list[_Option | None] = []
        if mover.tiers:
            counts = list(mover.reads(digests[first:end])) or [0]  # 0: extras alone
            found += [self._option(worker, None, digests, first, first + count) for count in counts]
        for other in workers:
            if other is not worker and can_exchange(worker, other):
                count = other.pool.match_len(digests, end)
                found.append(self._option(worker, OwnSource(other), digests, first, count))
        if lent is not None:
            found.append(self._option(worker, lent, digests, first, lent.num_held(digests, end)))
        return max((one for one in found if one is not None), key=lambda one: one.gain, default=None)

    def _option(
        self, target: WorkerState, source: Source | None, digests: Seq[bytes], first: int, end: int
    ) -> _Option | None:
        """The move of blocks from `first` to `end`, or of fewer if extras are missing; None if it gains nothing."""
        start = target.usable_hits(digests, first)
        end, missing = self._reach(target, source, digests, start, end)
        if end <= start:
            return None
        first = min(first, end)
        seconds = _seconds(_num_blocks(self._speeds(target, source, digests, (first, end), missing)))
        num_tokens = (end - start) * target.capacity.block_size
        gain = moved_tokens_gain(num_tokens, seconds, self._throughput.prefill.early_per_s)
        return _Option(gain, start, first, end, source, missing) if gain > 0 else None

    def _speeds(
        self,
        target: WorkerState,
        source: Source | None,
        digests: Seq[bytes],
        span: tuple[int, int],
        missing: Seq[Seq[int]],
    ) -> list[tuple[MoveSpeed, float]]:
        """As in `_Open`."""
        mover = self._movers[target.capacity.worker_id]
        found = [(digest, 1.0) for digest in digests[slice(*span)]]
        for part, indices in zip(target.parts_of_all, missing, strict=False):
            found += [(part.name_in_tier(digests[index]), part.blocks_worth(1)) for index in indices]
        if source is not None:
            return [(mover.transfer_speed, worth) for _, worth in found]
        return [(mover.tier_speeds[mover.tiers[name]], worth) for name, worth in found]

    def _reach(
        self, target: WorkerState, source: Source | None, digests: Seq[bytes], start: int, end: int
    ) -> tuple[int, list[list[int]]]:
        """The last block up to `end` after which rows of the target could start if it got what the source has, and the
        blocks whose extras it lacks there, for each part. `start` if there is none.
        """
        while end > start:
            missing = [
                [index for index in part.extras_at(end) if not part.holds(digests[index])]
                for part in target.parts_of_all
            ]
            wanted = ((number, index) for number, indices in enumerate(missing) for index in indices)
            absent = (index for number, index in wanted if not self._has_extra(target, source, number, digests[index]))
            if (first_absent := next(absent, None)) is None:
                return end, missing
            end = first_absent  # a row that starts behind it, and before the old end, needs it too
        return start, []

    def _has_extra(self, target: WorkerState, source: Source | None, number: int, digest: bytes) -> bool:
        if source is not None:
            part = source.part(number)
            return part is not None and part.holds(digest)
        return target.parts_of_all[number].name_in_tier(digest) in self._movers[target.capacity.worker_id].tiers

    def wait_for(self, worker: WorkerState, entry: QueueEntry, now: float) -> bool:
        """Whether a sequence that has room on this worker should wait for blocks. Begins the move if needed."""
        mover = self._movers.get(worker.capacity.worker_id)
        if mover is None:
            return False
        if entry.move is not None:
            move = entry.move
            return not move.is_ended and move.worker_id == worker.capacity.worker_id and now < move.give_up_at
        seq, bs = entry.seq, worker.capacity.block_size
        if seq.group.features.num_head_tokens or seq.group.features.is_private:
            return False
        end = min(seq.max_cached_tokens // bs, len(seq.digests))
        first = worker.pool.match_len(seq.digests, end)
        if first < end and (coming := mover.arriving.get(seq.digests[first])) is not None:
            entry.move = coming
            return now < coming.give_up_at
        found = self._best(worker, entry, self._workers.values())
        if found is None:
            if self._searches_for(worker, entry, first, end, now):
                return True
            for speed in (*mover.tier_speeds.values(), mover.transfer_speed, self._search_speed):
                speed.add_unmoved()
            return False
        if isinstance(worker.try_admit(entry, self._watermark, self._throughput.mean_output), Refusal):
            return False
        parts = zip(worker.parts_of_all, found.missing, strict=False)
        names = [part.name_in_tier(seq.digests[index]) for part, indices in parts for index in indices]
        coming = next((mover.arriving[name] for name in names if name in mover.arriving), None)
        if found.first == found.end and coming is not None:
            entry.move = coming
            return now < coming.give_up_at
        entry.move = self._begin(worker, seq, seq.digests, seq.data.token_ids(), found, now)
        return entry.move is not None

    def _searches_for(self, worker: WorkerState, entry: QueueEntry, first: int, end: int, now: float) -> bool:
        """Whether a sequence should wait for a search. Begins it if needed."""
        search = entry.search
        if search is None:
            search = entry.search = self._begin_search(worker, entry.seq, first, end, now)
        return search is not None and not search.is_ended and now < search.give_up_at

    def _begin_search(self, worker: WorkerState, seq: Sequence, first: int, end: int, now: float) -> BlockSearch | None:
        movement, bs = worker.capacity.movement, worker.capacity.block_size
        if not self._borrows or first >= end or movement is None or not movement.can_transfer:
            return None
        under_way = self._searches.get(seq.digests[first])
        if under_way is not None or len(self._searches) == MAX_SEARCHES:
            return under_way
        num_tokens, pace = (end - first) * bs, self._throughput.prefill.early_per_s
        transfer_speed = self._movers[worker.capacity.worker_id].transfer_speed
        worth = sum(part.blocks_worth(len(part.extras_at(end))) for part in worker.parts_of_all)
        seconds = self._search_speed.seconds(end) + transfer_speed.seconds(end - first + worth)
        if moved_tokens_gain(num_tokens, seconds, pace) <= 0:
            return None
        search = BlockSearch(
            worker.capacity.worker_id,
            movement.layout,
            num_held=first,
            digests=seq.digests[:end],
            token_ids=seq.data.token_ids()[: end * bs].copy(),
            began_at=now,
            give_up_at=now + _patience(num_tokens, pace),
        )
        self._searches[seq.digests[first]] = search
        self._new_searches.append(search)
        self._counts.prefix_searches += 1
        return search

    def take_searches(self) -> list[BlockSearch]:
        """The searches that have begun since the last call. The caller reports what it finds with `end_search`."""
        new, self._new_searches = self._new_searches, []
        return new

    def end_search(self, search: BlockSearch, lent: LentBlocks | None, now: float) -> None:
        """Another scheduler lends these blocks. None: a search has found nothing, or they are not kept any longer."""
        if lent is not None:
            self._search_speed.add(len(search.digests), now - search.began_at)
        search.lent, search.is_ended = lent, True
        key = search.digests[search.num_held]
        if self._searches.get(key) is search:
            del self._searches[key]
        if (worker := self._workers.get(search.worker_id)) is not None:
            self._on_change(worker)

    def take_read(self) -> list[LentBlocks]:
        """The lent blocks that need not be kept any longer, since the last call."""
        read, self._read = self._read, []
        self.is_on = bool(self._movers)
        return read

    # -- running sequences --------------------------------------------------------------------------------------------

    def leave(self, seq: Sequence, worker: WorkerState, takers: Seq[WorkerState], now: float) -> bool:
        """Whether a running sequence that should leave its worker may go. Its blocks go ahead to one of the takers, and
        meanwhile it runs on, so that it pauses for the tokens of the last block only.
        """
        move = self._leaving.get(seq)
        if move is None:
            move = self._send_ahead(seq, worker, takers, now)
            if move is None:
                return True
            self._leaving[seq] = move
        if not move.is_ended and now < move.give_up_at:
            return False
        del self._leaving[seq]
        return True

    def num_leaving_to(self, worker: WorkerState, besides: Sequence) -> int:
        """Number of other running sequences whose blocks have gone ahead to this worker."""
        self._note_left()
        name = worker.capacity.worker_id
        return sum(move.worker_id == name and seq is not besides for seq, move in self._leaving.items())

    def _note_left(self) -> None:
        """Sequences that have ended, or run elsewhere, do not leave any more."""
        leaving = self._leaving.items()
        self._leaving = {seq: move for seq, move in leaving if move.source and move.source.worker_id == seq.worker_id}

    def _send_ahead(self, seq: Sequence, worker: WorkerState, takers: Seq[WorkerState], now: float) -> BlockMove | None:
        row = seq.row
        if row is None or not can_send(worker, row):
            return None
        digests = worker.rows.digests[row]
        able = [taker for taker in takers if can_exchange(taker, worker) and taker.could_run(seq.group)]
        if not able or not digests:
            return None
        tokens = worker.rows.token_blocks[row, : len(digests)].reshape(-1)
        firsts = {taker: self._first_missing(taker, digests) for taker in able}
        taker = max(able, key=lambda taker: taker.pool.num_free + firsts[taker])
        found = self._option(taker, OwnSource(worker), digests, firsts[taker], len(digests))
        return None if found is None else self._begin(taker, seq, digests, tokens, found, now)

    def _first_missing(self, worker: WorkerState, digests: Seq[bytes]) -> int:
        arriving = self._movers[worker.capacity.worker_id].arriving
        first = worker.pool.match_len(digests, len(digests))
        while first < len(digests) and digests[first] in arriving:
            first += 1
        return first

    def next_end_of_patience(self, now: float) -> float:
        """When the next sequence after `now` stops to wait for its move; inf if there is none."""
        ends = [one.move.give_up_at for one in self._open.values()]
        ends += [search.give_up_at for search in self._searches.values()]
        return min((end for end in ends if end > now), default=math.inf)

    # -- a move -------------------------------------------------------------------------------------------------------

    def _begin(
        self, target: WorkerState, seq: Sequence, digests: Seq[bytes], token_ids: U32, found: _Option, now: float
    ) -> BlockMove | None:
        """Take what a move needs. None if the target has too little room, or the source no longer holds the blocks."""
        bs, pool, source, end = target.capacity.block_size, target.pool, found.source, found.end
        pinned = NO_BLOCKS
        if source is not None:
            pinned = source.committed(digests, token_ids, end)
        missing = found.missing
        if source is not None and len(pinned) < end:
            end, missing = self._reach(target, source, digests, found.start, len(pinned))
            pinned = pinned[:end]
        first = min(found.first, end)
        if end <= found.start:
            return None
        prefix = pool.match(digests, token_ids, first)
        if end - first + pool.num_unused(prefix) > pool.num_free:
            return None
        num_tokens = (end - found.start) * bs
        extras = self._take_extras(target, seq, source, digests, token_ids, missing, num_tokens)
        if extras is None:
            return None
        pool.share(prefix)
        if source is not None:
            source.share(pinned)
        self._num_moves += 1
        mover = self._movers[target.capacity.worker_id]
        move = BlockMove(
            move_id=self._num_moves,
            worker_id=target.capacity.worker_id,
            after_step_id=target.in_flight[-1].step_id if target.in_flight else 0,
            block_ids=pool.allocate(end - first),
            digests=list(digests[first:end]),
            token_blocks=token_ids[first * bs : end * bs].reshape(end - first, bs).copy(),
            source=None if source is None else source.describe(pinned[first:]),
            extras=[extra for one in extras for extra in one.extras],
            num_saved_tokens=num_tokens,
            give_up_at=now + _patience(num_tokens, self._throughput.prefill.early_per_s),
        )
        speeds = self._speeds(target, source, digests, (first, end), missing)
        self._open[move.move_id] = _Open(move, target, prefix, source, pinned, extras, speeds)
        mover.arriving.update(dict.fromkeys(_names(move, extras), move))
        self._new.append(move)
        return move

    def _take_extras(
        self,
        target: WorkerState,
        seq: Sequence,
        source: Source | None,
        digests: Seq[bytes],
        token_ids: U32,
        missing: list[list[int]],
        num_tokens: int,
    ) -> list[_PartExtras] | None:
        """Room for the extras on the target, and the extras of the source, which keeps them. None: there is no room."""
        bs, taken = target.capacity.block_size, list[_PartExtras]()
        for number, indices in enumerate(missing):
            part = target.parts_of_all[number]
            ids = part.reserve(len(indices), num_tokens)
            wanted = [digests[index] for index in indices[: len(ids)]]
            lender = None if source is None else source.part(number)
            lent: Seq[int | None] = (lender.lend(wanted) if lender is not None else ()) or [None] * len(ids)
            extras = []
            for index, block_id, source_id in zip(indices, ids, lent, strict=False):
                digest, words = part.name_extra(seq, token_ids[: (index + 1) * bs], digests[index])
                name = digest if lender is not None else part.name_in_tier(digests[index])
                extras.append(MovedExtra(digests[index], name, words, block_id, source_id))
            taken.append(_PartExtras(part, lender, extras))
            if len(ids) < len(indices) or (lender is not None and None in lent):
                _give_back(taken, 0)
                return None
        return taken

    def take_moves(self) -> list[BlockMove]:
        """The moves that have begun since the last call. The caller reports the end of each with `end_move`."""
        new, self._new = self._new, []
        return new

    def cancel_all(self) -> None:
        """Drop the content of the moves under way. Their blocks stay taken until they end: they may be written."""
        for one in self._open.values():
            one.move.is_ended = True
        for mover in self._movers.values():
            mover.arriving.clear()

    def take_losses(self) -> list[float]:
        """By how many seconds each move that has ended since the last call took longer than computing its tokens."""
        losses, self._losses_s = self._losses_s, []
        return losses

    def end_move(self, move_id: int, num_moved: int, took_s: float = 0.0) -> list[WorkerState]:
        """A move has ended: this many of its leading blocks have their content. Returns the workers that changed."""
        one = self._open.pop(move_id, None)
        if one is None:
            return []
        move, is_cancelled = one.move, one.move.is_ended
        move.is_ended = True
        num_moved = 0 if is_cancelled else num_moved
        self._note_left()
        changed = []
        if self._workers.get(move.worker_id) is one.target:
            changed.append(one.target)
            self._settle(one, num_moved)
            if not is_cancelled:
                self._measure(one, num_moved, took_s)
        _give_back(one.extras, max(0, num_moved - len(move.digests)))
        source = one.source
        if isinstance(source, OwnSource) and self._workers.get(source.worker_id) is source.worker:
            changed.append(source.worker)
            source.free(one.pinned)
        if isinstance(source, LentBlocks):
            self._read.append(source)
        return changed

    def _settle(self, one: _Open, num_moved: int) -> None:
        """The moved blocks become cached prefixes; the others are empty."""
        move, pool = one.move, one.target.pool
        arriving = self._movers[move.worker_id].arriving
        for name in _names(move, one.extras):
            if arriving.get(name) is move:
                del arriving[name]
        pool.cache(move.block_ids[:num_moved], move.digests[:num_moved], move.token_blocks[:num_moved])
        pool.free(np.concatenate((one.prefix, move.block_ids))[::-1])
        one.target.room_version += 1

    def _measure(self, one: _Open, num_moved: int, took_s: float) -> None:
        move, capacity, counts = one.move, one.target.capacity, self._counts
        is_whole = num_moved == move.num_items
        if move.source is None and not is_whole:  # the next one is not in the tier, or damaged
            self._movers[move.worker_id].tiers.pop(_names(move, one.extras)[num_moved], None)
        num_tokens = move.num_saved_tokens if is_whole else min(num_moved, len(move.digests)) * capacity.block_size
        counts.block_moves += 1
        counts.failed_block_moves += not is_whole
        if move.source is None:
            counts.tier_hit_tokens += num_tokens
        else:
            counts.transferred_tokens += num_tokens
            counts.borrowed_tokens += num_tokens if isinstance(one.source, LentBlocks) else 0
        speeds = _num_blocks(one.speeds[:num_moved])
        expected_s = _seconds(speeds)
        for speed, count in speeds.items():
            speed.add(count, took_s * speed.seconds(count) / expected_s)
        if capacity.movement is not None:
            counts.moved_bytes += round(sum(speeds.values()) * capacity.movement.block_bytes)
        pace = self._throughput.prefill.early_per_s
        if pace and move not in self._leaving.values():  # no sequence waits for those
            self._losses_s.append(max(0.0, took_s - num_tokens / pace))


def _patience(num_tokens: int, pace: float | None) -> float:
    """How long a sequence waits for what saves it so many tokens."""
    return max(MIN_PATIENCE_S, PATIENCE * num_tokens / (pace or UNKNOWN_PACE))


def _num_blocks(speeds: Iterable[tuple[MoveSpeed, float]]) -> dict[MoveSpeed, float]:
    """As how many blocks all that moves counts, by its place."""
    counts = dict[MoveSpeed, float]()
    for speed, worth in speeds:
        counts[speed] = counts.get(speed, 0.0) + worth
    return counts


def _seconds(num_blocks: Mapping[MoveSpeed, float]) -> float:
    """Expected duration of a move of so many blocks."""
    return sum(speed.seconds(count) for speed, count in num_blocks.items())


def _names(move: BlockMove, extras: Iterable[_PartExtras]) -> list[bytes]:
    """The digests of what moves, as in a tier."""
    return move.digests + [one.part.name_in_tier(extra.block_digest) for one in extras for extra in one.extras]


def _give_back(taken: Iterable[_PartExtras], num_arrived: int) -> None:
    """The source need not keep these extras any more, and the target has got so many of them."""
    for one in taken:
        one.part.receive(one.extras, num_arrived)
        if one.source is not None:
            one.source.take_back([extra.source_id for extra in one.extras if extra.source_id is not None])
        num_arrived = max(0, num_arrived - len(one.extras))


def can_exchange(worker: WorkerState, other: WorkerState) -> bool:
    """Whether the bytes of their blocks mean the same, and both exchange them."""
    mine, theirs = worker.capacity.movement, other.capacity.movement
    if mine is None or theirs is None:
        return False
    return mine.can_transfer and theirs.can_transfer and mine.layout == theirs.layout


def can_send(worker: WorkerState, row: int) -> bool:
    """Whether the blocks of a running row mean something on another worker."""
    features = worker.rows.sequence(row).group.features
    return not (features.is_gang or features.num_head_tokens or worker.rows.is_private[row])
