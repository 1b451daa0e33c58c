"""The KV blocks of one worker: reference counts, the prefix that each block holds, the eviction order.

A block is in exactly one place:

    empty    holds nothing                     taken first, oldest first
    cached   holds a prefix no sequence uses   taken last, least recently used first; a block that was ever hit is
                                               treated as if it was used `reuse_bonus` * num_blocks evictions later
    used     ref count > 0                     never taken

A block that holds a prefix is *pending* from the moment its step is planned until that step is answered. A pending
block may be shared with sequences of the same worker, because steps run in order, but it is not announced. `commit`
makes it a cached prefix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from step_protocol.columns import I64, U32, Bools

BlockEvent = tuple[bytes, bool]  # a digest, and True when its block is cached, False when it is evicted or reused
Fill = tuple[int, bytes]  # a block and the digest of its new content
NO_BLOCKS: I64 = np.empty(0, dtype=np.int64)

# Blocks are evicted together, because evicting four blocks takes as long as evicting twenty.
EVICTED_FRACTION = 1 / 256  # of the pool

EMPTY, CACHED, USED, SHARED = range(4)  # states of a block; SHARED: several sequences use it


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class FreeList:
    """First in, first out. Never holds more numbers than at the start."""

    def __init__(self, count: int) -> None:
        self._slots = np.arange(count, dtype=np.int64)
        self._head = 0
        self.size = count

    def take(self, count: int) -> I64:
        """Remove the first `count` numbers. The caller has checked `size`."""
        end = self._head + count
        self.size -= count
        if end <= len(self._slots):
            taken = self._slots[self._head : end].copy()
            self._head = end
            return taken
        taken = np.concatenate((self._slots[self._head :], self._slots[: end - len(self._slots)]))
        self._head = end - len(self._slots)
        return taken

    def put(self, numbers: I64 | list[int]) -> None:
        """Append numbers at the end."""
        start = (self._head + self.size) % len(self._slots)
        room = len(self._slots) - start
        self.size += len(numbers)
        self._slots[start : start + len(numbers)] = numbers[:room]
        if len(numbers) > room:
            self._slots[: len(numbers) - room] = numbers[room:]

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove these numbers from any position."""
        gone = set(numbers)
        others = [other for other in self.tolist() if other not in gone]
        self._head = self.size = 0
        self.put(others)

    def tolist(self) -> list[int]:
        """All numbers, in order."""
        order = np.arange(self._head, self._head + self.size) % len(self._slots)
        numbers: list[int] = self._slots[order].tolist()
        return numbers


WINDOW = 64  # minimum number of entries that are read at once


class LruQueue:
    """Blocks are appended at the end and taken from the front, many at a time.

    `put_back_at` [num_blocks] belongs to the caller: the time at which each block was last put back. An entry with
    another time is stale and is skipped: its block was used again or taken.
    """

    def __init__(self, put_back_at: I64) -> None:
        self._put_back_at = put_back_at
        self._blocks = np.zeros(2 * len(put_back_at), dtype=np.int64)
        self._when = np.zeros(2 * len(put_back_at), dtype=np.int64)  # non-decreasing
        self._head = self._tail = 0

    @property
    def is_empty(self) -> bool:
        return self._head == self._tail

    @property
    def head(self) -> int:
        """The time at which the first block was put back."""
        return int(self._when[self._head])

    def append(self, when: int, blocks: I64) -> None:
        """Append these blocks; the caller has set their `put_back_at` to `when`."""
        if self._tail + len(blocks) > len(self._blocks):
            self._remove_stale()  # frees half of the space, because each block has at most one live entry
        end = self._tail + len(blocks)
        self._blocks[self._tail : end] = blocks
        self._when[self._tail : end] = when
        self._tail = end

    def take(self, count: int, until: int) -> I64:
        """Remove up to `count` blocks from the front that were put back at `until` or earlier."""
        end = self._head + int(self._when[self._head : self._tail].searchsorted(until, side="right"))
        taken: I64 = self._blocks[:0]
        size = max(WINDOW, 2 * count)
        while len(taken) < count and self._head < end:
            stop = min(end, self._head + size)
            places = self._live(self._head, stop)[: count - len(taken)]
            found = self._blocks[places]
            taken = np.concatenate((taken, found)) if len(taken) else found
            self._head = int(places[-1]) + 1 if len(taken) == count else stop
            size *= 2
        return taken

    def tolist(self) -> list[int]:
        """All live blocks, in order."""
        blocks: list[int] = self._blocks[self._live(self._head, self._tail)].tolist()
        return blocks

    def _live(self, start: int, stop: int) -> I64:
        """Indices of the live entries."""
        places: I64 = (self._put_back_at[self._blocks[start:stop]] == self._when[start:stop]).nonzero()[0]
        return places + start

    def _remove_stale(self) -> None:
        places = self._live(self._head, self._tail)
        self._head, self._tail = 0, len(places)
        self._blocks[: self._tail], self._when[: self._tail] = self._blocks[places], self._when[places]


