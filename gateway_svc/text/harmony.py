"""Harmony, the format of GPT-OSS: an answer is a sequence of messages, each in a channel.

    <|channel|>analysis<|message|>...<|end|>                                                        reasoning
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>   a call
    <|start|>assistant<|channel|>final<|message|>...<|return|>                                      content

Messages to the user in the channel `commentary` are content. Text outside of messages is content too.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

from gateway_svc.text.answer import NAME, AnswerReader, ItemKind, Steps
from gateway_svc.text.calls.json_calls import write_arguments

START, CHANNEL, MESSAGE, CONSTRAIN = (f"<|{one}|>" for one in ("start", "channel", "message", "constrain"))
ENDS = ("<|end|>", "<|call|>", "<|return|>")
BREAKS = (*ENDS, START, CHANNEL)
MARKERS = (*BREAKS, MESSAGE, CONSTRAIN)
MAX_HEADER = 256  # characters of a message before its text
ROLE = r"(?:<\|start\|>)?\s*(?:[\w.-]+\s*)?(?:to=\S+?\s*)?"
CHANNEL_NAME = re.compile(ROLE + r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(rf"\bto=functions\.({NAME.pattern})(?=[\s<]|$)")


@dataclass(frozen=True, slots=True)
class _Header:
    channel: str
    tool: str  # "": the message is not a call
    end: int  # offset of the text of the message


def read_harmony(reader: AnswerReader, *, has_reasoning: bool, has_calls: bool, is_begun: bool = False) -> Steps:
    """Read an answer. `is_begun`: it begins inside of reasoning. Without `has_calls`, calls are content."""
    messages = _HarmonyMessages(reader, ItemKind.REASONING if has_reasoning else ItemKind.CONTENT, has_calls=has_calls)
    if is_begun:
        yield from messages.read_text(messages.analysis)
    elif (yield from reader.has("to=", (yield from reader.space_end()))):  # the prompt has the start of the header
        yield from messages.read(0, 0)
    while marker := (yield from reader.write_until(ItemKind.CONTENT, BREAKS)):
        at = yield from reader.space_end()
        if marker in ENDS:
            reader.skip(at + len(marker))
        else:
            yield from messages.read(at, at + len(marker))


class _HarmonyMessages:
    """Reads messages. Adjacent messages of one kind are one item, with a line break between them."""

    def __init__(self, reader: AnswerReader, analysis: ItemKind, *, has_calls: bool) -> None:
        self.analysis = analysis  # kind of this channel
        self._reader = reader
        self._has_calls = has_calls
        self._last: ItemKind | None = None  # kind of the last message, if it was text

    def read(self, at: int, marker_end: int) -> Steps:
        """Read the message at an offset. If it is not one, the text up to `marker_end` is content."""
        header = yield from self._header(at)
        if header is None:
            self._reader.keep(marker_end)
        elif not header.tool:
            self._reader.skip(header.end)
            self._reader.is_past_reasoning = header.channel == "final"
            yield from self.read_text(self.analysis if header.channel == "analysis" else ItemKind.CONTENT)
        elif not (yield from self._read_call(header)):
            self._reader.keep(header.end)

    def _header(self, at: int) -> Generator[None, None, _Header | None]:
        while (end := self._reader.find(MESSAGE, at)) is None:
            if self._reader.is_ended or self._reader.num_pending - at > MAX_HEADER + len(MESSAGE):
                return None
            yield
        text = self._reader.pending(at, end)
        channel, recipient = CHANNEL_NAME.match(text), RECIPIENT.search(text)
        if end - at > MAX_HEADER or channel is None or any(one in text[channel.end() :] for one in BREAKS):
            return None
        return _Header(channel[1], "" if recipient is None else recipient[1], end + len(MESSAGE))

    def read_text(self, kind: ItemKind) -> Steps:
        """Read the text of a message, with its end."""
        reader = self._reader
        reader.is_reasoning = kind is ItemKind.REASONING
        yield from reader.skip_space()
        is_empty = (yield from reader.has_any(BREAKS)) or not reader.num_pending
        if kind is self._last and not is_empty:
            reader.write(kind, "\n")
        self._last = self._last if is_empty else kind
        marker = yield from reader.write_until(kind, BREAKS)
        yield from self._skip_end(marker)
        reader.is_reasoning = False

    def _read_call(self, header: _Header) -> Generator[None, None, bool]:
        """Read a call. False: it is not one, or calls are content; nothing was read."""
        reader = self._reader
        start = yield from reader.space_end(header.end)
        if not self._has_calls or not (yield from reader.has("{", start)):
            return False
        reader.skip(start)
        reader.begin_call(header.tool)
        yield from write_arguments(reader, BREAKS)
        yield from self._skip_end((yield from reader.has_any(ENDS, (yield from reader.space_end()))))
        self._last = None
        return True

    def _skip_end(self, marker: str) -> Steps:
        if marker in ENDS:
            self._reader.skip((yield from self._reader.space_end()) + len(marker))
            self._reader.is_reasoning = False
            yield from self._reader.skip_space()
