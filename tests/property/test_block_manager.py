"""BlockManager against a model of plain lists: free blocks, the order of eviction, the blocks a prompt can share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefix_index.hashing import extend_digests
from scheduler_svc.core.block_manager import BlockManager, FreeList, LruQueue
from tests.invariants import check_pool

BLOCK_SIZE = 2
SETTINGS = settings(max_examples=120, stateful_step_count=40)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(lambda tokens: np.array(tokens, dtype=np.uint32))


class Table:
    """One sequence's use of the pool, and how far its steps are."""

    def __init__(self, tokens: np.ndarray, blocks: list[int], num_hits: int) -> None:
        self.tokens, self.blocks, self.num_hits = tokens, blocks, num_hits
        self.is_committed = False
        self.digests: list[bytes] = []
        extend_digests(self.digests, b"", tokens, BLOCK_SIZE)

    def full_blocks(self) -> list[tuple[int, bytes, np.ndarray]]:
        parts = [self.tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE] for i in range(len(self.digests))]
        return list(zip(self.blocks, self.digests, parts, strict=False))


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences are admitted, planned, answered and ended in any order that the scheduler can produce."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockManager(num_blocks, BLOCK_SIZE)
        self.tables: list[Table] = []
        self.users: dict[int, int] = {}
        self.empty = list(range(num_blocks))  # the first is allocated next
        self.cached: list[int] = []  # the first is evicted next, after all empty ones
        self.holds: dict[int, bytes] = {}  # digest of blocks that may be shared
        self.committed: set[int] = set()
        self.announced: set[bytes] = set()

    # -- rules --------------------------------------------------------------------------------------------------------

    @rule(tokens=prompts)
    def admit(self, tokens: np.ndarray) -> None:
        digests: list[bytes] = []
        extend_digests(digests, b"", tokens, BLOCK_SIZE)
        limit = (len(tokens) - 1) // BLOCK_SIZE
        hits = self.pool.match(digests, tokens, limit).tolist()
        assert hits == self._expected_hits(digests[:limit])
        assert self.pool.match_len(digests, limit) == len(hits)
        needed = -(-len(tokens) // BLOCK_SIZE) - len(hits)
        unused = [block for block in hits if block in self.cached]
        assert self.pool.num_unused(np.array(hits, dtype=np.int64)) == len(unused)
        if needed + len(unused) > self.pool.num_free:
            return
        self.pool.share(np.array(hits, dtype=np.int64))
        self._use(hits)
        expected = self._take(needed)
        fresh = self.pool.allocate(needed).tolist()
        assert fresh == expected
        self._use(fresh)
        self.tables.append(Table(tokens, hits + fresh, len(hits)))
        self._register(self.tables[-1])

    def _register(self, table: Table) -> None:
        for block, digest, part in table.full_blocks()[table.num_hits :]:
            is_new = digest not in self.holds.values()
            taken = self.pool.register(np.array([block]), [digest], part[None])
            assert taken == ([(block, digest)] if is_new else [])
            if is_new:
                self.holds[block] = digest

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        for block, digest, _ in table.full_blocks():
            is_new = self.holds.get(block) == digest and block not in self.committed
            self.pool.commit([(block, digest)])
            assert self.pool.take_commits() == ([(block, digest)] if is_new else [])
            if is_new:
                self.committed.add(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        self.pool.free(np.array(table.blocks[::-1]))
        for block in table.blocks[::-1]:
            self.users[block] -= 1
            if not self.users[block]:
                del self.users[block]
                self._put_back(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        lost = [block for block in table.blocks if block not in self.committed]
        self.pool.forget(np.array(lost, dtype=np.int64))
        for block in lost:
            self.holds.pop(block, None)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.share(np.array(table.blocks))
        self._use(table.blocks)
        self.tables.append(Table(table.tokens, list(table.blocks), len(table.blocks)))

    # -- the model ----------------------------------------------------------------------------------------------------

    def _expected_hits(self, digests: list[bytes]) -> list[int]:
        block_of = {digest: block for block, digest in self.holds.items()}
        hits: list[int] = []
        for digest in digests:
            if digest not in block_of:
                break
            hits.append(block_of[digest])
        return hits

    def _use(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] = self.users.get(block, 0) + 1
            if block in self.cached:
                self.cached.remove(block)

    def _take(self, count: int) -> list[int]:
        """The expected blocks: empty ones, oldest first, then the least recently used cached ones."""
        taken = (self.empty + self.cached)[:count]
        self.empty = [block for block in self.empty if block not in taken]
        self.cached = [block for block in self.cached if block not in taken]
        for block in taken:
            self.holds.pop(block, None)
            self.committed.discard(block)
        return taken

    def _put_back(self, block: int) -> None:
        if block in self.committed:
            self.cached.append(block)
            return
        self.holds.pop(block, None)
        self.empty.append(block)

    # -- invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        check_pool(self.pool)
        counts = (self.pool.num_empty, self.pool.num_cached, self.pool.num_used)
        assert counts == (len(self.empty), len(self.cached), len(self.users))
        assert {b: n for b, n in enumerate(self.pool.refs.tolist()) if n} == self.users

    @invariant()
    def events_add_up(self) -> None:
        for digest, is_cached in self.pool.take_events():
            assert (digest in self.announced) != is_cached
            (self.announced.add if is_cached else self.announced.remove)(digest)
        assert self.announced == {self.holds[block] for block in self.committed} == set(self.pool.cached_digests())


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = SETTINGS


def take_newest(line: LruQueue, count: int, until: int) -> np.ndarray:
    return line._blocks[line._live(line._head, line._tail)[::-1][:count]]


def take_newest_empty(ring: FreeList, count: int) -> np.ndarray:
    numbers = ring.tolist()
    ring.remove(numbers)
    ring.put(numbers[: len(numbers) - count])
    return np.array(numbers[len(numbers) - count :], dtype=np.int64)


@pytest.mark.parametrize(("owner", "wrong"), [(LruQueue, take_newest), (FreeList, take_newest_empty)])
def test_the_model_knows_the_order_of_eviction(owner: type, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "take", wrong)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(BlockManagerMachine, settings=settings(SETTINGS, phases=(Phase.generate,)))
