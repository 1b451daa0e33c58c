"""Scores of given tokens equal what Generate returned for them, bit for bit, on other workers and after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire_client import AsyncClient, InvalidRequest, TokenLogprob
from quire_client.demo import demo_model_dir

from tests.processes.stack import Stack

PROMPT = list(range(5, 45))
FLAGS = ("--num-blocks", "96", "--max-num-seqs", "6", "--max-num-batched-tokens", "48")
PARAMETERS: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.9, "seed": 11, "repetition_penalty": 1.2, "logit_bias": {9: 2.0},
    "logprobs_mode": "processed", "logits_digests": True,
}  # fmt: skip


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path) as stack:
        yield stack


async def score(client: AsyncClient, output: tuple[int, ...], **others: Any) -> list[TokenLogprob | None]:
    """The scores of an output that follows PROMPT."""
    result = await client.generate(
        token_ids=[*PROMPT, *output], num_forced_tokens=len(output), max_tokens=0, prompt_logprobs=2,
        **{**PARAMETERS, **others},
    )  # fmt: skip
    return list(result.prompt_logprobs[len(PROMPT) :])


async def test_scores_equal_generated_values_after_a_kill(stack: Stack) -> None:
    scheduler = stack.start_scheduler()
    workers = [stack.start_worker(scheduler, demo_model_dir(), *FLAGS) for _ in range(2)]
    gateway = stack.start_gateway(scheduler, flags=("--logprobs-mode", "processed"))
    async with await stack.connect(gateway) as client:
        result = await client.generate(token_ids=PROMPT, n=3, max_tokens=30, ignore_eos=True, logprobs=2, **PARAMETERS)
        workers[0].kill()
        for sample in result.samples:
            assert await score(client, sample.token_ids) == list(sample.logprobs)
            assert all(entry.num_kept and entry.logprob >= entry.raw_logprob - 20 for entry in sample.logprobs)
        output = result.samples[0].token_ids
        assert result.seed == 11
        unset = await client.generate(token_ids=PROMPT, max_tokens=1, logprobs=0)
        assert unset.samples[0].logprobs[0].num_kept, "the deployment's default"
        again = await client.generate(
            token_ids=[*PROMPT, *output[:10]], num_forced_tokens=10, max_tokens=20, ignore_eos=True, prompt_logprobs=0,
            **PARAMETERS,
        )  # fmt: skip
        assert again.samples[0].token_ids == output[10:]
        edited = (*output[:4], output[4] ^ 1, *output[5:])
        assert (await score(client, edited))[5:] != list(result.samples[0].logprobs)[5:]
        for fields, name in (
            ({"num_forced_tokens": 40}, "num_forced_tokens"),
            ({"n": 2}, "n"),
            ({"prompt_logprobs": None}, "prompt_logprobs"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await client.generate(
                    **{"token_ids": PROMPT, "max_tokens": 0, "num_forced_tokens": 3, "prompt_logprobs": 0, **fields}
                )
            assert name in str(refused.value)
