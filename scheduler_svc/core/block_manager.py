"""The KV blocks of one worker: who uses them, which prefix each holds, which goes next.

A block is in exactly one place:

    empty    holds nothing                     taken first, oldest first
    cached   holds a prefix nobody uses now    taken last, least recently used first; what was ever hit counts as used
                                               `reuse_bonus` pools of blocks later than it was
    used     ref count > 0                     never taken

A block that holds a prefix is *pending* from the moment its step is planned until that step is acknowledged: it may
be shared with sequences of the same worker (steps run in order), but it is not announced. `commit` makes it cached
content.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]

Fill = tuple[int, bytes]  # a block and the digest of what fills it
NO_BLOCKS: I64 = np.empty(0, dtype=np.int64)


class BlockManager:
    """Owns ref counts, free lists and the digest map of one pool.

    The caller frees a table from its tail to its head, so that heads, which more sequences can share, live longest.
    Without `prefix_caching` no block ever holds a prefix: only samples of one request share blocks.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, reuse_bonus: float = 0.0
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens cannot hold anything")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self.refs = np.zeros(num_blocks, dtype=np.int32)
        self._empty: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, int] = OrderedDict()  # never hit -> when it was put back
        self._reused: OrderedDict[int, int] = OrderedDict()  # hit before -> when it was put back
        self._clock = 0  # blocks put back so far
        self._bonus = int(reuse_bonus * num_blocks)
        self._was_hit = np.zeros(num_blocks, dtype=np.bool_)
        self._tokens = np.full((num_blocks, block_size), 0, dtype=np.uint32)  # written, so that no step meets new pages
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._committed: set[int] = set()
        self._events: list[tuple[bytes, bool]] = []

    # -- how much there is -------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: empty or cached."""
        return len(self._empty) + len(self._cached) + len(self._reused)

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._reused)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def num_unused(self, blocks: I64) -> int:
        """How many of these hits are free now: taking them costs capacity."""
        return len(blocks) - int(np.count_nonzero(self.refs[blocks]))

    # -- the prefix cache ---------------------------------------------------------------------------------------------

    def match(self, digests: Sequence[bytes], token_ids: U32, max_blocks: int) -> I64:
        """Blocks that hold the longest cached prefix of `token_ids`, at most `max_blocks`; tokens are compared."""
        if not max_blocks or digests[0] not in self._block_of:
            return NO_BLOCKS
        held = list(map(self._block_of.get, digests[:max_blocks]))
        count = held.index(None) if None in held else len(held)
        blocks = np.array(held[:count], dtype=np.int64)
        wanted = token_ids[: count * self.block_size].reshape(count, self.block_size)
        same = self._tokens[blocks] == wanted
        return blocks if same.all() else blocks[: int(same.all(axis=1).argmin())]

    def match_len(self, digests: Sequence[bytes], max_blocks: int) -> int:
        """Number of leading digests held here, for placement; `match` decides.

        A block outlives what continues it, so what is held is a prefix and can be searched in halves. Where a failure
        has torn a hole the answer is a guess.
        """
        end = min(max_blocks, len(digests))
        if not end or digests[0] not in self._block_of:
            return 0
        held = self._block_of
        return bisect_left(range(end), True, lo=1, key=lambda i: digests[i] not in held)

    def register(self, blocks: I64 | U32, digests: Sequence[bytes], block_tokens: U32) -> list[Fill]:
        """A planned step fills these blocks with `block_tokens` [len(blocks), block_size]: they may be shared from now
        on. Returns those that were taken; the prefix of the others is held by another block.
        """
        if not self._prefix_caching:
            return []
        held, digest_of = self._block_of, self._digest_of
        taken = []
        for fill in zip(blocks.tolist(), digests, strict=True):
            block, digest = fill
            if digest not in held:
                held[digest] = block
                digest_of[block] = digest
                taken.append(fill)
        if len(taken) == len(blocks):
            self._tokens[blocks] = block_tokens
        elif taken:
            is_holder = [held[digest] == block for block, digest in zip(blocks.tolist(), digests, strict=True)]
            self._tokens[blocks[is_holder]] = block_tokens[is_holder]
        return taken

    def commit(self, fills: Iterable[Fill]) -> list[Fill]:
        """The step that fills these blocks is acknowledged: announce them. Returns those that were news; a block may
        have lost its digest meanwhile.
        """
        digest_of, committed = self._digest_of, self._committed
        news = []
        for fill in fills:
            block, digest = fill
            if digest_of[block] == digest and block not in committed:
                committed.add(block)
                news.append(fill)
        self._events += [(digest, True) for _, digest in news]
        return news

    def still_committed(self, fills: list[Fill]) -> list[Fill]:
        """Those whose content is still acknowledged, and still this prefix."""
        digest_of, committed = self._digest_of, self._committed
        return [fill for fill in fills if fill[0] in committed and digest_of[fill[0]] == fill[1]]

    def forget(self, block: int) -> None:
        """The block does not hold what its digest says (its step failed, or it gets new content)."""
        digest = self._digest_of[block]
        if digest is None:
            return
        self._digest_of[block] = None
        self._was_hit[block] = False
        del self._block_of[digest]
        if block in self._committed:
            self._committed.remove(block)
            self._events.append((digest, False))

    def adopt(self, block: int, digest: bytes, block_tokens: U32) -> bool:
        """A worker that ran before already holds this prefix. False if the block or the prefix is taken."""
        is_taken = self._digest_of[block] is not None or self.refs[block]
        if is_taken or not self.register(np.array([block]), [digest], block_tokens[None]):
            return False
        self.commit([(block, digest)])
        self._empty.remove(block)
        self._put_back(block)
        return True

    def take_events(self) -> list[tuple[bytes, bool]]:
        """(digest, is_cached) since the last call, in order."""
        events, self._events = self._events, []
        return events

    def cached_digests(self) -> list[bytes]:
        """Every announced prefix block, for an index that must be filled again."""
        return [
            digest for block, digest in enumerate(self._digest_of) if digest is not None and block in self._committed
        ]

    # -- use ----------------------------------------------------------------------------------------------------------

    def share(self, blocks: I64) -> None:
        """One more sequence uses these blocks (a hit, a fork)."""
        refs = self.refs[blocks]
        idle = blocks[refs == 0]
        was_hit = self._was_hit[idle]
        for line, gone in ((self._cached, idle[~was_hit]), (self._reused, idle[was_hit])):
            for block in gone.tolist():
                del line[block]
        self.refs[blocks] = refs + 1

    def hit(self, blocks: I64) -> None:
        """A sequence uses what `match` found. Never called for forks: their blocks need not hold the prefix themselves,
        and then the head of a chain would go before its tail.
        """
        self.share(blocks)
        self._was_hit[blocks] = True

    def allocate(self, count: int) -> I64:
        """`count` blocks with no content and ref count 1. The caller has checked `num_free`."""
        if count > self.num_free:
            raise RuntimeError(f"asked for {count} blocks with {self.num_free} free: a bug in the caller's check")
        take = self._empty.popleft if count <= len(self._empty) else self._take_one
        blocks = np.array([take() for _ in range(count)], dtype=np.int64)
        self.refs[blocks] = 1
        self._was_hit[blocks] = False
        return blocks

    def _take_one(self) -> int:
        if self._empty:
            return self._empty.popleft()
        block, _ = self._goes_next().popitem(last=False)
        self.forget(block)
        return block

    def _goes_next(self) -> OrderedDict[int, int]:
        """The line whose head is evicted next."""
        if not self._cached or not self._reused:
            return self._cached or self._reused
        never_hit, hit = (next(iter(line.values())) for line in (self._cached, self._reused))
        return self._reused if hit + self._bonus < never_hit else self._cached

    def free(self, blocks: list[int]) -> None:
        """One sequence less uses these blocks; pass a table tail first."""
        if not blocks:
            return
        np.subtract.at(self.refs, blocks, 1)
        once = list(dict.fromkeys(blocks[::-1]))[::-1]  # each at its last place: behind all that continues it
        for block, refs in zip(once, self.refs[once].tolist(), strict=True):
            if refs == 0:
                self._put_back(block)

    def _put_back(self, block: int) -> None:
        if block in self._committed:
            self._clock += 1
            line = self._reused if self._was_hit[block] else self._cached
            line[block] = self._clock
            return
        self.forget(block)
        self._empty.append(block)

    # -- tests --------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance."""
        empty, cached = set(self._empty), set(self._cached) | set(self._reused)
        assert len(cached) == len(self._cached) + len(self._reused), "a block is in both lines"
        used = set(np.flatnonzero(self.refs).tolist())
        assert len(empty) == len(self._empty), "a block is twice in the empty list"
        assert len(empty) + len(cached) + len(used) == self.num_blocks, "a block is in two places, or lost"
        assert empty | cached | used == set(range(self.num_blocks)), "a block that does not exist"
        assert (self.refs >= 0).all(), "negative ref count"
        digests = {block: digest for block, digest in enumerate(self._digest_of) if digest is not None}
        assert {digest: block for block, digest in digests.items()} == self._block_of, "digest maps disagree"
        assert cached <= self._committed <= set(digests), "cached without commit, or commit without digest"
        assert not empty & set(digests), "an empty block has a digest"
