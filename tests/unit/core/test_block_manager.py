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
