"""The rows of the scheduler's metrics: derived counts, gauges, and at least one row for every metric of the core."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from quire.v1 import types_pb2

from scheduler_svc.core.messages import Counts
from scheduler_svc.metrics import COUNTS, GAUGES, SPECS, SchedulerReader
from scheduler_svc.step_loop import StepLoop
from svc_common.observe.metrics import Labels, ServiceMetrics
from tests.builders import make_group
from tests.unit.scheduler.fakes import FakeGateway, FakeWorker, running_loop, settle


class FakePool:
    """A pool with one ready worker of model m."""

    info = types_pb2.ModelInfo(model="m", block_size=4)
    weights = SimpleNamespace(version=3, num_updates=2, num_failed=1)

    def num_in_states(self) -> Counter[str]:
        return Counter(ready=1)


def rows_of(loop: StepLoop) -> dict[tuple[str, Labels], object]:
    reader = SchedulerReader(loop, FakePool(), lambda: 1, None)
    list(ServiceMetrics("scheduler", SPECS, reader).collect())  # raises KeyError for a row without a Spec
    return {(name, labels): value for name, labels, value in reader()}


def test_a_count_of_the_core_is_a_metric_with_its_name_and_help_text() -> None:
    assert COUNTS["prefix_cache_hits"].name == "prefix_cache_hits_total"
    assert COUNTS["prefix_cache_hits"].unit == "tokens"
    assert COUNTS["prefix_cache_hits"].meaning
    assert COUNTS.keys() <= set(Counts.__dataclass_fields__)


async def test_counts_and_gauges_show_what_the_core_did() -> None:
    async with running_loop() as loop:
        worker = FakeWorker(loop)
        worker.join(num_blocks=16)
        owner = loop.attach(FakeGateway())
        for handle in (1, 2):
            loop.submit(make_group(owner=owner, handle=handle, request_id=f"r{handle}", prompt=9, max_tokens=2))
            await worker.answer_all()
        rows = rows_of(loop)
        assert rows["steps_total", ("m",)] == len(worker.sent)
        assert (rows["prefix_cache_queries_total", ("m",)], rows["prefix_cache_hits_total", ("m",)]) == (18, 8)
        assert rows["cache_config_info", ("m", "4", "16")] == 1
        assert rows["kv_blocks", ("m", "w0", "used")] == rows["num_requests_waiting", ("m",)] == 0
        loop.worker_lost(worker, "gone")
        loop.submit(make_group(owner=owner, handle=3, request_id="r3"))
        await settle()
        assert rows_of(loop)["num_requests_unschedulable", ("m",)] == 1


async def test_tokens_of_the_queue() -> None:
    async with running_loop() as loop:
        worker = FakeWorker(loop)
        worker.join(max_num_seqs=1)
        owner = loop.attach(FakeGateway())
        for handle, prompt in ((1, 9), (2, 7), (3, 5)):
            loop.submit(make_group(owner=owner, handle=handle, request_id=f"r{handle}", prompt=prompt, max_tokens=2))
        await settle()
        assert rows_of(loop)["waiting_tokens", ("m",)] == 9 + 2 + 7 + 2  # the shortest prompt runs first
        await worker.answer_all()
        assert rows_of(loop)["waiting_tokens", ("m",)] == 0


async def test_every_metric_of_the_core_has_a_row_before_the_first_worker() -> None:
    async with running_loop() as loop:
        names = {name for name, _ in rows_of(loop)}
    assert names >= {spec.name for spec in (*COUNTS.values(), *GAUGES.values())}
