"""Readiness of a gateway with several processes, without the processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from gateway_svc.process import readiness
from gateway_svc.process.readiness import ReadyLink, ReadyProcesses
from svc_common.tasks import cancel

PATIENCE_S = 20.0


class Group:
    """The parent, and its children in this process."""

    def __init__(self, num_processes: int) -> None:
        self.parent = ReadyProcesses(num_processes)
        self.changed = asyncio.Event()
        self._children: dict[int, tuple[ReadyLink, asyncio.Task[None]]] = {}
        self._following: dict[int, asyncio.Task[None]] = {}

    def start(self, index: int, *, is_ready: bool) -> ReadyLink:
        ours, theirs = socket.socketpair()
        child = ReadyLink(theirs, self.changed.set)
        child.report(is_ready=is_ready)
        self._children[index] = child, asyncio.create_task(child.run())
        self._following[index] = asyncio.create_task(self.parent.follow(index, ours))
        return child

    async def end(self, index: int) -> None:
        _, task = self._children.pop(index)
        await cancel(task)
        await asyncio.wait_for(self._following[index], PATIENCE_S)

    async def reach(self, *, all_ready: bool) -> None:
        """Wait until all children know it."""
        async with asyncio.timeout(PATIENCE_S):
            while any(child.all_ready != all_ready for child, _ in self._children.values()):
                self.changed.clear()
                await self.changed.wait()

    async def close(self) -> None:
        await cancel(*self._following.values(), *(task for _, task in self._children.values()))


@pytest.fixture
async def group() -> AsyncIterator[Group]:
    group = Group(3)
    yield group
    await group.close()


async def test_all_processes_are_ready_or_none_is(group: Group) -> None:
    children = [group.start(index, is_ready=index < 2) for index in range(3)]
    assert not any(child.all_ready for child in children)
    children[2].report(is_ready=True)
    await group.reach(all_ready=True)
    children[0].report(is_ready=False)
    await group.reach(all_ready=False)
    children[0].report(is_ready=True)
    await group.reach(all_ready=True)


async def test_an_ended_process_counts_again_when_its_successor_listens(group: Group) -> None:
    for index in range(3):
        group.start(index, is_ready=True)
    await group.reach(all_ready=True)
    await group.end(1)
    group.start(1, is_ready=True)
    await group.reach(all_ready=True)  # nothing has changed for the others; the successor learns it
    await group.end(1)
    successor = group.start(1, is_ready=False)
    await group.reach(all_ready=False)
    successor.report(is_ready=True)
    await group.reach(all_ready=True)


async def test_an_ended_process_does_not_keep_the_others_from_being_ready(group: Group) -> None:
    children = [group.start(index, is_ready=True) for index in range(3)]
    await group.reach(all_ready=True)
    children[1].report(is_ready=False)
    await group.reach(all_ready=False)
    await group.end(1)
    await group.reach(all_ready=True)


async def test_a_process_that_hangs_is_not_ready(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "SILENT_S", 0.3)
    monkeypatch.setattr(readiness, "REPEAT_S", 0.01)
    group.start(0, is_ready=True)
    group.start(1, is_ready=True)
    ours, hanging = socket.socketpair()
    hanging.setblocking(False)
    following = asyncio.create_task(group.parent.follow(2, ours))
    hanging.send(readiness.READY)
    await group.reach(all_ready=True)
    await group.reach(all_ready=False)  # it has sent nothing more
    hanging.send(readiness.READY)
    await group.reach(all_ready=True)
    await group.reach(all_ready=False)
    hanging.close()
    await following
    await group.reach(all_ready=True)


async def test_a_child_without_its_parent_is_not_ready() -> None:
    ours, theirs = socket.socketpair()
    changed = asyncio.Event()
    child = ReadyLink(theirs, changed.set)
    running = asyncio.create_task(child.run())
    ours.send(readiness.READY)
    await asyncio.wait_for(changed.wait(), PATIENCE_S)
    assert child.all_ready
    ours.close()
    await asyncio.wait_for(running, PATIENCE_S)
    assert not child.all_ready


async def test_one_process_has_no_others() -> None:
    link = ReadyLink(None, lambda: None)
    link.report(is_ready=False)
    await link.run()
    assert link.all_ready
