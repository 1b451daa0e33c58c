#!/usr/bin/env python
"""The cost of messages between services, and the time that workers wait for their scheduler.

    python bench/wire.py [--seconds 15] [--only codec,round-trip,idle,many] [--realtime]

    codec       encoding and decoding the three messages of a decode step, by rows and by length of the sequences
    round-trip  the scheduler's core and one real worker process that computes nothing, over gRPC, depth 1 and 2
    idle        a real scheduler and two real workers at 5 ms per step: idle time between steps with work pending
    many        one scheduler, eight workers of 128 rows at 19 ms per step: steps/s, and the scheduler's CPU time

Other programs on the machine increase the idle times: `others_cpu` is their fraction of all cores, and --realtime
(requires root) takes precedence over them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from quire.v1 import types_pb2
from quire_client.demo import demo_model_dir

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.attach_load import AttachLoad
from bench.machine import cpu_s, describe, quiet_async
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import Deltas, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup, StopCondition
from scheduler_svc.gateways import wire as scheduler_wire
from scheduler_svc.workers import wire as step_wire
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.proto import output_to_proto
from svc_common.serve import open_channel
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack
from worker_svc import wire as worker_wire
from worker_svc.metrics import IDLE_TIMES_S

VOCAB_SIZE = 1 << 17
ROWS = (1, 256, 1024)
BLOCK_SIZE = 16
MAX_TOKENS = 800
GREEDY = types_pb2.SamplingParams(temperature=0.0)
FENCE = worker_pb2.Fence(scheduler_epoch=1, worker_epoch=2)


def floor_us(function: Callable[[], Any], repeats: int = 300) -> float:
    """Lowest tenth percentile of three rounds, in CPU microseconds."""
    floors = []
    for _ in range(3):
        spent = []
        for _ in range(repeats):
            started = time.thread_time_ns()
            function()
            spent.append(time.thread_time_ns() - started)
        floors.append(np.percentile(spent, 10) / 1000)
    return round(float(min(floors)), 2)


# -- codec ------------------------------------------------------------------------------------------------------------


class DecodingCore:
    """The scheduler's core with `num_rows` sequences in steady decode on one worker."""

    def __init__(self, num_rows: int, prompt_len: int, *, worker: WorkerCapacity | None = None) -> None:
        blocks = num_rows * ((prompt_len + MAX_TOKENS) // BLOCK_SIZE) * 21 // 20 + 1024
        self.capacity = worker or WorkerCapacity("w", 2, blocks, BLOCK_SIZE, num_rows, 1 << 24, 1 << 15, 2)
        self.core = Scheduler(SchedulerConfig(max_waiting=10_000, max_waiting_tokens=1 << 40))
        self.core.add_worker(self.capacity)
        rng = np.random.default_rng(0)
        for i in range(num_rows):
            prompt = rng.integers(3, 2000, prompt_len + i % BLOCK_SIZE, dtype=np.uint32)
            self.core.add_group(
                SequenceGroup(
                    str(i), prompt, StopCondition(MAX_TOKENS, ignore_eos=True), handle=i, options=worker_pb2.RowOpen()
                ),
                0.0,
            )

    def answer(self, batch: StepBatch) -> tuple[StepOutput, Deltas]:
        rows = batch.rows[batch.sample_mask]
        output = StepOutput(batch.step_id, rows, np.full(len(rows), 7, np.uint32), worker_id="w")
        return output, self.core.update(output, 0.0)


def codec(num_rows: int, prompt_len: int) -> dict[str, float]:
    """CPU time of each conversion of a decode step, and its bytes: averages over 32 steps, because blocks fill up."""
    decoding = DecodingCore(num_rows, prompt_len)
    in_flight = decoding.core.schedule(0.0)
    steps: list[tuple[StepBatch, StepOutput, Deltas]] = []
    for _ in range(64):
        batch = in_flight.pop(0)
        steps.append((batch, *decoding.answer(batch)))
        in_flight += decoding.core.schedule(0.0)
    steps = steps[32:]  # steady: the blocks of the prompts were opened and committed before
    if any(len(batch.rows) != num_rows or batch.opens for batch, _, _ in steps):
        raise RuntimeError("these steps are not steady decode")
    batches = [step_wire.step_batch_to_proto(batch, FENCE).SerializeToString() for batch, _, _ in steps]
    outputs = [_worker_output(output).SerializeToString() for _, output, _ in steps]
    deltas = [scheduler_wire.deltas_to_proto([part]).SerializeToString() for _, _, part in steps]
    batch, output, part = steps[5]
    sizes = {"batch_bytes": batches, "output_bytes": outputs, "deltas_bytes": deltas}
    total = sum(len(data) for column in sizes.values() for data in column) / len(steps)
    return {
        "batch_encode_us": floor_us(lambda: step_wire.step_batch_to_proto(batch, FENCE).SerializeToString()),
        "batch_decode_us": floor_us(
            lambda: worker_wire.step_batch_from_proto(worker_pb2.StepBatch.FromString(batches[5]))
        ),
        "output_encode_us": floor_us(lambda: _worker_output(output).SerializeToString()),
        "output_decode_us": floor_us(
            lambda: step_wire.step_output_from_proto(
                worker_pb2.StepOutput.FromString(outputs[5]),
                worker_id="w",
                worker_epoch=2,
                step_id=output.step_id,
                vocab_size=VOCAB_SIZE,
            )
        ),
        "deltas_encode_us": floor_us(lambda: scheduler_wire.deltas_to_proto([part]).SerializeToString()),
        "deltas_decode_us": floor_us(lambda: scheduler_pb2.Deltas.FromString(deltas[5])),
        **{name: round(sum(map(len, column)) / len(steps), 1) for name, column in sizes.items()},
        "bytes_per_row": round(total / num_rows, 2),
    }


def _worker_output(output: StepOutput) -> worker_pb2.StepOutput:
    output.forward_us = 5000
    return output_to_proto(output, worker_epoch=2, queue_us=10)


def measure_codec() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for num_rows in ROWS:
        for length in (100, 8000):
            found = figures[f"{num_rows}x{length}"] = codec(num_rows, length)
            print(f"codec {num_rows} rows of {length} tokens: {json.dumps(found)}", flush=True)
    return figures


# -- round trip -------------------------------------------------------------------------------------------------------


async def round_trip(address: str, num_rows: int, depth: int, num_steps: int = 600) -> dict[str, float]:
    """The time of steps that compute nothing, with and without the worker's own bookkeeping."""
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        lease = await stub.Lease(worker_pb2.LeaseRequest(scheduler_id="bench", protocol_version=1))
        epoch = lease.fence.worker_epoch
        worker = WorkerCapacity("w", epoch, 16384, BLOCK_SIZE, 1024, 1 << 16, 4096, depth)
        core = DecodingCore(num_rows, 24, worker=worker).core
        call = stub.StepStream()
        overheads, started, computed_us, in_flight, rows = [], 0.0, 0, [], num_rows
        for step in range(num_steps):
            for batch in core.schedule(0.0):
                for row_open in batch.opens:
                    row_open.group.options = worker_pb2.RowOpen(sampling=GREEDY)
                message = step_wire.step_batch_to_proto(batch, lease.fence)
                in_flight.append((batch.step_id, time.perf_counter()))
                await call.write(worker_pb2.StepStreamRequest(batch=message))
            response = await call.read()
            step_id, sent_at = in_flight.pop(0)
            output = step_wire.step_output_from_proto(
                response.output, worker_id="w", worker_epoch=epoch, step_id=step_id, vocab_size=VOCAB_SIZE
            )
            core.update(output, 0.0)
            if step < 100:
                rows, started, computed_us = len(output.rows), time.perf_counter(), 0
                continue
            computed_us += response.output.forward_us
            overheads.append(1e6 * (time.perf_counter() - sent_at) - response.output.forward_us)
        elapsed_us = 1e6 * (time.perf_counter() - started)
        call.cancel()
    assert rows == num_rows, f"{rows} of {num_rows} rows ran"
    num_counted = num_steps - 100
    return {
        "step_us": round(elapsed_us / num_counted, 1),
        "worker_us": round(computed_us / num_counted, 1),
        "outside_worker_us": round((elapsed_us - computed_us) / num_counted, 1),
        "answer_p50_us": round(float(np.percentile(overheads, 50)), 1),
        "answer_p99_us": round(float(np.percentile(overheads, 99)), 1),
    }


async def measure_round_trip(stack: Stack) -> dict[str, Any]:
    worker = start_worker(stack, None, "--sim-step-ms", "0", "--max-num-seqs", "1024", "--num-blocks", "16384")
    worker.wait_ready()
    figures = {}
    for num_rows in (1, 256):
        for depth in (1, 2):
            found = await quiet_async(partial(round_trip, worker.address, num_rows, depth))
            figures[f"{num_rows} rows, depth {depth}"] = found
            print(f"round trip, {num_rows} rows, depth {depth}: {json.dumps(found)}", flush=True)
    worker.terminate()
    return figures


# -- real services ----------------------------------------------------------------------------------------------------


def start_worker(stack: Stack, scheduler: Service | None, *flags: str) -> Service:
    own = ["--model", str(demo_model_dir()), "--executor", "sim", "--max-num-batched-tokens", "8192"]
    if scheduler is not None:
        own += ["--scheduler", scheduler.address]
    return stack._start("worker", "worker_svc.service", [*own, *flags])


def busy_s() -> float:
    """CPU seconds used by all processes of this machine."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def num_steps(scheduler: Service) -> int:
    with grpc.insecure_channel(scheduler.address) as channel:
        ask = scheduler_pb2_grpc.SchedulerServiceStub(channel).GetSchedulerStatus
        return ask(scheduler_pb2.GetSchedulerStatusRequest(), timeout=5.0).status.steps


async def under_load(
    stack: Stack, num_workers: int, num_rows: int, step_ms: float, seconds: float, *flags: str
) -> dict[str, Any]:
    """Figures of a scheduler and workers with every row in use, over `seconds`. Each request that ends is replaced."""
    scheduler = stack.start_scheduler()
    scheduler.wait_ready()
    blocks = str(num_rows * 40)
    own = ("--sim-step-ms", str(step_ms), "--max-num-seqs", str(num_rows), "--num-blocks", blocks, *flags)
    metrics = [f"127.0.0.1:{free_port()}" for _ in range(num_workers)]
    workers = [start_worker(stack, scheduler, *own, "--metrics-listen", address) for address in metrics]
    num_open = num_workers * num_rows + num_workers * 2
    load = AttachLoad(scheduler.address, num_open=num_open, prompt_lens=(16, 128), output_lens=(64, 512))
    async with load:
        await load.start(num_workers)
        await load.measure(2.0)
        pids = [os.getpid(), *(service.process.pid for service in (scheduler, *workers))]
        before, busy, steps = [cpu_s(pid) for pid in pids], busy_s(), num_steps(scheduler)
        idle_before = [idle_counts(address) for address in metrics]
        started, messages = time.perf_counter(), load.num_messages
        tokens_per_s = await load.measure(seconds)
        elapsed = time.perf_counter() - started
        shares = [(cpu_s(pid) - b) / elapsed for pid, b in zip(pids, before, strict=True)]
        others = (busy_s() - busy) / elapsed - sum(shares)
        messages, steps = load.num_messages - messages, num_steps(scheduler) - steps
        idle = [later - earlier for later, earlier in zip(map(idle_counts, metrics), idle_before, strict=True)]
    for service in (*workers, scheduler):
        service.terminate()
    return {
        "tokens_per_s": round(tokens_per_s),
        "steps_per_s_per_worker": round(steps / elapsed / num_workers, 1),
        "deltas_messages_per_s": round(messages / elapsed, 1),
        "scheduler_cpu": round(shares[1], 3),
        "worker_cpu": round(sum(shares[2:]) / num_workers, 3),
        "others_cpu": round(max(0.0, others) / (os.cpu_count() or 1), 3),
        "idle_p50_ms": round(max(idle_percentile_ms(counts, 50) for counts in idle), 3),
        "idle_p99_ms": round(max(idle_percentile_ms(counts, 99) for counts in idle), 3),
    }


def idle_counts(address: str) -> np.ndarray:
    """A worker's cumulative histogram of idle times between steps with work pending."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5.0) as response:
        text = response.read().decode()
    found = re.findall(r'^quire_worker_idle_seconds_bucket\{le="[^"]+"\} (\S+)$', text, re.MULTILINE)
    return np.array(found, dtype=np.float64)


def idle_percentile_ms(counts: np.ndarray, percent: float) -> float:
    """A percentile, interpolated within its bucket like in Prometheus."""
    bounds = np.array((0.0, *IDLE_TIMES_S, IDLE_TIMES_S[-1]))
    return float(1e3 * np.interp(percent / 100 * counts[-1], np.concatenate(([0.0], counts)), bounds))


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    figures = describe()
    parts = args.only.split(",")
    if "codec" in parts:
        figures["codec"] = measure_codec()
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder)) as stack:
        if "round-trip" in parts:
            figures["round_trip"] = await measure_round_trip(stack)
        if "idle" in parts:
            figures["idle"] = await quiet_async(partial(under_load, stack, 2, 64, 5.0, args.seconds))
            print(f"two workers at 5 ms per step: {json.dumps(figures['idle'])}", flush=True)
        if "many" in parts:
            figures["many"] = await quiet_async(partial(under_load, stack, 8, 128, 19.0, args.seconds))
            print(f"eight workers of 128 rows at 19 ms per step: {json.dumps(figures['many'])}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of load on real services, per part")
    parser.add_argument("--only", default="codec,round-trip,idle,many", help="parts, separated by commas")
    parser.add_argument("--realtime", action="store_true", help="use real-time priority (requires root)")
    args = parser.parse_args()
    if args.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print(json.dumps(asyncio.run(measure(args))))


if __name__ == "__main__":
    main()
