"""Output of the command: text, JSON, errors."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from quire_client.errors import InvalidRequest, QuireError, renamed
from quire_client.plain import plain
from quire_client.types import Delta, GenerateResult, Sample, TokenLogprob, TopLogprob, Usage

from request_fields.fields import FIELDS

FLAGS = {field.path: f"--{field.option.replace('_', '-')}" for field in FIELDS if field.has_flag} | {
    "sampling.n": "--n",
    "prompt.text": "the prompt",
    **dict.fromkeys(("prompt.tokens", "prompt.tokens.ids"), "--tokens"),
    **dict.fromkeys(("prompt.chat", "prompt.chat.messages"), "the chat"),
}

SDK_OPTION = "api_key=... in the client"  # in the gateway's message for a missing key


def complain(message: str) -> None:
    """Print an error as one line on stderr."""
    print(f"quire: error: {message}", file=sys.stderr)


def describe(error: QuireError) -> str:
    """An error in one line, with the invalid fields as flags and the retry delay."""
    parts = [error.wire_message or error.message]
    parts += [f"{v.field}: {v.description}" for v in error.field_violations if v.description not in error.message]
    if error.retry_after_s:
        parts.append(f"retry in {error.retry_after_s:.1f} s")
    return with_flag_names("; ".join(parts).replace("\n", " "))


def write(text: str) -> None:
    """Write text without a line end and flush it, for streams."""
    sys.stdout.write(text)
    sys.stdout.flush()


class AnswerWriter:
    """Writes an answer as it arrives: reasoning dimmed in a terminal, else with a label; tool calls with a label."""

    def __init__(self) -> None:
        self._is_tty = sys.stdout.isatty()
        self._last = ""  # kind of the last output: reasoning, text, or the id of a tool call

    def write(self, delta: Delta) -> None:
        """Write the new output of one sample."""
        if delta.reasoning:
            self._begin("reasoning", "\x1b[2m" if self._is_tty else "reasoning: ")
            write(delta.reasoning)
        if delta.text:
            self._begin("text", "")
            write(delta.text)
        for call in delta.tool_calls:
            self._begin(call.id, f"tool call: {call.name} ")
            write(call.arguments)

    def end(self) -> None:
        """End the answer; nothing is written if it is empty."""
        if self._last:
            self._begin("", "")

    def _begin(self, kind: str, label: str) -> None:
        if kind == self._last:
            return
        if self._last == "reasoning" and self._is_tty:
            write("\x1b[0m")
        if self._last:
            write("\n")
        write(label)
        self._last = kind


def read_stdin() -> str:
    """All of stdin. Raises InvalidRequest if it is not text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not {error.encoding} text: {error.reason} at byte {error.start}") from None


def count(number: int, noun: str) -> str:
    """A number with its noun: 1 token, 2 tokens."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def to_json(value: Any) -> str:
    """A dataclass, or any structure of dataclasses, as one line of JSON."""
    return json.dumps(plain(value))


def show(args: argparse.Namespace, value: Any, text: str) -> int:
    """Print a result as text, or with --json as one line of JSON. Returns the exit code of success."""
    print(to_json(value) if args.json else text)
    return 0


def sample_fields(sample: Sample) -> dict[str, Any]:
    chat = {"reasoning": sample.reasoning, "tool_calls": sample.tool_calls}
    scores = {"logprobs": sample.logprobs, "cumulative_logprob": sample.cumulative_logprob} if sample.logprobs else {}
    return {
        "token_ids": sample.token_ids,
        "text": sample.text,
        **{name: value for name, value in chat.items() if value},
        **scores,
        "finish_reason": sample.finish_reason,
    }


def usage_line(usage: Usage, seconds: float) -> str:
    """Tokens and time of an answer, as text."""
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    prompt = f"{count(usage.prompt_tokens, 'prompt token')}{cached}"
    return f"{prompt}, {count(usage.output_tokens, 'output token')}, {seconds:.2f} s"


def with_flag_names(message: str) -> str:
    """The message with flags instead of paths such as sampling.top_p."""
    message = message.replace(SDK_OPTION, "--api-key")
    return renamed(message, FLAGS)


def score_lines(result: GenerateResult) -> Iterator[str]:
    """The log probabilities of a result; nothing if none were requested."""
    if any(result.prompt_logprobs):
        yield "--- prompt: log probability, rank, token, most likely tokens"
        yield from _lines(result.prompt_logprobs)
    for sample in result.samples:
        if sample.logprobs:
            yield (
                f"--- sample {sample.index}: log probability, rank, token, most likely tokens "
                f"(sum {sample.cumulative_logprob:.3f})"
            )
            yield from _lines(sample.logprobs)


def _lines(entries: Sequence[TokenLogprob | None]) -> Iterator[str]:
    for entry in entries:
        if entry is None:  # the first token of a prompt
            continue
        top = "  ".join(f"{_shown(item)} {item.logprob:.3f}" for item in entry.top)
        yield f"{entry.logprob:9.3f} {entry.rank:6d}  {_shown(entry)}{f'  |  {top}' if top else ''}"


def _shown(token: TokenLogprob | TopLogprob) -> str:
    """The token's text in quotes, or its id if the server sent no text."""
    return repr(token.token.decode(errors="backslashreplace")) if token.token else f"#{token.token_id}"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A text table; numbers are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headers), *cells]) for i in range(len(headers))]
    lines = [list(headers), *cells]
    return "\n".join("  ".join(_aligned(c, w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _aligned(cell: str, width: int) -> str:
    is_number = cell.replace(",", "").replace(".", "").rstrip("%").isdigit()
    return cell.rjust(width) if is_number else cell.ljust(width)
