"""Holds of the barrier in random order, while workers join and are lost: each keeps its own promise, and no other one
ends it, carries it out or answers for it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.admission.barrier import Barrier, Hold, HoldMode, HoldState
from scheduler_svc.core.messages import MigrationReason
from scheduler_svc.step_loop import ModelFacts, StepLoop
from tests.builders import make_group
from tests.unit.scheduler.fakes import FakeGateway, FakeWorker, running_loop, settle

KINDS = ("submit", "answer", "answer", "answer", "hold", "hold", "release", "release", "join", "lose")
ACTIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1000)), min_size=5, max_size=50)
MODES = [HoldMode.FINISH, *HoldMode]


@dataclass(eq=False)
class Promise:
    """A hold, as its holder sees it."""

    holder: str
    mode: HoldMode
    reached: asyncio.Future[Hold]
    num_sent: int  # steps of all workers when it began
    is_reached: bool = False

    @property
    def is_closed(self) -> bool:
        return self.mode is not HoldMode.FINISH or self.is_reached


class Run:
    """A step loop between holders, workers and one gateway."""

    def __init__(self, loop: StepLoop) -> None:
        self.loop, self.gateway = loop, FakeGateway()
        self.owner = loop.attach(self.gateway)
        self.workers: list[FakeWorker] = []
        self.promises: list[Promise] = []
        self.num_workers = self.num_requests = self.num_holds = self.num_sent_before = 0
        self.num_aborted = self.num_retracted = 0

    @property
    def num_sent(self) -> int:
        return self.num_sent_before + sum(len(worker.sent) for worker in self.workers)

    @property
    def computes(self) -> bool:
        return any(worker.unanswered for worker in self.workers)

    @property
    def has_begun(self) -> bool:
        groups = self.loop.core._requests.groups.values()
        return any(not (seq.is_finished or seq.is_new) for group in groups for seq in group.sequences)

    # -- events -------------------------------------------------------------------------------------------------------

    def submit(self, number: int) -> None:
        self.num_requests += 1
        prompt, n = [number % 3] * (1 + number % 9), 1 + number % 2
        name = f"r{self.num_requests}"
        group = make_group(prompt, name, max_tokens=number % 6, n=n, owner=self.owner, handle=self.num_requests)
        self.loop.submit(group)

    def answer(self, number: int) -> None:
        if busy := [worker for worker in self.workers if worker.unanswered]:
            busy[number % len(busy)].answer()

    def hold(self, number: int) -> None:
        self.num_holds += 1
        holder, mode = f"h{self.num_holds}", MODES[number % len(MODES)]
        self.promises.append(Promise(holder, mode, self.loop.hold(Hold(holder, mode)), self.num_sent))

    def release(self, number: int) -> None:
        if self.promises:
            promise = self.promises.pop(number % len(self.promises))
            self.loop.release(promise.holder)
            self.loop.release(promise.holder)  # the second one changes nothing

    def join(self, number: int) -> None:
        """A worker, perhaps of another model, which is refused unless there is neither a worker nor work."""
        self.num_workers += 1
        worker = FakeWorker(self.loop, f"w{self.num_workers}")
        worker.join(ModelFacts(root_salt=b"%d" % (number % 3)), max_num_seqs=3, pipeline_depth=1 + number % 2)
        self.workers.append(worker)

    def lose(self, number: int) -> None:
        if self.workers:
            worker = self.workers.pop(number % len(self.workers))
            self.num_sent_before += len(worker.sent)
            self.loop.worker_lost(worker, "as asked")

    # -- checks -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After a turn."""
        self.workers = [worker for worker in self.workers if worker.closed is None]
        now_reached = [one for one in self.promises if one.reached.done() and not one.is_reached]
        for promise in now_reached:
            assert promise.reached.result().samples is not None, "it was not released"
            assert not self.computes, f"{promise} is answered while a worker computes"
            assert promise.mode is not HoldMode.FINISH or not self.has_begun, f"{promise} has not finished"
            promise.is_reached, promise.num_sent = True, self.num_sent
        for promise in self.promises:
            assert not promise.is_closed or promise.num_sent == self.num_sent, f"a step was sent during {promise}"
            is_due = not self.computes and (promise.is_closed or not self.has_begun)
            assert promise.is_reached or not is_due, f"{promise} is not answered"
        modes = {promise.mode for promise in now_reached}
        num_aborted = list(self.gateway.reasons().values()).count("aborted")
        assert num_aborted == self.num_aborted or HoldMode.ABORT in modes, "requests were aborted for no holder"
        num_retracted = self.loop.core.stats().counts.migrations[MigrationReason.PAUSE]
        assert num_retracted in (0, self.num_retracted) or HoldMode.RETRACT in modes, (
            "rows were retracted for no holder"
        )
        self.num_aborted, self.num_retracted = num_aborted, num_retracted

    async def act(self, kind: str, number: int) -> None:
        released = list(self.promises)
        getattr(self, kind)(number)
        await settle()
        self.check()
        for promise in released:
            if promise not in self.promises and not promise.is_reached:
                assert promise.reached.result().samples is None, f"{promise} was released and is not answered"

    async def end(self) -> None:
        """All promises are kept or released; then everything goes on."""
        await self.act("join", 0)
        while waiting := [one for one in self.promises if one.mode is not HoldMode.FINISH or one.is_reached]:
            await self.act("release", self.promises.index(waiting[0]))
        while self.computes:
            await self.act("answer", 0)
        assert all(promise.is_reached for promise in self.promises)
        while self.promises:
            await self.act("release", 0)
        for worker in self.workers:
            await worker.answer_all()
        assert not self.loop.has_work
        assert not self.loop.core.barrier.holders


async def run(actions: list[tuple[str, int]]) -> None:
    async with running_loop() as loop:
        a_run = Run(loop)
        await a_run.act("join", 0)
        for kind, number in actions:
            await a_run.act(kind, number)
        await a_run.end()


@given(actions=ACTIONS)
@settings(max_examples=60, deadline=None)
def test_each_hold_keeps_its_own_promise(actions: list[tuple[str, int]]) -> None:
    asyncio.run(run(actions))


def test_a_hold_that_is_reached_for_another_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The barrier as it is reached for all holders at once."""

    take = Barrier.take_reached

    def reached_for_all(barrier: Barrier) -> list[Hold]:
        for hold in barrier._holds.values() if barrier.is_closed else ():
            hold.state = HoldState.CLOSED if hold.state is HoldState.FINISHING else hold.state
        return take(barrier)

    monkeypatch.setattr(Barrier, "take_reached", reached_for_all)
    actions = [("submit", 5), ("answer", 0), ("hold", 0), ("hold", 2), ("answer", 0)]
    with pytest.raises(AssertionError, match="has not finished"):
        asyncio.run(run(actions))


def test_a_release_that_leaves_its_hold_to_be_carried_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Hold] = []
    release, take = Barrier.release, Barrier.take_reached

    def forgetful_release(barrier: Barrier, holder: str) -> Hold | None:
        hold = release(barrier, holder)
        left.extend([] if hold is None else [hold])
        return hold

    def take_all(barrier: Barrier) -> list[Hold]:
        found = take(barrier)
        return found + left if found else []

    monkeypatch.setattr(Barrier, "release", forgetful_release)
    monkeypatch.setattr(Barrier, "take_reached", take_all)
    actions = [("submit", 5), ("hold", 3), ("release", 0), ("hold", 2), ("answer", 0), ("answer", 0)]
    with pytest.raises(AssertionError, match="no holder"):
        asyncio.run(run(actions))
