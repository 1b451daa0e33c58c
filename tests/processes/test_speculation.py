"""A worker that computes drafts gives the answers of one that does not, also if it is killed in the middle."""

from __future__ import annotations

import asyncio
import re
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from quire_client import AsyncClient, FinishReason

from tests.processes.models import VOCAB_SIZE, make_checkpoint
from tests.processes.ports import free_port
from tests.processes.stack import Stack, is_ready, wait_idle
from tests.unit.engine.adapters import ATTENTION, make_adapter
from tests.unit.engine.heads import add_mtp, make_eagle
from tests.unit.engine.models import make_model

METRICS = free_port()
FLAGS = (
    *("--dtype", "float32", "--num-blocks", "256", "--max-num-seqs", "8"),
    *("--metrics-listen", f"127.0.0.1:{METRICS}"),
)
WORDS = [[(7 * i + 3 * word) % VOCAB_SIZE for i in range(9)] for word in range(4)]
PROMPT = [id_ for word in (0, 1, 0, 2, 1, 0, 3, 1) for id_ in WORDS[word]]
FEW: list[int] = [5, 6, 7]
REPETITION = {"max_pattern_size": 4, "min_count": 3}
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1, "allowed_token_ids": FEW, "logit_bias": {5: 4.0}},
    {"seed": 2, "allowed_token_ids": FEW, "frequency_penalty": 0.1, "logprobs": 2},
    {"seed": 3, "allowed_token_ids": FEW, "n": 3, "top_p": 0.9},
    {"seed": 5, "allowed_token_ids": FEW, "adapter": "lora"},
    {"seed": 4, "allowed_token_ids": FEW, "logit_bias": {5: 4.0, 6: -2.0}, "stop_token_ids": [6], "min_tokens": 30},
    {"seed": 6, "allowed_token_ids": FEW, "min_tokens": 70, "repetition_detection": REPETITION},
    {
        "seed": 7,
        "allowed_token_ids": FEW,
        "thinking_token_budget": 61,
        "thinking_end_ids": [9],
        "thinking_last_ids": [5, 8],
    },
]


async def answer(client: AsyncClient, fields: dict[str, Any], *, speculative: bool | None) -> list[Any]:
    more = {} if speculative is None else {"speculative": speculative}
    result = await client.generate(token_ids=PROMPT, max_tokens=160, ignore_eos=True, **fields, **more)
    return [(sample.token_ids, sample.finish_reason, sample.logprobs) for sample in result.samples]


def num_drafts() -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS}/metrics", timeout=10) as response:
        found = re.findall(r"^quire_worker_draft_tokens_total\{.*\} (\S+)$", response.read().decode(), re.MULTILINE)
    return sum(map(float, found))


def make_folders(folder: Path, proposer: str) -> tuple[Path, str]:
    """A model, and how its drafts are proposed."""
    if proposer in ("suffix", "draft"):
        model_dir = make_checkpoint(folder / "model")
        return model_dir, "suffix" if proposer == "suffix" else f"draft:{model_dir}"
    model_dir = make_checkpoint(folder / "tokenizer")
    target = add_mtp(make_model(folder / "model", "glm4_moe", vocab_size=VOCAB_SIZE), agrees=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (model_dir / name).exists():
            shutil.copy(model_dir / name, target)
    return target, "mtp" if proposer == "mtp" else f"eagle:{make_eagle(folder / 'eagle', target, agrees=True)}"


@pytest.mark.parametrize(
    "proposer", ["suffix", *(pytest.param(name, marks=pytest.mark.deep) for name in ("draft", "mtp", "eagle"))]
)
async def test_answers_are_those_without_drafts_also_after_a_kill(tmp_path: Path, proposer: str) -> None:
    model_dir, speculate = make_folders(tmp_path, proposer)
    adapter = make_adapter(model_dir, tmp_path / "lora", target_modules=ATTENTION)
    flags = *FLAGS, "--speculate", speculate, "--adapter-dir", str(tmp_path), "--adapter", f"lora={adapter}"
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        worker = stack.start_worker(scheduler, model_dir, *flags)
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client:
            plain = [await answer(client, fields, speculative=False) for fields in REQUESTS]
            assert num_drafts() == 0
            assert [reason for _, reason, _ in plain[-2]] == [FinishReason.REPETITION]
            assert [tokens[61:64] for tokens, _, _ in plain[-1]] == [(5, 8, 9)]
            drafted: list[float] = []
            running = [asyncio.create_task(answer(client, fields, speculative=None)) for fields in REQUESTS]
            async with client.stream(token_ids=PROMPT, max_tokens=160, ignore_eos=True, **REQUESTS[1]) as stream:
                async for delta in stream:
                    if delta.offset + len(delta.token_ids) >= 60 and not drafted:
                        drafted.append(await asyncio.to_thread(num_drafts))
                        worker.kill()
                        worker.start()
                        await stack.until(client, lambda schedulers: is_ready(schedulers, worker))
            assert await asyncio.wait_for(asyncio.gather(*running), 60) == plain
            drafted.append(num_drafts())
            assert proposer != "suffix" or all(drafted)  # models of the size of this one may not pay
            await wait_idle(stack, client)
