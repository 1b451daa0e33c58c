"""The expected outputs of streams: from the undisturbed stack, or from the rule of the simulated model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from quire_client import AsyncClient, GenerateResult
from tokenizers import Tokenizer

from tests.chaos.parameters import Parameter, served_parameters
from tests.chaos.workload import MIN_TOKENS, Answer, Request, make_requests, with_stop_string
from tests.simulated_tokens import sim_output
from worker_svc.simulator.tokens import read_vocabulary

Answers = tuple[Answer, ...]
AT_ONCE = 8


class Source(Protocol):
    """Computes expected answers."""

    parameters: Sequence[Parameter]  # parameters that it can compute, without the common ones

    async def answers(self, request: Request) -> Answers: ...


class UndisturbedStack:
    """The services themselves, while there are no faults, without drafts."""

    parameters: Sequence[Parameter] = served_parameters()

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._at_once = asyncio.Semaphore(AT_ONCE)

    async def answers(self, request: Request) -> Answers:
        async with self._at_once:
            return answers_of(await self._client.generate(**request.prompt, **request.options, speculative=False))


class SimRule:
    """Computes the answers of `--executor sim` from its specification. Only tokenization uses the gateway."""

    parameters: Sequence[Parameter] = ()

    def __init__(self, client: AsyncClient, model_dir: Path) -> None:
        self._client = client
        self._vocabulary = read_vocabulary(model_dir)
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    async def answers(self, request: Request) -> Answers:
        prompt = request.prompt.get("token_ids") or (await self._client.tokenize(**request.prompt)).token_ids
        return tuple(self._answer(request, list(prompt), index) for index in range(request.num_samples))

    def _answer(self, request: Request, prompt: list[int], sample_index: int) -> Answer:
        options = request.options
        token_ids = sim_output(
            prompt,
            options["max_tokens"],
            self._vocabulary,
            seed=options.get("seed", 0),
            sample_index=sample_index,
            temperature=options["temperature"],
        )
        text = self._decode(token_ids)
        for stop in options.get("stop", ()):
            if stop in text:
                num_tokens = self._num_tokens_until(token_ids, stop)
                return Answer(tuple(token_ids[:num_tokens]), text[: text.find(stop)], "stop")
        return Answer(tuple(token_ids), text, "length")

    def _num_tokens_until(self, token_ids: list[int], stop: str) -> int:
        """The smallest number of tokens whose text contains `stop`."""
        return next(n for n in range(1, len(token_ids) + 1) if stop in self._decode(token_ids[:n]))

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


class Catalogue:
    """Requests with their expected answers. Some requests occur a second time with a stop string."""

    def __init__(self, entries: list[tuple[Request, Answers]]) -> None:
        self._entries = entries

    @classmethod
    async def build(cls, source: Source, *, seed: int, count: int, vocab_size: int) -> Catalogue:
        requests = make_requests(seed, count, vocab_size, source.parameters)
        answers = await asyncio.gather(*map(source.answers, requests))
        entries = list(zip(requests, answers, strict=True))
        rng = random.Random(seed)
        ended = [
            stopped
            for request, whole in entries[: count // 2]
            if (stopped := with_stop_string(request, whole, rng, request.number + count)) is not None
        ]
        entries += zip(ended, await asyncio.gather(*map(source.answers, ended)), strict=True)
        whole_text = {request.number: whole[0].text for request, whole in entries[:count]}
        for request, (answer,) in entries[count:]:
            text = whole_text[request.number - count]
            expected = text[: text.find(request.options["stop"][0])]
            if answer.text != expected:
                raise RuntimeError(f"without faults, {request} returned {answer.text!r} instead of {expected!r}")
        return cls([(request, answer) for request, answer in entries if len(answer[0].token_ids) >= MIN_TOKENS])

    def draw(self, rng: random.Random) -> tuple[Request, Answers]:
        return rng.choice(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def answers_of(result: GenerateResult) -> Answers:
    return tuple(
        Answer(
            sample.token_ids,
            sample.text,
            sample.finish_reason.value,
            (sample.logprobs, sample.cumulative_logprob, result.prompt_logprobs),
        )
        for sample in result.samples
    )