class BlockManager:
    """Owns ref counts, free lists and the digest map of one pool.

    The caller frees a table from its tail to its head, so that heads, which more sequences can share, stay longest.
    Without `prefix_caching` no block ever holds a prefix: only samples of one request share blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        reuse_bonus: float = 0.0,
        keeps_events: bool = True,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"the pool has {num_blocks} blocks of {block_size} tokens; both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self.refs = np.zeros(num_blocks, dtype=np.int32)
        self.held: dict[bytes, int] = {}  # digest -> block; placement reads it too; only `match` compares tokens
        self._empty = FreeList(num_blocks)
        self._put_back_at = np.zeros(num_blocks, dtype=np.int64)  # 0: in use or empty
        self._cached = LruQueue(self._put_back_at)  # never hit
        self._reused = LruQueue(self._put_back_at)  # hit before
        self._num_cached = 0
        self._clock = 1  # 1 + blocks put back so far
        self._bonus = int(reuse_bonus * num_blocks)
        self._eviction_batch = int(EVICTED_FRACTION * num_blocks)  # blocks evicted at once, or all cached ones if fewer
        self._was_hit = np.zeros(num_blocks, dtype=np.bool_)
        self._kept_by = np.zeros(num_blocks, dtype=np.uint64)  # conversation whose turn used a block last; 0: none
        self._kept_depth = np.zeros(num_blocks, dtype=np.int64)  # its place in that turn's prompt
        self._tokens = np.full(
            (num_blocks, block_size), 0, dtype=np.uint32
        )  # written at once, so that page faults do not delay steps
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._committed = bytearray(num_blocks)  # 1: its prefix is announced
        self._is_committed = np.frombuffer(self._committed, dtype=np.bool_)  # the same memory, viewed as an array
        self.commits: list[Fill] = []  # since the last `take_commits`
        self._has_lost_commits = False  # some blocks in `commits` may have lost their digest since
        self._events: deque[BlockEvent] = deque(maxlen=None if keeps_events else 0)

    # -- counts ------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated: empty or cached."""
        return self._empty.size + self._num_cached

    @property
    def num_empty(self) -> int:
        return self._empty.size

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def num_unused(self, blocks: I64) -> int:
        """Number of these hits that no sequence uses. Taking them reduces `num_free`."""
        return len(blocks) - int(np.count_nonzero(self.refs[blocks]))

    def states(self) -> npt.NDArray[np.uint8]:
        """The state of every block."""
        states = np.minimum(self.refs, 2).astype(np.uint8)
        states[states > 0] += USED - 1
        states[self._put_back_at > 0] = CACHED
        return states

    def are_committed(self, blocks: I64) -> Bools:
        """Whether each of these blocks has a committed prefix."""
        return self._is_committed[blocks]

    # -- the prefix cache ---------------------------------------------------------------------------------------------

    def match(
        self, digests: Sequence[bytes], token_ids: U32, max_blocks: int, min_blocks: int = 0, before: int = 0
    ) -> I64:
        """The blocks of the longest cached prefix of `token_ids`, at most `max_blocks`; none if there are fewer than
        `min_blocks`. Compares tokens. `before`: see `match_len`.
        """
        count = self.match_len(digests, max_blocks, before)
        if not count or count < min_blocks:
            return NO_BLOCKS
        try:
            blocks = np.fromiter(map(self.held.__getitem__, digests[:count]), dtype=np.int64, count=count)
        except KeyError:  # a block is missing in the chain
            held = list(takewhile(self.held.__contains__, digests[:count]))
            blocks = np.array([self.held[digest] for digest in held], dtype=np.int64)
        wanted = token_ids[: len(blocks) * self.block_size].reshape(-1, self.block_size)
        tokens = self._tokens.take(blocks, axis=0)
        if tokens.tobytes() == wanted.tobytes():
            return blocks if len(blocks) >= min_blocks else NO_BLOCKS
        num_equal = int((tokens != wanted).any(axis=1).argmax())
        return blocks[:num_equal] if num_equal >= min_blocks else NO_BLOCKS

    def match_len(self, digests: Sequence[bytes], max_blocks: int, before: int = 0) -> int:
        """Number of leading digests that blocks hold: an estimate for placement. Exact unless a step has failed or
        a row has freed blocks behind an attention window.

        A block is evicted after the blocks that continue it. So the held digests are a prefix, and bisection finds its
        end. `before`: the result of an earlier call, which is checked first.
        """
        end = min(max_blocks, len(digests))
        held = self.held
        if not end or digests[0] not in held:
            return 0
        if 0 < before <= end and digests[before - 1] in held and (before == end or digests[before] not in held):
            return before
        return bisect_left(range(end), True, lo=1, key=lambda i: digests[i] not in held)

    def register(self, blocks: I64 | U32, digests: Sequence[bytes], block_tokens: U32) -> list[Fill]:
        """Register blocks that a planned step fills with `block_tokens` [len(blocks), block_size]: they may be shared
        from now on. Returns the blocks that got their digest. For each other block, another block already holds the
        prefix.
        """
        if not self._prefix_caching:
            return []
        held, digest_of, ids = self.held, self._digest_of, blocks.tolist()
        for block, digest in zip(ids, digests, strict=True):
            if digest not in held:
                held[digest], digest_of[block] = block, digest
        self._tokens[blocks] = block_tokens  # of all blocks: tokens without a digest are never read
        return [(block, digest) for block, digest in zip(ids, digests, strict=True) if held[digest] == block]

    def commit(self, fills: Iterable[Fill]) -> None:
        """Announce the blocks that still have this digest. The step that fills them has been answered."""
        digest_of, committed = self._digest_of, self._committed
        self._announce([fill for fill in fills if digest_of[fill[0]] == fill[1] and not committed[fill[0]]])

    def cache(self, blocks: I64 | U32, digests: Sequence[bytes], block_tokens: U32) -> None:
        """`register` and `commit` for blocks that an answered step has filled."""
        self._announce(self.register(blocks, digests, block_tokens))

    def _announce(self, fills: list[Fill]) -> None:
        for block, _ in fills:
            self._committed[block] = 1
        self.commits += fills
        self._events += [(digest, True) for _, digest in fills]

    def take_commits(self) -> list[Fill]:
        """Returns the blocks committed since the last call that still hold this prefix."""
        commits, self.commits = self.commits, []
        if self._has_lost_commits:
            commits = [fill for fill in commits if self._committed[fill[0]] and self._digest_of[fill[0]] == fill[1]]
            self._has_lost_commits = False
        return commits

    def forget(self, blocks: I64) -> None:
        """Remove the digests of these blocks, because their step failed or they get new content."""
        held, digest_of, committed = self.held, self._digest_of, self._committed
        for block in blocks.tolist():
            digest = digest_of[block]
            if digest is None:
                continue
            digest_of[block] = None
            del held[digest]
            if committed[block]:
                committed[block] = 0
                self._events.append((digest, False))
        self._was_hit[blocks] = False
        self._kept_by[blocks] = 0
        self._has_lost_commits = bool(self.commits)

    def forget_all(self) -> None:
        """Remove all digests. Cached blocks become empty, blocks in use stay in use."""
        if self._num_cached:
            self._evict(self._num_cached)
        self.forget(np.array([block for block, digest in enumerate(self._digest_of) if digest is not None], np.int64))

    def adopt(self, blocks: I64, digests: Sequence[bytes], block_tokens: U32) -> int:
        """Adopt the prefixes that a worker's pool holds. The first blocks are evicted first. Skips blocks that are in
        use and prefixes that another block holds. Returns the number of adopted blocks.
        """
        is_free = {
            block: self._digest_of[block] is None and not refs
            for block, refs in zip(blocks.tolist(), self.refs[blocks].tolist(), strict=True)
        }
        places = [i for i, block in enumerate(blocks.tolist()) if is_free.pop(block, False)]  # skips repeated blocks
        fills = self.register(blocks[places], [digests[i] for i in places], block_tokens[places])
        adopted = np.array([block for block, _ in fills], dtype=np.int64)
        self._is_committed[adopted] = True
        self._events += [(digest, True) for _, digest in fills]
        self._empty.remove(adopted.tolist())
        self._put_back(adopted)
        return len(fills)

    def take_events(self) -> list[BlockEvent]:
        """Returns the changes of cached prefixes since the last call, in order. Empty unless `keeps_events` is set."""
        events = list(self._events)
        self._events.clear()
        return events

    def cached_digests(self) -> list[bytes]:
        """Digests of all announced blocks, to fill an index that has lost its data."""
        return [digest for block, digest in enumerate(self._digest_of) if digest is not None and self._committed[block]]

    # -- use ----------------------------------------------------------------------------------------------------------

    def share(self, blocks: I64) -> None:
        """Count one more sequence that uses these blocks, after a hit or a fork."""
        refs = self.refs[blocks]
        self._num_cached -= len(blocks) - int(np.count_nonzero(refs))
        self._put_back_at[blocks] = 0
        self.refs[blocks] = refs + 1

    def hit(self, blocks: I64) -> None:
        """Count one more sequence that uses the blocks found by `match`. Forks call `share` instead. The prefix of a
        forked block may be cached in a different block, which is not marked as hit: it would be evicted first.
        """
        self.share(blocks)
        self._was_hit[blocks] = True

    def mark_hit(self, blocks: I64) -> None:
        """Evict these blocks as late as blocks that were hit, as long as they hold their prefix."""
        self._was_hit[blocks] = True

    def keep(self, blocks: I64, conversation: int, *, supersedes: bool) -> None:
        """Evict these blocks of a turn, tail first, as late as blocks that were hit. A turn may supersede an earlier
        one of which it has most blocks: the others of that one are evicted as if they had not been hit.
        """
        earlier = (self._kept_by == conversation).nonzero()[0]
        self.mark_hit(blocks)
        self._kept_by[blocks] = conversation
        self._kept_depth[blocks] = np.arange(len(blocks))[::-1]
        left = np.setdiff1d(earlier, blocks)
        if not supersedes or not len(left) or 2 * len(left) > len(earlier):
            return
        self._was_hit[left] = False
        self._kept_by[left] = 0
        unused = left[self._put_back_at[left] > 0]
        self._put_back_at[unused] = self._clock
        self._cached.append(self._clock, unused[np.argsort(-self._kept_depth[unused])])
        self._clock += len(unused)

    def allocate(self, count: int) -> I64:
        """Returns `count` blocks without content and with ref count 1. The caller has checked `num_free`."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks were requested, but {self.num_free} are free: a bug in the scheduler")
        if count > self._empty.size:
            self._evict(max(count - self._empty.size, min(self._eviction_batch, self._num_cached)))
        blocks = self._empty.take(count)
        self.refs[blocks] = 1
        return blocks

    def _evict(self, count: int) -> None:
        """Empty `count` cached blocks."""
        evicted = []
        while count:
            evicted.append(self._take_next(count))
            count -= len(evicted[-1])
        blocks = evicted[0] if len(evicted) == 1 else np.concatenate(evicted)
        self._put_back_at[blocks] = 0
        self._num_cached -= len(blocks)
        self._empty_out(blocks)

    def _take_next(self, count: int) -> I64:
        """Take up to `count` blocks from the queue whose head is evicted next, until the other queue is due."""
        cached, reused, bonus = self._cached, self._reused, self._bonus
        if cached.is_empty and reused.is_empty:
            raise RuntimeError("num_cached counts a block that is in no LRU queue: a bug in the scheduler")
        if cached.is_empty or reused.is_empty:
            return (reused if cached.is_empty else cached).take(count, self._clock)
        if reused.head + bonus < cached.head:
            return reused.take(count, cached.head - bonus - 1)
        return cached.take(count, reused.head + bonus)

    def free(self, blocks: I64) -> None:
        """Count one sequence fewer that uses these blocks. Pass each block once, the tail of a table first."""
        refs = self.refs[blocks] - 1
        self.refs[blocks] = refs
        self._put_back(blocks[refs == 0] if np.count_nonzero(refs) else blocks)

    def free_tables(self, tables: Sequence[I64]) -> None:
        """Free the blocks of several sequences, in order. Blocks that no other sequence uses are freed at once: none of
        them is in two tables.
        """
        if len(tables) > 1:
            blocks = np.concatenate(tables)
            tables = tables if np.count_nonzero(self.refs[blocks] > 1) else [blocks]
        for table in tables:
            self.free(table)

    def _put_back(self, blocks: I64) -> None:
        """Return blocks that no sequence uses any more to a queue or to the empty list."""
        is_cached = self._is_committed[blocks]
        if np.count_nonzero(is_cached) < len(blocks):
            self._empty_out(blocks[~is_cached])
            blocks = blocks[is_cached]
        self._put_back_at[blocks] = self._clock
        was_hit = self._was_hit[blocks]
        if np.count_nonzero(was_hit):
            self._cached.append(self._clock, blocks[~was_hit])
            self._reused.append(self._clock, blocks[was_hit])
        else:
            self._cached.append(self._clock, blocks)
        self._clock += len(blocks)
        self._num_cached += len(blocks)

    def _empty_out(self, blocks: I64) -> None:
        self.forget(blocks)
        self._empty.put(blocks)
