#!/usr/bin/env python
"""Streaming through one gateway process: 256 clients of which some are slow; HTTP (SSE) beside gRPC.

    python bench/gateway.py [--seconds 15] [--clients 256] [--slow 32] [--steps-per-s 70,150] [--realtime]
    python bench/gateway.py --http [--clients 256] [--rounds 3] [--idle 1000]

bench/pacing_scheduler.py generates the tokens, one real gateway streams them, and a third process has the clients:
fast clients read without delay, slow ones read a message every quarter second over connections with small windows. One
run per pace: the first is the required load, the others exceed it.

--http: gRPC and chats over HTTP take turns on gateways of the same command, of which each stream could get 600 tokens
per second, more than a gateway can send; both send text only, and the gateway's own metric counts. Afterwards `--idle`
chat streams get one token per second.

A run that lost much time to other virtual machines is repeated (bench/machine.py). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
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
from bench.machine import Figures, cpu_s, describe, quiet
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack

GENERATE = "/quire.v1.InferenceService/Generate"
MAX_TOKENS = 500_000
SLOW_PAUSE_S = 0.25
# Small client buffers: unread messages stay in the gateway.
SLOW_OPTIONS = [
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
HTTP_STEPS_PER_S, HTTP_SECONDS, HTTP_WARM_UP_S = 600.0, 8.0, 4.0


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


def request_bytes(*, has_ids: bool) -> bytes:
    return pb.GenerateRequest(
        prompt=pb.Prompt(tokens=types.TokenIds(ids=range(10, 60))),
        sampling=types.SamplingParams(temperature=0.0),
        stop=types.StopParams(max_tokens=MAX_TOKENS, ignore_eos=True),
        output=pb.OutputParams(token_ids=has_ids),
    ).SerializeToString()


def open_channels(target: str) -> list[grpc.aio.Channel]:
    return [grpc.aio.insecure_channel(target, options=[("bench", i)]) for i in range(8)]


async def read_all(args: argparse.Namespace) -> Figures:
    """Run all clients. Returns their figures for the measured period."""
    shared, request = open_channels(args.target), request_bytes(has_ids=True)
    readers = [Reader(i < args.slow) for i in range(args.clients)]
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


async def discard_grpc(target: str, num_clients: int) -> None:
    """Open streams over 8 channels and discard their messages."""
    channels, request = open_channels(target), request_bytes(has_ids=False)

    async def read(i: int) -> None:
        call = channels[i % 8].unary_stream(GENERATE)(request)
        while await call.read() is not grpc.aio.EOF:
            pass
        raise RuntimeError("a stream ended")

    await asyncio.gather(*(read(i) for i in range(num_clients)))


class Discard(asyncio.Protocol):
    """One HTTP connection with one request. Discards the answer."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self._request = request
        self._ended = ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(RuntimeError(f"a stream ended: {exc}"))


async def discard_http(target: str, num_clients: int) -> None:
    """Open chats over a connection each and discard their events."""
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "stream": True}
    data = json.dumps(body | {"max_tokens": MAX_TOKENS, "ignore_eos": True}).encode()
    request = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    host, _, port = target.rpartition(":")
    for _ in range(num_clients):
        await loop.create_connection(lambda: Discard(request + data, ended), host, int(port))
    await ended


# -- the gateway -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gateway:
    """A running gateway with a scheduler that generates tokens."""

    service: Service
    scheduler: Service
    http: str
    metrics: str

    def rss_bytes(self) -> int:
        return sum(process.memory_info().rss for process in _tree(self.service))

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics") as page:
            values = re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", page.read().decode(), re.MULTILINE)
        return sum(map(float, values))

    def wait_for_streams(self, count: int) -> None:
        deadline = time.monotonic() + 120
        while (num_open := self.metric("quire_gateway_streams")) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{num_open:g} of {count} streams are open\n{self.service.log()[-4000:]}")
            time.sleep(0.2)


def _tree(service: Service) -> list[psutil.Process]:
    assert service.process is not None
    process = psutil.Process(service.process.pid)
    return [process, *process.children(recursive=True)]


def pids_of(service: Service) -> list[int]:
    return [process.pid for process in _tree(service)]


@contextmanager
def gateway(steps_per_s: float, *flags: str) -> Iterator[Gateway]:
    """A gateway and a scheduler of this pace."""
    http, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder)) as stack:
        scheduler = stack._start("scheduler", "bench.pacing_scheduler", ["--steps-per-s", str(steps_per_s)])
        scheduler.wait_ready()
        own = ("--http-listen", http, "--metrics-listen", metrics)
        service = stack.start_gateway(scheduler, flags=(*own, *flags))
        service.wait_ready()
        yield Gateway(service, scheduler, http, metrics)


