"""Reads log probabilities from the columns of Deltas into a journal, and writes them to the columns of events."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.internal.v1 import logprobs_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.schedulers.wire import ProtocolError
from gateway_svc.text.bundle import Tokenizer
from prefix_index.hashing import ids_from_bytes

MAX_EVENT_ENTRIES = 1 << 11  # log probabilities per event: building it takes a few milliseconds


class TokenLogprobs(NamedTuple):
    """The log probabilities at one position: of its token, then of the most likely ones."""

    logprobs: array[float]
    token_ids: array[int]
    rank: int
    extras: tuple[float | int, ...] = (0.0, 0, 0)  # by EXTRAS; 0 for what the step's columns lack


@dataclass(frozen=True, slots=True)
class Extra:
    """A number of each token that some requests ask for. The columns of both protocols have its name."""

    name: str
    typecode: str  # typecode of the array
    is_asked: Callable[[types.SamplingParams], bool]


def is_processed(sampling: types.SamplingParams) -> bool:
    return sampling.logprobs_mode == types.LOGPROBS_MODE_PROCESSED


EXTRAS = (
    Extra("raw_logprobs", "f", is_processed),
    Extra("num_kept", "I", is_processed),
    Extra("logits_digests", "Q", lambda sampling: sampling.logits_digests),
)
RAW_LOGPROBS, NUM_KEPT = 0, 1  # in EXTRAS


def extras_of(sampling: types.SamplingParams) -> tuple[int, ...]:
    """The indices in EXTRAS of what a request asks for."""
    return tuple(i for i, extra in enumerate(EXTRAS) if extra.is_asked(sampling))


def entries_from_columns(columns: logprobs_pb2.LogprobColumns, num_tokens: int) -> Iterator[TokenLogprobs | None]:
    """One item per token; None for one without log probabilities. Raises ProtocolError or ColumnError, before the first
    item.
    """
    lens, token_ids = ids_from_bytes(columns.lens), ids_from_bytes(columns.token_ids)
    logprobs, ranks = _f32_from_bytes(columns.logprobs), ids_from_bytes(columns.ranks)
    num_entries, num_ranks = sum(lens), sum(1 for length in lens if length)
    if (len(lens), len(logprobs), len(token_ids), len(ranks)) != (num_tokens, num_entries, num_entries, num_ranks):
        raise ProtocolError(
            f"columns of log probabilities have {len(lens)} lens, {len(logprobs)} logprobs, {len(token_ids)} token_ids "
            f"and {len(ranks)} ranks; expected {num_tokens}, {num_entries}, {num_entries} and {num_ranks}"
        )
    extras = [_extra_from_columns(columns, extra, num_ranks) for extra in EXTRAS]
    return _split(lens, logprobs, token_ids, iter(ranks), zip(*extras, strict=True))


def _extra_from_columns(columns: logprobs_pb2.LogprobColumns, extra: Extra, num_tokens: int) -> array[Any]:
    data: bytes = getattr(columns, extra.name)
    values: array[Any] = array(extra.typecode)
    if not data:
        data = bytes(num_tokens * values.itemsize)
    if len(data) != num_tokens * values.itemsize:
        raise ProtocolError(f"{extra.name} has {len(data)} bytes; expected {num_tokens * values.itemsize}")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _split(
    lens: array[int],
    logprobs: array[float],
    token_ids: array[int],
    ranks: Iterator[int],
    extras: Iterator[tuple[float | int, ...]],
) -> Iterator[TokenLogprobs | None]:
    start = 0
    for length in lens:
        end = start + length
        yield TokenLogprobs(logprobs[start:end], token_ids[start:end], next(ranks), next(extras)) if length else None
        start = end


def _f32_from_bytes(data: bytes) -> array[float]:
    values = array("f")
    values.frombytes(ids_from_bytes(data).tobytes())
    return values


class LogprobJournal:
    """The unsent log probabilities of received tokens, in order: 1 + `num_top` per token, and the `extras` of each
    (indices in EXTRAS)."""

    def __init__(self, num_top: int, extras: tuple[int, ...] = ()) -> None:
        self.num_top = num_top
        self._extras: dict[int, array[Any]] = {index: array(EXTRAS[index].typecode) for index in extras}
        self._chosen = array("f")
        self._token_ids = array("I")
        self._ranks = array("I")
        self._top_ids = array("I")
        self._top = array("f")

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def tokens_per_event(self) -> int:
        """The largest number of tokens whose log probabilities fit in one event."""
        return max(1, MAX_EVENT_ENTRIES // (1 + self.num_top))

    def append(self, entries: TokenLogprobs | None) -> bool:
        """Append the log probabilities of the next token. False if their number is not 1 + `num_top`."""
        if entries is None or len(entries.token_ids) != 1 + self.num_top:
            return False
        self._chosen.append(entries.logprobs[0])
        self._token_ids.append(entries.token_ids[0])
        self._ranks.append(entries.rank)
        self._top_ids.extend(entries.token_ids[1:])
        self._top.extend(entries.logprobs[1:])
        for index, column in self._extras.items():
            is_raw = not entries.extras[NUM_KEPT]  # a prompt token: its log probability is raw
            column.append(entries.logprobs[0] if index == RAW_LOGPROBS and is_raw else entries.extras[index])
        return True

    def total(self, num_tokens: int) -> float:
        """The sum of the log probabilities of the first tokens, added in order."""
        return sum(self._chosen[:num_tokens], 0.0)

    def take(self, num_tokens: int) -> TakenLogprobs:
        """Remove and return the log probabilities of the first tokens."""
        num_top = num_tokens * self.num_top
        taken = TakenLogprobs(
            self.num_top,
            self._chosen[:num_tokens],
            self._token_ids[:num_tokens],
            self._ranks[:num_tokens],
            self._top_ids[:num_top],
            self._top[:num_top],
            {EXTRAS[index].name: column[:num_tokens] for index, column in self._extras.items()},
        )
        columns: list[array[Any]] = [self._chosen, self._token_ids, self._ranks, *self._extras.values()]
        for column in columns:
            del column[:num_tokens]
        for column in (self._top_ids, self._top):
            del column[:num_top]
        return taken


class TakenLogprobs(NamedTuple):
    """Log probabilities of n consecutive tokens."""

    num_top: int
    chosen: array[float]  # [n]
    token_ids: array[int]  # [n]
    ranks: array[int]  # [n]
    top_ids: array[int]  # [n * num_top]
    top: array[float]  # [n * num_top]
    extras: Mapping[str, array[Any]] = MappingProxyType({})  # columns [n] by name

    def first(self, num_tokens: int) -> TakenLogprobs:
        """The log probabilities of the first tokens."""
        num_top = num_tokens * self.num_top
        return TakenLogprobs(
            self.num_top,
            self.chosen[:num_tokens],
            self.token_ids[:num_tokens],
            self.ranks[:num_tokens],
            self.top_ids[:num_top],
            self.top[:num_top],
            {name: column[:num_tokens] for name, column in self.extras.items()},
        )

    def fill(self, message: pb.Logprobs, tokenizer: Tokenizer | None) -> None:
        """Write to a message, with the tokens' bytes if there is a tokenizer."""
        message.logprobs.extend(self.chosen)
        message.ranks.extend(self.ranks)
        message.top_token_ids.extend(self.top_ids)
        message.top_logprobs.extend(self.top)
        for name, column in self.extras.items():
            getattr(message, name).extend(column)
        if tokenizer is not None:
            message.token_bytes.extend(tokenizer.token_bytes(self.token_ids))
            message.top_token_bytes.extend(tokenizer.token_bytes(self.top_ids))


