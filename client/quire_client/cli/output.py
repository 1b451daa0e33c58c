"""How the command prints: plain text, columns, errors."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from quire_client.errors import InvalidRequest
from quire_client.types import FinishReason, Sample, Usage


def complain(message: str) -> None:
    """One line on stderr."""
    print(f"quire: error: {message}", file=sys.stderr)


def write(text: str) -> None:
    """Text without a line end, at once: a stream is read as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def read_stdin() -> str:
    """All of stdin. Raises InvalidRequest when it is no text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not {error.encoding} text: {error.reason} at byte {error.start}") from None


def to_json(value: Any) -> str:
    """A dataclass, or anything made of them, as one JSON line."""
    return json.dumps(value, default=_jsonable)


def sample_fields(sample: Sample) -> dict[str, Any]:
    return {"token_ids": sample.token_ids, "text": sample.text, "finish_reason": sample.finish_reason}


def usage_line(usage: Usage, seconds: float) -> str:
    """What an answer cost, for people."""
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    return f"{usage.prompt_tokens} prompt tokens{cached}, {usage.output_tokens} output tokens, {seconds:.2f} s"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their content; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headers), *cells]) for i in range(len(headers))]
    lines = [list(headers), *cells]
    return "\n".join("  ".join(_aligned(c, w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _aligned(cell: str, width: int) -> str:
    is_number = cell.replace(",", "").replace(".", "").rstrip("%").isdigit()
    return cell.rjust(width) if is_number else cell.ljust(width)


def _jsonable(value: Any) -> Any:
    if isinstance(value, FinishReason):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form")
