"""Updates of the weights with a scheduler or a worker that is killed at each point: all workers end on one version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from quire.internal.v1 import worker_pb2
from quire.v1 import rollouts_pb2, types_pb2

from scheduler_svc.step_loop import StepLoop
from scheduler_svc.workers.rollouts import Request, Rollouts
from scheduler_svc.workers.weights import Weights
from svc_common.errors import AbortedError, AlreadyExistsError, InvalidRequestError, ServiceError, UnavailableError
from tests.builders import make_group
from tests.unit.scheduler.fakes import FakeGateway, FakeIndex, FakeWorker, running_loop, settle, until

Killed = asyncio.CancelledError  # the end of a process is no error that it handles


class RecordingIndex(FakeIndex):
    """Keeps the record of the weights, as Redis does. `events` counts what may fail."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self.record = ""
        self._fleet = fleet

    async def read_weights(self, model: str, revision: str) -> str | None:
        return self.record

    async def write_weights(self, model: str, revision: str, version: int, record: str) -> str | None:
        self._fleet.event("decide")
        if not self.record or json.loads(self.record)["version"] < version:
            self.record = record
        self._fleet.event("decided")
        return self.record


@dataclass(eq=False)
class FakeLink:
    """A leased worker. Its weights are the list of files that they come from."""

    worker_id: str
    fleet: Fleet
    version: int = 0
    files: tuple[str, ...] = ()
    staged: tuple[int, tuple[str, ...]] | None = None
    is_lost: bool = False
    capacity: Any = field(default_factory=lambda: SimpleNamespace(movement=None))

    @property
    def calls(self) -> FakeLink:
        return self

    @property
    def info(self) -> types_pb2.ModelInfo:
        return info_of(self.version, self.files)

    def close(self, reason: str) -> None:
        self.is_lost = True

    def _call(self, name: str) -> None:
        self.fleet.event(f"{name} {self.worker_id}", self)
        if self.is_lost:
            raise UnavailableError(f"{self.worker_id} is gone")

    async def change_weights(
        self, action: worker_pb2.WeightsAction.ValueType, *, version: int = 0, files: Sequence[str] = ()
    ) -> worker_pb2.ChangeWeightsResponse:
        name = worker_pb2.WeightsAction.Name(action).removeprefix("WEIGHTS_ACTION_").lower()
        if name != "drop":
            self._call(name)
        if name == "check":
            if files[-1] == "bad":
                raise InvalidRequestError("tensor a has another shape", field="tensors")
            tensor = rollouts_pb2.TensorChecksum(name=files[-1], dtype="F32", shape=[2, 3], checksum="c")
            return worker_pb2.ChangeWeightsResponse(tensors=[tensor])
        if name in ("stage", "drop"):
            self.staged = (version, tuple(files)) if name == "stage" else None
            return worker_pb2.ChangeWeightsResponse(used_files=files, info=info_of(version, files))
        assert self.staged is not None
        self.version, self.files = self.staged
        self.fleet.event(f"activated {self.worker_id}", self)
        return worker_pb2.ChangeWeightsResponse(info=self.info)


def info_of(version: int, files: Sequence[str]) -> types_pb2.ModelInfo:
    digest = "+".join(files)
    return types_pb2.ModelInfo(
        model="m", revision="r", weight_version=version, weights_digest=digest, weights_revision=f"r{digest}"
    )


class Fleet:
    """Three workers and the schedulers that lead them, one after the other."""

    def __init__(self, *, has_redis: bool = True) -> None:
        self.index: FakeIndex = RecordingIndex(self) if has_redis else FakeIndex()
        self.links = [FakeLink(f"w{i}", self) for i in range(3)]
        self.events: list[str] = []
        self.kill_at: int | None = None
        self.on_kill: Callable[[FakeLink | None], None] = lambda link: None

    def event(self, name: str, link: FakeLink | None = None) -> None:
        self.events.append(name)
        if self.kill_at is not None and len(self.events) == self.kill_at:
            self.on_kill(link)

    async def lead(self, step_loop: StepLoop) -> Weights:
        """A scheduler starts, and the workers join it."""
        weights = Weights(step_loop, self.index, lambda link, info: None)
        for link in self.links:
            await self.join(weights, link)
        return weights

    async def join(self, weights: Weights, link: FakeLink) -> None:
        announced = worker_pb2.UpdatedWeights(version=link.version, files=link.files)
        async with weights.joining(link, link.info, announced, is_asleep=False) as info:  # type: ignore[arg-type]
            assert info == link.info

    @property
    def versions(self) -> set[tuple[int, tuple[str, ...]]]:
        return {(link.version, link.files) for link in self.links}


