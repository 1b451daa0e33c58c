#!/usr/bin/env python
"""Blocks that move: what a restart, a small pool and a busy holder cost with and without tiers and transfers.

    make bench-kv
    python bench/kv.py [--prefill-tokens-per-s 5000] [--transport] [--realtime]

Simulated workers with real services around them: a step takes its simulated time, blocks are small. So the figures show
what is computed and how long the decisions and messages take. `transport` shows the speed of bytes, with 64 blocks of
1.75 MiB: a plain copy of them, records through files, and FetchBlocks of a worker that reads from another process, by
gRPC over loopback and by shared memory, all copies and xxh3 checksums included.

    restart        seconds to the first token of a prompt of 2,000 tokens after kill -9 of its only worker
    small_pool     prompts of 16 prefixes in turn, with a pool that holds a quarter: cached fraction of tokens, seconds
    pull           seconds to the first token of a prefix of 8,000 tokens that another, busy worker holds; and that a
                   worker of another scheduler holds
    drain          the longest pause of 20 streams with 2,000 tokens of context whose worker drains, in ms
    roles          time between tokens of 24 chats while a prompt of 6,000 tokens arrives each 2 s: three workers that
                   are alike, and one that prefills beside two that decode
    moves          of all runs: their number, and by how much they took longer than computing: together, and a bound of
                   the 99th percentile

The last line is one JSON object. Run it on an idle machine. --transport measures only the speed of bytes; --realtime
(requires root) takes precedence over other programs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import svc_common  # noqa: F401  (gRPC gets its poller)

# isort: split
import grpc
import numpy as np
from quire.internal.v1 import worker_pb2
from quire_client import AsyncClient
from quire_client.demo import demo_model_dir

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import worker_svc.blocks
from bench.machine import describe
from prefix_index.hashing import layout_digest
from step_protocol.columns import u32_to_bytes
from svc_common.channels import BULK_OPTIONS
from svc_common.serve import CHANNEL_OPTIONS, SERVER_OPTIONS, run_service
from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack, is_ready
from worker_svc.blocks import MovementSettings, WorkerBlocks
from worker_svc.engine.decoder.pool.block_contents import BlockContents
from worker_svc.engine.decoder.pool.block_payload import MovableBlocks, PoolPart
from worker_svc.kv_store.block_store import BlockStore
from worker_svc.kv_store.disk_tier import DiskTier
from worker_svc.kv_store.nixl_memory import has_nixl
from worker_svc.kv_store.record import Origin, RecordFormat, WantedBlock

BLOCK_SIZE, BLOCK_BYTES, LAYERS, NUM_BLOCKS = 16, 7 << 18, 28, 64
DIGESTS = [number.to_bytes(16, "little") for number in range(NUM_BLOCKS)]
NUM_CHATS, CHAT_TOKENS, NUM_LONG = 24, 600, 6
NUM_PREFIXES, PREFIX_TOKENS, ROUNDS = 16, 1024, 3


def payload_blocks(*, is_source: bool) -> MovableBlocks:
    """The pool of a worker with blocks of BLOCK_BYTES. Those of a source are committed."""
    contents = BlockContents(NUM_BLOCKS, BLOCK_SIZE)
    array = np.random.default_rng(1).integers(0, 256, (LAYERS, NUM_BLOCKS, BLOCK_BYTES // LAYERS), np.uint8)
    blocks = MovableBlocks(contents, [PoolPart("uint8", (BLOCK_BYTES // LAYERS,), array)])
    if is_source:
        contents.commit(np.arange(NUM_BLOCKS), DIGESTS)
    return blocks


class PoolOnly(SimpleNamespace):
    """In place of the executor of a worker without a model: a pool, whose writes wait for no step."""

    model_thread = ThreadPoolExecutor(1)

    async def write_blocks(self, lease: object, after_step_id: int, write: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self.model_thread, write)


def open_bulk(address: str, worker_id: str) -> grpc.aio.Channel:
    """Opens a channel with the options of channels between workers."""
    return grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *BULK_OPTIONS.items()])


async def worker_blocks(epoch: int, *, is_source: bool, nixl: bool) -> WorkerBlocks:
    executor: Any = PoolOnly(worker_epoch=epoch, on_step=None, check_fence=lambda fence: None)
    executor.movable_blocks = lambda: payload_blocks(is_source=is_source)
    found = WorkerBlocks(executor, MovementSettings(kv_transfer=True, kv_nixl=nixl), open_bulk)
    info: Any = SimpleNamespace(groups=(), num_snapshots=None, revision="r", numerics="n", weights_revision="")
    await found.start(info)
    return found


def serve_blocks(pipe: Connection, *, shares: bool, nixl: bool) -> None:
    """The process of the source. Ends with the pipe."""
    if not shares:
        setattr(worker_svc.blocks, "find_shared_memory", lambda *_: None)  # noqa: B010

    async def serve() -> None:
        blocks, server = await worker_blocks(1, is_source=True, nixl=nixl), grpc.aio.server(options=SERVER_OPTIONS)

        async def read(request: worker_pb2.ReadBlocksRequest, context: object) -> AsyncIterator[Any]:
            async for response in blocks.read(request):
                yield response

        handler = grpc.unary_stream_rpc_method_handler(
            read,
            worker_pb2.ReadBlocksRequest.FromString,
            lambda answer: answer if isinstance(answer, bytes) else answer.SerializeToString(),
        )
        name = "quire.internal.v1.WorkerService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"ReadBlocks": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(port)
        await asyncio.get_running_loop().run_in_executor(None, pipe.poll, None)

    run_service(serve())


async def fetch_speed(*, shares: bool = False, nixl: bool = False) -> float:
    """GB/s from a pool of one process to that of another."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=serve_blocks, args=(theirs,), kwargs={"shares": shares, "nixl": nixl}, daemon=True)
    process.start()
    port = await asyncio.get_running_loop().run_in_executor(None, mine.recv)
    target = await worker_blocks(2, is_source=False, nixl=nixl)
    ids = u32_to_bytes(np.arange(NUM_BLOCKS, dtype=np.uint32))
    request = worker_pb2.FetchBlocksRequest(block_ids=ids, hashes=b"".join(DIGESTS))
    request.token_ids = bytes(4 * BLOCK_SIZE * NUM_BLOCKS)
    request.source.worker_id, request.source.address = "source", f"127.0.0.1:{port}"
    request.source.worker_epoch, request.source.block_ids = 1, ids
    best = float("inf")
    for _ in range(15):
        started = time.perf_counter()
        response = await target.fetch(request)
        best = min(best, time.perf_counter() - started)
        if response.num_fetched != NUM_BLOCKS:
            raise RuntimeError(response.message)
    mine.send(None)
    process.join(10)
    await target.close()
    return round(NUM_BLOCKS * BLOCK_BYTES / best / 1e9, 2)


