"""Heads of tool calls: text with a tool's name in it, such as `<function={name}>`."""

from __future__ import annotations

import re
from collections.abc import Generator

from gateway_svc.text.answer import AnswerReader

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
MAYBE_NAME = re.compile(r"[A-Za-z0-9_.:/-]{0,129}")
PARTS = re.compile(r"(\{name\}|\s+)")


def read_head(reader: AnswerReader, at: int, template: str) -> Generator[None, None, tuple[str, int] | None]:
    """Match a template at an offset; space before it and in it stands for any space.

    Returns the name and the offset after the head; None: it is not there. Nothing is read.
    """
    name, at = "", (yield from reader.space_end(at))
    for part in filter(None, PARTS.split(template)):
        if part.isspace():
            at = yield from reader.space_end(at)
            continue
        if part != "{name}":
            if not (yield from reader.has(part, at)):
                return None
            at += len(part)
            continue
        end = yield from reader.end_of(MAYBE_NAME, at)
        name = reader.pending(at, end)
        if not NAME.fullmatch(name):
            return None
        at = end
    return name, at
