"""Mutation tests of the simulation: each bug is planted into a service, and must fail with the expected message.

The seed that caught a bug is then run again without the bug, and must pass.
"""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import pytest

import gateway_svc.request.resume
import gateway_svc.schedulers.scheduler_request
from gateway_svc.schedulers.attach_stream import AttachStream
from gateway_svc.schedulers.dispatcher import Dispatcher
from gateway_svc.schedulers.scheduler_request import SchedulerRequest
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.steps.step_planner import StepPlanner
from scheduler_svc.core.worker_state import InFlightStep, StepPlan, WorkerState
from scheduler_svc.gateways.streams import Attached, Gateways
from scheduler_svc.step_loop import StepLoop
from scheduler_svc.workers import block_calls
from scheduler_svc.workers import wire as worker_wire
from scheduler_svc.workers.leased_worker import LeasedWorker
from tests.sim.system.simulation import FAULTS, run_seed
from worker_svc.steps.executor import StepExecutor
from worker_svc.steps.lease import Lease

MAX_SEEDS = 400

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Bug:
    """`plant` breaks a service. `complaint` is a regular expression for the message of the failure."""

    plant: Callable[[Patch], None]
    complaint: str
    faults: tuple[str, ...]  # faults that make it visible
    first_seed: int = 0  # for bugs that few seeds show


BUGS: dict[str, Bug] = {}


