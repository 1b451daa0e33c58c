"""The cost of metrics: per chunk in a gateway, per step and turn in a scheduler, per message, and per scrape.

    python bench/metrics.py        # takes seconds; the last line is JSON, in CPU microseconds of one core

Each number is the minimum of several rounds, to reduce the effect of other processes.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
from prometheus_client import generate_latest
from quire.v1.types_pb2 import ModelInfo

from gateway_svc.answer.request_meter import ModelTimes, RequestMeter
from gateway_svc.metrics import SPECS as GATEWAY_SPECS
from gateway_svc.metrics import model_rows
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import Deltas
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.stats import SchedulerStats, WorkerStats
from scheduler_svc.metrics import SPECS as SCHEDULER_SPECS
from scheduler_svc.metrics import SchedulerReader, SchedulerTimes
from svc_common.calls import RpcStats
from svc_common.observe.metrics import ServiceMetrics, make_registry

ROUNDS, CALLS = 15, 2000
ROWS, WORKERS = 256, 16


def least_us(work: Callable[[], object], calls: int = CALLS) -> float:
    """CPU microseconds of one call."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(calls):
            work()
        best = min(best, time.process_time() - start)
    return round(1e6 * best / calls, 3)


def chunk_us(tokens: int) -> float:
    """A gateway counts a chunk of `tokens` tokens."""
    meter = RequestMeter("r", "m", ModelTimes(), lambda: 0.0)
    meter.on_tokens(0, 1, 0.5)
    return least_us(lambda: meter.on_tokens(0, tokens, 0.52))


def deltas_us() -> float:
    """A scheduler counts the output of one step of `ROWS` decoding rows."""
    columns = [np.arange(1, ROWS + 1, dtype=np.uint32) for _ in range(5)]
    times, deltas = SchedulerTimes(), Deltas(*columns)
    return least_us(lambda: times.record_deltas(deltas, 1.0, lambda owner, handle: None))


def turn_us() -> float:
    times = SchedulerTimes()
    return least_us(lambda: times.record_turn(1.0, 1.001))


def message_us() -> float:
    """The added cost of counting the bytes of one message."""
    data = bytes(600)
    counted = RpcStats().counting_serializer(bytes, "quire.v1.InferenceService/Generate")
    return round(least_us(lambda: counted(data)) - least_us(lambda: bytes(data)), 3)


def gateway_scrape_us() -> float:
    """A scrape of a gateway with two models."""
    models = {name: ModelTimes() for name in ("a", "b")}
    metrics = ServiceMetrics("gateway", GATEWAY_SPECS, lambda: [r for n, t in models.items() for r in model_rows(n, t)])
    registry = make_registry(metrics)
    return least_us(lambda: generate_latest(registry), 20)


def scheduler_scrape_us() -> float:
    """A scrape of a scheduler with `WORKERS` workers."""
    reader = SchedulerReader(_Loop(), _Pool(), lambda: 2, None)
    registry = make_registry(ServiceMetrics("scheduler", SCHEDULER_SPECS, reader, has_vllm=True))
    return least_us(lambda: generate_latest(registry), 20)


class _Loop:
    """A step loop whose core has the statistics of `WORKERS` workers."""

    def __init__(self) -> None:
        self.times = SchedulerTimes()
        self.core = _Core(SchedulerConfig())


class _Core(Scheduler):
    def stats(self) -> SchedulerStats:
        workers = [WorkerStats(f"worker-{i}", 10, 64, 100, 200, 300, 1) for i in range(WORKERS)]
        return SchedulerStats(1, 2, 3, workers)


class _Pool:
    """A pool of ready workers."""

    info = ModelInfo(model="m", block_size=16)

    def num_in_states(self) -> Counter[str]:
        return Counter(ready=WORKERS)


def main() -> None:
    print(
        json.dumps(
            {
                "gateway_chunk_of_1_us": chunk_us(1),
                "gateway_token_in_chunk_of_8_us": round(chunk_us(8) / 8, 3),
                "scheduler_answer_of_256_rows_us": deltas_us(),
                "scheduler_turn_us": turn_us(),
                "message_bytes_us": message_us(),
                "gateway_scrape_us": gateway_scrape_us(),
                "scheduler_scrape_us": scheduler_scrape_us(),
            }
        )
    )


if __name__ == "__main__":
    main()