async def transport(folder: Path) -> dict[str, float]:
    """GB/s of a plain copy, of records to and from files, and between two processes."""
    source, target = payload_blocks(is_source=True), payload_blocks(is_source=False)
    layout = layout_digest("r", "n", source.layout)
    tier, records = DiskTier(folder, 1 << 40, layout), RecordFormat(layout, source)
    store = BlockStore(records, [tier])
    store.start()
    wanted = [WantedBlock(digest, np.zeros(BLOCK_SIZE, np.uint32)) for digest in DIGESTS]

    def write() -> None:
        record = np.empty(records.num_bytes, np.uint8)
        for block, digest in enumerate(DIGESTS):
            records.pack(digest, Origin(1, block), record)
            tier.put(digest, record)

    def read() -> None:
        for block, found in enumerate(store.read_all(wanted)):
            target.write(block, wanted[block].tokens, found.payload)

    pools = np.ones((2, NUM_BLOCKS * BLOCK_BYTES), np.uint8)
    found = {
        "copy": _speed(lambda: np.copyto(pools[0], pools[1])),
        "disk_write": _speed(write),
        "disk_read": _speed(read),
        "grpc": await fetch_speed(),
        "shared_memory": await fetch_speed(shares=True),
    }
    if has_nixl():
        found["nixl"] = await fetch_speed(nixl=True)
    store.close()
    return found


