"""Streams that run while weights are updated and processes are killed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

from quire_client import AsyncClient, QuireError, Sample

from tests.processes.stack import Service

PROMPT = list(range(5, 30))
OPTIONS: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}


class Load:
    """Streams that follow each other until `stop`. All must end well."""

    def __init__(self, client: AsyncClient, rng: random.Random, **options: Any) -> None:
        self.samples: list[tuple[list[int], int, Sample]] = []  # prompt, seed, sample
        self._client, self._rng, self._options = client, rng, {**OPTIONS, **options}
        self._is_over = False

    def stop(self) -> None:
        self._is_over = True

    async def run(self, num_streams: int) -> None:
        await asyncio.gather(*(self._stream() for _ in range(num_streams)))

    async def _stream(self) -> None:
        while not self._is_over:
            prompt, seed = PROMPT[: self._rng.randint(3, 20)], self._rng.randrange(1000)
            num_tokens = self._rng.randint(20, 120)
            result = await self._client.generate(token_ids=prompt, max_tokens=num_tokens, seed=seed, **self._options)
            (sample,) = result.samples
            assert len(sample.token_ids) == num_tokens, sample
            self.samples.append((prompt, seed, sample))


async def update_with_kill(
    client: AsyncClient, path: str, version: int, victim: Service, phase: str, rng: random.Random
) -> None:
    """One update, during which a service is killed. A trainer whose call fails begins again."""
    for attempt in range(20):
        try:
            await client.begin_update(f"u{version}", version=version)
            if phase == "begin" and not attempt:
                victim.kill()
            put = asyncio.create_task(client.put_tensors(f"u{version}", path))
            if phase == "put" and not attempt:
                await asyncio.sleep(rng.random() * 0.02)
                victim.kill()
            await put
            commit = asyncio.create_task(client.commit_update(f"u{version}"))
            if phase == "commit" and not attempt:
                await asyncio.sleep(rng.random() * 0.6)
                victim.kill()
            await commit
        except QuireError:
            if not victim.is_running:
                victim.start()
            await asyncio.sleep(0.3)
            with contextlib.suppress(QuireError):
                if (await client.weights()).weights.version == version:
                    break
        else:
            break
    if not victim.is_running:
        victim.start()
