"""Log probabilities in the formats of OpenAI's chats and text completions, and vLLM's prompt_logprobs. Pure."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from quire.v1 import inference_pb2 as pb

from gateway_svc.http.json_text import Json, encoded_list, joined_lists

TEXT_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
LOWEST = -9999.0  # OpenAI's value for minus infinity, which JSON cannot express


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token at a position. `logprob` is None for the first token of a prompt."""

    token_id: int
    logprob: float | None
    data: bytes

    @property
    def text(self) -> str:
        """The token's text. Bytes that are not whole characters become U+FFFD."""
        return self.data.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Position:
    """The token at a position, and the most likely ones there."""

    token: Candidate
    rank: int
    top: Sequence[Candidate]
    extras: Mapping[str, Any] = field(default_factory=dict)  # by column of `EXTRAS`, if the request asks for them


# Columns of Logprobs: their names in the objects of chats, and their values in JSON, whose numbers have 53 bits. Text
# completions have lists with the columns' names.
EXTRAS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "raw_logprobs": ("raw_logprob", lambda value: _finite(value)),
    "num_kept": ("num_kept", int),
    "logits_digests": ("logits_digest", "{:016x}".format),
}


def positions(columns: pb.Logprobs, token_ids: Sequence[int] = ()) -> Iterator[Position]:
    """The positions of the columns. `token_ids` may be empty if the ids are not needed. Without a tokenizer the columns
    have no bytes; a token is then `token_id:` with its id, as in vLLM."""
    count = len(columns.logprobs)
    k = len(columns.top_logprobs) // count if count else 0
    top_bytes = columns.top_token_bytes or map(_named, columns.top_token_ids)
    top_values = zip(columns.top_token_ids, map(_finite, columns.top_logprobs), top_bytes, strict=True)
    top = [Candidate(*values) for values in top_values]
    extras = {
        name: list(map(shown, column)) for name, (_, shown) in EXTRAS.items() if (column := getattr(columns, name))
    }
    for i in range(count):
        token_id = token_ids[i] if token_ids else -1
        data = columns.token_bytes[i] if columns.token_bytes else _named(token_id)
        token = Candidate(token_id, _finite(columns.logprobs[i]), data)
        own = {name: column[i] for name, column in extras.items()}
        yield Position(token, columns.ranks[i], top[i * k : (i + 1) * k], own)


def _named(token_id: int) -> bytes:
    return b"token_id:%d" % token_id


def first_of(found: Sequence[Position], k: int) -> list[Position]:
    """The positions, each with only the k most likely tokens."""
    return [replace(one, top=one.top[:k]) for one in found]


def prompt_positions(event: pb.PromptLogprobs) -> list[Position]:
    """The positions of an event; the first event of a prompt begins with the prompt's first token."""
    first = []
    if event.HasField("first_token_id"):
        data = event.first_token_bytes or _named(event.first_token_id)
        first.append(Position(Candidate(event.first_token_id, None, data), 0, ()))
    return [*first, *positions(event.logprobs, event.token_ids)]


class Entries(Protocol):
    """Builds `logprobs` of one choice."""

    def entry(self, found: Sequence[Position]) -> Json:
        """The object for the next positions. Its lists are encoded."""

    def joined(self, parts: Sequence[Json]) -> Json:
        """Join the objects of consecutive positions into one object."""


class ChatLogprobs:
    """`logprobs` of one choice of a chat."""

    def entry(self, found: Sequence[Position]) -> Json:
        return {"content": encoded_list([_chat_entry(position) for position in found]), "refusal": None}

    def joined(self, parts: Sequence[Json]) -> Json:
        return {"content": joined_lists(part["content"] for part in parts), "refusal": None}


def _chat_entry(position: Position) -> Json:
    extras = {EXTRAS[name][0]: value for name, value in position.extras.items()}
    return {**_chat_candidate(position.token), "top_logprobs": [_chat_candidate(one) for one in position.top], **extras}


def _chat_candidate(one: Candidate) -> Json:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.data)}


class TextLogprobs:
    """`logprobs` of one choice of a text completion. Counts characters for text_offset."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0

    def entry(self, found: Sequence[Position]) -> Json:
        # The first token of a prompt has no log probability: its values are null.
        lists: dict[str, list[Any]] = {
            "tokens": [position.token.text for position in found],
            "token_logprobs": [position.token.logprob for position in found],
            "top_logprobs": [_by_text(position) for position in found],
            "text_offset": [self._offset_of(position.token) for position in found],
        }
        for name in {name for position in found for name in position.extras}:
            lists[name] = [position.extras.get(name) for position in found]
        return {name: encoded_list(values) for name, values in lists.items()}

    def joined(self, parts: Sequence[Json]) -> Json:
        extras = [name for name in EXTRAS if any(name in part for part in parts)]
        return {name: joined_lists(part[name] for part in parts if name in part) for name in (*TEXT_LISTS, *extras)}

    def _offset_of(self, token: Candidate) -> int:
        start = self._num_chars
        self._num_chars += len(self._decoder.decode(token.data))
        return start


def _by_text(position: Position) -> dict[str, float | None] | None:
    """Log probabilities by text: of the most likely tokens, then of the token. For equal texts, the first is used."""
    if position.token.logprob is None:
        return None
    values: dict[str, float | None] = {}
    for one in (*position.top, position.token):
        values.setdefault(one.text, one.logprob)
    return values


def prompt_logprobs(found: Sequence[Position]) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: one object per token, keyed by token id; null for the first token."""
    return [None if one.token.logprob is None else _by_id(one) for one in found]


def _by_id(position: Position) -> Json:
    ranked = [(rank, one) for rank, one in enumerate(position.top, start=1)]
    if position.token.token_id not in {one.token_id for one in position.top}:
        ranked.append((position.rank, position.token))
    return {
        str(one.token_id): {"logprob": one.logprob, "rank": rank, "decoded_token": one.text} for rank, one in ranked
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST
