"""Ids of prompt positions that have no vocabulary token, because an input (CarriedInput) provides their embeddings.

Bit 31 of a content id is set. Token ids are below vocab_size, which is at most 2**24, so the two never coincide.
The other bits are word i of SHAKE-128 of the input's digest, for position i of the input. Content ids take the place of
token ids in digests of prefixes and in comparisons of tokens. Digests also cover the whole digests of the inputs
(`hashing.extra_keys`), so that prefixes with different inputs have different digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

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
    """The content ids of an input with this digest and number of positions: u32[length], little-endian."""
    words = bytearray(hashlib.shake_128(digest).digest(4 * length))
    words[3::4] = words[3::4].translate(_WITH_TOP_BIT)
    return bytes(words)
