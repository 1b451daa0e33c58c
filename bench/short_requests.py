#!/usr/bin/env python
"""Short requests: how many one gateway process can serve, what each costs, and the time to the first token.

    make bench-requests
    python bench/short_requests.py [--requests 3000] [--concurrency 64] [--probes 400] [--rounds 3]

Real services without metrics: one gateway, one scheduler, one worker whose executor is simulated and takes no time for
steps and prompts. Requests have 64 prompt tokens and 1 or 8 output tokens. A process with 8 connections sends them:

    load   `--concurrency` requests are always open; their prompts differ, so nothing is cached
    probe  one request at a time on the idle system; the prompt is always the same, so it is cached

The same client also calls a bare grpc.aio server that answers with messages of the same number and size: no gateway in
Python on grpc.aio can be cheaper. `us` is processor time per request of each process, which other programs on the
machine disturb less than `requests_per_s`. Each figure is the best of the rounds. `_joined`: the same in turns with
joins_events; `of_separate` compares its `us` (median of the rounds). `of_echo` is the echo server's `us`
divided by the gateway's. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from quire_client.demo import demo_model_dir

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.machine import Figures, cpu_s, describe, quiet
from svc_common.serve import SERVER_OPTIONS, run_service
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack

GENERATE = "/quire.v1.InferenceService/Generate"
PROMPT_LEN = 64
OUTPUT_LENS = (1, 8)
NUM_CHANNELS = 8
VOCAB_SIZE = 2000
TIMEOUT_S = 120.0
WORKER_FLAGS = (
    "--executor", "sim", "--sim-step-ms", "0", "--sim-prefill-tokens-per-s", "1e12", "--max-num-seqs", "256",
    "--num-blocks", "8192",
)  # fmt: skip


def request_bytes(rng: np.random.Generator, num_output: int, *, is_joined: bool) -> bytes:
    return pb.GenerateRequest(
        prompt=pb.Prompt(tokens=types.TokenIds(ids=rng.integers(10, VOCAB_SIZE, PROMPT_LEN).tolist())),
        sampling=types.SamplingParams(temperature=0.0),
        stop=types.StopParams(max_tokens=num_output, ignore_eos=True),
        joins_events=is_joined,
    ).SerializeToString()


# -- the echo server -------------------------------------------------------------------------------------------------


async def serve_echo(listen: str) -> None:
    """Answer each request with the messages that a gateway would send."""
    accepted, chunk, finished = (message.SerializeToString() for message in sample_messages())

    async def echo(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield accepted
        for _ in range(num_chunks(request)):
            yield chunk
        yield finished

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler = grpc.unary_stream_rpc_method_handler(echo)
    service, method = GENERATE[1:].split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(listen)
    await server.start()
    await server.wait_for_termination()


def num_chunks(request: bytes) -> int:
    """Number of chunks that a gateway sends on an idle system: one per token."""
    return pb.GenerateRequest.FromString(request).stop.max_tokens


def sample_messages() -> list[pb.GenerateResponse]:
    accepted = pb.Accepted(
        request_id="gen-0123456789abcdef01234567",
        seed=1 << 63,
        model="demo",
        prompt_tokens=PROMPT_LEN,
        revision="0" * 16,
    )
    usage = types.Usage(prompt_tokens=PROMPT_LEN, output_tokens=8)
    return [
        pb.GenerateResponse(accepted=accepted),
        pb.GenerateResponse(event_seq=1, chunk=pb.Chunk(text=" word", token_ids=[1000])),
        pb.GenerateResponse(event_seq=2, finished=pb.Finished(reason=3, usage=usage, output_digest=1 << 63)),
    ]


# -- the client process ----------------------------------------------------------------------------------------------


class Client:
    """Sends requests over some channels and checks that each is answered completely."""

    def __init__(self, target: str) -> None:
        self._channels = [grpc.aio.insecure_channel(target, options=[("bench", i)]) for i in range(NUM_CHANNELS)]
        self._calls = [channel.unary_stream(GENERATE) for channel in self._channels]
        self.num_messages = 0

    async def run(self, requests: Sequence[bytes], concurrency: int) -> Figures:
        """Send the requests, `concurrency` of them at a time."""
        waiting, first_s = iter(requests), []

        async def worker(i: int) -> None:
            for request in waiting:
                first_s.append(await self._send(i, request))

        self.num_messages = 0
        started = time.perf_counter()
        await asyncio.gather(*(worker(i) for i in range(concurrency)))
        p50, p99 = np.percentile(first_s, (50, 99))
        return {
            "requests_per_s": round(len(requests) / (time.perf_counter() - started), 1),
            "messages": round(self.num_messages / len(requests), 2),
            "ttft_p50_ms": round(1e3 * float(p50), 2),
            "ttft_p99_ms": round(1e3 * float(p99), 2),
        }

    async def _send(self, i: int, request: bytes) -> float:
        """Seconds until the first chunk."""
        started = time.perf_counter()
        first_s, last = 0.0, b""
        call = self._calls[i % NUM_CHANNELS](request)
        while (data := await call.read()) is not grpc.aio.EOF:
            if last and not first_s:  # the second message
                first_s = time.perf_counter() - started
            last = data
            self.num_messages += 1
        message = pb.GenerateResponse.FromString(last)
        event = message.following[-1] if message.following else message
        if event.WhichOneof("event") != "finished":
            raise RuntimeError("an answer is not complete")
        return first_s or time.perf_counter() - started  # all events in one message


async def serve_commands(target: str) -> None:
    """Run the commands of standard input, one JSON object per line, and print the figures of each."""
    client, rng = Client(target), np.random.default_rng()  # prompts of another client process would be cached
    for line in sys.stdin:
        command = json.loads(line)
        make = partial(request_bytes, rng, command["num_output"], is_joined=command["is_joined"])
        shared = make()
        requests = [shared if command["is_cached"] else make() for _ in range(command["count"])]
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(await client.run(requests, command["concurrency"])), flush=True)


class ClientProcess:
    """The client in its own process."""

    def __init__(self, target: str) -> None:
        command = [sys.executable, __file__, "--role", "client", "--target", target]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def run(self, pids: dict[str, int], **command: Any) -> Figures:
        """Run a command. Returns the client's figures and the processor time of each process per request."""
        self._write(json.dumps(command))
        self._read()  # the requests are made
        watched = pids | {"client": self.pid}
        before = {name: cpu_s(pid) for name, pid in watched.items()}
        self._write("go")
        figures = json.loads(self._read())
        us = {name: 1e6 * (cpu_s(pid) - before[name]) / command["count"] for name, pid in watched.items()}
        return figures | {"us": {name: round(value, 1) for name, value in us.items()}}

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the client failed")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# -- measurement -------------------------------------------------------------------------------------------------------


