"""Log probabilities in the core: columns follow their tokens, and each prompt position is delivered once."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.errors import UnexpectedStepError
from scheduler_svc.core.messages import Deltas, PromptDeltas, merge_deltas, split_deltas
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.gateways import wire
from step_protocol.features import LogprobColumns, PromptLogprobs
from step_protocol.messages import StepBatch, StepOutput
from tests.builders import make_capacity, make_group, make_scheduler
from tests.invariants import check_scheduler


def u32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def columns(*lens: int, first: int = 0) -> LogprobColumns:
    """Columns whose entries are numbered from `first`."""
    entries = np.arange(first, first + sum(lens))
    num_ranks = sum(1 for length in lens if length)
    return LogprobColumns(u32(*lens), -entries.astype(np.float32), entries.astype(np.uint32), u32(*range(num_ranks)))


def per_token(found: LogprobColumns | None, num_tokens: int) -> list[list[int]]:
    """The ids of each token's entries."""
    if found is None:
        return [[]] * num_tokens
    ends = np.cumsum(found.lens).tolist()
    return [found.token_ids[end - length : end].tolist() for end, length in zip(ends, found.lens.tolist(), strict=True)]


# -- columns -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=5), max_size=5))
def test_merging_and_splitting_keeps_every_entry_with_its_token(parts: list[list[tuple[int, int]]]) -> None:
    """Each part is a list of (owner, entries) per token."""
    deltas, expected, number = [], dict[int, list[tuple[int, list[int]]]](), 0
    for part in parts:
        owners, lens = [owner for owner, _ in part], [length for _, length in part]
        handles = u32(*range(number, number + len(part)))
        logprobs = columns(*lens, first=100 * number) if any(lens) else None
        for token, ids in zip(part, per_token(logprobs, len(part)), strict=True):
            expected.setdefault(token[0], []).append((number, ids))
            number += 1
        zeros = np.zeros_like(handles)
        deltas.append(Deltas(u32(*owners), handles, zeros, zeros, zeros, logprobs=logprobs))
    if not deltas:
        return
    found = dict[int, list[tuple[int, list[int]]]]()
    for owner, share in split_deltas(merge_deltas(deltas)).items():
        entries = per_token(share.logprobs, len(share.handles))
        found[owner] = list(zip(share.handles.tolist(), entries, strict=True))
    assert found == expected


def test_prompt_tokens_are_merged_in_order_and_split_by_owner() -> None:
    nothing = [u32()] * 5
    first = Deltas(*nothing, prompt=PromptDeltas(u32(1, 2), u32(7, 8), u32(1, 1), columns(1, 2)))
    second = Deltas(*nothing, prompt=PromptDeltas(u32(1), u32(7), u32(2), columns(1, first=50)))
    shares = split_deltas(merge_deltas([first, Deltas(*nothing), second]))
    assert sorted(shares) == [1, 2]
    mine, other = shares[1].prompt, shares[2].prompt
    assert mine is not None
    assert other is not None
    assert (mine.positions.tolist(), per_token(mine.columns, 2)) == ([1, 2], [[0], [50]])
    assert (other.handles.tolist(), per_token(other.columns, 1)) == ([8], [[1, 2]])


def test_a_message_without_log_probabilities_has_no_columns() -> None:
    message = wire.deltas_to_proto([Deltas(u32(1), u32(1), u32(0), u32(0), u32(5))])
    assert not message.HasField("logprobs")
    assert not message.HasField("prompt_logprobs")


# -- prompt positions --------------------------------------------------------------------------------------------------


