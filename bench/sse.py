#!/usr/bin/env python
"""Streaming over HTTP (SSE) compared with gRPC: tokens per second of one gateway process, and memory of idle streams.

    python bench/sse.py [--seconds 8] [--clients 256] [--steps-per-s 600] [--rounds 3] [--idle 1000]

bench/pacing_scheduler.py generates more tokens than the gateway can send, and another process has the clients. gRPC and
HTTP take turns on gateways of the same command; both send text only. Tokens are counted by the gateway's own metric.
A run that lost much time to other virtual machines is repeated (bench/machine.py). Afterwards, `--idle` chat streams
get one token per second. The last line is one JSON object, the ratio first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.machine import cpu_s, describe, quiet
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack

GENERATE = "/quire.v1.InferenceService/Generate"
PROMPT = list(range(10, 60))
MAX_TOKENS = 500_000
COUNTER = re.compile(r"^quire_generation_tokens_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


# -- the client process ----------------------------------------------------------------------------------------------


async def read_grpc(target: str, num_clients: int) -> None:
    """Open streams over 8 channels and discard their messages."""
    channels = [grpc.aio.insecure_channel(target, options=[("bench", i)]) for i in range(8)]
    request = pb.GenerateRequest(
        prompt=pb.Prompt(tokens=types.TokenIds(ids=PROMPT)),
        sampling=types.SamplingParams(temperature=0.0),
        stop=types.StopParams(max_tokens=MAX_TOKENS, ignore_eos=True),
        output=pb.OutputParams(token_ids=False),
    ).SerializeToString()

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


async def read_http(target: str, num_clients: int, path: str) -> None:
    """Open streams over a connection each and discard their events."""
    own = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    body = {**own, "temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    request = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    host, _, port = target.rpartition(":")
    for _ in range(num_clients):
        await loop.create_connection(lambda: Discard(request, ended), host, int(port))
    await ended


# -- measurement -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gateway:
    """A running gateway with a scheduler that generates tokens."""

    service: Service
    http: str
    metrics: str

    @property
    def process(self) -> psutil.Process:
        assert self.service.process is not None
        return psutil.Process(self.service.process.pid)

    def num_tokens(self) -> float:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics") as page:
            return sum(map(float, COUNTER.findall(page.read().decode())))

    def num_streams(self) -> int:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics") as page:
            (count,) = re.findall(r"^quire_gateway_streams ([0-9.]+)$", page.read().decode(), re.MULTILINE)
            return int(float(count))


@contextmanager
def gateway(steps_per_s: float) -> Iterator[Gateway]:
    """A gateway and a scheduler of this pace."""
    http, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder)) as stack:
        scheduler = stack._start("scheduler", "bench.pacing_scheduler", ["--steps-per-s", str(steps_per_s)])
        scheduler.wait_ready()
        service = stack.start_gateway(scheduler, flags=("--http-listen", http, "--metrics-listen", metrics))
        service.wait_ready()
        yield Gateway(service, http, metrics)


@contextmanager
def clients(kind: str, target: str, count: int) -> Iterator[None]:
    """The client process."""
    command = [sys.executable, __file__, "--kind", kind, "--target", target, "--clients", str(count)]
    process = subprocess.Popen(command)
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError("the clients failed")
    finally:
        process.kill()
        process.wait()


def throughput(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Figures of one gateway at a load that it cannot carry."""
    with gateway(args.steps_per_s) as one:
        target = one.service.address if kind == "grpc" else one.http
        with clients(kind, target, args.clients):
            wait_for_streams(one, args.clients)
            time.sleep(args.warm_up)
            before, cpu = one.num_tokens(), cpu_s(one.process.pid)
            started = time.perf_counter()
            time.sleep(args.seconds)
            elapsed = time.perf_counter() - started
            tokens, cpu = one.num_tokens() - before, cpu_s(one.process.pid) - cpu
    return {
        "tokens_per_s": round(tokens / elapsed),
        "us_per_token": round(1e6 * cpu / tokens, 2),
        "cpu": round(cpu / elapsed, 3),
    }


def idle_memory(args: argparse.Namespace) -> dict[str, float]:
    """Growth of the gateway's memory by chat streams that get one token per second."""
    with gateway(1.0) as one:
        with clients("chat", one.http, 1):  # the first stream loads what all streams share
            wait_for_streams(one, 1)
        before = one.process.memory_info().rss
        with clients("chat", one.http, args.idle):
            wait_for_streams(one, args.idle)
            time.sleep(args.warm_up)
            growth = one.process.memory_info().rss - before
    return {
        "streams": args.idle,
        "mib": round(growth / 2**20, 1),
        "kib_per_stream": round(growth / 1024 / args.idle, 1),
    }


def wait_for_streams(one: Gateway, count: int) -> None:
    deadline = time.monotonic() + 120
    while one.num_streams() < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{one.num_streams()} of {count} streams are open\n{one.service.log()[-4000:]}")
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds measured in each round")
    parser.add_argument("--warm-up", type=float, default=4.0, help="seconds before each measurement")
    parser.add_argument("--clients", type=int, default=256, help="streams of each round")
    parser.add_argument("--steps-per-s", type=float, default=600.0, help="tokens per second that each stream could get")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each kind, in turns")
    parser.add_argument("--idle", type=int, default=1000, help="idle streams; 0 skips them")
    parser.add_argument("--kind", choices=("grpc", "completions", "chat"), help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.target:
        paths = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
        run = read_grpc(args.target, args.clients) if args.kind == "grpc" else None
        asyncio.run(run or read_http(args.target, args.clients, paths[args.kind]))
        return
    runs: dict[str, list[dict[str, float]]] = {"grpc": [], "chat": []}
    for _ in range(args.rounds):
        for kind, figures in runs.items():
            figures.append(quiet(partial(throughput, kind, args)))
            print(f"{kind}: {json.dumps(figures[-1])}", flush=True)
    best = {kind: median(figures) for kind, figures in runs.items()}
    result: dict[str, Any] = {
        "sse_of_grpc_tokens_per_s": round(best["chat"]["tokens_per_s"] / best["grpc"]["tokens_per_s"], 3),
        "grpc_of_sse_us_per_token": round(best["grpc"]["us_per_token"] / best["chat"]["us_per_token"], 3),
        "grpc": best["grpc"],
        "sse": best["chat"],
    }
    if args.idle:
        result["idle"] = idle_memory(args)
    print(json.dumps(result | describe()))


def median(figures: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] or 0.0 for one in figures) for name in figures[0]}


if __name__ == "__main__":
    main()
