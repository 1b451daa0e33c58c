"""PromptDigests: digests copied from an earlier prompt equal computed ones, and memory is bounded."""

import gc
import tracemalloc

import numpy as np
import pytest

from prefix_index.hashing import extend_digests, root_digest
from scheduler_svc.core import prompt_digests
from scheduler_svc.core.prompt_digests import DIGEST_BYTES, ENTRY_BYTES, PromptDigests

BLOCK_SIZE = 4


def computed(tokens: np.ndarray, root_key: bytes = b"") -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, root_digest(b"salt", BLOCK_SIZE, root_key), tokens, BLOCK_SIZE)
    return digests


def remembered(memo: PromptDigests, tokens: np.ndarray, root_key: bytes = b"") -> list[bytes]:
    digests: list[bytes] = []
    memo.extend(digests, tokens, root_key, BLOCK_SIZE)
    return digests


def test_prompts_that_share_any_number_of_tokens() -> None:
    memo, rng = PromptDigests(b"salt"), np.random.default_rng(0)
    base = rng.integers(0, 9, 40, dtype=np.uint32)
    for num_shared in (40, 39, 17, 16, 15, 4, 3, 0, 40):
        own = rng.integers(10, 19, rng.integers(0, 9), dtype=np.uint32)
        prompt = np.concatenate((base[:num_shared], own))
        for root_key in (b"", b"tenant"):
            assert remembered(memo, prompt, root_key) == computed(prompt, root_key)


def test_parts_that_begin_with_a_keyed_block_are_remembered() -> None:
    """Prompts of tenants with a public prefix, and images: each part is hashed once per tenant."""
    limit = 40 * (ENTRY_BYTES + 40 * 4 + 10 * DIGEST_BYTES)
    memo, rng = PromptDigests(b"salt", limit), np.random.default_rng(0)
    for number in range(200):
        tokens = np.concatenate((np.zeros(rng.integers(0, 20), np.uint32), rng.integers(0, 2, 20, dtype=np.uint32)))
        keys = {int(index): bytes([rng.integers(3)]) for index in rng.integers(0, 12, rng.integers(0, 4))}
        expected, found = list[bytes](), list[bytes]()
        extend_digests(expected, root_digest(b"salt", BLOCK_SIZE, b""), tokens, BLOCK_SIZE, keys)
        memo.extend(found, tokens, b"", BLOCK_SIZE, keys)
        assert found == expected, number
        assert memo._num_bytes <= limit
    prompt, keys = np.arange(40, dtype=np.uint32), {4: b"tenant"}
    memo.extend([], prompt, b"", BLOCK_SIZE, keys)
    found = []
    with pytest.MonkeyPatch.context() as patch:  # nothing is left to hash but first blocks
        patch.setattr(prompt_digests, "extend_digests", lambda digests, *others: None)
        memo.extend(found, prompt, b"", BLOCK_SIZE, keys)
    assert len(found) == 10


def test_digests_of_a_grown_sequence_are_appended() -> None:
    memo, tokens = PromptDigests(b"salt"), np.arange(30, dtype=np.uint32)
    digests = remembered(memo, tokens[:10])
    memo.extend(digests, tokens, b"", BLOCK_SIZE)
    assert digests == computed(tokens)
    assert remembered(memo, tokens) == computed(tokens)


def test_the_oldest_prompts_are_evicted() -> None:
    two_entries = 2 * (ENTRY_BYTES + 8 * 4 + 2 * DIGEST_BYTES)
    memo = PromptDigests(b"salt", two_entries)
    for first in range(10):
        remembered(memo, np.full(8, first, dtype=np.uint32))
    assert len(memo._entries) == 2


def test_a_prompt_larger_than_the_limit_is_not_kept() -> None:
    memo, prompt = PromptDigests(b"salt", 1000), np.arange(4000, dtype=np.uint32)
    assert remembered(memo, prompt) == computed(prompt)
    assert not memo._entries
    assert memo._num_bytes == 0


@pytest.mark.parametrize("num_blocks", [1, 2, 50])
def test_memory_stays_within_the_limit_at_any_length_of_prompts(num_blocks: int) -> None:
    limit = 400_000
    memo = PromptDigests(b"salt", limit)
    root_digest(b"salt", BLOCK_SIZE, b"")
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(3000):
            tokens = np.arange(num_blocks * BLOCK_SIZE, dtype=np.uint32) + number
            digests: list[bytes] = []
            memo.extend(digests, np.frombuffer(tokens.tobytes(), dtype=np.uint32), b"", BLOCK_SIZE)
            digests += [number.to_bytes(16, "little")] * 50  # the sequence generates
        del digests, tokens
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert limit / 2 < used <= limit
