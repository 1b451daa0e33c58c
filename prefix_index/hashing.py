"""Chained block digests: equal digests mean equal tokens *and* an equal prefix.

digest_i = xxh3_128(digest_{i-1} + tokens of block i as little-endian uint32 + its extra keys); digest_{-1} is the root,
which covers everything else that KV depends on: model revision, dtype, block size, cache salt.
A digest is only a key: on a hit the tokens are compared.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from struct import iter_unpack
from typing import Protocol

from xxhash import xxh3_128_digest

DIGEST_BYTES = 16
FIRST_CONTENT_ID = 1 << 31
_WITH_TOP_BIT = bytes(byte | 0x80 for byte in range(256))


def content_digest(*parts: bytes) -> bytes:
    """The digest of an input from the parts that determine its result. It covers the lengths of the parts too."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def input_digest(kind: str, dtype: str, shape: Sequence[int], data: bytes) -> bytes:
    """The digest of a carried input. `kind` and `dtype` are the lower-case names of the protocol."""
    dimensions = b"".join(size.to_bytes(4, "little") for size in shape)
    return content_digest(kind.encode(), dtype.encode(), dimensions, data)


def content_ids(digest: bytes, length: int) -> bytes:
    """The content ids of an input with this digest and number of positions: u32[length], little-endian.

    They are the ids of prompt positions without a vocabulary token, because an input (CarriedInput) provides their
    embeddings, and take the place of token ids in digests and comparisons. Bit 31 is set, and token ids are below
    vocab_size, at most 2**24, so the two never coincide. The other bits are word i of SHAKE-128 of the input's digest.
    Digests also cover the whole digests of the inputs (`extra_keys`).
    """
    words = bytearray(hashlib.shake_128(digest).digest(4 * length))
    words[3::4] = words[3::4].translate(_WITH_TOP_BIT)
    return bytes(words)


NO_KEYS: Mapping[int, bytes] = {}
STATE_ID_BYTES = 20


class HashedInput(Protocol):
    """An input of a prompt that is not a token."""

    @property
    def start(self) -> int:
        """Its first position in the prompt."""

    @property
    def digest(self) -> bytes:
        """16 bytes that depend on its content."""


class U32Column(Protocol):
    """Token ids as uint32 in the machine's byte order: array("I") or a numpy array."""

    def __len__(self) -> int:
        """The number of ids."""

    def tobytes(self) -> bytes:
        """The memory of the column."""

    def __getitem__(self, part: slice, /) -> U32Column:
        """A slice of the column."""


def model_salt(revision: str, dtype: str, determinism: int, weights_revision: str = "") -> bytes:
    """The properties of a model on which KV depends: the `root_salt` of all its chains. After an update of the weights,
    it is that of workers that start with the updated weights.
    """
    return f"{weights_revision or revision}|{dtype}|{determinism}".encode()


def root_key(*, cache_salt: bytes = b"", encoder: bytes = b"", adapter: bytes = b"") -> bytes:
    """The properties of a request on which KV depends, besides its tokens.

    Each part has its name and length, so that different parts never give the same bytes.
    """
    if not (cache_salt or encoder or adapter):
        return b""
    parts = {b"cache_salt": cache_salt, b"encoder": encoder, b"adapter": adapter}
    return b"".join(b"%s:%d:%s|" % (name, len(value), value) for name, value in parts.items() if value)


def encoder_digest(token_ids: U32Column) -> bytes:
    """The digest of a whole encoder input. An encoder is bidirectional: KV of its first block depends on its last
    id.
    """
    return xxh3_128_digest(token_bytes(token_ids))


@lru_cache(maxsize=4096)  # one per cache salt
def root_digest(root_salt: bytes, block_size: int, root_key: bytes) -> bytes:
    """The parent digest of every first block. It covers the lengths too, so different inputs give different bytes."""
    head = b"%d|%d|%d|" % (block_size, len(root_salt), len(root_key))
    return xxh3_128_digest(head + root_salt + root_key)


