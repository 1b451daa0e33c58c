"""BlockManager: sharing, the order of eviction, the comparison of tokens."""

import numpy as np
import pytest

from scheduler_svc.core.block_manager import BlockManager
from tests.invariants import check_pool, queues

A, B = bytes(16), bytes([1] * 16)


def u32(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.uint32)


def register(pool: BlockManager, block: int, digest: bytes, tokens: np.ndarray) -> bool:
    return pool.register(np.array([block]), [digest], tokens[None]) == [(block, digest)]


def commit(pool: BlockManager, block: int, digest: bytes) -> bool:
    pool.commit([(block, digest)])
    return pool.take_commits() == [(block, digest)]


def test_equal_digest_with_other_tokens_is_no_hit() -> None:
    pool = BlockManager(4, 2)
    (block,) = pool.allocate(1)
    register(pool, block, A, u32(1, 2))
    assert pool.match([A], u32(1, 2, 9), 1).tolist() == [block]
    assert pool.match([A], u32(1, 3, 9), 1).tolist() == []


def test_adopted_blocks_are_hits_and_taken_ones_are_refused() -> None:
    pool = BlockManager(4, 2)
    tokens = np.array([u32(1, 2), u32(3, 4), u32(5, 6)])
    assert pool.adopt(np.array([1, 2, 1]), [A, B, bytes([3] * 16)], tokens) == 2
    assert pool.adopt(np.array([1, 0]), [bytes([3] * 16), A], tokens[:2]) == 0
    assert pool.match([A], u32(1, 2), 1).tolist() == [1]
    assert pool.take_events() == [(A, True), (B, True)]
    assert queues(pool) == ([1, 2], [], [0, 3])
    check_pool(pool)


def test_allocating_too_much_raises() -> None:
    pool = BlockManager(2, 1)
    with pytest.raises(RuntimeError, match="3 blocks were requested, but 2 are free"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="0 blocks"):
        BlockManager(0, 16)


def cache(pool: BlockManager, *digests: bytes) -> list[int]:
    """Cached blocks that hold these prefixes."""
    blocks = pool.allocate(len(digests)).tolist()
    for i, digest in enumerate(digests):
        register(pool, blocks[i], digest, u32(i, i))
        commit(pool, blocks[i], digest)
    pool.free(np.array(blocks[::-1]))
    return blocks


def test_a_block_that_was_hit_is_cached_longer_but_not_for_ever() -> None:
    pool = BlockManager(4, 2, reuse_bonus=1.0)
    (hot,) = cache(pool, A)
    pool.hit(np.array([hot]))
    pool.free(np.array([hot]))
    names = [bytes([i] * 16) for i in range(2, 20)]
    for name in names[:4]:
        cache(pool, name)
    assert pool.match_len([A], 1) == 1  # least recently used, and it was hit
    for name in names[4:]:
        cache(pool, name)
    assert pool.match_len([A], 1) == 0  # the pool's number of blocks were cached since
    check_pool(pool)


def keep(pool: BlockManager, digests: list[bytes], conversation: int = 7) -> None:
    """A turn with these blocks ends."""
    held = [digest for digest in digests if digest in pool.held]
    pool.share(np.array([pool.held[digest] for digest in held], np.int64))
    new = [digest for digest in digests if digest not in held]
    blocks = pool.allocate(len(new))
    pool.cache(blocks, new, np.zeros((len(new), 2), np.uint32))
    table = np.array([pool.held[digest] for digest in digests])[::-1]
    pool.keep(table, conversation, supersedes=True)
    pool.free(table)
    check_pool(pool)


@pytest.mark.parametrize("num_shared", [1, 3, 5], ids=["subagent", "turn", "repeated"])
def test_a_later_turn_supersedes_the_blocks_that_it_no_longer_has(num_shared: int) -> None:
    """Only if it has most of the earlier one: subagents share a system prompt."""
    names = [bytes([i] * 16) for i in range(1, 40)]
    pool = BlockManager(16, 2, reuse_bonus=4.0)
    keep(pool, names[:5])
    keep(pool, names[:num_shared] + names[5 : 10 - num_shared])
    keep(pool, names[10:12], conversation=8)
    for name in names[20:32]:
        cache(pool, name)
    left = [index for index in range(5) if names[index] in pool.held]
    assert left == ([0, 1, 2] if num_shared == 3 else [0, 1, 2, 3, 4])
    check_pool(pool)


def test_the_queue_has_room_for_any_number_of_hits() -> None:
    pool = BlockManager(2, 2)
    (hot,) = cache(pool, A)
    for _ in range(100):
        pool.hit(np.array([hot]))
        pool.free(np.array([hot]))
    assert queues(pool) == ([], [hot], [1 - hot])
    check_pool(pool)


def test_without_a_bonus_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockManager(2, 2)
    (hot,) = cache(pool, A)
    pool.hit(np.array([hot]))
    pool.free(np.array([hot]))
    cache(pool, B)
    cache(pool, bytes([2] * 16))
    assert (pool.match_len([A], 1), pool.match_len([B], 1)) == (0, 1)


def cached_pool(num_blocks: int) -> BlockManager:
    """A pool in which every block holds a cached prefix."""
    pool = BlockManager(num_blocks, 1)
    blocks = pool.allocate(num_blocks)
    digests = [bytes([i // 256, i % 256] * 8) for i in range(num_blocks)]
    pool.commit(pool.register(blocks, digests, blocks[:, None]))
    pool.free(blocks[::-1])
    return pool


def test_a_large_pool_evicts_several_blocks_at_once() -> None:
    pool = cached_pool(1024)
    assert pool.allocate(1).tolist() == [1023]
    assert (pool.num_empty, pool.num_cached) == (3, 1020)
    assert pool.allocate(5).tolist() == [1022, 1021, 1020, 1019, 1018]
    assert (pool.num_empty, pool.num_cached) == (2, 1016)
    assert len(pool.allocate(1018)) == 1018
    assert pool.num_free == 0
    check_pool(pool)


def test_a_small_pool_evicts_no_block_early() -> None:
    pool = cached_pool(255)
    pool.allocate(1)
    assert (pool.num_empty, pool.num_cached) == (0, 254)


def test_equal_digests_in_one_step_are_held_by_the_first_block() -> None:
    pool = BlockManager(4, 1)
    blocks = pool.allocate(4)
    fills = pool.register(blocks, [A, B, A, B], u32(1, 2, 1, 2)[:, None])
    assert fills == [(0, A), (1, B)]
    assert pool.register(blocks[2:], [B, bytes([2] * 16)], u32(2, 3)[:, None]) == [(3, bytes([2] * 16))]
    assert pool.match([bytes([2] * 16)], u32(3), 1).tolist() == [3]


def test_tables_are_freed_together_in_order() -> None:
    pool = BlockManager(6, 1)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.free_tables([second, first])
    assert pool.allocate(6).tolist() == [4, 5, *second, *first]
    pool.share(np.array([0]))
    pool.free_tables([np.array([0, 1]), np.array([2, 0])])
    assert pool.num_empty == 3
    check_pool(pool)