@contextmanager
def clients(kind: str, target: str, count: int, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """The client process."""
    command = [sys.executable, __file__, "--kind", kind, "--target", target, "--clients", str(count), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
        if process.poll():
            raise RuntimeError("the clients failed")
    finally:
        process.kill()
        process.wait()


# -- measurement -------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, steps_per_s: float) -> Figures:
    """Figures of one gateway at one pace."""
    own = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in ("slow", "seconds", "warm_up")]
    with (
        gateway(steps_per_s, *args.gateway_flags.split()) as one,
        clients("readers", one.service.address, args.clients, *own) as process,
    ):
        assert process.stdout is not None
        if process.stdout.readline() != "begin\n":
            raise RuntimeError(f"the clients failed\n{one.service.log()[-4000:]}")
        watched = {"gateway": pids_of(one.service), "clients": [process.pid], "scheduler": pids_of(one.scheduler)}
        before, rss = {name: cpu_s(pids) for name, pids in watched.items()}, [one.rss_bytes()]
        started = time.perf_counter()
        time.sleep(args.seconds - 0.5)
        elapsed = time.perf_counter() - started
        cpu = {name: (cpu_s(pids) - before[name]) / elapsed for name, pids in watched.items()}
        rss.append(one.rss_bytes())
        figures = json.loads(process.stdout.readline())
    figures |= {f"{name}_cpu": round(share, 3) for name, share in cpu.items()}
    figures["gateway_us_per_token"] = round(1e6 * cpu["gateway"] / figures["tokens_per_s"], 1)
    figures["gateway_us_per_message"] = round(1e6 * cpu["gateway"] / figures["messages_per_s"], 1)
    figures["offered_tokens_per_s"] = round(steps_per_s * args.clients)
    return dict(figures | {"rss_mb": [round(size / 2**20, 1) for size in rss]})


def throughput(kind: str, args: argparse.Namespace) -> Figures:
    """Figures of one gateway at a load that it cannot carry."""
    with gateway(HTTP_STEPS_PER_S) as one:
        target, pid = one.http if kind == "chat" else one.service.address, pids_of(one.service)[0]
        with clients(kind, target, args.clients):
            one.wait_for_streams(args.clients)
            time.sleep(HTTP_WARM_UP_S)
            before, cpu = one.metric("quire_generation_tokens_total"), cpu_s(pid)
            started = time.perf_counter()
            time.sleep(HTTP_SECONDS)
            elapsed = time.perf_counter() - started
            tokens, cpu = one.metric("quire_generation_tokens_total") - before, cpu_s(pid) - cpu
    return {
        "tokens_per_s": round(tokens / elapsed),
        "us_per_token": round(1e6 * cpu / tokens, 2),
        "cpu": round(cpu / elapsed, 3),
    }


def idle_memory(num_streams: int) -> Figures:
    """Growth of the gateway's memory by chat streams that get one token per second."""
    with gateway(1.0) as one:
        with clients("chat", one.http, 1):  # the first stream loads what all streams share
            one.wait_for_streams(1)
        before = one.rss_bytes()
        with clients("chat", one.http, num_streams):
            one.wait_for_streams(num_streams)
            time.sleep(HTTP_WARM_UP_S)
            growth = one.rss_bytes() - before
    kib = round(growth / 1024 / num_streams, 1)
    return {"streams": num_streams, "mib": round(growth / 2**20, 1), "kib_per_stream": kib}


def compare_http(args: argparse.Namespace) -> Figures:
    """Medians of gRPC and of chats over HTTP, and their ratios."""
    runs: dict[str, list[Figures]] = {"grpc": [], "chat": []}
    for _ in range(args.rounds):
        for kind, figures in runs.items():
            figures.append(quiet(partial(throughput, kind, args)))
            print(f"{kind}: {json.dumps(figures[-1])}", flush=True)
    rpc, sse = (
        {name: statistics.median(one[name] or 0.0 for one in figures) for name in figures[0]}
        for figures in runs.values()
    )
    ratios = {
        "sse_of_grpc_tokens_per_s": round(sse["tokens_per_s"] / rpc["tokens_per_s"], 3),
        "grpc_of_sse_us_per_token": round(rpc["us_per_token"] / sse["us_per_token"], 3),
    }
    idle = {"idle": idle_memory(args.idle)} if args.idle else {}
    return {**ratios, "grpc": rpc, "sse": sse, **idle}


def at_paces(args: argparse.Namespace) -> Figures:
    """Figures of the required load and of those above it."""
    runs = []
    for pace in args.steps_per_s.split(","):
        runs.append(quiet(partial(measure, args, float(pace))))
        print(f"{pace} steps/s: {json.dumps(runs[-1])}", flush=True)
    return {"carried": runs[0], "above": runs[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds measured at each pace")
    parser.add_argument("--warm-up", type=float, default=12.0, help="seconds before the measurement starts")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--slow", type=int, default=32, help="number of slow clients")
    parser.add_argument("--steps-per-s", default="70,150", help="paces: tokens per second of each stream, one run each")
    parser.add_argument("--gateway-flags", default="", help="additional flags of quire-gateway, as one argument")
    parser.add_argument("--http", action="store_true", help="compare HTTP with gRPC")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of --http, in turns")
    parser.add_argument("--idle", type=int, default=1000, help="idle streams of --http; 0 skips them")
    parser.add_argument("--realtime", action="store_true", help="use real-time priority (requires root)")
    parser.add_argument("--kind", choices=("readers", "grpc", "chat"), help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind == "readers":
        print(json.dumps(asyncio.run(read_all(args))))
        return
    if args.kind:
        discard: Any = discard_http if args.kind == "chat" else discard_grpc
        asyncio.run(discard(args.target, args.clients))
    if args.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print(json.dumps({**(compare_http(args) if args.http else at_paces(args)), **describe()}))


if __name__ == "__main__":
    main()
