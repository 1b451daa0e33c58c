"""Chained block digests: equal digests mean equal tokens *and* an equal prefix.

digest_i = xxh3_128(digest_{i-1} + tokens of block i as little-endian uint32); digest_{-1} is the root, which holds
everything else that KV depends on: model revision, dtype, block size, cache salt.
A digest is only ever a key: on a hit the tokens are compared.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import iter_unpack
from typing import Protocol

from xxhash import xxh3_128_digest, xxh64


class U32Column(Protocol):
    """Token ids as uint32 in the machine's byte order: array("I") or a numpy array."""

    def tobytes(self) -> bytes:
        """Its memory."""

    def __getitem__(self, part: slice, /) -> U32Column:
        """A part of it."""


def model_salt(revision: str, dtype: str, determinism: int) -> bytes:
    """What KV depends on besides tokens and requests: the `root_salt` of every chain of a model."""
    return f"{revision}|{dtype}|{determinism}".encode()


@lru_cache(maxsize=4096)  # one per tenant's salt
def root_digest(root_salt: bytes, block_size: int, root_key: bytes) -> bytes:
    """The parent of every first block. Lengths are part of it, so that no two inputs run together."""
    head = b"%d|%d|%d|" % (block_size, len(root_salt), len(root_key))
    return xxh3_128_digest(head + root_salt + root_key)


chained = xxh3_128_digest
"""Digest of one full block: of its parent's digest and its tokens as `block_bytes` gives them, one after the other."""


def extend_digests(digests: list[bytes], root: bytes, token_ids: U32Column, block_size: int) -> None:
    """Append the digests of all full blocks of `token_ids` that `digests` does not hold yet."""
    parent = digests[-1] if digests else root
    for block in block_bytes(token_bytes(token_ids[block_size * len(digests) :]), block_size):
        parent = chained(parent + block)
        digests.append(parent)


def block_bytes(data: bytes, block_size: int) -> list[bytes]:
    """The full blocks of these tokens, as `token_bytes` gives them."""
    stride = 4 * block_size
    return [block for (block,) in iter_unpack(f"{stride}s", data[: len(data) // stride * stride])]


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
