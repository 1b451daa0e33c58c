#!/usr/bin/env python
"""Blocks that move: what a restart, a small pool and a busy holder cost with and without tiers and transfers.

    make bench-kv
    python bench/kv.py [--prefill-tokens-per-s 5000]

Simulated workers with real services around them: a step takes its simulated time, blocks are small. So the figures show
what is computed and how long the decisions and messages take; `transport` shows the speed of bytes, with blocks of
1.75 MiB in one process (the xxh3 checksums and two copies included).

    restart        seconds to the first token of a prompt of 2,000 tokens after kill -9 of its only worker
    small_pool     prompts of 16 prefixes in turn, with a pool that holds a quarter: cached fraction of tokens, seconds
    pull           seconds to the first token of a prefix of 8,000 tokens that another, busy worker holds
    roles          time between tokens of 24 chats while a prompt of 6,000 tokens arrives each 2 s: three workers that
                   are alike, and one that prefills beside two that decode

The last line is one JSON object. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from quire_client import AsyncClient
from quire_client.demo import demo_model_dir

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.machine import describe
from prefix_index.hashing import layout_digest
from tests.processes.stack import Stack, is_ready, wait_idle
from worker_svc.kv_store.disk_tier import DiskTier
from worker_svc.kv_store.record import Origin, WantedBlock, pack_record, unpack_record

BLOCK_SIZE, BLOCK_BYTES, NUM_BLOCKS = 16, 7 << 18, 64
NUM_CHATS, CHAT_TOKENS, NUM_LONG = 24, 600, 6
NUM_PREFIXES, PREFIX_TOKENS, ROUNDS = 16, 1024, 3


def transport(folder: Path) -> dict[str, float]:
    """GB/s of a plain copy, and of records to and from files and memory."""
    payload, tokens = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES, np.uint8), np.zeros(BLOCK_SIZE, np.uint32)
    layout, target = layout_digest("r", "n", [("uint8", [BLOCK_BYTES])]), np.empty(BLOCK_BYTES, np.uint8)
    digests = [number.to_bytes(16, "little") for number in range(NUM_BLOCKS)]
    tier = DiskTier(folder, 1 << 40, layout)
    tier.open()

    def write() -> None:
        for digest in digests:
            tier.put(digest, pack_record(digest, layout, tokens, payload, Origin(1, 1)))

    def read() -> None:
        for digest in digests:
            data = tier.read(digest)
            if data is None:
                raise RuntimeError("the tier lost a record")
            target[:] = unpack_record(data, WantedBlock(digest, tokens), layout, BLOCK_BYTES).payload

    def through_memory() -> None:
        for digest in digests:
            data = b"".join(pack_record(digest, layout, tokens, payload, Origin(1, 1)))
            target[:] = unpack_record(data, WantedBlock(digest, tokens), layout, BLOCK_BYTES).payload

    def copy() -> None:
        for _ in digests:
            target[:] = payload

    found = {
        "copy": _speed(copy),
        "disk_write": _speed(write),
        "disk_read": _speed(read),
        "record": _speed(through_memory),
    }
    tier.close()
    return found


def _speed(run: Any) -> float:
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return round(NUM_BLOCKS * BLOCK_BYTES / best / 1e9, 2)


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


async def small_pool(folder: Path, sim: Sequence[str], num_blocks: int, *flags: str) -> dict[str, float]:
    with Stack(folder) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), *sim, "--num-blocks", str(num_blocks), *flags)
        async with await stack.connect(stack.start_gateway(scheduler)) as client:
            started, num_cached, num_tokens = time.perf_counter(), 0, 0
            for turn in range(ROUNDS):
                for number in range(NUM_PREFIXES):
                    result = await client.generate(token_ids=prompt_of(number, PREFIX_TOKENS), max_tokens=1)
                    if turn:
                        num_cached += result.usage.cached_tokens
                        num_tokens += PREFIX_TOKENS
            return {"hits": round(num_cached / num_tokens, 3), "seconds": round(time.perf_counter() - started, 2)}


async def pull(folder: Path, sim: Sequence[str], *flags: str) -> float:
    """The holder is busy with a long prompt when the prefix is asked for again."""
    with Stack(folder) as stack:
        scheduler = stack.start_scheduler()
        for _ in range(2):
            stack.start_worker(scheduler, demo_model_dir(), *sim, "--num-blocks", "4096", *flags)
        async with await stack.connect(stack.start_gateway(scheduler), workers=2) as client:
            prefix = prompt_of(1, 8000)
            await first_token_s(client, prefix)
            await wait_idle(stack, client)
            busy = [asyncio.create_task(first_token_s(client, [*prefix, *prompt_of(2, 12_000)]))]
            await stack.until(client, lambda schedulers: schedulers[0].num_running > 0)
            took = await first_token_s(client, [*prefix, 5])
            await asyncio.gather(*busy)
            return round(took, 3)


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


async def measure(pace: float) -> dict[str, Any]:
    sim = ("--executor", "sim", "--sim-step-ms", "2", "--sim-prefill-tokens-per-s", str(pace))
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
        return {
            "transport_gb_per_s": transport(new()),
            "restart_s": {"none": await restart(new(), sim), "disk": await restart(new(), sim, *disk)},
            "small_pool": {
                "none": await small_pool(new(), sim, quarter),
                "disk": await small_pool(new(), sim, quarter, *other),
                "unlimited": await small_pool(new(), sim, 8 * quarter),
            },
            "roles": {
                "colocated": await roles(new(), slow, "both", "both", "both"),
                "split": await roles(new(), slow, "prefill", "decode", "decode"),
            },
            "pull_s": {"recompute": await pull(new(), sim), "transfer": await pull(new(), sim, "--kv-transfer")},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill-tokens-per-s", type=float, default=5000.0)
    args = parser.parse_args()
    print(json.dumps({"machine": describe(), "kv": asyncio.run(measure(args.prefill_tokens_per_s))}))


if __name__ == "__main__":
    main()
