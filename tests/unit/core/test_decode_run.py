"""A new run of decode steps continues exactly where the last step ended."""

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup, StopCondition
from step_protocol.messages import StepBatch, StepOutput
from tests.invariants import check_scheduler


def test_a_row_that_lacked_a_block_continues_where_it_was() -> None:
    scheduler = Scheduler(SchedulerConfig(watermark=0.0))
    scheduler.add_worker(WorkerCapacity("w", 1, 16, 4, 1, 16, 64, pipeline_depth=4))
    scheduler.add_group(SequenceGroup("r", np.array([5, 6, 7], np.uint32), StopCondition(20)), 0.0)
    in_flight = scheduler.schedule(0.0)  # contexts 0, 3, 4, 5
    worker = scheduler._workers["w"]
    worker.in_flight[-1].releases.append(worker.pool.allocate(worker.pool.num_free))

    def answer_oldest() -> list[StepBatch]:
        batch = in_flight.pop(0)
        sampled = batch.rows[batch.sample_mask]
        scheduler.update(StepOutput(batch.step_id, sampled, np.full(len(sampled), 9, np.uint32), worker_id="w"), 0.0)
        return scheduler.schedule(0.0)

    in_flight += answer_oldest() + answer_oldest()  # contexts 6 and 7, which fills the block
    assert answer_oldest() == []  # no block is free yet
    (batch,) = answer_oldest()[:1]  # the step that named the blocks is answered
    assert batch.context_lens.tolist() == [8]
    check_scheduler(scheduler)