def bug(
    complaint: str, *faults: str, first_seed: int = 0
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Add a planted bug to the list under its function's name."""

    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS[plant.__name__] = Bug(plant, complaint, faults or FAULTS, first_seed)
        return plant

    return add


def wrap(patch: Patch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace owner.name by a function that gets the original as its first argument."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


@pytest.fixture(autouse=True)
def _collect_between_runs() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# -- fences ------------------------------------------------------------------------------------------------------------


@bug("never sent under lease|step .*, expected|not open|which is open|context_lens|another open row", "freeze")
def worker_accepts_a_stale_scheduler_epoch(patch: Patch) -> None:
    """A frozen scheduler continues to send steps to a worker that another scheduler has leased meanwhile."""
    patch.setattr(Lease, "end", lambda self, error: None)
    patch.setattr(StepExecutor, "check_fence", lambda self, fence: self.current_lease())
    patch.setattr(StepExecutor, "_check_current", lambda self, lease: None)


@bug("open rows|step 1 .*, expected|which is open|not open", "freeze", "kill")
def worker_keeps_the_rows_of_an_earlier_lease(patch: Patch) -> None:
    """A worker that was frozen and lost returns and gets a new lease, but keeps its old rows."""
    patch.setattr(StepExecutor, "_reset_rows", lambda self, runner: None)


@bug("the oracle has|UnexpectedStepError|Error", "forge_answer", "kill")
def scheduler_applies_any_answer_to_its_oldest_step(patch: Patch) -> None:
    """Neither step id nor worker epoch is checked: a repeated answer counts twice."""

    def trusting(original: Any, message: Any, **expected: Any) -> Any:
        message.step_id, message.worker_epoch = expected["step_id"], expected["worker_epoch"]
        return original(message, **expected)

    wrap(patch, worker_wire, "step_output_from_proto", trusting)


# -- blocks ------------------------------------------------------------------------------------------------------------


@bug("acknowledged|commits block|as cached, but it is not")
def prefixes_published_before_the_answer(patch: Patch) -> None:
    def finish(original: Any, planner: StepPlanner, plan: StepPlan) -> Any:
        batch = original(planner, plan)
        if batch is not None:
            planner.worker.commit_fills(_without_decodes(planner.worker.in_flight[-1]), None)
        return batch

    def _without_decodes(flight: InFlightStep) -> InFlightStep:
        return replace(flight, full=flight.full[:0])

    wrap(patch, StepPlanner, "finish_plan", finish)


@bug("another open row has|which is open|open rows|other rows share|not open")
def rows_and_blocks_freed_before_the_worker_has_closed_them(patch: Patch) -> None:
    """Blocks are free at once, but the worker learns of the end of their row only with the step after next."""
    delayed: WeakKeyDictionary[StepPlanner, Any] = WeakKeyDictionary()

    def make(original: Any, planner: StepPlanner, *args: Any) -> Any:
        batch = original(planner, *args)
        late = delayed.get(planner, batch.close_rows[:0])
        delayed[planner] = batch.close_rows
        return replace(batch, close_rows=late)

    wrap(patch, StepPlanner, "_send", make)
    patch.setattr(WorkerState, "_release", lambda self, blocks: self.pool.free(blocks))


@bug("reads the wrong content|as cached, but it is not", "kill", "freeze", "tear_link")
def adopted_blocks_mixed_up(patch: Patch) -> None:
    def rotate(original: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = original(*args, **kwargs)
        ids = [block.block_id for block in blocks]
        return [replace(block, block_id=i) for block, i in zip(blocks, ids[1:] + ids[:1], strict=True)]

    wrap(patch, block_calls, "cached_blocks_from_proto", rotate)


# -- continuations -----------------------------------------------------------------------------------------------------


@bug("StreamCorrupted|offset|starts at", "kill", "tear_link")
def gateway_loses_a_token_of_the_clients_continuation(patch: Patch) -> None:
    def read(original: Any, *args: Any) -> Any:
        outputs, finished = original(*args)
        return tuple(output[:-1] for output in outputs), finished

    wrap(patch, gateway_svc.request.resume, "_read_continuation", read)


@bug("the oracle has|opens with", "kill", "tear_link")
def gateway_loses_a_token_when_a_request_moves(patch: Patch) -> None:
    def forget(original: Any, samples: Any, *others: Any) -> Any:
        return original(((outputs[1:], is_finished) for outputs, is_finished in samples), *others)

    wrap(patch, gateway_svc.schedulers.scheduler_request, "continuation_from_outputs", forget)


@bug("the oracle has|opens with|prompt", "kill", "tear_link")
def resumed_one_position_off(patch: Patch) -> None:
    """The last prompt token counts as output: later noise and offsets are those of the next position."""

    def open_row(original: Any, row_open: Any, batch: Any) -> None:
        original(row_open, batch)
        if len(row_open.token_ids) > row_open.prompt_len:
            batch.opens[-1].prompt_len -= 1

    wrap(patch, worker_wire, "_open_row", open_row)


@bug(
    "twice|is still live|leaks|still has|disagree|in 0 places|in two places|KeyError|is in",
    "kill",
    "tear_link",
    first_seed=43,
)
def request_taken_over_without_ending_the_old_one(patch: Patch) -> None:
    def add(original: Any, core: Scheduler, group: Any, now: float) -> Any:
        if group.takes_over:
            core._requests.groups.pop(group.request_id, None)
        return original(core, group, now)

    wrap(patch, Scheduler, "add_group", add)


# -- ends --------------------------------------------------------------------------------------------------------------


@bug("is still live|leaks|still has|no progress")
def abort_dropped_when_a_request_is_withdrawn(patch: Patch) -> None:
    def withdraw(self: AttachStream, request: Any) -> None:
        if request.handle is not None:
            self._by_handle.pop(request.handle, None)
            request.handle = None

    patch.setattr(AttachStream, "withdraw", withdraw)


# -- silence -----------------------------------------------------------------------------------------------------------


async def _never_return(self: Any, *args: Any) -> str:
    await asyncio.get_running_loop().create_future()
    return ""


@bug("no token for|no progress", "kill", first_seed=37)
def gateway_waits_for_a_silent_scheduler(patch: Patch) -> None:
    patch.setattr(AttachStream, "_watch", _never_return)


@bug("no token for|no progress", "kill", first_seed=16)
def scheduler_waits_for_a_silent_worker(patch: Patch) -> None:
    patch.setattr(LeasedWorker, "_watch", _never_return)


# -- losses ------------------------------------------------------------------------------------------------------------


@bug("still has messages for a gateway|is still live", "freeze", "kill", first_seed=38)
def scheduler_waits_for_a_silent_gateway(patch: Patch) -> None:
    async def beat(gateways: Gateways, attached: Attached) -> None:
        while True:
            attached.outbox.heartbeat(gateways._heartbeat())
            await asyncio.sleep(gateways._interval_s)

    patch.setattr(Gateways, "_beat", beat)


@bug("is still live", "kill", "freeze", first_seed=18)
def requests_of_a_lost_gateway_go_on(patch: Patch) -> None:
    patch.setattr(StepLoop, "detach", lambda self, owner: None)


@bug("is still live", "drain", first_seed=17)
def cancel_ignored(patch: Patch) -> None:
    patch.setattr(StepLoop, "cancel", lambda self, *args: None)


@bug("no progress|no token for", "freeze", "kill", first_seed=10)
def lost_worker_keeps_its_sequences(patch: Patch) -> None:
    patch.setattr(StepLoop, "worker_lost", lambda self, link, reason: None)


@bug("no token for|no progress", "kill", "tear_link", first_seed=8)
def requests_of_a_lost_scheduler_are_not_sent_again(patch: Patch) -> None:
    patch.setattr(Dispatcher, "on_lost", lambda self, *args: None)


@bug("no token for|no progress", "kill")
def accepted_request_not_reported_to_its_handler(patch: Patch) -> None:
    patch.setattr(SchedulerRequest, "on_accepted", lambda self: None)


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str, monkeypatch: Patch) -> None:
    planted = BUGS[name]
    with monkeypatch.context() as patch:
        planted.plant(patch)
        seed, complaint = first_failure(planted)
    assert seed is not None, f"{MAX_SEEDS} seeds ran with the bug and none failed"
    assert re.search(planted.complaint, complaint), f"seed {seed} says: {complaint}"
    run_seed(seed, planted.faults)


def first_failure(planted: Bug) -> tuple[int | None, str]:
    """The first seed that fails, and its message."""
    for seed in range(planted.first_seed, planted.first_seed + MAX_SEEDS):
        try:
            run_seed(seed, planted.faults)
        except Exception as error:
            return seed, f"{type(error).__name__}: {error}"
        if seed % 20 == 19:
            gc.collect()
    return None, ""