def _speed(run: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return round(NUM_BLOCKS * BLOCK_BYTES / best / 1e9, 2)


class Lost:
    """The time by which moves of all runs took longer than computing, by the upper bound of its bucket."""

    def __init__(self) -> None:
        self.up_to: Counter[float] = Counter()  # cumulative, by bound in seconds
        self.lost_s = 0.0

    async def add(self, page: str) -> None:
        """Read the metrics of a scheduler."""
        text = await asyncio.to_thread(lambda: urlopen(f"http://{page}/metrics", timeout=10).read().decode())
        for bound, count in re.findall(r'^quire_block_move_lost_seconds_bucket{\S*le="([^"]+)"\S* (\S+)$', text, re.M):
            self.up_to[float(bound)] += int(float(count))
        self.lost_s += float(re.findall(r"^quire_block_move_lost_seconds_sum\S* (\S+)$", text, re.M)[0])

    def summary(self) -> dict[str, float]:
        """The number of moves, what they lost together, and a bound of the 99th percentile."""
        number = max(self.up_to.values(), default=0)
        p99 = min((bound for bound, count in self.up_to.items() if count >= 0.99 * number), default=0.0)
        return {"number": number, "lost_ms": round(1e3 * self.lost_s, 2), "lost_p99_ms_at_most": 1e3 * p99}


def prompt_of(number: int, length: int) -> list[int]:
    return [3 + (number * 31 + i * 7) % 90 for i in range(length)]


async def first_token_s(client: AsyncClient, prompt: Sequence[int]) -> float:
    started = time.perf_counter()
    await client.generate(token_ids=list(prompt), max_tokens=1)
    return time.perf_counter() - started


async def restart(folder: Path, sim: Sequence[str], *flags: str) -> float:
    with Stack(folder) as stack:
        scheduler = stack.start_scheduler()
        worker = stack.start_worker(scheduler, demo_model_dir(), *sim, "--num-blocks", "1024", *flags)
        async with await stack.connect(stack.start_gateway(scheduler)) as client:
            await first_token_s(client, prompt_of(0, 2000))
            await asyncio.sleep(1.0)  # the writer is done; without a tier nothing happens
            worker.kill()
            worker.start()
            await stack.until(client, lambda schedulers: is_ready(schedulers, worker))
            return round(await first_token_s(client, prompt_of(0, 2000)), 3)


async def small_pool(folder: Path, sim: Sequence[str], lost: Lost, num_blocks: int, *flags: str) -> dict[str, float]:
    page = f"127.0.0.1:{free_port()}"
    with Stack(folder) as stack:
        scheduler = stack.start_scheduler("--metrics-listen", page)
        stack.start_worker(scheduler, demo_model_dir(), *sim, "--num-blocks", str(num_blocks), *flags)
        async with await stack.connect(stack.start_gateway(scheduler)) as client:
            started, num_cached, num_tokens = time.perf_counter(), 0, 0
            for turn in range(ROUNDS):
                for number in range(NUM_PREFIXES):
                    result = await client.generate(token_ids=prompt_of(number, PREFIX_TOKENS), max_tokens=1)
                    if turn:
                        num_cached += result.usage.cached_tokens
                        num_tokens += PREFIX_TOKENS
            seconds = time.perf_counter() - started
            await lost.add(page)
            return {"hits": round(num_cached / num_tokens, 3), "seconds": round(seconds, 2)}


async def pull(folder: Path, sim: Sequence[str], lost: Lost, *flags: str) -> float:
    """The only worker that has the prefix is busy with long prompts when another one is ready."""
    page = f"127.0.0.1:{free_port()}"
    with Stack(folder) as stack:
        scheduler = stack.start_scheduler("--metrics-listen", page)
        stack.start_worker(scheduler, demo_model_dir(), *sim, "--num-blocks", "8192", *flags)
        async with await stack.connect(stack.start_gateway(scheduler)) as client:
            prefix = prompt_of(1, 8000)
            await first_token_s(client, prefix)
            busy = asyncio.gather(*(first_token_s(client, prompt_of(number, 23_500)) for number in (2, 3)))
            await stack.until(client, lambda schedulers: schedulers[0].num_running > 1)
            other = stack.start_worker(scheduler, demo_model_dir(), *sim, "--num-blocks", "8192", *flags)
            await stack.until(client, lambda schedulers: is_ready(schedulers, other))
            if busy.done():
                raise RuntimeError("the holder was idle before the prefix was asked for")
            took = await first_token_s(client, [*prefix, 5])
            await busy
            await lost.add(page)
            return round(took, 3)


async def borrow(folder: Path, sim: Sequence[str], lost: Lost, *flags: str) -> float:
    """A worker of another scheduler has the prefix. The own worker is idle."""
    prefix, pages = prompt_of(1, 8000), [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with RedisServer(folder) as redis, Stack(folder) as stack:
        gateways = list[Service]()
        for page in pages:
            scheduler = stack.start_scheduler("--redis", redis.url, "--metrics-listen", page)
            stack.start_worker(scheduler, demo_model_dir(), *sim, "--num-blocks", "8192", *flags)
            gateways.append(stack.start_gateway(scheduler))
        async with await stack.connect(gateways[0]) as holder, await stack.connect(gateways[1]) as client:
            await first_token_s(holder, prefix)
            await first_token_s(client, prompt_of(2, 8000))  # makes the pace of both workers known
            while redis.num_keys() < 2 * len(prefix) // BLOCK_SIZE:  # noqa: ASYNC110  (it is written without an event)
                await asyncio.sleep(0.05)
            took = await first_token_s(client, [*prefix, 5])
            await lost.add(pages[1])
            return round(took, 3)


async def drain(folder: Path, sim: Sequence[str], lost: Lost, *flags: str) -> float:
    """The longest pause of streams, in ms, whose worker drains."""
    page, num_streams = f"127.0.0.1:{free_port()}", 20
    sim = (*sim, "--num-blocks", "32768", "--max-num-seqs", "64", *flags)
    with Stack(folder) as stack:
        scheduler = stack.start_scheduler("--metrics-listen", page)
        first = stack.start_worker(scheduler, demo_model_dir(), *sim)
        async with await stack.connect(stack.start_gateway(scheduler)) as client:
            begun, gone, pauses = asyncio.Semaphore(0), asyncio.Event(), list[float]()
            streams = [
                asyncio.create_task(_drained(client, number, begun, gone, pauses)) for number in range(num_streams)
            ]
            for _ in streams:
                await begun.acquire()
            other = stack.start_worker(scheduler, demo_model_dir(), *sim)
            await stack.until(client, lambda schedulers: is_ready(schedulers, other))
            pauses.clear()
            await asyncio.to_thread(first.terminate)
            gone.set()
            await asyncio.gather(*streams)
            await lost.add(page)
            return round(1e3 * max(pauses), 1)


async def _drained(
    client: AsyncClient, number: int, begun: asyncio.Semaphore, gone: asyncio.Event, pauses: list[float]
) -> None:
    """Reads a stream until it has got tokens from its next worker."""
    num_more, before = 50, None
    prompt = prompt_of(number, 2000)
    async with client.stream(token_ids=prompt, max_tokens=20_000, ignore_eos=True) as stream:
        async for _ in stream:
            now = time.perf_counter()
            if before is None:
                begun.release()
            else:
                pauses.append(now - before)
            before = now
            num_more -= gone.is_set()
            if not num_more:
                return


async def roles(folder: Path, sim: Sequence[str], *names: str) -> dict[str, float]:
    with Stack(folder) as stack:
        scheduler = stack.start_scheduler()
        for name in names:
            flags = ("--num-blocks", "4096", "--kv-transfer", "--role", name)
            stack.start_worker(scheduler, demo_model_dir(), *sim, *flags)
        async with await stack.connect(stack.start_gateway(scheduler), workers=len(names)) as client:
            gaps, firsts = list[float](), list[float]()
            started = time.perf_counter()
            long = [asyncio.create_task(_long_prompt(client, number, firsts)) for number in range(NUM_LONG)]
            await asyncio.gather(*(_chat(client, number, gaps) for number in range(NUM_CHATS)))
            chats_s = time.perf_counter() - started
            await asyncio.gather(*long)
            p50, p99, longest = (1e3 * float(gap) for gap in np.quantile(gaps, (0.5, 0.99, 1)))
            return {
                "p50_ms": round(p50, 1),
                "p99_ms": round(p99, 1),
                "longest_ms": round(longest, 1),
                "chat_tokens_per_s": round(NUM_CHATS * CHAT_TOKENS / chats_s),
                "long_first_token_p50_s": round(float(np.median(firsts)), 2),
            }


async def _long_prompt(client: AsyncClient, number: int, firsts: list[float]) -> None:
    await asyncio.sleep(2.0 * number + 0.5)
    firsts.append(await first_token_s(client, prompt_of(100 + number, 6000)))


async def _chat(client: AsyncClient, number: int, gaps: list[float]) -> None:
    async with client.stream(token_ids=prompt_of(200 + number, 64), max_tokens=CHAT_TOKENS, ignore_eos=True) as stream:
        before = None
        async for _ in stream:
            now = time.perf_counter()
            if before is not None:
                gaps.append(now - before)
            before = now


async def measure(pace: float, *, is_transport_only: bool) -> dict[str, Any]:
    sim: tuple[str, ...] = ("--executor", "sim", "--sim-step-ms", "2", "--sim-prefill-tokens-per-s", str(pace))
    sim += ("--max-model-len", "24000", "--block-size", str(BLOCK_SIZE))
    slow = (*sim, "--sim-step-ms", "20")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folders = iter([folder / str(number) for number in range(20)])

        def new() -> Path:
            made = next(folders)
            made.mkdir()
            return made

        quarter = NUM_PREFIXES * PREFIX_TOKENS // BLOCK_SIZE // 4
        disk = ("--kv-disk", str(folder / "tier"), "--kv-disk-size", "1G")
        other = ("--kv-disk", str(folder / "other"), "--kv-disk-size", "1G")
        lost = Lost()
        speeds = {"transport_gb_per_s": await transport(new())}
        if is_transport_only:
            return speeds
        found = {
            **speeds,
            "restart_s": {"none": await restart(new(), sim), "disk": await restart(new(), sim, *disk)},
            "small_pool": {
                "none": await small_pool(new(), sim, lost, quarter),
                "memory": await small_pool(new(), sim, lost, quarter, "--kv-host-memory", "1G"),
                "disk": await small_pool(new(), sim, lost, quarter, *other),
                "unlimited": await small_pool(new(), sim, lost, 8 * quarter),
            },
            "pull_s": {
                "recompute": await pull(new(), sim, lost),
                "transfer": await pull(new(), sim, lost, "--kv-transfer"),
                "recompute_beside_another_scheduler": await borrow(new(), sim, lost),
                "borrow_from_another_scheduler": await borrow(new(), sim, lost, "--kv-transfer"),
            },
            "drain_ms": {
                "recompute": await drain(new(), sim, lost),
                "transfer": await drain(new(), sim, lost, "--kv-transfer"),
            },
            "roles": {
                "colocated": await roles(new(), slow, "both", "both", "both"),
                "split": await roles(new(), slow, "prefill", "decode", "decode"),
            },
        }
        return {**found, "moves": lost.summary()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill-tokens-per-s", type=float, default=5000.0)
    parser.add_argument("--transport", action="store_true", help="measure only the speed of bytes")
    parser.add_argument("--realtime", action="store_true", help="use real-time priority (requires root)")
    args = parser.parse_args()
    if args.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    found = run_service(measure(args.prefill_tokens_per_s, is_transport_only=args.transport))
    print(json.dumps({"machine": describe(), "kv": found}))


if __name__ == "__main__":
    main()
