"""Bugs that the simulation found in the core, each as the shortest sequence of events that shows it."""

from __future__ import annotations

import pytest

from request_fields.parameters import BeamParams, EarlyStopping
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import WorkerMismatchError
from scheduler_svc.core.sequence import FinishReason, StopCondition
from tests.builders import make_capacity
from tests.sim.cluster import ROOT_SALT, Cluster, Request


class Story(Cluster):
    """One lazy worker, and events in the order in which the test writes them."""

    def __init__(self, *, block_size: int, **sizes: int) -> None:
        config = SchedulerConfig(root_salt=ROOT_SALT, watermark=0.0)
        super().__init__(config, block_size=block_size, max_model_len=64, vocab_size=100)
        self.worker = self.join(make_capacity("w", block_size=block_size, max_model_len=64, **sizes), is_lazy=True)

    def request(self, prompt: range, max_tokens: int, n: int = 1, beams: BeamParams | None = None) -> Request:
        request = self.make_request(list(prompt), StopCondition(max_tokens), n=n, beams=beams)
        self.submit(request)
        return request

    def answer_next(self) -> None:
        self.answer(self.worker)
        self.check()

    def finish(self) -> None:
        self.settle(lambda busy: busy[0])
        self.check_end()


def test_a_failure_in_a_step_of_a_row_that_was_closed_meanwhile() -> None:
    """Its blocks were committed as cached prefixes although the failed step had not written them."""
    story = Story(block_size=2, pipeline_depth=3, max_num_seqs=4, max_num_batched_tokens=4)
    first = story.request(range(12), 1)
    story.schedule()
    story.answer_next()
    story.abort(first)
    story.worker.fail_next = "lost"
    story.answer_next()
    again = story.request(range(12), 1)
    story.finish()
    assert again.finished == [FinishReason.LENGTH]


def test_a_sample_that_forked_from_a_prompt_whose_earlier_chunk_failed() -> None:
    """The prompt shares no full block, so no digest showed that its samples start from garbage."""
    story = Story(block_size=16, pipeline_depth=2, max_num_seqs=4, max_num_batched_tokens=5)
    request = story.request(range(10), 4, n=2)
    story.schedule()
    story.worker.fail_next = "lost"
    story.finish()
    assert request.finished == [FinishReason.ERROR, FinishReason.LENGTH]


def test_a_block_is_not_committed_in_the_step_that_fills_it_again() -> None:
    """The pending commit of an evicted block went out after the block had been given away for the same content."""
    story = Story(block_size=4, num_blocks=4)
    story.request(range(16), 1)
    story.schedule()
    story.answer_next()
    story.request(range(16), 1)
    story.finish()


def test_refusals_of_a_worker_end_when_it_rejoins() -> None:
    """A refusal from before the restart still counted: the request waited for ever."""
    story = Story(block_size=4, num_blocks=8)
    big = story.request(range(20), 12)
    story.schedule()
    story.answer_next()
    small = story.request(range(30, 46), 12)
    story.schedule()
    story.reconnect(story.worker)
    story.abort(big)
    story.finish()
    assert small.finished == [FinishReason.LENGTH]


def test_adopted_blocks_are_evicted_tails_first() -> None:
    """The heads were evicted first, which made their tails useless."""
    story = Story(block_size=2, num_blocks=5)
    story.request(range(8), 1)
    story.finish()
    story.reconnect(story.worker)
    story.request(range(50, 54), 1)
    story.finish()
    again = story.request(range(8), 1)
    story.finish()
    assert again.num_cached == {0: 6}


def test_sizes_of_the_model_outlive_its_workers() -> None:
    """After the last worker left, one with another block size could join: waiting requests had old digests."""
    story = Story(block_size=4)
    story.request(range(8), 4)
    story.lose(story.worker)
    with pytest.raises(WorkerMismatchError, match="block_size 8"):
        story.scheduler.add_worker(make_capacity("w", block_size=8, max_model_len=64))
    with pytest.raises(WorkerMismatchError, match="max_model_len 65"):
        story.scheduler.add_worker(make_capacity("w", block_size=4, max_model_len=65))


def test_beams_of_a_recurrent_model_need_room_without_a_shared_prompt() -> None:
    """Beams that are computed again found no snapshot at the end of the prompt, and no blocks to do without it: the
    search began again for ever.
    """
    beams = BeamParams(3, 3, 1.0, EarlyStopping.FALSE)
    story = Story(block_size=2, num_blocks=20, num_snapshots=1)
    refused = story.request(range(12), 3, beams=beams)
    assert refused.request_id not in story.open
    story = Story(block_size=2, num_blocks=21, num_snapshots=1)
    served = story.request(range(12), 3, beams=beams)
    story.schedule()
    story.answer_next()
    story.reconnect(story.worker)
    story.finish()
    assert None not in served.finished
