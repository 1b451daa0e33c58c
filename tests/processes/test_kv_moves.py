"""Blocks that move between pools, files and workers: the same tokens as without, and fewer of them computed."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
from quire_client import AsyncClient, SchedulerStatus
from quire_client.demo import demo_model_dir

from tests.processes.models import make_checkpoint
from tests.processes.ports import free_port
from tests.processes.stack import Stack, is_ready, read_page, wait_idle, worker_status
from tests.unit.engine.models import make_model

FLAGS = ("--dtype", "bfloat16", "--num-blocks", "96", "--max-num-seqs", "6", "--max-num-batched-tokens", "16")
# Such a prompt takes longer to compute, in steps of 16 tokens, than a scheduler expects of a first move.
PROMPT = [3 + i * 7 % 90 for i in range(300)]
BLOCK_SIZE = 16


async def answer(client: AsyncClient, prompt: list[int] = PROMPT, **options: object) -> tuple[list[int], int]:
    """The tokens of an answer and the prompt tokens that were cached."""
    options = {"max_tokens": 24} | options
    result = await client.generate(token_ids=prompt, seed=5, temperature=1.0, ignore_eos=True, **options)
    return list(result.token_ids), result.usage.cached_tokens


async def collect(stream: Any) -> list[int]:
    """All tokens of a stream."""
    async with stream:
        return [token async for delta in stream for token in delta.token_ids]


def wait_for_records(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(list(folder.glob("*/*/*"))) < count:
        assert time.monotonic() < deadline, sorted(folder.rglob("*"))
        time.sleep(0.02)


def write_model(folder: Path, name: str) -> Path:
    """A model whose rows start from blocks, or one whose rows start from snapshots or blocks of windows too."""
    folder.mkdir()
    return make_checkpoint(folder) if name in ("attention", "cuda") else make_model(folder, name)


# The engine for GPUs, on a CPU.
BACKENDS = {"cuda": ("--backend", "cuda", "--kernels", "torch", "--block-size", str(BLOCK_SIZE))}
NUM_BLOCKS = (len(PROMPT) + 23) // BLOCK_SIZE
NUM_RECORDS = {"attention": NUM_BLOCKS, "qwen3_5": NUM_BLOCKS + 4, "gemma3": 2 * NUM_BLOCKS, "bamba": NUM_BLOCKS + 4}
NUM_RECORDS |= dict.fromkeys(("cuda", "starcoder2"), NUM_BLOCKS)  # all layers of starcoder2 have windows
DEEP = [pytest.param("bamba", marks=pytest.mark.deep)]


@pytest.mark.parametrize("name", ["attention", "cuda", "qwen3_5", "gemma3", "starcoder2", *DEEP])
async def test_a_worker_that_was_killed_is_warm_again(tmp_path: Path, name: str) -> None:
    disk = tmp_path / "tier"
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        model = write_model(tmp_path / "model", name)
        flags = (*FLAGS, *BACKENDS.get(name, ()), "--kv-disk", str(disk))
        worker = stack.start_worker(scheduler, model, *flags)
        async with await stack.connect(stack.start_gateway(scheduler)) as client:
            expected, num_cached = await answer(client)
            assert num_cached == 0
            wait_for_records(disk, NUM_RECORDS[name])
            worker.kill()
            worker.start()
            await stack.until(client, lambda schedulers: is_ready(schedulers, worker))
            assert await answer(client) == (expected, len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE)
            other = await answer(client, cache_salt="another tenant")
            assert other == (expected, 0)
            await wait_idle(stack, client)


@pytest.mark.parametrize("flags", [(), ("--kv-disk",)], ids=["memory", "memory and disk"])
async def test_a_prefix_that_the_pool_evicted_is_read_from_memory_or_below(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """With --kv-disk, memory has room for a few blocks only."""
    prompts = [[number, *PROMPT, *PROMPT] for number in range(4)]
    size = "20K" if flags else "16M"
    flags = (*flags, str(tmp_path / "tier")) if flags else ()
    with Stack(tmp_path) as stack:
        scheduler, page = stack.start_scheduler(), free_port()
        model = make_checkpoint(tmp_path / "model")
        own = ("--num-blocks", "48", "--kv-host-memory", size, "--metrics-listen", f"127.0.0.1:{page}")
        stack.start_worker(scheduler, model, *FLAGS, *own, *flags)
        async with await stack.connect(stack.start_gateway(scheduler)) as client:
            expected = [await answer(client, prompt) for prompt in prompts]
            assert [num_cached for _, num_cached in expected] == [0] * 4
            again = [await answer(client, prompt) for prompt in prompts]
            assert [tokens for tokens, _ in again] == [tokens for tokens, _ in expected]
            assert any(num_cached for _, num_cached in again)  # how much is read follows from measured times
            assert await answer(client, prompts[0], cache_salt="another tenant") == (expected[0][0], 0)
            await wait_idle(stack, client)
        metrics = await asyncio.to_thread(read_page, page)
    tier = "disk" if flags else "memory"
    hits = re.search(rf'^quire_worker_kv_tier_reads_total{{result="hit",tier="{tier}"}} (\S+)$', metrics, re.MULTILINE)
    assert hits is not None, metrics
    assert float(hits[1]) > 0, metrics


NUM_SLEEPS = 6


def are_begun(scheduler: SchedulerStatus, asked: list[asyncio.Task[Any]]) -> bool:
    """Whether requests are at work; short ones may all have ended before the state is read."""
    return bool(scheduler.num_running + scheduler.num_waiting) or all(task.done() for task in asked)


@pytest.mark.parametrize("source", ["disk", "prefill worker"])
async def test_pools_that_sleep_while_blocks_arrive_hold_none_of_them_later(tmp_path: Path, source: str) -> None:
    """Blocks that arrived would be memory of zeros, and the next requests would start from them."""
    prompts = [[number, *PROMPT[1:]] for number in range(4)]
    with Stack(tmp_path) as stack:
        scheduler, model = stack.start_scheduler(), make_checkpoint(tmp_path / "model")
        flags = (*FLAGS, "--num-blocks", "192", "--weights-dir", str(tmp_path))
        roles = [("--role", role, "--kv-transfer") for role in ("prefill", "decode")]
        for own in roles if source != "disk" else [("--kv-disk", str(tmp_path / "tier"))]:
            stack.start_worker(scheduler, model, *flags, *own)
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway, workers=1 if source == "disk" else 2) as client:
            expected = [(await answer(client, prompt))[0] for prompt in prompts]
            if source == "disk":
                wait_for_records(tmp_path / "tier", len(prompts) * (NUM_BLOCKS - 1))
            await client.sleep_workers("kv_cache")
            await client.wake_workers("kv_cache")
            for _ in range(NUM_SLEEPS):
                asked = [asyncio.create_task(answer(client, prompt)) for prompt in prompts]
                await stack.until(client, lambda schedulers, asked=asked: are_begun(schedulers[0], asked))
                await client.sleep_workers("kv_cache")
                await client.wake_workers("kv_cache")
                assert [tokens for tokens, _ in await asyncio.gather(*asked)] == expected
            await wait_idle(stack, client)


async def test_streams_of_a_drained_worker_take_their_blocks_along(tmp_path: Path) -> None:
    """Each simulated worker checks every block that a step reads."""
    sim = ("--executor", "sim", "--sim-step-ms", "15", "--block-size", "16", "--num-blocks", "256", "--kv-transfer")
    prompts = [[3 + (i * 7 + number) % 90 for i in range(300)] for number in range(4)]
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler("--metrics-listen", f"127.0.0.1:{(port := free_port())}")
        workers = [stack.start_worker(scheduler, demo_model_dir(), *sim) for _ in range(2)]
        async with await stack.connect(stack.start_gateway(scheduler), workers=2) as client:
            streams = [client.stream(token_ids=p, max_tokens=250, seed=5, ignore_eos=True) for p in prompts]
            tasks = [asyncio.create_task(collect(stream)) for stream in streams]
            found = await stack.until(client, lambda schedulers: schedulers[0].num_running == len(tasks))
            leaving = max(workers, key=lambda worker: worker_status(found, worker).rows_used)
            await asyncio.to_thread(leaving.terminate)
            tokens = [await task for task in tasks]
            await wait_idle(stack, client)
            expected = [
                (
                    await client.generate(token_ids=p, max_tokens=250, seed=5, ignore_eos=True, cache_salt="alone")
                ).token_ids
                for p in prompts
            ]
        assert tokens == [list(ids) for ids in expected]
        page = await asyncio.to_thread(read_page, port)
        moved = re.search(r"^quire_transferred_tokens_total\S* (\S+)$", page, re.MULTILINE)
        assert moved is not None
        assert float(moved[1]) >= 300 // BLOCK_SIZE * BLOCK_SIZE, stack.logs()


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "cuda",
        "qwen3_5",
        *(pytest.param(n, marks=pytest.mark.deep) for n in ("bamba", "gemma3", "starcoder2")),
    ],
)
async def test_streams_leave_a_prefill_worker_for_a_decode_worker_that_is_killed(tmp_path: Path, name: str) -> None:
    flags = (*FLAGS, *BACKENDS.get(name, ()), "--kv-transfer", "--role")
    prompts = [[number, *PROMPT] for number in range(4)]
    with Stack(tmp_path) as stack:
        model = write_model(tmp_path / "model", name)
        scheduler = stack.start_scheduler("--metrics-listen", f"127.0.0.1:{(port := free_port())}")
        stack.start_worker(scheduler, model, *flags, "prefill")
        decode = stack.start_worker(scheduler, model, *flags, "decode")
        async with await stack.connect(stack.start_gateway(scheduler), workers=2) as client:
            expected = [(await answer(client, p, max_tokens=100, cache_salt="alone"))[0] for p in prompts]
            tasks = [asyncio.create_task(answer(client, p, max_tokens=100)) for p in prompts]
            found = await stack.until(client, lambda schedulers: worker_status(schedulers, decode).rows_used > 0)
            assert sorted(worker.role for worker in found[0].workers) == ["decode", "prefill"]
            decode.kill()
            assert [(await task)[0] for task in tasks] == expected
        page = await asyncio.to_thread(read_page, port)
        left = re.search(r'^quire_migrations_total{\S*reason="handover"\S* (\S+)$', page, re.MULTILINE)
        assert left is not None, page
        assert float(left[1]) > 0, stack.logs()
        moved = re.search(r"^quire_transferred_tokens_total\S* (\S+)$", page, re.MULTILINE)
        assert moved is not None
        assert float(moved[1]) >= len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE, stack.logs()
