"""Tool calls of a name and JSON arguments between markers.

<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>                              DeepSeek
<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>      Kimi K2
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway_svc.text.answer import AnswerReader, ItemKind, Steps
from gateway_svc.text.call_heads import read_head
from gateway_svc.text.tool_json import write_arguments

MARKERS = re.compile(r"```|<[^>]*>")
NUMBERED = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


@dataclass(frozen=True, slots=True)
class MarkedCalls:
    """The texts around all calls of an answer, and around the arguments of each; `{name}` is the name of the tool.

    `is_numbered`: the name is written as `functions.NAME:NUMBER`.
    """

    section: tuple[str, str]
    call: tuple[str, str]
    separator: str = ""  # between calls
    is_numbered: bool = False

    @property
    def start(self) -> str:
        """The marker at the start of a call."""
        return str(MARKERS.findall(self.call[0])[0])

    def read(self, reader: AnswerReader, tools: Mapping[str, Mapping[str, Any]]) -> Steps:
        """Read an answer. A call without the section around it is read too."""
        starts = (self.section[0], self.start)
        while marker := (yield from reader.write_until(ItemKind.CONTENT, starts)):
            at = yield from reader.space_end()
            start = at + len(marker) if marker == self.section[0] else at
            if not (yield from self._read_call(reader, start)):
                reader.keep(at + len(marker))
                continue
            while (yield from self._read_call(reader, 0)):
                pass
            yield from reader.skip_end(self.section[1])

    def _read_call(self, reader: AnswerReader, at: int) -> Generator[None, None, bool]:
        """Read one call at an offset. False: it is not a call; nothing was read."""
        head = yield from read_head(reader, at, self.call[0])
        if head is None:
            return False
        start = yield from reader.space_end(head[1])
        if not (yield from reader.has("{", start)):
            return False
        named = NUMBERED.fullmatch(head[0]) if self.is_numbered else None
        ends = tuple(MARKERS.findall(self.call[1]))
        reader.skip(start)
        reader.begin_call(head[0] if named is None else named[1])
        yield from write_arguments(reader, ends)
        for end in ends:
            yield from reader.skip_end(end)
        return True
