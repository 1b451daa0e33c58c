"""PromptDigests: what is copied from a former prompt is what would have been computed."""

import numpy as np
import pytest

from prefix_index.hashing import extend_digests, root_digest
from scheduler_svc.core.blocks import prompt_digests
from scheduler_svc.core.blocks.prompt_digests import PromptDigests

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


def test_a_sequence_that_has_grown_goes_on_where_it_was() -> None:
    memo, tokens = PromptDigests(b"salt"), np.arange(30, dtype=np.uint32)
    digests = remembered(memo, tokens[:10])
    memo.extend(digests, tokens, b"", BLOCK_SIZE)
    assert digests == computed(tokens)
    assert remembered(memo, tokens) == computed(tokens)


def test_the_oldest_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_digests, "MAX_TOKENS", 20)
    memo = PromptDigests(b"salt")
    for first in range(10):
        remembered(memo, np.full(8, first, dtype=np.uint32))
    assert len(memo._former) == 2
