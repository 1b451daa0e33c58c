"""Rules of the Scheduler that transcripts do not show: refusals, failed rows, adoption, steady state."""

from contextlib import suppress

import numpy as np
import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import (
    NeverFitsError,
    QueueFullError,
    UnexpectedStepError,
    UnreachableDeadlineError,
    WorkerMismatchError,
)
from scheduler_svc.core.messages import MigrationReason, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import (
    TRANSITIONS,
    FinishReason,
    IllegalTransitionError,
    Sequence,
    SequenceData,
    SequenceGroup,
    SequenceStatus,
    StopCondition,
)
from scheduler_svc.core.worker_state import WorkerState
from step_protocol.columns import EMPTY
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.types import RowError
from tests.invariants import check_scheduler
from tests.unit.core.calls import count_calls


def u32(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.uint32)


def capacity(worker_id: str = "w", **changes: int) -> WorkerCapacity:
    sizes = {"num_blocks": 32, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64}
    return WorkerCapacity(worker_id, 1, **{**sizes, "pipeline_depth": 1, **changes})


def make(config: SchedulerConfig | None = None, **changes: int) -> Scheduler:
    scheduler = Scheduler(config or SchedulerConfig())
    scheduler.add_worker(capacity(**changes))
    return scheduler


def group(request_id: str, prompt: range, max_tokens: int = 4, **options: object) -> SequenceGroup:
    stop = StopCondition(max_tokens, ignore_eos=True)
    return SequenceGroup(request_id, u32(*prompt), stop, **options)  # type: ignore[arg-type]


def answer(batch: StepBatch, failures: tuple[int, ...] = ()) -> StepOutput:
    rows = np.concatenate((batch.rows[batch.sample_mask], batch.fork_rows))
    rows = rows[~np.isin(rows, failures)]
    return StepOutput(
        batch.step_id,
        rows,
        rows + 500,
        [RowError(row, "NaN in the logits") for row in failures],
        worker_id=batch.worker_id,
    )


def test_status_moves_only_along_the_table() -> None:
    for start, allowed in TRANSITIONS.items():
        for end in SequenceStatus:
            seq = Sequence(group("a", range(2)), 0, SequenceData(EMPTY, EMPTY), 1, status=start)
            if end in allowed:
                seq.move_to(end)
                assert seq.status is end
            else:
                with pytest.raises(IllegalTransitionError, match=f"{start.name} -> {end.name}"):
                    seq.move_to(end)


def test_a_full_queue_refuses_until_it_is_shorter() -> None:
    scheduler = make(SchedulerConfig(max_waiting=2), max_num_seqs=1)
    for name in "ab":
        scheduler.add_group(group(name, range(4)), 0.0)
    with pytest.raises(QueueFullError, match="limit is 2"):
        scheduler.add_group(group("c", range(4)), 0.0)
    scheduler.schedule(0.0)
    scheduler.add_group(group("c", range(4)), 0.0)
    check_scheduler(scheduler)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(NeverFitsError, match="empty") as caught:
        make().add_group(group("a", range(0)), 0.0)
    assert caught.value.field == "prompt"


def test_workers_must_agree_and_sizes_must_work() -> None:
    scheduler = make()
    with pytest.raises(WorkerMismatchError, match="block_size 8, but worker w has 4"):
        scheduler.add_worker(capacity("x", block_size=8))
    with pytest.raises(WorkerMismatchError, match="max_model_len"):
        scheduler.add_worker(capacity("x", max_model_len=32))
    with pytest.raises(ValueError, match="at least max_num_seqs"):
        scheduler.add_worker(capacity("x", max_num_batched_tokens=7))
    with pytest.raises(ValueError, match="has already joined"):
        scheduler.add_worker(capacity("w"))


