"""Block digests of prompts. Only blocks after the common prefix with an earlier prompt are hashed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import zip_longest

from prefix_index.hashing import NO_KEYS, chained, extend_digests, root_digest, token_bytes
from step_protocol.columns import U32

MAX_BYTES = 40 << 20  # memory for remembered prompts
ENTRY_BYTES = 424  # entry without tokens and digests: array, tuple, dict slots right after the dict has grown
DIGEST_BYTES = 72  # size of one digest: a bytes object of 16 bytes and its reference


class PromptDigests:
    """Remembers, for each distinct first block, the newest prompt that begins with it, within `max_bytes` of memory.

    Comparing tokens takes a hundredth of the time of hashing them. Most prompts with cached blocks share their
    beginning with an earlier prompt: the same system prompt, the same template, the same conversation one turn earlier.
    """

    def __init__(self, root_salt: bytes, max_bytes: int = MAX_BYTES) -> None:
        self._root_salt = root_salt
        self._max_bytes = max_bytes
        # Keyed by the first digest, oldest prompt first.
        self._entries: OrderedDict[bytes, tuple[U32, tuple[bytes, ...]]] = OrderedDict()
        self._num_bytes = 0

    def extend(
        self,
        digests: list[bytes],
        token_ids: U32,
        root_key: bytes,
        block_size: int,
        keys: Mapping[int, bytes] = NO_KEYS,
    ) -> None:
        """Append to `digests` the missing digests of the full blocks of `token_ids`. A block with extra keys begins
        another part of the prompt, which is remembered on its own: equal tokens before it do not make its digest equal.
        """
        root = root_digest(self._root_salt, block_size, root_key)
        if digests or len(token_ids) < block_size:
            extend_digests(digests, root, token_ids, block_size, keys)
            return
        num_blocks = len(token_ids) // block_size
        borders = [0, *(index for index in sorted(keys) if 0 < index < num_blocks)]
        for begin, end in zip_longest(borders, borders[1:]):
            tokens = token_ids
            if len(borders) > 1:  # a view would keep the whole prompt in memory
                tokens = token_ids[begin * block_size : None if end is None else end * block_size].copy()
            parent = digests[-1] if digests else root
            digests += self._part(parent, tokens, keys.get(begin, b""), block_size)

    def _part(self, parent: bytes, tokens: U32, key: bytes, block_size: int) -> list[bytes]:
        """The digests of the full blocks of one part, whose first block has this key."""
        digests = [chained(parent + token_bytes(tokens[:block_size]) + key)]
        entry = self._entries.get(digests[0])
        if entry is not None:
            _copy_common(digests, *entry, tokens, block_size)
        extend_digests(digests, parent, tokens, block_size)
        self._remember(tokens, digests)
        return digests

    def _remember(self, token_ids: U32, digests: list[bytes]) -> None:
        """Store a prompt, replacing the prompt with the same first block. Evicts the oldest prompts over the limit."""
        replaced = self._entries.pop(digests[0], None)
        if replaced is not None:
            self._num_bytes -= _num_bytes(*replaced)
        entry = token_ids, tuple(digests)  # a copy: the sequence appends the digests of its output to its own list
        self._entries[digests[0]] = entry
        self._num_bytes += _num_bytes(*entry)
        while self._num_bytes > self._max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self._num_bytes -= _num_bytes(*evicted)


def _copy_common(digests: list[bytes], tokens: U32, known: tuple[bytes, ...], token_ids: U32, block_size: int) -> None:
    """Append the digests, but the first, of the blocks that `token_ids` have in common with an earlier prompt."""
    length = min(len(tokens), len(token_ids))
    differs = tokens[:length] != token_ids[:length]
    first = int(differs.argmax())
    num_common = first if differs[first] else length
    digests += known[1 : num_common // block_size]


def _num_bytes(token_ids: U32, digests: tuple[bytes, ...]) -> int:
    return ENTRY_BYTES + token_ids.nbytes + DIGEST_BYTES * len(digests)
