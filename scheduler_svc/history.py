"""The past of a scheduler for the console: events, and requests that ended lately. All lists are bounded. Messages that
are kept here have times of the event loop's clock; an answer has Unix times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from operator import sub

import numpy as np
from quire.internal.v1 import scheduler_pb2 as pb

from scheduler_svc.core.stats import Load
from scheduler_svc.core.steps.costs import Cost

MAX_EVENTS = 200
MAX_ENDED = 200  # requests
MAX_SAMPLES = 360
SAMPLE_S = 10.0
MAX_TENANTS = 50
MAX_STAGES = 64  # of one request
MAX_TEXT = 300  # characters of an event: workers choose their ids and errors
JOIN_S = 10.0  # equal events within this time are one with a count


class Events:
    """Owns the newest events."""

    def __init__(self) -> None:
        self.newest: deque[pb.SchedulerEvent] = deque(maxlen=MAX_EVENTS)

    def add(self, now: float, text: str, *, is_bad: bool = False, count: int = 0) -> None:
        """Add an event. With a `count`, it is added to that of the same event of the last JOIN_S."""
        text = text[:MAX_TEXT]
        for event in reversed(self.newest):
            if not count or event.at < now - JOIN_S:
                break
            if event.text == text:
                event.count += count
                return
        self.newest.append(pb.SchedulerEvent(at=now, text=text, is_bad=is_bad, count=count))


class LoadSamples:
    """Owns the samples of the last hour. `keep_samples` of the service takes them."""

    def __init__(self) -> None:
        self.newest: deque[tuple[float, ...]] = deque(maxlen=MAX_SAMPLES)
        self._before: Sequence[int] = ()

    def add(self, now: float, load: Load, counters: Sequence[int]) -> None:
        """Add the load and the changes of the counters. The first call only keeps the counters."""
        if self._before:
            changes = map(sub, counters, self._before)
            self.newest.append((now, load.num_running, load.num_waiting, *changes))
        self._before = counters

    def to_bytes(self, now: float) -> bytes:
        """The samples with their age instead of their time, as in GetHistoryResponse."""
        return np.array([(now - at, *values) for at, *values in self.newest], dtype="<f4").tobytes()


def history_to_proto(
    events: Events, ended: Iterable[pb.RequestTimeline], to_unix: Callable[[float], float]
) -> pb.GetHistoryResponse:
    """The answer of GetHistory without a request. `to_unix` converts a time of the event loop."""
    message = pb.GetHistoryResponse(events=events.newest)
    for event in message.events:
        event.at = to_unix(event.at)
    for record in ended:
        message.ended.append(_in_unix_time(record, to_unix))
        del message.ended[-1].stages[:]
    return message


def add_totals(message: pb.GetHistoryResponse, refusals: Mapping[str, int], tenants: Mapping[str, Cost]) -> None:
    """Add counts since the start: refused requests by code, and the tenants that used the most."""
    message.refused.update(refusals)
    for name, cost in nlargest(MAX_TENANTS, tenants.items(), key=lambda pair: pair[1].processor_us):
        message.tenants.add(tenant_id=name, processor_s=cost.processor_us / 1e6, block_s=cost.block_s)


def request_to_proto(record: pb.RequestTimeline | None, to_unix: Callable[[float], float]) -> pb.GetHistoryResponse:
    """The answer of GetHistory for one request."""
    return pb.GetHistoryResponse(request=None if record is None else _in_unix_time(record, to_unix))


def _in_unix_time(record: pb.RequestTimeline, to_unix: Callable[[float], float]) -> pb.RequestTimeline:
    message = pb.RequestTimeline()
    message.CopyFrom(record)
    message.arrived_at, message.ended_at = to_unix(record.arrived_at), to_unix(record.ended_at)
    for stage in message.stages:
        stage.start, stage.end = to_unix(stage.start), to_unix(stage.end)
    return message
