"""Waves of requests that run while a test stops and starts services."""

from __future__ import annotations

import asyncio
import random

from quire_client import AsyncClient

from tests.processes.models import VOCAB_SIZE

WAVE = 8
WAVES = 4
MAX_TOKENS = 40
TOTAL_TOKENS = WAVES * WAVE * MAX_TOKENS
SHARED_PREFIX = 64


def wave_prompts(wave: int) -> list[list[int]]:
    """Prompts that begin with the same 64 tokens, followed by different tokens."""
    rng = random.Random(7)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(SHARED_PREFIX)]
    own = random.Random(wave)
    return [shared + [own.randrange(VOCAB_SIZE) for _ in range(own.choice((1, 30, 150)))] for _ in range(WAVE)]


class Load:
    """Seeded requests in consecutive waves. `finish` raises the first error.

    Runs with different `salt` share no cached blocks and must produce the same outputs.
    """

    def __init__(self, client: AsyncClient, salt: str) -> None:
        self._client = client
        self._salt = salt
        self._num_tokens = 0
        self._task = asyncio.create_task(self._run())

    async def finish(self) -> list[tuple[int, ...]]:
        """The outputs, in the order of the requests."""
        return await self._task

    async def reach(self, fraction: float) -> None:
        """Wait until this fraction of all tokens has arrived. Raises AssertionError if the load ends before that."""
        while self._num_tokens < fraction * TOTAL_TOKENS:
            assert not self._task.done(), f"the load ended before it reached {fraction:.0%} of its tokens"
            await asyncio.sleep(0.005)

    async def _run(self) -> list[tuple[int, ...]]:
        outputs: list[tuple[int, ...]] = []
        for wave in range(WAVES):
            outputs += await asyncio.gather(*(self._generate(prompt) for prompt in wave_prompts(wave)))
        return outputs

    async def _generate(self, prompt: list[int]) -> tuple[int, ...]:
        stream = self._client.stream(
            token_ids=prompt, max_tokens=MAX_TOKENS, temperature=1.0, seed=3, ignore_eos=True, cache_salt=self._salt
        )
        async with stream:
            async for delta in stream:
                self._num_tokens += len(delta.token_ids)
            return (await stream.result()).token_ids