async def update(weights: Weights, path: str = "a", update_id: str = "u") -> Any:
    weights.begin(update_id, 0)
    await weights.put(update_id, path)
    return await weights.commit(update_id, "", rollouts_pb2.RUNNING_ROWS_RECOMPUTE)


async def killed_run(kill_at: int | None, *, kills_scheduler: bool, has_redis: bool = True) -> tuple[Fleet, bool]:
    """An update with a kill at this event, and what follows: the fleet, and whether the update was confirmed."""
    fleet, is_confirmed = Fleet(has_redis=has_redis), False
    fleet.kill_at = kill_at
    async with running_loop() as step_loop:
        weights = await fleet.lead(step_loop)

        def kill(link: FakeLink | None) -> None:
            if kills_scheduler:
                raise Killed
            if link is not None:
                link.is_lost = True
                weights.leave(link)  # type: ignore[arg-type]

        fleet.on_kill = kill
        try:
            is_confirmed = bool((await update(weights)).num_workers)
        except (ServiceError, Killed):
            is_confirmed = False
        await weights.close()
    fleet.kill_at = None
    fleet.links = [FakeLink(link.worker_id, fleet) if link.is_lost else link for link in fleet.links]
    async with running_loop() as step_loop:
        for order in (fleet.links, fleet.links[::-1]):
            fleet.links = order
            await (await fleet.lead(step_loop)).close()
    return fleet, is_confirmed


async def num_events() -> int:
    fleet, is_confirmed = await killed_run(None, kills_scheduler=True)
    assert is_confirmed
    assert fleet.versions == {(1, ("a",))}
    return len(fleet.events)


@pytest.mark.parametrize("has_redis", [True, False])
@pytest.mark.parametrize("kills_scheduler", [True, False])
async def test_a_kill_at_any_point_leaves_one_version(kills_scheduler: bool, has_redis: bool) -> None:
    for kill_at in range(1, await num_events() + 1):
        fleet, is_confirmed = await killed_run(kill_at, kills_scheduler=kills_scheduler, has_redis=has_redis)
        assert len(fleet.versions) == 1, (kill_at, fleet.events, fleet.versions)
        assert not is_confirmed or fleet.versions == {(1, ("a",))}, (kill_at, fleet.events)


async def test_the_test_finds_a_commit_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forget(weights: Weights, record: Any) -> None:
        """The scheduler that starts believes the first worker."""

    monkeypatch.setattr(Weights, "_decide", forget)
    monkeypatch.setattr(Weights, "_catch_up_with", forget)
    found = [await killed_run(kill_at, kills_scheduler=True) for kill_at in range(1, 14)]
    assert any(len(fleet.versions) > 1 or next(iter(fleet.versions))[0] == 0 for fleet, _ in found)
    with pytest.raises(AssertionError):
        await test_a_kill_at_any_point_leaves_one_version(kills_scheduler=True, has_redis=True)


