"""Datasets: conversations of one or more turns, generated from a seed or read from a file. No clock, no network.

The same arguments and seed give the same requests on every machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST_TOKEN_ID = 3  # lower ids are special tokens in most vocabularies
DEFAULT_OUTPUT_LEN = 128
TRACE_BLOCK_SIZE = 512  # tokens per hash id of a Mooncake trace
MAX_SHOWN = 60

Prompt = tuple[int, ...] | str


class DatasetError(Exception):
    """A dataset cannot be used. The message has the place, the value and the remedy."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `prompt` is its new part; earlier turns and answers of the conversation precede it."""

    prompt: Prompt
    max_tokens: int
    think_s: float = 0.0  # pause after the previous answer


@dataclass(frozen=True, slots=True)
class DatasetConversation:
    """Consecutive turns. `start_s` is the start time if the dataset has one (a trace)."""

    turns: tuple[Turn, ...]
    start_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the last turn's prompt and answer. Texts count as 0: only the server knows their length."""
        return sum(turn.max_tokens + (0 if isinstance(turn.prompt, str) else len(turn.prompt)) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform lengths around a mean: from mean x (1 - ratio) to mean x (1 + ratio), at least 1."""

    mean: int
    range_ratio: float = 0.0

    def draw(self, rng: random.Random) -> int:
        spread = self.mean * self.range_ratio
        return max(1, rng.randint(round(self.mean - spread), round(self.mean + spread)))


def random_prompts(
    count: int, inputs: Lengths, outputs: Lengths, *, vocab_size: int, rng: random.Random
) -> list[DatasetConversation]:
    """Random prompts without common prefixes."""
    return [
        DatasetConversation((Turn(_tokens(inputs.draw(rng), vocab_size, rng), outputs.draw(rng)),))
        for _ in range(count)
    ]


def shared_prefixes(
    count: int,
    inputs: Lengths,
    outputs: Lengths,
    *,
    num_groups: int,
    prefix_len: int,
    vocab_size: int,
    rng: random.Random,
) -> list[DatasetConversation]:
    """Each prompt is the prefix of a random group, then unique tokens."""
    prefixes = [_tokens(prefix_len, vocab_size, rng) for _ in range(num_groups)]
    return [
        DatasetConversation(
            (Turn(rng.choice(prefixes) + _tokens(inputs.draw(rng), vocab_size, rng), outputs.draw(rng)),)
        )
        for _ in range(count)
    ]


def multi_turn(
    count: int,
    inputs: Lengths,
    outputs: Lengths,
    *,
    num_turns: int,
    think_s: float,
    num_groups: int,
    prefix_len: int,
    vocab_size: int,
    rng: random.Random,
) -> list[DatasetConversation]:
    """Conversations with `count` requests in total. Each starts with the prefix of its group."""
    prefixes = [_tokens(prefix_len, vocab_size, rng) for _ in range(num_groups)]
    found: list[DatasetConversation] = []
    while count > 0:
        turns = []
        for i in range(min(num_turns, count)):
            new = _tokens(inputs.draw(rng), vocab_size, rng)
            pause_s = rng.expovariate(1 / think_s) if i and think_s else 0.0
            turns.append(Turn(new if i else rng.choice(prefixes) + new, outputs.draw(rng), pause_s))
        found.append(DatasetConversation(tuple(turns)))
        count -= len(turns)
    return found


def trace(
    path: Path, *, speed: float, length_scale: float, limit: int | None, vocab_size: int, seed: int
) -> list[DatasetConversation]:
    """A trace as JSON lines: timestamp (ms), input_length, output_length, hash_ids of its prefix blocks.

    Each hash id stands for 512 tokens, always the same. `speed` 2 replays the trace twice as fast; `length_scale` 0.1
    makes prompts, answers and blocks ten times shorter.
    """
    block_size = max(1, round(TRACE_BLOCK_SIZE * length_scale))
    blocks: dict[int, tuple[int, ...]] = {}

    def block(hash_id: int) -> tuple[int, ...]:
        if hash_id not in blocks:
            blocks[hash_id] = _tokens(block_size, vocab_size, random.Random(f"{seed}/block/{hash_id}"))
        return blocks[hash_id]

    found: list[tuple[float, Turn]] = []
    for number, (place, entry) in enumerate(_entries(path)):
        if limit is not None and len(found) == limit:
            break
        at_ms = _number(entry, "timestamp", place)
        length = max(1, round(_number(entry, "input_length", place) * length_scale))
        output_len = max(1, round(_number(entry, "output_length", place) * length_scale))
        ids = [token for hash_id in _hash_ids(entry, place) for token in block(hash_id)][:length]
        own = _tokens(length - len(ids), vocab_size, random.Random(f"{seed}/own/{number}"))
        found.append((at_ms, Turn((*ids, *own), output_len)))
    if not found:
        raise DatasetError(f"{path} contains no request")
    found.sort(key=lambda item: item[0])
    first_ms = found[0][0]
    return [DatasetConversation((turn,), (at_ms - first_ms) / 1000 / speed) for at_ms, turn in found]


def texts_of_file(path: Path, *, count: int, output_len: int | None, rng: random.Random) -> list[DatasetConversation]:
    """Prompts of a JSON array or JSON lines in random order, repeated if there are too few.

    An entry has `prompt` (text), `token_ids` or `conversations` (ShareGPT); `max_tokens` is optional.
    """
    turns = [_file_turn(entry, place, output_len) for place, entry in _entries(path)]
    turns = [turn for turn in turns if turn.prompt]
    if not turns:
        raise DatasetError(f"{path} contains no prompt")
    return _shuffled(turns, count, rng)


def requests_of_file(path: Path, *, output_len: int | None, limit: int | None) -> list[DatasetConversation]:
    """All prompts of a file, in order."""
    turns = [_file_turn(entry, place, output_len) for place, entry in _entries(path)]
    if not turns:
        raise DatasetError(f"{path} contains no prompt")
    return [DatasetConversation((turn,)) for turn in turns[:limit]]


def demo_questions(path: Path, *, count: int, output_len: int | None, rng: random.Random) -> list[DatasetConversation]:
    """Questions that the bundled model knows, from its pairs.json."""
    content = json.loads(path.read_text())
    questions = [
        question
        for pair in content["pairs"]
        for question in (
            pair["questions"]
            if "questions" in pair
            else [wording.format(pair["about"]) for wording in content["wordings"][pair["kind"]]]
        )
    ]
    return _shuffled([Turn(question, output_len or DEFAULT_OUTPUT_LEN) for question in questions], count, rng)


def without_too_long(conversations: Sequence[DatasetConversation], max_model_len: int) -> list[DatasetConversation]:
    """The conversations that fit into the model's length."""
    return [conversation for conversation in conversations if conversation.num_tokens <= max_model_len]


def check_lengths(conversations: Sequence[DatasetConversation], max_model_len: int) -> None:
    """Raises DatasetError if a conversation exceeds the model's length."""
    longest = max((conversation.num_tokens for conversation in conversations), default=0)
    if longest > max_model_len:
        raise DatasetError(
            f"the longest prompt and answer have {longest} tokens, but max_model_len is {max_model_len}: reduce "
            "--input-len, --output-len, --prefix-len, --turns or --length-scale, start the server with a larger "
            "--max-model-len, or skip such requests with --skip-too-long"
        )


def _tokens(count: int, vocab_size: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choices(range(FIRST_TOKEN_ID, vocab_size), k=count))


def _shuffled(turns: Sequence[Turn], count: int, rng: random.Random) -> list[DatasetConversation]:
    order: list[Turn] = []
    while len(order) < count:
        order += rng.sample(turns, len(turns))
    return [DatasetConversation((turn,)) for turn in order[:count]]


def _file_turn(entry: Mapping[str, Any], place: str, output_len: int | None) -> Turn:
    given = output_len or entry.get("max_tokens") or entry.get("output_length")
    if given is not None and (not isinstance(given, int) or given < 1):
        raise DatasetError(f"{place}: max_tokens is {_shown(given)}; it must be an integer of at least 1")
    if "token_ids" in entry:
        return Turn(_token_ids(entry["token_ids"], place), given or DEFAULT_OUTPUT_LEN)
    if "conversations" in entry:
        return _sharegpt_turn(entry["conversations"], place, given)
    prompt = entry.get("prompt")
    if not isinstance(prompt, str):
        fields = ", ".join(sorted(entry)) or "none"
        raise DatasetError(f"{place}: the entry has no prompt, token_ids or conversations; its fields: {fields}")
    return Turn(prompt, given or DEFAULT_OUTPUT_LEN)


def _sharegpt_turn(messages: Any, place: str, given: int | None) -> Turn:
    """A turn from the first message; max_tokens is 4/3 of the answer's words. The prompt is empty without a message."""
    try:
        values = [str(message["value"]) for message in messages]
    except (TypeError, KeyError):
        raise DatasetError(
            f'{place}: conversations is {_shown(messages)}; it must be a list of {{"from": ..., "value": ...}}'
        ) from None
    answer_len = len(values[1].split()) * 4 // 3 if len(values) > 1 else DEFAULT_OUTPUT_LEN
    return Turn(values[0] if values else "", given or max(1, answer_len))


def _token_ids(value: Any, place: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(i, int) and i >= 0 for i in value):
        raise DatasetError(f"{place}: token_ids is {_shown(value)}; it must be a list of integers of at least 0")
    return tuple(value)


def _hash_ids(entry: Mapping[str, Any], place: str) -> list[int]:
    value = entry.get("hash_ids", [])
    if not isinstance(value, list) or not all(isinstance(i, int) for i in value):
        raise DatasetError(f"{place}: hash_ids is {_shown(value)}; it must be a list of integers")
    return value


def _number(entry: Mapping[str, Any], name: str, place: str) -> float:
    value = entry.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise DatasetError(f"{place}: {name} is {_shown(value)}; it must be a number of at least 0")
    return float(value)


def _entries(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of a JSON array or of JSON lines, with their place for error messages."""
    try:
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from None
    parse = _array_entries if content.lstrip().startswith("[") else _line_entries
    for place, entry in parse(path, content):
        if not isinstance(entry, dict):
            raise DatasetError(f"{place}: {_shown(entry)} is not a JSON object")
        yield place, entry


def _array_entries(path: Path, content: str) -> Iterator[tuple[str, Any]]:
    entries = _parsed(content, str(path))
    for number, entry in enumerate(entries):
        yield f"{path}, entry {number}", entry


def _line_entries(path: Path, content: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield f"{path}, line {number}", _parsed(line, f"{path}, line {number}")


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{place} is not valid JSON: {error}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