def test_workers_of_another_size_may_join_when_no_request_is_left() -> None:
    scheduler = make()
    scheduler.add_group(group("a", range(4)), 0.0)
    scheduler.remove_worker("w")
    with pytest.raises(WorkerMismatchError, match="block_size 8"):
        scheduler.add_worker(capacity("x", block_size=8))
    scheduler.abort_group("a", FinishReason.ABORTED)
    scheduler.add_worker(capacity("x", block_size=8, max_model_len=128))
    with pytest.raises(WorkerMismatchError, match="block_size 4, but worker x has 8"):
        scheduler.add_worker(capacity("y", block_size=4, max_model_len=128))
    scheduler.add_group(group("b", range(70)), 0.0)
    check_scheduler(scheduler)


@pytest.mark.parametrize("order", [[1, 0], [0, 1, 1], [0, 0]])
def test_an_answer_whose_rows_are_out_of_order_or_come_twice_is_refused(order: list[int]) -> None:
    scheduler = make()
    for name, start in (("a", 0), ("b", 10)):
        scheduler.add_group(group(name, range(start, start + 3), 30), 0.0)
    for now in (0.0, 0.1, 0.2):  # the last one is a step of a run
        (batch,) = scheduler.schedule(now)
        rows = batch.rows[order]
        with pytest.raises(UnexpectedStepError, match=r"with rows .*, expected"):
            scheduler.update(StepOutput(batch.step_id, rows, rows + 500, worker_id="w"), now)
        scheduler.update(answer(batch), now)


def test_an_answer_out_of_order_or_for_other_rows_is_refused_and_changes_nothing() -> None:
    scheduler = make()
    scheduler.add_group(group("a", range(4)), 0.0)
    (batch,) = scheduler.schedule(0.0)
    for step_id, row in ((7, 0), (1, 5)):
        with pytest.raises(UnexpectedStepError):
            scheduler.update(StepOutput(step_id, u32(row), u32(1), worker_id="w"), 0.0)
    closed_row = RowError(5, "no such row in this step")
    with pytest.raises(UnexpectedStepError, match="failure of row 5, which the step did not compute"):
        scheduler.update(StepOutput(1, u32(0), u32(1), [closed_row], worker_id="w"), 0.0)
    deltas = scheduler.update(answer(batch), 0.0)
    assert deltas.token_ids.tolist() == [500]
    assert not len(scheduler.update(StepOutput(1, EMPTY, EMPTY, worker_id="gone"), 0.0).token_ids)


def test_without_prefix_caching_every_prompt_is_computed() -> None:
    scheduler = make(SchedulerConfig(prefix_caching=False))
    for name in ("a", "b"):
        scheduler.add_group(group(name, range(8), max_tokens=1), 0.0)
        (batch,) = scheduler.schedule(0.0)
        assert batch.opens[0].num_computed_tokens == 0
        scheduler.update(answer(batch), 0.0)
        check_scheduler(scheduler)
    assert scheduler.take_prefix_events() == []
    assert scheduler.stats().counts.prefix_cache_hits == 0


def fail_all(scheduler: Scheduler, batch: StepBatch) -> list[tuple[str, FinishReason]]:
    deltas = scheduler.update(answer(batch, failures=tuple(batch.rows.tolist())), 0.0)
    check_scheduler(scheduler)
    return [(finished.group.request_id, finished.reason) for finished in deltas.finished]


def test_a_failed_row_is_tried_once_more_on_another_worker() -> None:
    scheduler = make()
    scheduler.add_group(group("a", range(6)), 0.0)
    (batch,) = scheduler.schedule(0.0)
    scheduler.add_worker(capacity("other"))
    assert fail_all(scheduler, batch) == []
    batches = [batch for batch in scheduler.schedule(0.0) if len(batch.rows)]
    assert [(b.worker_id, b.opens[0].group.request_id) for b in batches] == [("other", "a")]
    assert scheduler.stats().counts.migrations == {MigrationReason.FAILED: 1}
    assert fail_all(scheduler, batches[0]) == [("a", FinishReason.ERROR)]
    assert not scheduler.has_work


