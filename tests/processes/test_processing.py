"""Fields that change logits, with real services: tokens equal those of transformers, also after a worker is killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from quire_client import AsyncClient, GenerateResult
from transformers import LogitsProcessor, LogitsProcessorList

from tests.processes.models import Reference, make_checkpoint
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack, is_ready

PROMPT = [17, 5, 80, 5, 33, 101, 17, 5, 250, 9, 11, 12, 80, 80, 7, 400, 301, 66, 5, 90]
MAX_TOKENS = 40
FLAGS = ("--dtype", "float32", "--num-blocks", "128", "--max-num-seqs", "8")


class OutputPenalty(LogitsProcessor):  # type: ignore[misc]
    """Frequency and presence penalties by their definition; transformers has none."""

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency = frequency
        self._presence = presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token_id, count in Counter(input_ids[0, len(PROMPT) :].tolist()).items():
            scores[0, token_id] -= self._frequency * count + self._presence
        return scores


@dataclass(frozen=True)
class Running:
    stack: Stack
    scheduler: Service
    gateway: Service
    http: str
    folder: Path
    reference: Reference

    async def connect(self) -> AsyncClient:
        return await self.stack.connect(self.gateway)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("processing")
    model_dir = make_checkpoint(folder / "model")
    with Stack(folder) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, model_dir, *FLAGS)
        address = f"127.0.0.1:{free_port()}"
        gateway = stack.start_gateway(scheduler, flags=("--http-listen", address))
        yield Running(stack, scheduler, gateway, f"http://{address}", model_dir, Reference(model_dir))


async def greedy(client: AsyncClient, **options: Any) -> list[int]:
    options = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True} | options
    return list((await client.generate(token_ids=PROMPT, **options)).token_ids)


def allow(*ids: int) -> Callable[[int, torch.Tensor], list[int]]:
    return lambda batch, tokens: list(ids)


BIAS = {5: 3.5, 200: -100.0, 17: 2.0, 444: 6.0}
# Options of a request, and the arguments of transformers' `generate` with the same meaning.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition_penalty": ({"repetition_penalty": 1.6}, {"repetition_penalty": 1.6}),
    "small repetition_penalty": ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    "frequency_penalty": ({"frequency_penalty": 1.5}, {"logits_processor": [OutputPenalty(1.5, 0)]}),
    "presence_penalty": ({"presence_penalty": 2.0}, {"logits_processor": [OutputPenalty(0, 2.0)]}),
    "logit_bias": ({"logit_bias": BIAS}, {"sequence_bias": {(token_id,): bias for token_id, bias in BIAS.items()}}),
    "allowed_token_ids": (
        {"allowed_token_ids": range(100, 140)},
        {"prefix_allowed_tokens_fn": allow(*range(100, 140))},
    ),
    "banned_token_ids": ({"banned_token_ids": range(0, 512, 3)}, {"suppress_tokens": [*range(0, 512, 3)]}),
    "all": (
        {
            "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3, "logit_bias": BIAS,
            "banned_token_ids": range(0, 512, 3),
        },
        {
            "repetition_penalty": 1.2, "logits_processor": [OutputPenalty(0.5, 0.3)],
            "suppress_tokens": [*range(0, 512, 3)],
            "sequence_bias": {(token_id,): bias for token_id, bias in BIAS.items()},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
async def test_greedy_tokens_are_those_of_transformers(running: Running, name: str) -> None:
    options, settings = CASES[name]
    if "logits_processor" in settings:
        settings = settings | {"logits_processor": LogitsProcessorList(settings["logits_processor"])}
    async with await running.connect() as client:
        tokens = await greedy(client, **options)
        assert tokens == running.reference.greedy(PROMPT, MAX_TOKENS, **settings)
        assert tokens != await greedy(client)
        assert await greedy(client, n=2, **options) == tokens


async def test_min_tokens_is_min_new_tokens_of_transformers(running: Running) -> None:
    async with await running.connect() as client:
        stops = (await greedy(client))[3:20]
        tokens = await greedy(client, stop_token_ids=stops, min_tokens=15)
        assert len(tokens) >= 16
        assert len(await greedy(client, stop_token_ids=stops)) < 15
    wanted = running.reference.greedy(PROMPT, MAX_TOKENS, eos_token_id=stops, min_new_tokens=15)
    assert tokens == wanted


async def test_bad_words_are_bad_words_ids_of_transformers(running: Running) -> None:
    async with await running.connect() as client:
        words, ids = await words_of(client, await greedy(client))
        assert {len(sequence) for sequence in ids} >= {1, 2}
        tokens = await greedy(client, bad_words=words)
        assert tokens != await greedy(client)
    assert tokens == running.reference.greedy(PROMPT, MAX_TOKENS, bad_words_ids=ids)
    runs = {tuple(tokens[start : start + size]) for size in (1, 2) for start in range(MAX_TOKENS)}
    assert not runs & {tuple(sequence) for sequence in ids}


async def words_of(client: AsyncClient, output: list[int]) -> tuple[list[str], list[list[int]]]:
    """Strings whose token ids are one or two successive tokens of the output, and the ids of all their variants."""
    words: list[str] = []
    ids: list[list[int]] = []
    for size in (1, 2):
        for start in range(len(output) - size):
            text = await client.detokenize(output[start : start + size])
            if not text.strip() or "\ufffd" in text:
                continue
            variants = [list((await client.tokenize(prefix + text.lstrip(" "))).token_ids) for prefix in ("", " ")]
            if output[start : start + size] in variants:
                words.append(text)
                ids += variants
                break
    return words, ids


async def test_a_truncated_prompt_is_its_last_tokens(running: Running) -> None:
    async with await running.connect() as client:
        options = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        truncated = await client.generate(token_ids=PROMPT * 100, truncate_prompt_tokens=7, **options)
        short = await client.generate(token_ids=PROMPT[-7:], **options)
        assert truncated.usage.prompt_tokens == 7
        assert truncated.token_ids == short.token_ids
        text = await client.generate("the quick brown fox " * 500, truncate_prompt_tokens=9, **options)
        assert text.usage.prompt_tokens == 9


async def test_the_models_default_penalty_is_applied(running: Running, tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model")
    (model_dir / "generation_config.json").write_text('{"repetition_penalty": 1.6, "do_sample": false}')
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        worker = stack.start_worker(scheduler, model_dir, *FLAGS)
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client:
            tokens = await greedy(client)
            assert tokens == running.reference.greedy(PROMPT, MAX_TOKENS, repetition_penalty=1.6)
            assert await greedy(client, repetition_penalty=1.0) == running.reference.greedy(PROMPT, MAX_TOKENS)
        assert "unsupported settings" not in gateway.log() + worker.log()


SAMPLED = {
    "token_ids": PROMPT, "seed": 3, "temperature": 1.0, "n": 2, "max_tokens": 250, "min_tokens": 150,
    "stop_token_ids": range(5, 400, 3),
    "repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": BIAS,
    "allowed_token_ids": range(3, 400), "banned_token_ids": [4, 9], "bad_words": ["the", "fox"],
    "truncate_prompt_tokens": 15,
}  # fmt: skip


async def killed_mid_stream(running: Running, client: AsyncClient, worker: Service) -> tuple[GenerateResult, Service]:
    """Runs the request and kills its worker after a few tokens. Returns its result and the worker that took over."""
    async with client.stream(**SAMPLED, cache_salt=worker.name) as stream:  # type: ignore[arg-type]
        async for delta in stream:
            if delta.offset + len(delta.token_ids) >= 5:
                break
        worker.kill()
        other = running.stack.start_worker(running.scheduler, running.folder, *FLAGS)
        return await stream.result(), other


async def test_a_killed_worker_changes_no_token(running: Running) -> None:
    async with await running.connect() as client:
        whole = await client.generate(**SAMPLED)  # type: ignore[arg-type]
        outputs = [sample.token_ids for sample in whole.samples]
        assert outputs[0] != outputs[1]
        assert {token_id for output in outputs for token_id in output} <= set(range(3, 400)) - {4, 9}
        for output in outputs:  # with so many stop ids, a sample ends soon after min_tokens
            assert [i for i, id_ in enumerate(output) if id_ in SAMPLED["stop_token_ids"]] == [len(output) - 1]
            assert 150 < len(output) < 250
        worker = next(service for service in running.stack.services if service.name.startswith("worker"))
        for _ in range(5):  # on a quick machine, a sample may end before its worker does
            moved, worker = await killed_mid_stream(running, client, worker)
            assert [sample.token_ids for sample in moved.samples] == outputs
            await running.stack.until(client, lambda schedulers, other=worker: is_ready(schedulers, other))
            if moved.usage.recomputed_tokens:
                break
        assert moved.usage.recomputed_tokens > 0


HTTP_CASES = [
    {"repetition_penalty": 1.6}, {"frequency_penalty": 1.5}, {"presence_penalty": 2.0}, {"logit_bias": BIAS},
    {"allowed_token_ids": [*range(100, 140)]}, {"banned_token_ids": [*range(0, 512, 3)]},
    {"bad_words": ["a", "b", "c", "d", "e", "f", "g", "h"]}, {"truncate_prompt_tokens": 7},
]  # fmt: skip


async def test_a_body_field_has_the_effect_of_its_request_field(running: Running) -> None:
    async with await running.connect() as client, aiohttp.ClientSession(running.http) as session:
        plain = await greedy(client)
        for options in HTTP_CASES:
            biases = {str(token_id): bias for token_id, bias in options.get("logit_bias", {}).items()}
            body = {"prompt": PROMPT, "temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **options}
            body |= {"return_token_ids": True} | ({"logit_bias": biases} if biases else {})
            async with session.post("/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                [choice] = (await answer.json())["choices"]
            assert choice["token_ids"] == await greedy(client, **options), options
            assert choice["token_ids"] != plain, options
