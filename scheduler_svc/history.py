"""Events of a scheduler that the console shows. Their number is bounded, and no step adds to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quire.internal.v1 import scheduler_pb2

MAX_EVENTS = 200
MAX_TEXT = 300  # characters of an event: workers choose their ids and errors
JOIN_S = 10.0  # equal events within this time are one with a count


@dataclass(slots=True)
class Event:
    """A change of a worker or a gateway, or requests with the same fate. `at` is the time of the first one."""

    at: float
    text: str
    is_bad: bool
    count: int


class Events:
    """Owns the newest events. Times are those of the event loop's clock."""

    def __init__(self) -> None:
        self.newest: deque[Event] = deque(maxlen=MAX_EVENTS)

    def add(self, now: float, text: str, *, is_bad: bool = False, count: int = 0) -> None:
        """Add an event. With a `count`, it is added to that of the same event of the last JOIN_S."""
        text = text[:MAX_TEXT]
        for event in reversed(self.newest):
            if not count or event.at < now - JOIN_S:
                break
            if event.text == text:
                event.count += count
                return
        self.newest.append(Event(now, text, is_bad, count))


def history_to_proto(events: Events, to_unix: Callable[[float], float]) -> scheduler_pb2.GetHistoryResponse:
    """The answer of GetHistory. `to_unix` converts a time of the event loop."""
    found = [
        scheduler_pb2.SchedulerEvent(at=to_unix(event.at), text=event.text, is_bad=event.is_bad, count=event.count)
        for event in events.newest
    ]
    return scheduler_pb2.GetHistoryResponse(events=found)
