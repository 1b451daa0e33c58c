#!/usr/bin/env python
"""The token throughput of one gateway process with 256 streaming clients, some of them slow.

    python bench/gateway.py [--seconds 15] [--clients 256] [--slow 32] [--steps-per-s 70,150] [--realtime]

bench/pacing_scheduler.py generates the tokens, one real gateway streams them, and a third process has the clients:
fast clients read without delay, slow ones read a message every quarter second over connections with small windows. One
run per pace: the first is the required load, the others exceed it. A run that lost much time to other virtual machines
is repeated (bench/machine.py). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.machine import cpu_s, describe, quiet
from tests.processes.stack import Service, Stack

GENERATE = "/quire.v1.InferenceService/Generate"
SLOW_PAUSE_S = 0.25
# Small client buffers: unread messages stay in the gateway.
SLOW_OPTIONS = [
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


# -- the client process ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Reader:
    """One client and its measurements."""

    is_slow: bool
    num_tokens: int = 0
    num_messages: int = 0
    first_s: float = 0.0
    gaps: list[float] = field(default_factory=list)

    async def run(self, channel: grpc.aio.Channel, request: bytes) -> None:
        started = last = time.perf_counter()
        call = channel.unary_stream(GENERATE)(request)
        while (data := await call.read()) is not grpc.aio.EOF:
            event = pb.GenerateResponse.FromString(data)
            now = time.perf_counter()
            num_new = len(event.chunk.token_ids)
            if event.chunk.offset != self.num_tokens and num_new:
                raise RuntimeError(f"offset {event.chunk.offset}, expected {self.num_tokens}")
            if num_new and not self.num_tokens:
                self.first_s = now - started
            elif num_new:
                self.gaps.append(now - last)
            self.num_tokens += num_new
            self.num_messages += 1
            last = now
            if self.is_slow:
                await asyncio.sleep(SLOW_PAUSE_S)


async def read_all(args: argparse.Namespace) -> dict[str, Any]:
    """Run all clients. Returns their figures for the measured period."""
    shared = [grpc.aio.insecure_channel(args.target, options=[("bench", i)]) for i in range(8)]
    readers = [Reader(i < args.slow) for i in range(args.clients)]
    request = pb.GenerateRequest(
        prompt=pb.Prompt(tokens=types.TokenIds(ids=range(10, 60))),
        sampling=types.SamplingParams(temperature=0.0),
        stop=types.StopParams(max_tokens=100_000, ignore_eos=True),
    ).SerializeToString()
    tasks = []
    for i, reader in enumerate(readers):
        channel = grpc.aio.insecure_channel(args.target, options=SLOW_OPTIONS) if reader.is_slow else shared[i % 8]
        tasks.append(asyncio.create_task(reader.run(channel, request)))
    await _sleep_unless_done(args.warm_up, tasks)
    for reader in readers:
        reader.gaps.clear()
    before = [(r.num_tokens, r.num_messages) for r in readers]
    started = time.perf_counter()
    print("begin", flush=True)
    await _sleep_unless_done(args.seconds, tasks)
    elapsed = time.perf_counter() - started
    tokens = np.array([r.num_tokens - b[0] for r, b in zip(readers, before, strict=True)])
    messages = np.array([r.num_messages - b[1] for r, b in zip(readers, before, strict=True)])
    gaps_ms = 1e3 * np.concatenate([r.gaps for r in readers if not r.is_slow])
    slow = np.array([r.is_slow for r in readers])
    for task in tasks:
        task.cancel()
    return {
        "tokens_per_s": round(tokens.sum() / elapsed),
        "fast_tokens_per_s_each": round(float(tokens[~slow].mean()) / elapsed, 1),
        "fast_tokens_per_message": round(tokens[~slow].sum() / messages[~slow].sum(), 2),
        "slow_tokens_per_message": round(tokens[slow].sum() / max(1, messages[slow].sum()), 2),
        "messages_per_s": round(messages.sum() / elapsed),
        "itl_p50_ms": round(float(np.percentile(gaps_ms, 50)), 1),
        "itl_p99_ms": round(float(np.percentile(gaps_ms, 99)), 1),
        "ttft_p50_ms": round(1e3 * float(np.median([r.first_s for r in readers if not r.is_slow])), 1),
    }


async def _sleep_unless_done(seconds: float, tasks: list[asyncio.Task[None]]) -> None:
    """Sleep. Raises the error of a client that ended."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
        raise RuntimeError("a stream ended")


# -- measurement -------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, steps_per_s: float) -> dict[str, Any]:
    """Figures of one gateway at one pace."""
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder)) as stack:
        scheduler = stack._start("scheduler", "bench.pacing_scheduler", ["--steps-per-s", str(steps_per_s)])
        scheduler.wait_ready()
        gateway = stack.start_gateway(scheduler, flags=tuple(args.gateway_flags.split()))
        gateway.wait_ready()
        command = [sys.executable, __file__, "--target", gateway.address]
        for name in ("clients", "slow", "seconds", "warm_up"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as clients:
            assert clients.stdout is not None
            if clients.stdout.readline() != "begin\n":
                raise RuntimeError(f"the clients failed\n{gateway.log()[-4000:]}")
            watched = {"gateway": pids_of(gateway), "clients": [clients.pid], "scheduler": pids_of(scheduler)}
            before, rss_start = {name: cpu_s(pids) for name, pids in watched.items()}, rss_mb(gateway)
            started = time.perf_counter()
            time.sleep(args.seconds - 0.5)
            elapsed = time.perf_counter() - started
            cpu = {name: (cpu_s(pids) - before[name]) / elapsed for name, pids in watched.items()}
            rss_end = rss_mb(gateway)
            figures = json.loads(clients.stdout.readline())
    figures |= {f"{name}_cpu": round(share, 3) for name, share in cpu.items()}
    figures["gateway_us_per_token"] = round(1e6 * cpu["gateway"] / figures["tokens_per_s"], 1)
    figures["gateway_us_per_message"] = round(1e6 * cpu["gateway"] / figures["messages_per_s"], 1)
    figures |= {"offered_tokens_per_s": round(steps_per_s * args.clients), "rss_mb": [rss_start, rss_end]}
    return figures


def tree(service: Service) -> list[psutil.Process]:
    assert service.process is not None
    process = psutil.Process(service.process.pid)
    return [process, *process.children(recursive=True)]


def pids_of(service: Service) -> list[int]:
    return [process.pid for process in tree(service)]


def rss_mb(service: Service) -> float:
    return round(sum(process.memory_info().rss for process in tree(service)) / 2**20, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds measured at each pace")
    parser.add_argument("--warm-up", type=float, default=12.0, help="seconds before the measurement starts")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--slow", type=int, default=32, help="number of slow clients")
    parser.add_argument("--steps-per-s", default="70,150", help="paces: tokens per second of each stream, one run each")
    parser.add_argument("--gateway-flags", default="", help="additional flags of quire-gateway, as one argument")
    parser.add_argument("--realtime", action="store_true", help="use real-time priority (requires root)")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.target:
        print(json.dumps(asyncio.run(read_all(args))))
        return
    if args.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    runs = []
    for pace in args.steps_per_s.split(","):
        runs.append(quiet(partial(measure, args, float(pace))))
        print(f"{pace} steps/s: {json.dumps(runs[-1])}", flush=True)
    print(json.dumps({**describe(), "carried": runs[0], "above": runs[1:]}))


if __name__ == "__main__":
    main()
