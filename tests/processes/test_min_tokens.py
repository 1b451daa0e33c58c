"""min_tokens with real services: no sample ends earlier, except by max_tokens, even if its worker is killed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quire_client import AsyncClient, FinishReason, GenerateResult

from tests.processes.models import VOCAB_SIZE, make_checkpoint
from tests.processes.stack import Service, Stack, is_ready

MIN_TOKENS = 150
RNG = random.Random(9)
PROMPT = [RNG.randrange(VOCAB_SIZE) for _ in range(20)]
# With so many stop ids, a sample ends within a few tokens after min_tokens.
REQUEST = {
    "token_ids": PROMPT, "seed": 11, "temperature": 1.0, "n": 2, "max_tokens": 250,
    "stop_token_ids": list(range(0, VOCAB_SIZE, 3)),
}  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path) as stack:
        yield stack


def start_worker(stack: Stack, scheduler: Service, model_dir: Path) -> Service:
    flags = ("--dtype", "float32", "--num-blocks", "128", "--max-num-seqs", "8")
    return stack.start_worker(scheduler, model_dir, *flags)


def check(result: GenerateResult) -> None:
    for sample in result.samples:
        early, late = sample.token_ids[:MIN_TOKENS], sample.token_ids[MIN_TOKENS:]
        assert len(early) == MIN_TOKENS
        assert not set(early) & set(REQUEST["stop_token_ids"])
        assert sample.finish_reason is FinishReason.STOP
        assert late[-1] in REQUEST["stop_token_ids"]
        assert not set(late[:-1]) & set(REQUEST["stop_token_ids"])


async def killed_mid_stream(
    client: AsyncClient, stack: Stack, scheduler: Service, worker: Service, model_dir: Path
) -> tuple[GenerateResult, Service]:
    """Runs the request and kills its worker after a few tokens. Returns its result and the worker that took over."""
    async with client.stream(**REQUEST, min_tokens=MIN_TOKENS, cache_salt=worker.name) as stream:
        async for delta in stream:
            if delta.offset + len(delta.token_ids) >= 5:
                break
        worker.kill()
        other = start_worker(stack, scheduler, model_dir)
        return await stream.result(), other


async def test_no_sample_ends_before_min_tokens(stack: Stack, model_dir: Path) -> None:
    scheduler = stack.start_scheduler()
    worker = start_worker(stack, scheduler, model_dir)
    async with await stack.connect(stack.start_gateway(scheduler)) as client:
        free = await client.generate(**REQUEST)
        assert all(len(sample.token_ids) < MIN_TOKENS for sample in free.samples)
        whole = await client.generate(**REQUEST, min_tokens=MIN_TOKENS)
        check(whole)
        for _ in range(5):  # on a quick machine, a sample may end before its worker does
            moved, worker = await killed_mid_stream(client, stack, scheduler, worker, model_dir)
            assert [s.token_ids for s in moved.samples] == [s.token_ids for s in whole.samples]
            await stack.until(client, lambda schedulers, other=worker: is_ready(schedulers, other))
            if moved.usage.recomputed_tokens:
                break
        assert moved.usage.recomputed_tokens > 0
