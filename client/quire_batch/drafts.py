"""Answers of an earlier batch as drafts of the requests with the same custom_id."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MAX_CHARS = 64 << 10  # at most 256 KiB, the limit of draft_text


class BatchFileError(Exception):
    """An input or output file cannot be used. The message has the file and the reason."""


def write_with_drafts(source: Path, old: Path, folder: Path) -> Path:
    """A file in `folder` with the requests of `source`, and answers of `old` as `draft_text`. Raises BatchFileError."""
    drafts = {str(line.get("custom_id")): answer_text(line) for line in _lines(old)}
    target = folder / source.name
    with target.open("w") as file:
        for line in _lines(source):
            text, body = drafts.get(str(line.get("custom_id"))), line.get("body")
            if text and isinstance(body, dict):
                body.setdefault("draft_text", text[:MAX_CHARS])
            file.write(json.dumps(line) + "\n")
    return target


def answer_text(line: Mapping[str, Any]) -> str:
    """The text of a result: of a completion, a chat, a response or a message; empty if it has none."""
    body = (line.get("response") or {}).get("body")
    if not isinstance(body, dict):
        return ""
    for choice in body.get("choices") or ():
        return str(choice.get("text") or (choice.get("message") or {}).get("content") or "")
    parts = body.get("content") or [part for item in body.get("output") or () for part in item.get("content") or ()]
    return "".join(part.get("text") or "" for part in parts if isinstance(part, dict))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            if not data.strip():
                continue
            try:
                line = json.loads(data)
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict):
                raise BatchFileError(f"line {number} of {path} is not a JSON object")
            yield line
