"""Two workers whose checkpoints differ only in the weights: the second worker is refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.processes.models import make_checkpoint
from tests.processes.stack import Service, Stack, is_ready

FLAGS = ("--model-name", "model", "--dtype", "float32", "--num-blocks", "128", "--max-num-seqs", "4")
PROMPT = list(range(3, 40))
NUM_TOKENS = 400


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    torch.set_num_threads(1)
    with Stack(tmp_path) as stack:
        yield stack


async def log_line(service: Service, words: str) -> str:
    async with asyncio.timeout(60):
        while True:
            found = [line for line in service.log().splitlines() if words in line]
            if found:
                return found[0]
            assert service.is_running, service.log()
            await asyncio.sleep(0.05)


async def test_a_worker_with_other_weights_is_refused_and_streams_continue(stack: Stack, tmp_path: Path) -> None:
    scheduler = stack.start_scheduler()
    first = stack.start_worker(scheduler, make_checkpoint(tmp_path / "one", seed=1), *FLAGS)
    gateway = stack.start_gateway(scheduler)
    request = {"token_ids": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    async with await stack.connect(gateway) as client:
        expected = await client.generate(**request)
        second = stack.start_worker(scheduler, make_checkpoint(tmp_path / "other", seed=2), *FLAGS)
        refusal = asyncio.create_task(log_line(second, "refuses this worker"))
        while not refusal.done():  # streams run before, while and after the second worker is refused
            assert (await client.generate(**request)).token_ids == expected.token_ids
        assert (await client.generate(**request)).token_ids == expected.token_ids
        line = await refusal
        assert "weights_digest" in line
        assert "start the worker with the same checkpoint (--model), or under another scheduler" in line
        digests = re.findall(r"'([0-9a-f]{32})'", line)
        assert len(set(digests)) == 2, line
        schedulers = (await client.status()).schedulers
        assert is_ready(schedulers, first)
        assert not is_ready(schedulers, second)
