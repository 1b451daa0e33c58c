"""Builds the events of a response and the response object from its output. Pure.

`sequence_number` counts events, and each character of a delta. A delta has the number of its last character. So the
numbers depend only on the output, not on how it was split into chunks. A reader that has number n continues with n + 1
on any gateway.

    0 created   1 queued   2 in_progress   3 item added   4 part added   5..9 "Hello"   10.. " you"   done   completed

Number 1 is used for background responses only. Ids of items are functions of the response's id and the item's position.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from gateway_svc.http.json_text import Json, encoded_list, joined_lists
from gateway_svc.http.responses.tools import KINDS, NAMESPACE, InputReader, called_by_name, parsed
from grammars.schemas import INPUT

MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"


@dataclass(frozen=True, slots=True)
class OutputPart:
    """New text of one item. An item is complete when the next one begins."""

    item: int
    kind: str
    text: str
    name: str = ""  # name of the called function
    call_id: str = ""
    logprobs: Any = ()  # log probabilities of the tokens of a message's text: a list, or one that is encoded
    namespace: str = ""  # namespace of the called function


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `number` is its sequence_number."""

    number: int
    data: Json

    def after(self, number: int) -> Event | None:
        """The part of the event after a sequence number; None if nothing is left."""
        if self.number <= number:
            return None
        delta = self.data.get("delta", "")
        if len(delta) <= self.number - number:
            return self
        cut: Json = {"logprobs": []} if "logprobs" in self.data else {}  # the tokens may be those before
        return Event(self.number, {**self.data, "delta": delta[number - self.number :], **cut})


@dataclass(frozen=True, slots=True)
class ResponseEnd:
    """How a response ended. `status`: completed, incomplete, cancelled or failed."""

    status: str
    usage: Json | None = None
    completed_at: int | None = None
    error: Json | None = None


TERMINAL = {"completed": "response.completed", "failed": "response.failed"}
INCOMPLETE = {"reason": "max_output_tokens"}


@dataclass(frozen=True, slots=True)
class _Form:
    """The names that differ between kinds of items. `part`: type of the content part; empty: the item has none. `text`:
    the streamed field; empty: it has none.
    """

    prefix: str
    part: str
    event: str
    text: str


FORMS: Mapping[str, _Form] = {
    MESSAGE: _Form("msg", "output_text", "response.output_text", "text"),
    REASONING: _Form("rs", "reasoning_text", "response.reasoning_text", "text"),
    **{item: _Form(kind.prefix, "", kind.event, kind.text) for item, kind in KINDS.items()},
}


def item_id(response_id: str, kind: str, place: str) -> str:
    """The id of an item: the same wherever the response is computed."""
    return f"{FORMS[kind].prefix}_{xxhash.xxh3_128_hexdigest(f'{response_id}/{place}'.encode())}"


@dataclass(slots=True)
class _OutputItem:
    id: str
    index: int
    part: OutputPart  # its first part
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # a list per delta that has them
    reader: InputReader | None = None  # reads a custom tool's input from the arguments

    @property
    def form(self) -> _Form:
        return FORMS[self.part.kind]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def content(self, text: str) -> Json:
        extra: Json = {}
        if self.part.kind == MESSAGE:
            extra = {"annotations": [], "logprobs": self.all_logprobs if text else []}
        return {"type": self.form.part, "text": text, **extra}

    @property
    def all_logprobs(self) -> Any:
        """Log probabilities of the whole text."""
        return joined_lists(self.logprobs) if self.logprobs else []

    def shown(self, status: str, *, is_empty: bool = False) -> Json:
        head: Json = {"id": self.id, "type": self.part.kind, "status": status}
        if self.part.kind in KINDS:
            text = "" if is_empty else self.text
            if self.part.namespace:
                head[NAMESPACE] = self.part.namespace
            own = {"name": self.part.name, self.form.text: text} if self.form.text else self.fields(text)
            return {**head, "call_id": self.part.call_id, **own}
        content = [] if is_empty else [self.content(self.text)]
        own = {"role": "assistant"} if self.part.kind == MESSAGE else {"summary": []}
        return {**head, **own, "content": content}

    def fields(self, arguments: str) -> Json:
        """The fields of a call without a streamed text."""
        return KINDS[self.part.kind].fields(parsed(arguments))

    @property
    def place(self) -> Json:
        """The fields of events of this item."""
        own = {"content_index": 0} if self.form.part else {}
        return {"item_id": self.id, "output_index": self.index, **own}