async def test_refused_updates_change_nothing() -> None:
    fleet = Fleet()
    async with running_loop() as step_loop:
        weights = await fleet.lead(step_loop)
        await update(weights)
        weights.begin("v", 5)
        assert weights.begin("v", 0) == 5
        with pytest.raises(AlreadyExistsError):
            weights.begin("other", 0)
        with pytest.raises(InvalidRequestError, match="no update"):
            await weights.put("other", "b")
        with pytest.raises(InvalidRequestError, match="shape"):
            await weights.put("v", "bad")
        with pytest.raises(InvalidRequestError, match="no tensors"):
            await weights.commit("v", "", rollouts_pb2.RUNNING_ROWS_KEEP)
        await weights.put("v", "b")
        with pytest.raises(InvalidRequestError, match="digest"):
            await weights.commit("v", "0", rollouts_pb2.RUNNING_ROWS_KEEP)
        assert fleet.versions == {(1, ("a",))}
        await weights.abort("v")
        with pytest.raises(InvalidRequestError, match="above 1"):
            weights.begin("w", 1)
        done = await update(weights, "c", "w")
        assert (done.weights.version, done.num_workers) == (2, 3)
        assert await weights.commit("w", "", rollouts_pb2.RUNNING_ROWS_KEEP) == done, "a retry"
        assert fleet.versions == {(2, ("a", "c"))}
        assert (await update(weights, "d", "w")).weights.version == 3, "another update with the same id"
        assert fleet.versions == {(3, ("a", "c", "d"))}
        await weights.close()


async def test_schedulers_of_a_model_follow_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.workers.weights.FOLLOW_S", 0.01)
    fleet, other = Fleet(), Fleet()
    other.index = fleet.index
    async with running_loop() as step_loop, running_loop() as other_loop:
        weights, follower = await fleet.lead(step_loop), await other.lead(other_loop)
        await update(weights)
        await until(lambda: other.versions == fleet.versions)
        await weights.close()
        await follower.close()


@asynccontextmanager
async def stopped_loop() -> AsyncIterator[tuple[StepLoop, Weights, FakeWorker]]:
    """A worker that does not answer its step, so that no hold is reached until it does."""
    async with running_loop() as step_loop:
        weights, worker = Weights(step_loop, FakeIndex(), lambda link, info: None), FakeWorker(step_loop)
        worker.join(max_num_seqs=4)
        step_loop.submit(make_group(owner=step_loop.attach(FakeGateway()), handle=1, max_tokens=100))
        await until(lambda: worker.unanswered)
        yield step_loop, weights, worker
        while worker.unanswered and not step_loop.core.barrier.holders:
            step_loop.abort(["r"])
            await worker.answer_all()


async def test_a_pause_that_is_ended_before_it_is_reached_is_not_carried_out() -> None:
    async with stopped_loop() as (step_loop, weights, worker):
        rollouts = Rollouts(step_loop, weights)
        pause = rollouts_pb2.PauseRequest(pause_id="p", mode=rollouts_pb2.PAUSE_MODE_ABORT)
        pausing = asyncio.create_task(rollouts.control(Request(pause=pause)))
        await settle()
        await rollouts.control(Request(unpause=rollouts_pb2.UnpauseRequest(pause_id="p")))
        with pytest.raises(AbortedError, match="'p' was ended before"):
            await pausing
        resetting = asyncio.create_task(weights.reset_prefix_cache())
        await settle()
        worker.answer()
        await resetting
        assert step_loop.core.has_work, "no request was aborted"


async def test_a_reset_that_is_cancelled_ends_no_other_one() -> None:
    async with stopped_loop() as (step_loop, weights, worker):
        first, second = (asyncio.create_task(weights.reset_prefix_cache()) for _ in range(2))
        await settle()
        first.cancel()
        await settle()
        assert len(step_loop.core.barrier.holders) == 1
        worker.answer()
        await second
        await until(lambda: not step_loop.core.barrier.holders)


async def test_sleeps_that_are_ended_by_a_wake_do_not_sleep_later() -> None:
    async with stopped_loop() as (step_loop, weights, worker):
        sleeping = [asyncio.create_task(weights.sleep(tags)) for tags in (["kv_cache"], ["weights"])]
        await settle()
        await weights.wake([])
        for task in sleeping:
            with pytest.raises(AbortedError, match="woken"):
                await task
        assert not weights.asleep
        await until(lambda: not step_loop.core.barrier.holders)
        worker.answer()
        await until(lambda: worker.unanswered)