@contextmanager
def services(gateway_flags: Sequence[str]) -> Iterator[tuple[str, dict[str, int]]]:
    """A running stack: the gateway's address, and the process id of each service."""
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder)) as stack:
        scheduler = stack.start_scheduler()
        worker = stack.start_worker(scheduler, Path(demo_model_dir()), *WORKER_FLAGS)
        gateway = stack.start_gateway(scheduler, flags=tuple(gateway_flags))
        for service in (worker, gateway):
            service.wait_ready()
        yield gateway.address, {"gateway": pid_of(gateway), "scheduler": pid_of(scheduler), "worker": pid_of(worker)}


def pid_of(service: Service) -> int:
    assert service.process is not None
    return service.process.pid


@contextmanager
def echo_server() -> Iterator[tuple[str, dict[str, int]]]:
    """A running echo server: its address and process id."""
    address = f"127.0.0.1:{free_port()}"
    with subprocess.Popen([sys.executable, __file__, "--role", "echo", "--target", address]) as process:
        try:
            with grpc.insecure_channel(address) as channel:
                grpc.channel_ready_future(channel).result(timeout=TIMEOUT_S)
            yield address, {"echo": process.pid}
        finally:
            process.kill()


def measure(target: str, pids: dict[str, int], args: argparse.Namespace, *, joins: bool) -> Figures:
    """Load and probes with each number of output tokens; with `joins`, in turns also with joined events."""
    client = ClientProcess(target)
    figures: Figures = {}
    try:
        warm_up = {"count": 500, "concurrency": args.concurrency, "num_output": 2, "is_cached": False}
        client.run(pids, **warm_up, is_joined=joins)
        for num_output in OUTPUT_LENS:
            load = {"count": args.requests, "concurrency": args.concurrency, "is_cached": False}
            probe = {"count": args.probes, "concurrency": 1, "is_cached": True}
            for name, command in (("load", load), ("probe", probe)):
                run = partial(client.run, pids, num_output=num_output, **command)
                figures |= in_turns(f"{name}_{num_output}", run, args.rounds, joins=joins)
    finally:
        client.close()
    for name, found in figures.items():
        print(f"  {name:14} {json.dumps(found)}", flush=True)
    return figures


def in_turns(name: str, run: Callable[..., Figures], num_rounds: int, *, joins: bool) -> Figures:
    """The best figures of the rounds. Joined events also have `of_separate`: the median of their `us` divided by those
    of separate events in the same round.
    """
    rounds = [
        [quiet(partial(run, is_joined=is_joined)) for is_joined in (False, joins)[: 1 + joins]]
        for _ in range(num_rounds)
    ]
    figures = {name: best([one[0] for one in rounds])}
    if joins:
        of_separate = {
            process: round(
                statistics.median(joined["us"][process] / separate["us"][process] for separate, joined in rounds), 3
            )
            for process in ("gateway", "client")
        }
        figures[f"{name}_joined"] = best([one[1] for one in rounds]) | {"of_separate": of_separate}
    return figures


def best(rounds: Sequence[Figures]) -> Figures:
    """The best value of each figure: the highest rate, the lowest times."""
    lowest = {name: min(figures[name] for figures in rounds) for name in rounds[0] if name != "us"}
    us = {name: min(figures["us"][name] for figures in rounds) for name in rounds[0]["us"]}
    return lowest | {"requests_per_s": max(figures["requests_per_s"] for figures in rounds), "us": us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000, help="requests of each load")
    parser.add_argument("--concurrency", type=int, default=64, help="open requests of a load")
    parser.add_argument("--probes", type=int, default=400, help="requests on the idle system")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--gateway-flags", default="", help="additional flags of quire-gateway, as one argument")
    parser.add_argument("--role", choices=("client", "echo"), help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        run_service(serve_echo(args.target) if args.role == "echo" else serve_commands(args.target))
        return
    print("echo", flush=True)
    with echo_server() as (address, pids):
        echo = measure(address, pids, args, joins=False)
    print("quire", flush=True)
    with services(args.gateway_flags.split()) as (address, pids):
        quire = measure(address, pids, args, joins=True)
    of_echo = {name: round(echo[name]["us"]["echo"] / quire[name]["us"]["gateway"], 3) for name in echo}
    print(json.dumps({"of_echo": of_echo, "quire": quire, "echo": echo, **describe()}))


if __name__ == "__main__":
    main()
