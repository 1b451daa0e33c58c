"""Log probabilities with real services: equal to those of transformers, and unchanged when processes are killed."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from quire_client import AsyncClient, GenerateResult, InvalidRequest, TokenLogprob
from quire_client.demo import demo_model_dir
from transformers import AutoModelForCausalLM

from tests.processes.models import SHAPES, VOCAB_SIZE, make_checkpoint
from tests.processes.stack import Service, Stack, is_ready
from tests.simulated_tokens import context_digest, sim_logprobs

RNG = random.Random(4)
PROMPT = [RNG.randrange(VOCAB_SIZE) for _ in range(150)]
FLAGS = ("--dtype", "float32", "--num-blocks", "96", "--max-num-seqs", "6", "--max-num-batched-tokens", "48")
TOLERANCE = 1e-4


def check_against(model: Any, result: GenerateResult, prompt: list[int], num_top: int, prompt_top: int) -> None:
    """Every log probability of a request against one pass of transformers per sample."""
    for sample in result.samples:
        tokens = [*prompt, *sample.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].float()
        expected = logits.log_softmax(-1)
        found = [*result.prompt_logprobs, *sample.logprobs]
        assert len(found) == len(tokens)
        for position in range(1, len(tokens)):
            entry, line = found[position], expected[position - 1]
            assert entry is not None
            assert entry.token_id == tokens[position]
            assert entry.logprob == pytest.approx(float(line[tokens[position]]), abs=TOLERANCE)
            assert entry.rank == 1 + int((logits[position - 1] > logits[position - 1][tokens[position]]).sum())
            top = line.topk(prompt_top if position < len(prompt) else num_top)
            assert [item.token_id for item in entry.top] == top.indices.tolist()
            assert np.allclose([item.logprob for item in entry.top], top.values.numpy(), atol=TOLERANCE)
        if sample.logprobs:
            assert sample.cumulative_logprob == sum(entry.logprob for entry in sample.logprobs)


@pytest.mark.parametrize(
    "shape",
    [SHAPES[0], SHAPES[2], *(pytest.param(shape, marks=pytest.mark.deep) for shape in (SHAPES[1], SHAPES[3]))],
    ids=lambda shape: shape.name,
)
async def test_logprobs_equal_those_of_transformers(stack: Stack, tmp_path: Path, shape: Any) -> None:
    model_dir = make_checkpoint(tmp_path / "model", shape)
    scheduler = stack.start_scheduler()
    stack.start_worker(scheduler, model_dir, *FLAGS)
    gateway = stack.start_gateway(scheduler)
    async with await stack.connect(gateway) as client:
        greedy = await client.generate(
            token_ids=PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5, prompt_logprobs=2
        )
        sampled = await client.generate(
            token_ids=PROMPT, seed=3, n=3, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0
        )
        echo = await client.generate(token_ids=PROMPT, max_tokens=0, prompt_logprobs=1)
        plain = await client.generate(token_ids=PROMPT, max_tokens=2)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    check_against(model, greedy, PROMPT, 5, 2)
    check_against(model, sampled, PROMPT, 0, 0)
    check_against(model, echo, PROMPT, 0, 1)
    assert (plain.prompt_logprobs, plain.samples[0].logprobs, plain.samples[0].cumulative_logprob) == ((), (), None)
    # The greedy test of evaluation harnesses: the chosen value equals the largest value, bit for bit.
    for entry in greedy.samples[0].logprobs:
        assert entry.logprob == max(item.logprob for item in entry.top)
        assert entry.rank == 1
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    scores = model.compute_transition_scores(output.sequences, output.logits, normalize_logits=True)
    assert greedy.samples[0].cumulative_logprob == pytest.approx(float(scores.sum()), abs=1e-3)


REQUEST: dict[str, Any] = {
    "token_ids": PROMPT, "seed": 11, "n": 2, "max_tokens": 60, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 1,
}  # fmt: skip


def values(result: GenerateResult) -> list[Any]:
    """Everything that must not depend on failures."""
    samples = [(s.token_ids, s.text, s.logprobs, s.cumulative_logprob) for s in result.samples]
    return [result.prompt_logprobs, samples]


async def killed_after(
    client: AsyncClient, num_tokens: int, service: Service, *, restarts: bool = False
) -> GenerateResult:
    """Runs the request and kills a service when a sample has this many tokens."""
    async with client.stream(**REQUEST, cache_salt=f"{service.name} {num_tokens}") as stream:
        async for delta in stream:
            if delta.offset + len(delta.token_ids) >= num_tokens:
                break
        service.kill()
        if restarts:
            service.start()
        return await stream.result()


async def test_logprobs_do_not_change_when_processes_are_killed(stack: Stack, tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model")
    scheduler = stack.start_scheduler()
    workers = [stack.start_worker(scheduler, model_dir, *FLAGS) for _ in range(2)]
    gateways = [stack.start_gateway(scheduler) for _ in range(2)]
    async with await stack.connect(gateways[0], workers=2) as client:
        undisturbed = values(await client.generate(**REQUEST))

        assert values(await killed_after(client, 10, workers[0])) == undisturbed
        workers[0].start()
        await stack.until(client, lambda schedulers: is_ready(schedulers, workers[0]))
        assert values(await killed_after(client, 20, workers[1])) == undisturbed

        assert values(await killed_after(client, 30, scheduler, restarts=True)) == undisturbed
    async with await AsyncClient.connect([gateway.address for gateway in gateways]) as client:
        assert values(await killed_after(client, 15, gateways[0])) == undisturbed


# -- a slow prompt on simulated workers: processes are killed between its chunks ----------------------------------

SIM_FLAGS = (
    *("--executor", "sim", "--sim-step-ms", "40", "--max-num-batched-tokens", "32", "--num-blocks", "64"),
    *("--max-num-seqs", "4", "--block-size", "16"),
)
LONG_PROMPT = [5 + i % 90 for i in range(400)]


def expected_prompt(num_top: int, vocab_size: int) -> list[TokenLogprob | None]:
    found: list[TokenLogprob | None] = [None]
    for position in range(1, len(LONG_PROMPT)):
        digest = context_digest(LONG_PROMPT[:position])
        logprobs, token_ids, rank = sim_logprobs(digest, LONG_PROMPT[position], num_top, vocab_size)
        found.append(TokenLogprob(token_ids[0], logprobs[0], rank))
    return found


@pytest.mark.parametrize("killed", ["worker", "scheduler", "gateway"])
async def test_each_prompt_position_is_delivered_once(stack: Stack, killed: str) -> None:
    scheduler = stack.start_scheduler()
    workers = [stack.start_worker(scheduler, demo_model_dir(), *SIM_FLAGS) for _ in range(2)]
    gateways = [stack.start_gateway(scheduler) for _ in range(2)]
    service = {"worker": workers[0], "scheduler": scheduler, "gateway": gateways[0]}[killed]
    async with (
        await stack.connect(gateways[1], workers=2) as observer,
        await AsyncClient.connect([gateway.address for gateway in gateways]) as client,
    ):
        vocab_size = (await observer.models())[0].vocab_size
        both = [
            asyncio.create_task(
                client.generate(token_ids=LONG_PROMPT, max_tokens=3, seed=seed, prompt_logprobs=0, cache_salt=str(seed))
            )
            for seed in (1, 2)
        ]
        await stack.until(observer, lambda schedulers: schedulers[0].steps >= 10)  # each request takes 13 steps
        assert not any(task.done() for task in both)
        service.kill()
        if killed == "scheduler":
            scheduler.start()
        for result in await asyncio.gather(*both):
            without_bytes = [None if entry is None else replace(entry, token=b"") for entry in result.prompt_logprobs]
            assert without_bytes == expected_prompt(0, vocab_size)


async def test_preempted_prompts_deliver_each_position_once(stack: Stack) -> None:
    scheduler = stack.start_scheduler()
    stack.start_worker(scheduler, demo_model_dir(), *SIM_FLAGS)
    gateway = stack.start_gateway(scheduler)
    async with await stack.connect(gateway) as client:
        vocab_size = (await client.models())[0].vocab_size
        options: dict[str, Any] = {"token_ids": LONG_PROMPT, "ignore_eos": True, "temperature": 0.0}
        patient = [
            asyncio.create_task(
                client.generate(**options, max_tokens=80, prompt_logprobs=0, priority=5, cache_salt=str(i))
            )
            for i in range(2)
        ]
        await stack.until(client, lambda schedulers: schedulers[0].num_running == 2)
        await client.generate(**options, max_tokens=60, priority=-5, cache_salt="urgent")
        results = await asyncio.gather(*patient)
    assert sum(sample.preemptions for result in results for sample in result.samples)
    for result in results:
        without_bytes = [None if entry is None else replace(entry, token=b"") for entry in result.prompt_logprobs]
        assert without_bytes == expected_prompt(0, vocab_size)


# -- the public messages -----------------------------------------------------------------------------------------------


async def test_limits_bytes_and_stop_strings(stack: Stack, tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model")
    scheduler = stack.start_scheduler()
    stack.start_worker(scheduler, model_dir, *FLAGS)
    gateway = stack.start_gateway(scheduler, flags=("--max-logprobs", "7"))
    async with await stack.connect(gateway) as client:
        for option in ("logprobs", "prompt_logprobs"):
            with pytest.raises(InvalidRequest, match=rf"{option} is 8; must be at most 7 .*--max-logprobs"):
                await client.generate("the fox", max_tokens=1, **{option: 8})
        result = await client.generate("the quick fox", max_tokens=9, seed=1, logprobs=7, prompt_logprobs=7)
        sample = result.samples[0]
        ids = (await client.tokenize("the quick fox")).token_ids
        assert b"".join(entry.token for entry in result.prompt_logprobs[1:] if entry).decode() == await text_of(
            client, ids[1:]
        )
        assert b"".join(entry.token for entry in sample.logprobs).decode(errors="replace") == await text_of(
            client, sample.token_ids
        )
        # A stop string ends the output with the token that completes it; later tokens do not count.
        letter = re.search("[a-z ]", sample.text)
        assert letter is not None
        stopped = await client.generate("the quick fox", max_tokens=9, seed=1, logprobs=7, stop=[letter[0]])
        kept = stopped.samples[0]
        assert 0 < len(kept.token_ids) < 9
        assert kept.logprobs == sample.logprobs[: len(kept.token_ids)]
        assert kept.cumulative_logprob == sum(entry.logprob for entry in kept.logprobs)
        events = [event async for event in raw_events(client)]
    prompts = [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]
    assert [prompt.HasField("first_token_id") for prompt in prompts] == [True]
    assert (prompts[0].first_token_id, prompts[0].offset, list(prompts[0].token_ids)) == (9, 1, [8])
    assert prompts[0].first_token_bytes == b""
    chunks = [event.chunk for event in events if event.HasField("chunk")]
    assert not any(chunk.token_ids or chunk.text for chunk in chunks)
    assert sum(len(chunk.logprobs.logprobs) for chunk in chunks) == 4
    assert not any(chunk.logprobs.token_bytes for chunk in chunks)
    assert [event.WhichOneof("event") for event in events].index("prompt_logprobs") == 1


async def text_of(client: AsyncClient, ids: Any) -> str:
    return await client.detokenize(ids)


async def raw_events(client: AsyncClient) -> Any:
    """The events of a request without text and token ids."""
    request = pb.GenerateRequest(
        prompt=pb.Prompt(tokens=types.TokenIds(ids=[9, 8])),
        stop=types.StopParams(max_tokens=4, ignore_eos=True),
        output=pb.OutputParams(text=False, token_ids=False, logprobs=1, prompt_logprobs=1),
    )
    async for event in client.raw.Generate(request):
        yield event