def test_a_queue_is_bounded_by_tokens_too() -> None:
    scheduler = make(SchedulerConfig(max_waiting_tokens=60, expected_output_tokens=10), max_num_seqs=1)
    scheduler.add_group(group("runs", range(40), max_tokens=20), 0.0)
    scheduler.schedule(0.0)
    scheduler.add_group(group("first", range(50), max_tokens=14), 0.0)  # an empty queue accepts any request
    with pytest.raises(QueueFullError, match="this request adds 11"):
        scheduler.add_group(group("second", range(10), max_tokens=1), 0.0)
    scheduler.add_group(group("second", range(10), max_tokens=1, takes_over=True), 0.0)  # it was accepted before
    scheduler.add_group(group("third", range(10), max_tokens=1, tenant_id="b"), 0.0)  # its share is free
    check_scheduler(scheduler)
    scheduler.abort_group("first", FinishReason.ABORTED)
    scheduler.add_group(group("fourth", range(10), max_tokens=1), 0.0)
    check_scheduler(scheduler)


def busy_scheduler(now: float = 0.0) -> tuple[Scheduler, list[StepBatch]]:
    """One row; ten requests of 20 prompt tokens came together, each takes 1 s, three have run."""
    scheduler = make(max_num_seqs=1, max_num_batched_tokens=16)
    for i in range(10):
        scheduler.add_group(group(f"old{i}", range(20 * i, 20 * i + 20), max_tokens=1), now)
    batches = scheduler.schedule(now)
    for _ in range(6):
        now += 0.5
        scheduler.update(answer(batches.pop(0)), now)
        batches += scheduler.schedule(now)
    return scheduler, batches


def test_a_deadline_that_cannot_be_met_is_refused_with_advice() -> None:
    scheduler, _ = busy_scheduler()
    assert scheduler.load().pending_tokens > 6 * 20
    with pytest.raises(UnreachableDeadlineError, match=r"deadline is in 2\.0 s") as caught:
        scheduler.add_group(group("new", range(500, 520), timeout_s=2.0), 3.0)
    assert 3.0 < caught.value.retry_after_s < 9.0
    assert scheduler.stats().counts.refused_deadline == 1
    scheduler.add_group(group("patient", range(500, 520), timeout_s=20.0), 3.0)
    scheduler.add_group(group("urgent", range(500, 520), timeout_s=3.0, priority=-1), 3.0)
    scheduler.add_group(group("stranger", range(500, 520), timeout_s=3.0, tenant_id="b"), 3.0)
    scheduler.add_group(group("accepted before", range(500, 520), timeout_s=1.0, takes_over=True), 3.0)
    check_scheduler(scheduler)


def test_no_deadline_is_refused_on_a_cold_estimate() -> None:
    scheduler = make(max_num_seqs=1)
    for i in range(100):
        scheduler.add_group(group(f"{i}", range(20), timeout_s=0.001), 0.0)
    assert scheduler.stats().counts.refused_deadline == 0


def test_cached_tokens_do_not_count_as_work() -> None:
    scheduler = make(max_num_seqs=1, max_num_batched_tokens=16)
    now = 0.0
    for i in range(4):
        scheduler.add_group(group(f"{i}", range(100 * i, 100 * i + 40), max_tokens=1), now)
        while scheduler.has_work:
            for batch in scheduler.schedule(now):
                now += 1.0
                scheduler.update(answer(batch), now)
    with pytest.raises(UnreachableDeadlineError):
        scheduler.add_group(group("cold", range(900, 940), max_tokens=1, timeout_s=1.5), now)
    scheduler.add_group(group("warm", range(300, 340), max_tokens=1, timeout_s=1.5), now)


def test_few_requests_are_computed_beyond_their_deadline() -> None:
    """Load of 1.3: half of the requests have 2 s, of which 100 outputs take 1 s."""
    scheduler = make(num_blocks=1024, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=256)
    rng, now = np.random.default_rng(3), 0.0
    arrivals = np.cumsum(rng.exponential(1 / (1.3 * 14), 1100)).tolist()
    fates = {"in time": 0, "beyond": 0, "not computed": 0}
    while arrivals or scheduler.has_work:
        while arrivals and arrivals[0] <= now:
            arrivals.pop(0)
            timeout_s = 2.0 if rng.random() < 0.5 else None
            new = group(f"{len(arrivals)}", range(20), max_tokens=100, timeout_s=timeout_s)
            with suppress(UnreachableDeadlineError):
                scheduler.add_group(new, now)
        batches = scheduler.schedule(now)
        ends = scheduler.take_expired().finished
        now += 0.01 + 0.00005 * sum(int(batch.query_lens.sum()) for batch in batches)
        for batch in batches:
            ends += scheduler.update(answer(batch), now).finished
        for end in ends:
            if end.group.timeout_s is not None:
                is_in_time = now <= end.group.deadline
                fates["not computed" if not end.num_output_tokens else "in time" if is_in_time else "beyond"] += 1
    assert fates["beyond"] < 10
    assert fates["in time"] > 300


def chats_beside_long_prompts(
    num_long: int, chats_at: tuple[float, ...], **config: float
) -> tuple[dict[str, float], float]:
    """3,000 tokens/s, 2,048 per step. Prompts of 100,000 tokens come at once, chats of 50 later. Returns when the first
    token of each came, since its request, and the longest time between two tokens of a chat.
    """
    sizes = {"num_blocks": 14_000, "block_size": 16, "max_num_batched_tokens": 2048, "max_model_len": 100_200}
    scheduler, now = make(SchedulerConfig(**config), **sizes, pipeline_depth=2), 0.0
    requests = [("long", i, 0.0, 100_000) for i in range(num_long)]
    requests += [("chat", i, at, 50) for i, at in enumerate(chats_at)]
    first, newest, gap, num_added = dict[str, float](), dict[int, float](), 0.0, 0
    in_flight: list[StepBatch] = []
    while num_added < len(requests) or scheduler.has_work:
        for kind, i, at, size in requests[num_added:]:
            if at <= now:
                prompt = range(200_000 * num_added, 200_000 * num_added + size)
                scheduler.add_group(group(f"{kind} {i}", prompt, 100, handle=num_added), at)
                num_added += 1
        in_flight += scheduler.schedule(now)
        batch = in_flight.pop(0)
        now += 0.002 + int(batch.query_lens.sum()) / 3000
        for handle in scheduler.update(answer(batch), now).handles.tolist():
            kind, i, at, _ = requests[handle]
            first.setdefault(f"{kind} {i}", now - at)
            gap = max(gap, now - newest.get(handle, now)) if kind == "chat" else gap
            newest[handle] = now
    check_scheduler(scheduler)
    return first, gap


def test_a_chat_does_not_wait_for_a_long_prompt() -> None:
    """It waits for the steps in flight and its own. The long prompt is delayed only by what the chats compute."""
    first, _ = chats_beside_long_prompts(1, (1.0, 10.0, 20.0))
    alone, _ = chats_beside_long_prompts(1, ())
    assert max(first[f"chat {i}"] for i in range(3)) < 3 * 2048 / 3000
    assert first["long 0"] < alone["long 0"] + 3 * 150 / 3000 + 0.5


def test_long_prompts_are_computed_one_after_the_other() -> None:
    first, _ = chats_beside_long_prompts(2, (1.0, 40.0))
    assert max(first["chat 0"], first["chat 1"]) < 3 * 2048 / 3000
    assert first["long 0"] < 35 < 65 < first["long 1"] < 70


def test_the_longest_step_beside_streams_is_bounded() -> None:
    """Once the time of a prompt token is measured, which the first step does. Prompts alone have whole steps."""
    first, gap = chats_beside_long_prompts(1, (1.0, 10.0, 20.0), max_step_s=0.1)
    assert gap < 0.11
    assert max(first["chat 1"], first["chat 2"]) < 3 * 2048 / 3000
    assert first["long 0"] < 37


def test_a_slow_step_or_long_answers_of_others_refuse_no_short_request() -> None:
    scheduler = make()
    scheduler.add_group(group("first", range(8), max_tokens=8), 0.0)
    now = 0.0
    while scheduler.has_work:  # steps of a worker that has just started
        for batch in scheduler.schedule(now):
            now += 3.0
            scheduler.update(answer(batch), now)
    scheduler.add_group(group("forced", range(8), max_tokens=40, timeout_s=10.0), 100.0)
    scheduler.add_group(group("running", range(20, 28), max_tokens=40), 100.0)
    for batch in scheduler.schedule(100.0):
        scheduler.update(answer(batch), 101.0)
    short = SequenceGroup("short", u32(*range(8)), StopCondition(40), timeout_s=2.0)
    scheduler.add_group(short, 101.0)  # eight tokens, the mean, take 24 s
    scheduler.schedule(101.0)
    assert not scheduler.take_expired().finished
    with pytest.raises(UnreachableDeadlineError):
        scheduler.add_group(group("long", range(8), max_tokens=40, timeout_s=10.0), 101.0)


def drain_of_a_full_fleet(steps: int, step_s: float) -> tuple[Scheduler, list[int]]:
    """One of two full workers drains beside a waiting request. Returns how many rows it has after each step."""
    scheduler = make(max_num_seqs=2)
    scheduler.add_worker(capacity("v", max_num_seqs=2))
    for i in range(5):
        scheduler.add_group(group(f"r{i}", range(i * 10, i * 10 + 5), max_tokens=5 + 3 * i), 0.0)
    found, batches = [], scheduler.schedule(0.0)
    scheduler.drain_worker("w", timeout_s=10.0)
    for step in range(steps):
        for batch in batches:
            scheduler.update(answer(batch), step * step_s)
        batches = scheduler.schedule(step * step_s)
        check_scheduler(scheduler)
        found.append(scheduler.stats().workers[0].rows_used)
    return scheduler, found


def test_rows_stay_on_a_draining_worker_until_another_one_has_room() -> None:
    scheduler, found = drain_of_a_full_fleet(30, 0.01)
    assert found[:3] == [2, 2, 2]
    assert found[-1] == 0
    assert not scheduler.has_work


def test_rows_leave_a_draining_worker_when_its_time_ends() -> None:
    _, found = drain_of_a_full_fleet(3, 2.6)
    assert found == [2, 2, 0]


def crowded_scheduler(urgent: SequenceGroup) -> Scheduler:
    """One urgent request runs beside many others; a second urgent one has no room beside the first."""
    scheduler = make(SchedulerConfig(watermark=0.0), num_blocks=40, max_model_len=160, max_num_batched_tokens=256)
    scheduler.add_group(group("first", range(8), max_tokens=88, priority=-1), 0.0)
    for i in range(12):
        scheduler.add_group(group(f"patient{i}", range(1000 * i + 100, 1000 * i + 126), 10, priority=1), 0.0)
    for _ in range(3):
        for batch in scheduler.schedule(0.0):
            scheduler.update(answer(batch), 0.0)
    scheduler.add_group(urgent, 0.0)
    return scheduler


def test_nothing_is_preempted_for_a_request_without_room_even_then() -> None:
    urgent = group("urgent", range(5000, 5100), max_tokens=30, priority=-1)  # too many blocks beside the first
    scheduler = crowded_scheduler(urgent)
    ended = []
    while scheduler.has_work:
        for batch in scheduler.schedule(0.0):
            ended += [end.group.request_id for end in scheduler.update(answer(batch), 0.0).finished]
        check_scheduler(scheduler)
    assert ended.index("first") < ended.index("urgent")
    assert scheduler.stats().counts.num_preemptions == 0


def test_a_sequence_without_room_beside_equals_is_not_asked_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = crowded_scheduler(group("urgent", range(5000, 5100), max_tokens=30, priority=-1))
    checks = count_calls(monkeypatch, WorkerState, "check_preempting")
    for _ in range(80):
        for batch in scheduler.schedule(0.0):
            scheduler.update(answer(batch), 0.0)
    assert scheduler.stats().num_waiting == 1
    assert 0 < len(checks) <= 16, "again when a row ends, and as the projected peak falls"
