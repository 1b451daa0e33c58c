"""Events of a response: numbers do not depend on how the output was cut, and the object equals the events."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.http.responses.events import (
    CALL,
    HEAD_DEFAULTS,
    MESSAGE,
    REASONING,
    Event,
    OutputPart,
    ResponseEnd,
    ResponseEvents,
    events_of,
)

TOOLS = [{"type": "custom", "name": "patch"}, {"type": "shell"}, {"type": "local_shell"}, {"type": "tool_search"}]
HEAD = {"id": "resp_1", "object": "response", "background": True, "tools": TOOLS, **HEAD_DEFAULTS}
USAGE = {"input_tokens": 3, "output_tokens": 5}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
INPUTS = TEXTS.map(lambda text: {"input": text})
ARGUMENTS = {  # arguments of calls, by the name of the tool
    "patch": INPUTS | st.just({"path": "a"}),
    "shell": st.lists(TEXTS, max_size=2).map(lambda commands: {"commands": commands, "timeout_ms": 5}),
    "local_shell": st.lists(TEXTS, max_size=2).map(lambda command: {"command": command, "env": {"A": "b"}}),
    "tool_search": TEXTS.map(lambda text: {"query": text}),
}
CALLS = st.one_of(
    st.tuples(st.just(name), st.builds(json.dumps, some, ensure_ascii=st.booleans()))
    for name, some in ARGUMENTS.items()
)
ITEMS = st.lists(st.tuples(st.sampled_from([MESSAGE, REASONING, "f"]), TEXTS) | CALLS, max_size=4)
STATUSES = st.sampled_from(["completed", "incomplete", "cancelled"])


def part(item: int, kind: str, text: str) -> OutputPart:
    return OutputPart(item, *((kind, text) if kind in (MESSAGE, REASONING) else (CALL, text, kind, f"call_{item}")))


def build(pieces: list[list[OutputPart]], status: str) -> tuple[list[Event], dict[str, Any]]:
    builder = ResponseEvents(HEAD)
    events = builder.begin()
    for parts in pieces:
        events += builder.add(parts)
    events += builder.finish(ResponseEnd(status, USAGE, 12))
    return events, builder.response()


def by_character(events: list[Event]) -> dict[int, str]:
    """By sequence number: an event, or one character of a delta."""
    found = {}
    for event in events:
        if "delta" not in event.data:
            found[event.number] = json.dumps({**event.data}, sort_keys=True)
            continue
        delta = event.data["delta"]
        for i, char in enumerate(delta):
            found[event.number - len(delta) + 1 + i] = f"{event.data['output_index']} {char}"
    return found


@st.composite
def cut_outputs(draw: st.DrawFn) -> tuple[list[list[OutputPart]], list[list[OutputPart]]]:
    """One output, whole and in pieces."""
    items = draw(ITEMS)
    whole = [[part(i, kind, text)] for i, (kind, text) in enumerate(items)]
    parts = [one for i, (kind, text) in enumerate(items) for one in _cut(draw, i, kind, text)]
    pieces, current = [], []
    for one in parts:
        current.append(one)
        if draw(st.booleans()):
            pieces.append(current)
            current = []
    return whole, [*pieces, current]


def _cut(draw: st.DrawFn, item: int, kind: str, text: str) -> list[OutputPart]:
    places = sorted(draw(st.sets(st.integers(1, len(text)), max_size=3)) | {0, len(text)})
    return [part(item, kind, text[a:b]) for a, b in pairwise(places)]


@given(cut_outputs(), STATUSES)
def test_numbers_are_a_function_of_the_output(
    cut: tuple[list[list[OutputPart]], list[list[OutputPart]]], status: str
) -> None:
    whole, pieces = cut
    (events, response), (others, other_response) = build(whole, status), build(pieces, status)
    assert by_character(events) == by_character(others)
    assert response == other_response
    numbers = [event.number for event in others]
    assert numbers == sorted(set(numbers))
    assert [event.data["sequence_number"] for event in others] == numbers


@given(cut_outputs(), STATUSES, st.integers(-1, 90))
def test_the_events_after_any_number_are_the_rest(
    cut: tuple[list[list[OutputPart]], list[list[OutputPart]]], status: str, after: int
) -> None:
    whole, pieces = cut
    events, others = build(whole, status)[0], build(pieces, status)[0]
    rest = [one for event in others if (one := event.after(after)) is not None]
    assert by_character(rest) == {number: what for number, what in by_character(events).items() if number > after}


@given(cut_outputs(), STATUSES)
def test_the_events_of_a_stored_object_are_those_of_the_stream(
    cut: tuple[list[list[OutputPart]], list[list[OutputPart]]], status: str
) -> None:
    events, response = build(cut[1], status)
    assert by_character(events_of(json.loads(json.dumps(response)))) == by_character(events)


@given(cut_outputs(), STATUSES)
def test_items_of_the_object_equal_the_items_of_the_events(
    cut: tuple[list[list[OutputPart]], list[list[OutputPart]]], status: str
) -> None:
    events, response = build(cut[1], status)
    done = [event.data["item"] for event in events if event.data["type"] == "response.output_item.done"]
    assert done == response["output"]
    added = [event.data["item"]["id"] for event in events if event.data["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in done]
    assert events[-1].data["response"] == response


def test_the_order_of_events() -> None:
    events = build([[part(0, REASONING, "ab")], [part(1, MESSAGE, "c"), part(2, CALL, "{}")]], "completed")[0]
    assert [(event.number, event.data["type"].removeprefix("response.")) for event in events] == [
        (0, "created"),
        (1, "queued"),
        (2, "in_progress"),
        (3, "output_item.added"),
        (4, "content_part.added"),
        (6, "reasoning_text.delta"),
        (7, "reasoning_text.done"),
        (8, "content_part.done"),
        (9, "output_item.done"),
        (10, "output_item.added"),
        (11, "content_part.added"),
        (12, "output_text.delta"),
        (13, "output_text.done"),
        (14, "content_part.done"),
        (15, "output_item.done"),
        (16, "output_item.added"),
        (18, "function_call_arguments.delta"),
        (19, "function_call_arguments.done"),
        (20, "output_item.done"),
        (21, "completed"),
    ]


def test_an_answer_without_text_has_an_empty_message() -> None:
    events, response = build([], "completed")
    assert [item["content"][0]["text"] for item in response["output"]] == [""]
    assert events[-1].data["type"] == "response.completed"
    assert build([], "cancelled")[1]["output"] == []