class PromptLogprobJournal:
    """The log probabilities of a prompt's tokens. `num_received` includes the first token, which has none."""

    def __init__(self, num_top: int, num_received: int, extras: tuple[int, ...] = ()) -> None:
        self.num_received = max(1, num_received)
        self.pending = LogprobJournal(num_top, extras)

    def append(self, position: int, entries: TokenLogprobs | None) -> str | None:
        """Append the next position. A repeated position is dropped. Returns an error message, or None."""
        if position < self.num_received:
            return None
        if position > self.num_received:
            return f"the scheduler sent prompt position {position}, expected {self.num_received}"
        if not self.pending.append(entries):
            return f"the scheduler sent no or too few log probabilities for prompt position {position}"
        self.num_received += 1
        return None


class PromptLogprobStream:
    """Builds the events of a prompt's log probabilities. Owns the position up to which they were sent."""

    def __init__(self, prompt_ids: array[int], num_sent: int, tokenizer: Tokenizer | None) -> None:
        """`num_sent`: prompt tokens that the client has. 0: it does not have the first token either."""
        self._prompt_ids = prompt_ids
        self._num_sent = num_sent
        self._tokenizer = tokenizer

    def events(self, journal: PromptLogprobJournal) -> Iterator[pb.GenerateResponse]:
        """Events for the received positions."""
        pending = journal.pending
        while pending or self._num_sent < len(self._prompt_ids) == 1:
            yield self._event(pending.take(min(len(pending), pending.tokens_per_event)))

    def _event(self, taken: TakenLogprobs) -> pb.GenerateResponse:
        event = pb.GenerateResponse()
        message, first_id = event.prompt_logprobs, self._prompt_ids[0]
        if self._num_sent == 0:
            message.first_token_id = first_id
            message.first_token_bytes = b"" if self._tokenizer is None else self._tokenizer.token_bytes([first_id])[0]
        message.offset = max(1, self._num_sent)
        self._num_sent = message.offset + len(taken.ranks)
        message.token_ids.extend(self._prompt_ids[message.offset : self._num_sent])
        taken.fill(message.logprobs, self._tokenizer)
        return event
