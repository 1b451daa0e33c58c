"""Chained block digests: equal digests mean equal tokens *and* an equal prefix.

digest_i = xxh3_128(digest_{i-1} + tokens of block i as little-endian uint32); digest_{-1} is the root, which holds
everything else that KV depends on: model revision, dtype, block size, cache salt.
A digest is only ever a key: on a hit the tokens are compared.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Protocol

from xxhash import xxh3_128_digest, xxh64


class U32Column(Protocol):
    """Token ids as uint32 in the machine's byte order: array("I") or a numpy array."""

    def tobytes(self) -> bytes:
        """Its memory."""


def model_salt(revision: str, dtype: str, determinism: int) -> bytes:
    """What KV depends on besides tokens and requests: the `root_salt` of every chain of a model."""
    return f"{revision}|{dtype}|{determinism}".encode()


def root_digest(root_salt: bytes, block_size: int, root_key: bytes) -> bytes:
    """The parent of every first block. Lengths are part of it, so that no two inputs run together."""
    head = b"%d|%d|%d|" % (block_size, len(root_salt), len(root_key))
    return xxh3_128_digest(head + root_salt + root_key)


def block_digest(parent: bytes, block_bytes: bytes) -> bytes:
    """Digest of one full block, as `token_bytes` gives it, whose prefix has digest `parent`."""
    return xxh3_128_digest(parent + block_bytes)


def extend_digests(digests: list[bytes], root: bytes, token_ids: U32Column, block_size: int) -> None:
    """Append the digests of all full blocks of `token_ids` that `digests` does not hold yet."""
    data = token_bytes(token_ids)
    stride = 4 * block_size
    parent = digests[-1] if digests else root
    for start in range(len(digests) * stride, len(data) - stride + 1, stride):
        parent = xxh3_128_digest(parent + data[start : start + stride])
        digests.append(parent)


def compute_hash(token_ids: Sequence[int], parent: int | None = None) -> int:
    """nano-vllm's chain (xxh64 over the parent's 8 bytes and int64 tokens), for cross-checks only."""
    state = xxh64()
    if parent is not None:
        state.update(parent.to_bytes(8, "little"))
    state.update(b"".join(token_id.to_bytes(8, "little", signed=True) for token_id in token_ids))
    return state.intdigest()


def token_bytes(column: U32Column) -> bytes:
    """Token ids as little-endian uint32: what is digested."""
    data = column.tobytes()
    if sys.byteorder == "little":
        return data
    words = array("I", data)
    words.byteswap()
    return words.tobytes()
