"""Rules of the Scheduler that transcripts do not show: refusals, failed rows, adoption, steady state."""

import numpy as np
import pytest

from prefix_index.hashing import extend_digests, root_digest
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import (
    NeverFitsError,
    QueueFullError,
    UnexpectedStepError,
    WorkerMismatchError,
)
from scheduler_svc.core.messages import EMPTY, CachedBlock, RowFailure, StepBatch, StepOutput, WorkerCapacity
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


def u32(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.uint32)


def capacity(worker_id: str = "w", **changes: int) -> WorkerCapacity:
    sizes = {"num_blocks": 32, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64}
    return WorkerCapacity(worker_id, 1, **{**sizes, "pipeline_depth": 1, **changes})


def make(config: SchedulerConfig | None = None, **changes: int) -> Scheduler:
    scheduler = Scheduler(config or SchedulerConfig())
    scheduler.add_worker(capacity(**changes), 0.0)
    return scheduler


def group(request_id: str, prompt: range, max_tokens: int = 4, **options: object) -> SequenceGroup:
    stop = StopCondition(max_tokens, ignore_eos=True)
    return SequenceGroup(request_id, u32(*prompt), stop, **options)  # type: ignore[arg-type]


def answer(batch: StepBatch, failures: tuple[int, ...] = ()) -> StepOutput:
    rows = np.concatenate((batch.rows[batch.sample_mask], batch.fork_rows))
    rows = rows[~np.isin(rows, failures)]
    return StepOutput(
        batch.worker_id, batch.step_id, rows, rows + 500, [RowFailure(row, "NaN in the logits") for row in failures]
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


def test_a_full_queue_refuses_and_takes_again_when_it_is_shorter() -> None:
    scheduler = make(SchedulerConfig(max_waiting=2), max_num_seqs=1)
    for name in "ab":
        scheduler.add_group(group(name, range(4)), 0.0)
    with pytest.raises(QueueFullError, match="limit is 2"):
        scheduler.add_group(group("c", range(4)), 0.0)
    scheduler.schedule(0.0)
    scheduler.add_group(group("c", range(4)), 0.0)
    scheduler.check_invariants()


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(NeverFitsError, match="empty") as caught:
        make().add_group(group("a", range(0)), 0.0)
    assert caught.value.field == "prompt"


def test_workers_must_agree_and_sizes_must_work() -> None:
    scheduler = make()
    with pytest.raises(WorkerMismatchError, match="block_size 8, but w has 4"):
        scheduler.add_worker(capacity("x", block_size=8), 0.0)
    with pytest.raises(WorkerMismatchError, match="max_model_len"):
        scheduler.add_worker(capacity("x", max_model_len=32), 0.0)
    with pytest.raises(ValueError, match="below max_num_seqs"):
        scheduler.add_worker(capacity("x", max_num_batched_tokens=7), 0.0)
    with pytest.raises(ValueError, match="is here already"):
        scheduler.add_worker(capacity("w"), 0.0)


def test_an_answer_out_of_order_or_for_other_rows_is_refused_and_changes_nothing() -> None:
    scheduler = make()
    scheduler.add_group(group("a", range(4)), 0.0)
    (batch,) = scheduler.schedule(0.0)
    for step_id, row in ((7, 0), (1, 5)):
        with pytest.raises(UnexpectedStepError):
            scheduler.update(StepOutput("w", step_id, u32(row), u32(1)), 0.0)
    deltas = scheduler.update(answer(batch), 0.0)
    assert deltas.token_ids.tolist() == [500]
    assert not len(scheduler.update(StepOutput("gone", 1, EMPTY, EMPTY), 0.0).token_ids)


def test_a_row_without_token_has_failed_and_others_go_on() -> None:
    scheduler = make()
    for name, start in (("a", 0), ("b", 50)):
        scheduler.add_group(group(name, range(start, start + 4)), 0.0)
    (batch,) = scheduler.schedule(0.0)
    deltas = scheduler.update(StepOutput("w", batch.step_id, u32(1), u32(9)), 0.0)
    assert [(f.group.request_id, f.reason) for f in deltas.finished] == [("a", FinishReason.ERROR)]
    assert deltas.token_ids.tolist() == [9]
    scheduler.check_invariants()
    (batch,) = scheduler.schedule(0.0)
    assert batch.rows.tolist() == [1]


def test_rows_that_share_what_a_failed_row_computed_are_computed_again() -> None:
    scheduler = make()
    scheduler.add_group(group("bad", range(10)), 0.0)
    scheduler.add_group(group("good", range(10), max_tokens=1), 0.0)
    (batch,) = scheduler.schedule(0.0)
    assert batch.opens[1].num_computed_tokens == 8  # shares two blocks of the same step
    deltas = scheduler.update(answer(batch, failures=(0,)), 0.0)
    scheduler.check_invariants()
    assert [(f.group.request_id, f.message) for f in deltas.finished] == [("bad", "NaN in the logits")]
    assert not len(deltas.token_ids)  # good's token came from blocks that nobody filled
    (batch,) = scheduler.schedule(0.0)
    assert (batch.opens[0].group.request_id, batch.opens[0].num_computed_tokens) == ("good", 0)
    deltas = scheduler.update(answer(batch), 0.0)
    assert [(f.group.request_id, f.reason) for f in deltas.finished] == [("good", FinishReason.LENGTH)]


def test_samples_of_a_failed_prompt_are_computed_on_their_own() -> None:
    scheduler = make()
    scheduler.add_group(group("a", range(6), max_tokens=1, n=3), 0.0)
    (batch,) = scheduler.schedule(0.0)
    deltas = scheduler.update(StepOutput("w", batch.step_id, EMPTY, EMPTY, [RowFailure(0, "NaN")]), 0.0)
    assert [(f.sample_index, f.reason) for f in deltas.finished] == [(0, FinishReason.ERROR)]
    scheduler.check_invariants()
    (batch,) = scheduler.schedule(0.0)
    deltas = scheduler.update(answer(batch), 0.0)
    assert [(f.sample_index, f.reason) for f in deltas.finished] == [(1, FinishReason.LENGTH), (2, FinishReason.LENGTH)]
    assert not scheduler.has_work


def test_adopted_blocks_are_hits_after_a_comparison_of_tokens() -> None:
    config = SchedulerConfig(root_salt=b"model")
    digests: list[bytes] = []
    extend_digests(digests, root_digest(b"model", 4, b""), u32(*range(8)), 4)
    scheduler = Scheduler(config)
    blocks = [CachedBlock(7, digests[0], u32(0, 1, 2, 3)), CachedBlock(3, digests[1], u32(4, 5, 6, 99))]
    scheduler.add_worker(capacity(), 0.0, blocks)
    scheduler.add_group(group("a", range(9)), 0.0)
    (batch,) = scheduler.schedule(0.0)
    assert batch.opens[0].num_computed_tokens == 4  # block 3 holds other tokens than its digest says
    assert batch.opens[0].block_table[0] == 7
    scheduler.check_invariants()
    with pytest.raises(ValueError, match="block 99"):
        scheduler.add_worker(capacity("x"), 0.0, [CachedBlock(99, digests[0], u32(0, 1, 2, 3))])


def test_salts_keep_requests_apart() -> None:
    scheduler = make()
    scheduler.add_group(group("a", range(8), max_tokens=1), 0.0)
    (batch,) = scheduler.schedule(0.0)
    scheduler.update(answer(batch), 0.0)
    scheduler.add_group(group("b", range(8), max_tokens=1, root_key=b"other"), 0.0)
    (batch,) = scheduler.schedule(0.0)
    assert batch.opens[0].num_computed_tokens == 0


def test_a_drained_worker_finishes_and_takes_nothing_new() -> None:
    scheduler = make()
    scheduler.add_group(group("a", range(4), max_tokens=2), 0.0)
    (batch,) = scheduler.schedule(0.0)
    scheduler.drain_worker("w", 0.0)
    scheduler.add_group(group("b", range(4), max_tokens=2), 0.0)
    scheduler.update(answer(batch), 0.0)
    (batch,) = scheduler.schedule(0.0)
    deltas = scheduler.update(answer(batch), 0.0)
    assert [f.group.request_id for f in deltas.finished] == ["a"]
    assert not any(len(batch.rows) for batch in scheduler.schedule(0.0))
    scheduler.add_worker(capacity("late"), 0.0)
    batches = [batch for batch in scheduler.schedule(0.0) if len(batch.rows)]
    assert [(b.worker_id, b.opens[0].group.request_id) for b in batches] == [("late", "b")]


def test_a_returned_sequence_never_exceeds_its_limit() -> None:
    scheduler = make(pipeline_depth=3)
    scheduler.add_group(group("a", range(4), max_tokens=2), 0.0)
    batches = scheduler.schedule(0.0)
    assert [batch.query_lens.tolist() for batch in batches] == [[4], [1]]  # a third would compute beyond max_tokens


def test_prefix_events_tell_what_an_index_should_hold() -> None:
    scheduler = make(num_blocks=4)
    scheduler.add_group(group("a", range(8), max_tokens=1), 0.0)
    (batch,) = scheduler.schedule(0.0)
    assert scheduler.take_prefix_events() == []
    scheduler.update(answer(batch), 0.0)
    events = scheduler.take_prefix_events()
    assert [event.is_cached for event in events] == [True, True]
    assert scheduler.cached_prefixes() == events
    scheduler.remove_worker("w", 0.0)
    assert [event.is_cached for event in scheduler.take_prefix_events()] == [False, False]
