"""A seeded request gets the same tokens with any batch, preemption, chunks, prefix hits and workers."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from quire_client import AsyncClient, GenerateResult

from tests.processes.models import VOCAB_SIZE, make_checkpoint
from tests.processes.stack import Service, Stack, is_ready, wait_idle

ROOMY, TIGHT = "roomy", "tight"  # one checkpoint under two names, each with its own scheduler and worker
MAX_TOKENS = 40
LONG_TOKENS = 220  # long enough to still run when urgent requests arrive; fits the tight pool alone
URGENT_TOKENS = 340  # fits the tight pool only alone
RNG = random.Random(5)
PROMPT = [RNG.randrange(VOCAB_SIZE) for _ in range(150)]
SEED = 2**63 + 12345


@dataclass(frozen=True)
class Pair:
    """A gateway with both models. `start_roomy_worker` adds a worker for ROOMY."""

    stack: Stack
    gateway: Service
    roomy_scheduler: Service
    model_dir: Path
    dtype: str

    def start_roomy_worker(self) -> Service:
        flags = ("--model-name", ROOMY, "--dtype", self.dtype, "--num-blocks", "1024", "--max-num-seqs", "64")
        return self.stack.start_worker(self.roomy_scheduler, self.model_dir, *flags)

    async def connect(self) -> AsyncClient:
        return await self.stack.connect(self.gateway)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    model_dir = make_checkpoint(folder / "model")
    with Stack(folder) as stack:
        schedulers = stack.start_scheduler(), stack.start_scheduler()
        gateway = stack.start_gateway(*schedulers)
        pair = Pair(stack, gateway, schedulers[0], model_dir, request.param)
        pair.start_roomy_worker()
        tight_flags = (
            *("--model-name", TIGHT, "--dtype", request.param, "--num-blocks", "24"),
            *("--max-num-seqs", "8", "--max-num-batched-tokens", "23"),
        )
        stack.start_worker(schedulers[1], model_dir, *tight_flags)
        yield pair


async def sample(client: AsyncClient, model: str = ROOMY, seed: int = SEED, **options: object) -> GenerateResult:
    options = {"cache_salt": "fresh", "max_tokens": MAX_TOKENS} | options
    return await client.generate(token_ids=PROMPT, model=model, seed=seed, temperature=1.0, ignore_eos=True, **options)


def noise_request(index: int) -> dict[str, object]:
    """One of many other requests with various sizes and parameters."""
    rng = random.Random(index)
    token_ids = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 7, 40, 130)))]
    return {
        "token_ids": token_ids,
        "temperature": rng.choice((0.0, 0.7, 1.5)),
        "top_k": rng.choice((0, 20)),
        "top_p": rng.choice((1.0, 0.9)),
        "max_tokens": rng.choice((3, 30, 60)),
        "seed": index,
        "ignore_eos": True,
    }


async def test_same_tokens_with_any_batch_and_pool(pair: Pair) -> None:
    async with await pair.connect() as client:
        alone = await sample(client, cache_salt="alone")
        assert alone.usage.cached_tokens == 0
        assert len(set(alone.token_ids)) > MAX_TOKENS // 3  # temperature 1 over 512 tokens: no loop
        assert (await sample(client, seed=SEED + 1)).token_ids != alone.token_ids

        others = [client.generate(model=ROOMY, **noise_request(i)) for i in range(31)]
        crowded, *_ = await asyncio.gather(sample(client, cache_salt="crowd"), *others)
        assert crowded.token_ids == alone.token_ids

        cached = await sample(client, cache_salt="alone")
        assert cached.usage.cached_tokens == len(PROMPT) // 16 * 16
        assert cached.token_ids == alone.token_ids

        in_chunks = await sample(client, model=TIGHT)
        assert in_chunks.token_ids == alone.token_ids

        long = await sample(client, max_tokens=LONG_TOKENS)
        preempted = await sample_preempted(client)
        for _ in range(9):  # on a busy machine it may end before an urgent request arrives
            if preempted.samples[0].preemptions:
                break
            preempted = await sample_preempted(client)
        assert preempted.samples[0].preemptions >= 1
        assert preempted.usage.recomputed_tokens > 0
        assert preempted.token_ids == long.token_ids
        assert preempted.token_ids[:MAX_TOKENS] == alone.token_ids


async def sample_preempted(client: AsyncClient) -> GenerateResult:
    """Sample in the tight pool, where urgent requests take the blocks after some tokens."""
    stream = client.stream(
        token_ids=PROMPT,
        model=TIGHT,
        seed=SEED,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=LONG_TOKENS,
        priority=5,
        cache_salt=secrets.token_hex(8),
    )
    async with stream:
        async for delta in stream:
            if delta.offset + len(delta.token_ids) >= 3:
                break
        urgent = [
            client.generate(token_ids=[i + 1] * URGENT_TOKENS, model=TIGHT, temperature=0.0, max_tokens=8)
            for i in range(2)
        ]
        await asyncio.gather(*urgent)
        return await stream.result()


async def test_samples_of_one_seed_differ_and_the_first_equals_a_single_sample(pair: Pair) -> None:
    async with await pair.connect() as client:
        single = await sample(client, cache_salt="n")
        several = await sample(client, cache_salt="n", n=3)
        tokens = [result.token_ids for result in several.samples]
        assert tokens[0] == single.token_ids
        assert len(set(tokens)) == 3
        crowd = [client.generate(model=ROOMY, **noise_request(100 + i)) for i in range(8)]
        again, *_ = await asyncio.gather(sample(client, n=3, cache_salt="n2"), *crowd)
        assert [result.token_ids for result in again.samples] == tokens


async def test_seed_zero_is_a_seed_and_an_unset_seed_is_drawn(pair: Pair) -> None:
    async with await pair.connect() as client:
        zero = await sample(client, seed=0)
        assert zero.seed == 0
        assert (await sample(client, seed=0)).token_ids == zero.token_ids
        drawn = await client.generate(token_ids=PROMPT, model=ROOMY, temperature=1.0, max_tokens=8, ignore_eos=True)
        assert (await sample(client, seed=drawn.seed, max_tokens=8)).token_ids == drawn.token_ids


async def test_same_tokens_on_another_worker(pair: Pair) -> None:
    async with await pair.connect() as client:
        before = await sample(client)
        first = next(s for s in pair.stack.services if s.name == "worker-0")
        first.kill()
        other = pair.start_roomy_worker()
        await pair.stack.until(client, lambda schedulers: is_ready(schedulers, other))
        after = await sample(client)
        assert after.usage.cached_tokens == 0
        assert after.token_ids == before.token_ids
        await wait_idle(pair.stack, client)