def layout_digest(revision: str, numerics: str, parts: Iterable[tuple[str, Iterable[int]]]) -> bytes:
    """Digest of what gives the bytes of a block their meaning besides its chain: weights and settings (`revision`), the
    arithmetic that computed them, and the arrays that they fill, in order, by number type and shape.

    In best_effort mode workers with different numerics have the same chains, but not the same bytes.
    """
    words = [revision, numerics, *(f"{dtype}{list(shape)}" for dtype, shape in parts)]
    return xxh3_128_digest(b"".join(b"%d:%s|" % (len(word), word.encode()) for word in words))


def snapshot_digest(digest: bytes) -> bytes:
    """The digest of a snapshot of recurrent states, from that of the block that ends where it was taken."""
    return xxh3_128_digest(b"snapshot|" + digest)


def group_digest(digest: bytes, number: int) -> bytes:
    """The digest of a block of a cache group after the first one, from that of the block with the same tokens there."""
    return xxh3_128_digest(b"group %d|" % number + digest)


def state_id(token_ids: U32Column, adapter: bytes) -> bytes:
    """Identifies the recurrent state after these tokens, of rows with this adapter: the number of tokens (u32), and a
    digest of tokens and adapter, its *chain*.
    """
    return len(token_ids).to_bytes(4, "little") + xxh3_128_digest(adapter + token_bytes(token_ids))


def block_key(digest: bytes, layout: bytes) -> bytes:
    """The key of a block's bytes outside the pool that computed them, in tiers and transfers. It covers everything that
    changes a bit of them: `digest` covers the chain from its root, `layout` is from `layout_digest`.
    """
    return layout + digest


chained = xxh3_128_digest
"""Digest of one full block: its parent's digest, its tokens as `block_bytes` gives them, and its extra keys if it has
some, concatenated.
"""


def extra_keys(inputs: Iterable[HashedInput], block_size: int) -> dict[int, bytes]:
    """The keys that digests of blocks cover besides their tokens, by index of the block: the digests of the inputs that
    begin in the block. A content id has 31 bits, too few where a block has only the first positions of an input.
    """
    keys: dict[int, bytes] = {}
    for carried in inputs:
        index = carried.start // block_size
        keys[index] = keys.get(index, b"") + carried.digest
    return keys


def extend_digests(
    digests: list[bytes], root: bytes, token_ids: U32Column, block_size: int, keys: Mapping[int, bytes] = NO_KEYS
) -> None:
    """Append to `digests` the missing digests of the full blocks of `token_ids`. `keys`: as from `extra_keys`."""
    parent = digests[-1] if digests else root
    blocks = block_bytes(token_bytes(token_ids[block_size * len(digests) :]), block_size)
    if keys:
        blocks = [block + keys.get(index, b"") for index, block in enumerate(blocks, len(digests))]
    for block in blocks:
        parent = chained(parent + block)
        digests.append(parent)


def block_bytes(data: bytes, block_size: int) -> list[bytes]:
    """Splits the output of `token_bytes` into full blocks."""
    stride = 4 * block_size
    return [block for (block,) in iter_unpack(f"{stride}s", data[: len(data) // stride * stride])]


def token_bytes(column: U32Column) -> bytes:
    """Token ids as little-endian uint32, the input of digests."""
    data = column.tobytes()
    if sys.byteorder == "little":
        return data
    words = array("I", data)
    words.byteswap()
    return words.tobytes()


class ColumnError(ValueError):
    """A column of numbers is cut off."""


def ids_from_bytes(data: bytes) -> array[int]:
    """The numbers of a little-endian uint32 column. Raises ColumnError if its length is not a multiple of 4."""
    try:
        ids = array("I", data)
    except ValueError:
        raise ColumnError(f"a uint32 column has {len(data)} bytes; expected a multiple of 4") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
