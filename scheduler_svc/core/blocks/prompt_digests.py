"""Block digests of prompts, computed only where a prompt differs from a former one that began alike."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from prefix_index.hashing import extend_digests, root_digest

U32 = npt.NDArray[np.uint32]

MAX_TOKENS = 1 << 22  # of all prompts that are remembered: about 40 MB with their digests


class PromptDigests:
    """Remembers, for each first block, the newest prompt that began with it.

    Comparing tokens costs a hundredth of digesting them. Most prompts that are cached begin like the one before: the
    same system prompt, the same template, the same conversation one turn earlier.
    """

    def __init__(self, root_salt: bytes) -> None:
        self._root_salt = root_salt
        self._former: OrderedDict[bytes, tuple[U32, list[bytes]]] = OrderedDict()  # by the first digest, oldest first
        self._num_tokens = 0

    def extend(self, digests: list[bytes], token_ids: U32, root_key: bytes, block_size: int) -> None:
        """Append the digests of all full blocks of `token_ids` that `digests` does not hold yet."""
        root = root_digest(self._root_salt, block_size, root_key)
        if not digests and len(token_ids) >= block_size:
            extend_digests(digests, root, token_ids[:block_size], block_size)
            self._copy_common(digests, token_ids, block_size)
            self._remember(token_ids, digests)
        extend_digests(digests, root, token_ids, block_size)

    def _copy_common(self, digests: list[bytes], token_ids: U32, block_size: int) -> None:
        former = self._former.get(digests[0])
        if former is None:
            return
        tokens, known = former
        length = min(len(tokens), len(token_ids))
        differs = tokens[:length] != token_ids[:length]
        first = int(differs.argmax())
        num_common = first if differs[first] else length
        digests += known[1 : num_common // block_size]

    def _remember(self, token_ids: U32, digests: list[bytes]) -> None:
        former = self._former.pop(digests[0], None)
        self._former[digests[0]] = (token_ids, digests)
        self._num_tokens += len(token_ids) - (len(former[0]) if former else 0)
        while self._num_tokens > MAX_TOKENS:
            _, (tokens, _) = self._former.popitem(last=False)
            self._num_tokens -= len(tokens)
