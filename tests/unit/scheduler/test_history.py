"""The memory of a scheduler for operators, and its bounds."""

from __future__ import annotations

from scheduler_svc.history import (
    JOIN_S,
    MAX_EVENTS,
    MAX_TEXT,
    Events,
    RequestTimelines,
    history_to_proto,
)
from tests.builders import make_group
from tests.unit.scheduler.fakes import FakeGateway, FakeWorker, running_loop, settle


def texts(events: Events) -> list[tuple[str, int]]:
    return [(event.text, event.count) for event in events.newest]


def test_only_the_newest_events_are_kept() -> None:
    events = Events()
    for i in range(3 * MAX_EVENTS):
        events.add(float(i), f"event {i}")
    assert [event.at for event in events.newest] == [float(i) for i in range(2 * MAX_EVENTS, 3 * MAX_EVENTS)]
    events.add(1e3, "w" * 10_000)
    assert len(events.newest[-1].text) == MAX_TEXT


def test_equal_counts_within_a_short_time_are_one_event() -> None:
    events = Events()
    events.add(0.0, "refused", count=2)
    events.add(1.0, "worker a joined")
    events.add(1.0, "worker a joined")
    events.add(JOIN_S, "refused", count=3)
    assert texts(events) == [("refused", 5), ("worker a joined", 0), ("worker a joined", 0)]
    events.add(JOIN_S + 0.1, "refused", count=1)
    assert texts(events)[-1] == ("refused", 1), "the first one is too old"
    message = history_to_proto(events, RequestTimelines().ended, lambda at: at + 1000.0)
    first = message.events[0]
    assert (first.at, first.count) == (1000.0, 5)


async def test_events_of_workers_and_requests() -> None:
    async with running_loop() as loop:
        gateway, workers = FakeGateway(), [FakeWorker(loop, name) for name in ("a", "b")]
        owner = loop.attach(gateway)
        loop.submit(make_group(owner=owner, handle=1))
        workers[0].join()
        await settle()
        loop.submit(make_group(owner=owner, handle=2))
        await settle()
        workers[1].join()
        loop.worker_lost(workers[0], "no heartbeat")
        await settle()
        loop.worker_draining(workers[1])
        await settle()
        assert texts(loop.events) == [
            ("requests refused: UNAVAILABLE", 1),
            ("worker a joined", 0),
            ("worker b joined", 0),
            ("worker a is lost: no heartbeat; sequences to move: 1", 0),
            ("sequences queued again: lost", 1),
            ("worker b is draining", 0),
        ]
        assert [event.is_bad for event in loop.events.newest] == [False, False, False, True, False, False]
