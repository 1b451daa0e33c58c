"""Digests: equal means equal tokens and equal prefix, salts keep chains apart."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from prefix_index.hashing import extend_digests, root_digest


def u32(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.uint32)


def test_chain_is_parent_then_little_endian_tokens() -> None:
    root = root_digest(b"model", 2, b"")
    digests: list[bytes] = []
    extend_digests(digests, root, u32(1, 2, 3, 4, 5), 2)
    first = xxh3_128_digest(root + b"\x01\0\0\0\x02\0\0\0")
    assert digests == [first, xxh3_128_digest(first + b"\x03\0\0\0\x04\0\0\0")]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8), st.integers(0, 40))
def test_extending_in_two_parts_gives_the_same_chain(ids: list[int], block_size: int, cut: int) -> None:
    root = root_digest(b"", block_size, b"")
    whole: list[bytes] = []
    extend_digests(whole, root, u32(*ids), block_size)
    parts: list[bytes] = []
    extend_digests(parts, root, u32(*ids[:cut]), block_size)
    extend_digests(parts, root, u32(*ids), block_size)
    assert parts == whole
    assert len(whole) == len(ids) // block_size


def test_salt_key_and_block_size_separate_chains() -> None:
    roots = {root_digest(s, b, k) for s in (b"", b"a", b"ab") for b in (1, 16) for k in (b"", b"b", b"tenant")}
    assert len(roots) == 18
    assert root_digest(b"a", 1, b"bc") != root_digest(b"ab", 1, b"c")