class ResponseEvents:
    """Builds the events of one response. `head`: the response object without status, output and end."""

    def __init__(self, head: Json) -> None:
        self._head = head
        self._tools = called_by_name(head.get("tools", ()))
        self._next = 0
        self._items: list[_OutputItem] = []
        self._is_open = False  # the last item is not complete
        self._end: ResponseEnd | None = None
        self._has_begun = False

    def begin(self) -> list[Event]:
        """The events before any output."""
        self._has_begun = True
        is_background = bool(self._head["background"])
        waiting = self.response("queued" if is_background else "in_progress")
        events = [self._event("response.created", response=waiting)]
        if is_background:
            events.append(self._event("response.queued", response=waiting))
        self._next = 2
        return [*events, self._event("response.in_progress", response=self.response())]

    def add(self, parts: Iterable[OutputPart]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if part.item >= len(self._items):
                events += self._close_item("completed")
                events += self._open_item(part)
            events += self._delta(self._items[-1], part)
        return events

    def finish(self, end: ResponseEnd) -> list[Event]:
        """The last events. The response object is complete after this."""
        events: list[Event] = []
        if not self._items and end.status in ("completed", "incomplete"):
            events += self._open_item(OutputPart(0, MESSAGE, ""))
        events += self._close_item("completed" if end.status == "completed" else "incomplete")
        self._end = end
        name = TERMINAL.get(end.status, "response.incomplete")
        return [*events, self._event(name, response=self.response())]

    def response(self, status: str = "") -> Json:
        """The response object as it is now."""
        end = self._end
        if end is None:
            items = [item.shown("completed") for item in self._items]
            if self._is_open:
                items[-1] = self._items[-1].shown("in_progress")
            return {**self._head, "status": status or "in_progress", "output": items}
        last = "completed" if end.status == "completed" else "incomplete"
        items = [item.shown("completed") for item in self._items[:-1]]
        items += [item.shown(last) for item in self._items[-1:]]
        return {
            **self._head,
            "status": end.status,
            "output": items,
            "usage": end.usage,
            "completed_at": end.completed_at,
            "error": end.error,
            "incomplete_details": INCOMPLETE if end.status == "incomplete" else None,
        }

    def _open_item(self, part: OutputPart) -> list[Event]:
        index = len(self._items)
        called = self._tools.get(part.name) if part.kind == CALL and not part.namespace else None
        if called is not None:
            part = replace(part, kind=called.kind, namespace=called.namespace, name=called.name)
        item = _OutputItem(item_id(self._head["id"], part.kind, str(index)), index, part)
        if called is not None and item.form.text == INPUT:
            item.reader = InputReader()
        self._items.append(item)
        self._is_open = True
        shown = item.shown("in_progress", is_empty=True)
        events = [self._event("response.output_item.added", output_index=index, item=shown)]
        if item.form.part:
            events.append(self._event("response.content_part.added", **item.place, part=item.content("")))
        return events

    def _delta(self, item: _OutputItem, part: OutputPart, *, is_last: bool = False) -> list[Event]:
        text = part.text if item.reader is None else item.reader.read(part.text, is_last=is_last)
        if not text:
            return []
        item.texts.append(text)
        if not item.form.text:
            return []
        if part.logprobs:
            item.logprobs.append(part.logprobs)
        extra: Json = {"logprobs": part.logprobs or []} if item.part.kind == MESSAGE else {}
        return [self._delta_event(item.form.event, text, **item.place, **extra)]

    def _delta_event(self, event: str, text: str, **fields: Any) -> Event:
        self._next += len(text) - 1
        return self._event(f"{event}.delta", delta=text, **fields)

    def _close_item(self, status: str) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        events = self._delta(item, replace(item.part, text="", logprobs=()), is_last=True)
        extra: Json = {"logprobs": item.all_logprobs} if item.part.kind == MESSAGE else {}
        if item.part.kind == CALL:
            extra = {"name": item.part.name}
        if item.form.text:
            events.append(self._event(f"{item.form.event}.done", **item.place, **{item.form.text: item.text}, **extra))
        elif item.form.event:
            events += self._commands(item)
        if item.form.part:
            events.append(self._event("response.content_part.done", **item.place, part=item.content(item.text)))
        done = self._event("response.output_item.done", output_index=item.index, item=item.shown(status))
        return [*events, done]

    def _commands(self, item: _OutputItem) -> list[Event]:
        """The events of a shell call's commands, which are known when the call is complete."""
        events = []
        for i, command in enumerate(item.fields(item.text)["action"]["commands"]):
            place = {"output_index": item.index, "command_index": i}
            events.append(self._event(f"{item.form.event}.added", **place, command=""))
            if command:
                events.append(self._delta_event(item.form.event, command, **place))
            events.append(self._event(f"{item.form.event}.done", **place, command=command))
        return events

    def _event(self, kind: str, /, **fields: Any) -> Event:
        number = self._next
        self._next += 1
        return Event(number, {"type": kind, "sequence_number": number, **fields})


HEAD_DEFAULTS: Json = {"usage": None, "completed_at": None, "error": None, "incomplete_details": None}


def events_of(response: Json) -> list[Event]:
    """The events of a complete response object. They equal the streamed events, but each item has one delta."""
    end = ResponseEnd(response["status"], response["usage"], response["completed_at"], response["error"])
    builder = ResponseEvents({**response, **HEAD_DEFAULTS})
    parts = [part_of(index, item) for index, item in enumerate(response["output"])]
    return [*builder.begin(), *builder.add(parts), *builder.finish(end)]


def part_of(index: int, item: Json) -> OutputPart:
    """The whole text of an output item."""
    if item["type"] in KINDS:
        kind, namespace = KINDS[item["type"]], item.get(NAMESPACE, "")
        text = item[kind.text] if kind.text else json.dumps(kind.arguments(item), ensure_ascii=False)
        return OutputPart(index, item["type"], text, item.get("name", ""), item["call_id"], namespace=namespace)
    logprobs = [one for content in item["content"] for one in content.get("logprobs", ())]
    text = "".join(content["text"] for content in item["content"])
    return OutputPart(index, item["type"], text, logprobs=encoded_list(logprobs) if logprobs else ())
