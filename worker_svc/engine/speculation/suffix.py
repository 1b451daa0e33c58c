"""Drafts from the row's own tokens: what followed the newest tokens where they occurred before.

Agents, editors and chats repeat: files, code, quotations, the previous turn. The index of a row finds the earlier place
that ends with the same tokens as the row:

    heads     hash of three tokens -> the newest position after them
    before    position -> the next older position with the same hash: a chain, newest first

A match of n tokens becomes a match of n + 1 when its next token is the one that was sampled, so the chain is read only
where a match ends. The index has 4 bytes per token and 128 KiB per row, and a token takes a few microseconds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from step_protocol.columns import I32, I64, U32

MIN_MATCH = 3  # tokens; shorter matches say little about the next token
MAX_MATCH = 32  # tokens that are compared
MAX_PLACES = 16  # places of one chain that are compared
HASH_BITS = 15
FEW = 16  # new tokens that are added one by one

_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_MASK = 2**64 - 1
_SHIFT = 64 - HASH_BITS


def mixed_threes(tokens: U32) -> npt.NDArray[np.uint64]:
    """A number for each three tokens in a row, from which their hash follows."""
    columns = [tokens[nth : len(tokens) - MIN_MATCH + 1 + nth].astype(np.uint64) for nth in range(MIN_MATCH)]
    return np.asarray(sum(column * np.uint64(factor) for column, factor in zip(columns, _FACTORS, strict=True)))


class SuffixIndex:
    """The index of one row. `tokens` is its history, which others write."""

    def __init__(self, tokens: U32) -> None:
        self._tokens = tokens
        self._heads: I32 = np.full(1 << HASH_BITS, -1, np.int32)
        self._before: I32 = np.empty(len(tokens) + 1, np.int32)
        self._end = 0  # tokens in the index
        self._source = 0  # position after the matching tokens
        self._length = 0  # of the match; 0: there is none

    def propose(self, num_tokens: int, most: int) -> list[int]:
        """Up to `most` tokens that may follow the first `num_tokens`. Earlier calls had no more of them."""
        self._extend(num_tokens)
        if not self._length:
            return []
        end = min(self._source + most, num_tokens)
        found: list[int] = self._tokens[self._source : end].tolist()
        while len(found) < most:  # the row repeats its end
            found.append(found[len(found) - (num_tokens - self._source)])
        return found

    def _extend(self, num_tokens: int) -> None:
        if num_tokens - self._end > FEW:
            self._add_many(num_tokens)
            self._length = 0
        else:
            for end in range(self._end + 1, num_tokens + 1):
                self._add(end)
        self._end = num_tokens
        if not self._length and num_tokens >= MIN_MATCH:
            self._search(num_tokens)

    def _add(self, end: int) -> None:
        """Add the token before position `end`, and continue the match with it or end it."""
        if self._length:
            continues = self._tokens.item(self._source) == self._tokens.item(end - 1)
            self._source, self._length = self._source + continues, (self._length + 1) * continues
        if end >= MIN_MATCH:
            place = self._hash(end)
            self._before[end] = self._heads[place]
            self._heads[place] = end

    def _hash(self, end: int) -> int:
        ids: list[int] = self._tokens[end - MIN_MATCH : end].tolist()
        first, second, third = ids
        return ((first * _FACTORS[0] + second * _FACTORS[1] + third * _FACTORS[2]) & _MASK) >> _SHIFT

    def _add_many(self, num_tokens: int) -> None:
        ends: I64 = np.arange(max(MIN_MATCH, self._end + 1), num_tokens + 1)
        if not len(ends):
            return
        mixed = mixed_threes(self._tokens[ends[0] - MIN_MATCH : num_tokens])
        places: I64 = (mixed >> np.uint64(_SHIFT)).astype(np.int64)
        order: npt.NDArray[np.intp] = np.argsort(places, kind="stable")
        places, ends = places[order], ends[order]
        is_first = np.append(True, places[1:] != places[:-1])
        self._before[ends] = np.where(is_first, self._heads[places], np.roll(ends, 1))
        self._heads[places] = ends  # the newest of each place is the last one

    def _search(self, num_tokens: int) -> None:
        """The longest match among the newest places, the newest of equal ones."""
        place = int(self._before[num_tokens])
        newest = self._tokens[max(0, num_tokens - MAX_MATCH) : num_tokens][::-1]
        for _ in range(MAX_PLACES):
            if place < MIN_MATCH:
                return
            earlier = self._tokens[max(0, place - MAX_MATCH) : place][::-1]
            differs = np.flatnonzero(earlier != newest[: len(earlier)])
            length = int(differs[0]) if len(differs) else len(earlier)
            if length >= MIN_MATCH and length > self._length:
                self._source, self._length = place, length
            place = int(self._before[place])