class Worker:
    """Answers steps as a worker does, and collects the delivered prompt positions of each request."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.delivered: dict[int, list[int]] = {}
        self.first_token_after: dict[int, int] = {}  # number of delivered positions at the first token
        self._prompt_lens: dict[tuple[str, int], int] = {}  # by (worker, row), of rows with prompt_logprobs
        self.computed: dict[int, int] = {}  # context of the first step of each row, by handle

    def answer(self, batch: StepBatch) -> None:
        for item in batch.opens:
            self._prompt_lens.pop((batch.worker_id, item.row), None)
            if item.prompt_logprobs is not None:
                self._prompt_lens[batch.worker_id, item.row] = item.prompt_len
                self.computed[item.group.handle] = item.num_computed_tokens
        rows, positions = list[int](), list[int]()
        steps = zip(batch.rows.tolist(), batch.context_lens.tolist(), batch.query_lens.tolist(), strict=True)
        for row, context, count in steps:
            end = min(context + count, self._prompt_lens.get((batch.worker_id, row), 0) - 1)
            positions += range(context + 1, end + 1)
            rows += [row] * max(0, end - context)
        found = PromptLogprobs(u32(*rows), u32(*positions), columns(*[1] * len(rows))) if rows else None
        sampled = np.concatenate((batch.rows[batch.sample_mask], batch.fork_rows))
        output = StepOutput(batch.step_id, sampled, np.full_like(sampled, 9), worker_id=batch.worker_id)
        output.add(found)
        self.note(self.scheduler.update(output, 0.0))

    def note(self, deltas: Deltas) -> None:
        if deltas.prompt is not None:
            for handle, position in zip(deltas.prompt.handles.tolist(), deltas.prompt.positions.tolist(), strict=True):
                self.delivered.setdefault(handle, []).append(position)
        for handle in deltas.handles.tolist():
            self.first_token_after.setdefault(handle, len(self.delivered.get(handle, [])))


@pytest.mark.parametrize("seed", range(20))
def test_each_position_is_delivered_once_before_the_first_token(seed: int) -> None:
    """A small pool preempts; workers leave and join; requests fork, resume and share prefixes."""
    rng = random.Random(seed)
    sizes = {"num_blocks": 20, "max_num_batched_tokens": 12, "pipeline_depth": 2}
    scheduler = make_scheduler(*(make_capacity(f"w{i}", **sizes) for i in range(2)), worker_patience_s=1e9)
    worker, lengths, epoch = Worker(scheduler), dict[int, int](), 1
    in_flight: list[StepBatch] = []
    for handle in range(8):
        lengths[handle] = rng.randint(1, 40)
        group = make_group(
            lengths[handle], f"r{handle}", handle=handle, max_tokens=rng.choice((0, 1, 12)), n=rng.choice((1, 1, 3)),
            priority=rng.randint(0, 2), prompt_logprobs=rng.choice((0, 2)),
        )  # fmt: skip
        worker.note(scheduler.add_group(group, 0.0))
        for _ in range(rng.randint(0, 4)):
            in_flight += scheduler.schedule(0.0)
            if in_flight:
                worker.answer(in_flight.pop(0))
        if rng.random() < 0.3:
            epoch += 1
            scheduler.remove_worker("w1")
            in_flight = [batch for batch in in_flight if batch.worker_id != "w1"]
            scheduler.add_worker(make_capacity("w1", worker_epoch=epoch, **sizes))
        check_scheduler(scheduler)
    while scheduler.has_work:
        in_flight += scheduler.schedule(0.0)
        worker.answer(in_flight.pop(0))
    for handle, length in lengths.items():
        assert worker.delivered.get(handle, []) == list(range(1, length))
        assert worker.first_token_after.get(handle, length - 1) == length - 1


def test_a_scored_prompt_is_published_but_not_read_from_the_cache() -> None:
    scheduler = make_scheduler()
    worker = Worker(scheduler)
    for handle, options in enumerate(({}, {"prompt_logprobs": 0}, {})):
        worker.note(scheduler.add_group(make_group(20, f"r{handle}", handle=handle, max_tokens=1, **options), 0.0))
        while scheduler.has_work:
            for batch in scheduler.schedule(0.0):
                worker.answer(batch)
    assert worker.computed == {1: 0}
    assert worker.delivered == {1: list(range(1, 20))}
    assert scheduler.stats().counts.prefix_cache_hits == 16, "only the last request reads the cache"


def test_prompt_logprobs_of_an_unknown_row_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add_group(make_group(4, prompt_logprobs=0), 0.0)
    batch = scheduler.schedule(0.0)[0]
    found = PromptLogprobs(u32(5), u32(1), columns(1))
    output = StepOutput(batch.step_id, batch.rows, batch.rows, parts=(found,), worker_id=batch.worker_id)
    with pytest.raises(UnexpectedStepError, match="prompt_logprobs of row 5, which the step did not compute"):
        scheduler.update(output, 0.0)


def test_a_leading_sample_that_ends_early_does_not_take_the_prompt_along() -> None:
    """Its step completes the prompt for the other samples too."""
    scheduler = make_scheduler()
    worker = Worker(scheduler)
    scheduler.add_group(make_group(20, "r", handle=1, max_tokens=4, n=3, prompt_logprobs=0), 0.0)
    (batch,) = scheduler.schedule(0.0)
    worker.note(scheduler.finish_sample("r", 0, FinishReason.STOP))
    worker.answer(batch)
    check_scheduler(scheduler)
    while scheduler.has_work:
        for batch in scheduler.schedule(0.0):
            worker.answer(batch)
    assert worker.delivered == {1: list(range(1, 20))}
