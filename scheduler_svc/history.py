"""The past of a scheduler for the console: events, and requests that ended lately. All lists are bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(slots=True)
class FleetEvent:
    """A change of a worker or a gateway, or requests with the same fate. `at` is the time of the first one."""

    at: float
    text: str
    is_bad: bool
    count: int


class Events:
    """Owns the newest events. Times are those of the event loop's clock."""

    def __init__(self) -> None:
        self.newest: deque[FleetEvent] = deque(maxlen=MAX_EVENTS)

    def add(self, now: float, text: str, *, is_bad: bool = False, count: int = 0) -> None:
        """Add an event. With a `count`, it is added to that of the same event of the last JOIN_S."""
        text = text[:MAX_TEXT]
        for event in reversed(self.newest):
            if not count or event.at < now - JOIN_S:
                break
            if event.text == text:
                event.count += count
                return
        self.newest.append(FleetEvent(now, text, is_bad, count))


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


@dataclass(frozen=True, slots=True)
class Stage:
    """A time of one sample: queue, prefill, decode, or move (from the loss of its row to the next row)."""

    name: str
    sample_index: int
    start: float
    end: float
    worker_id: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """A request with its stages, without its content. `reason`: of its last end; empty while a sample is open."""

    request_id: str
    tenant_id: str
    trace_id: str
    arrival: float
    ended_at: float
    reason: str
    prompt_tokens: int
    output_tokens: int
    stages: list[Stage]


def history_to_proto(
    events: Events, ended: Iterable[RequestTimeline], to_unix: Callable[[float], float]
) -> pb.GetHistoryResponse:
    """The answer of GetHistory without a request. `to_unix` converts a time of the event loop."""
    found = [
        pb.SchedulerEvent(at=to_unix(event.at), text=event.text, is_bad=event.is_bad, count=event.count)
        for event in events.newest
    ]
    records = [_record_to_proto(record, to_unix) for record in ended]
    return pb.GetHistoryResponse(events=found, ended=records)


def add_totals(message: pb.GetHistoryResponse, refusals: Mapping[str, int], tenants: Mapping[str, Cost]) -> None:
    """Add counts since the start: refused requests by code, and the tenants that used the most."""
    message.refused.update(refusals)
    for name, cost in nlargest(MAX_TENANTS, tenants.items(), key=lambda pair: pair[1].processor_us):
        message.tenants.add(tenant_id=name, processor_s=cost.processor_us / 1e6, block_s=cost.block_s)


def request_to_proto(record: RequestTimeline | None, to_unix: Callable[[float], float]) -> pb.GetHistoryResponse:
    """The answer of GetHistory for one request."""
    if record is None:
        return pb.GetHistoryResponse()
    message = _record_to_proto(record, to_unix)
    for stage in record.stages:
        times = {"start": to_unix(stage.start), "end": to_unix(stage.end)}
        message.stages.add(**asdict(stage) | times)
    return pb.GetHistoryResponse(request=message)


def _record_to_proto(record: RequestTimeline, to_unix: Callable[[float], float]) -> pb.RequestTimeline:
    return pb.RequestTimeline(
        request_id=record.request_id,
        tenant_id=record.tenant_id,
        trace_id=record.trace_id,
        arrived_at=to_unix(record.arrival),
        ended_at=to_unix(record.ended_at),
        reason=record.reason,
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
    )
