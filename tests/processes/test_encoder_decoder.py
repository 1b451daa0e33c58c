"""Encoder-decoder models through gateway, scheduler and workers: their outputs equal those of transformers."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from quire_client import AsyncClient, GenerateResult, InvalidRequest, NotConfigured
from quire_client.types import SchedulerStatus

from tests.processes.encoder_models import MAX_LEN, TEXT_SHAPES, TextReference, TextShape, make_text_checkpoint
from tests.processes.models import VOCAB_SIZE
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack, wait_idle

NOT_DEEP = {"t5", "bart"}
BLOCK_SIZE = 16
WORKER_FLAGS = (
    *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--num-blocks", "44"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", str(MAX_LEN + 8)),
)
PATIENT_LENGTHS = (1, 33, 15, 16, 17, 40, 100, 130, 160, 200, 210)
URGENT_LENGTHS = (MAX_LEN, 3, 150, 64)
BEAMS = {"beam_width": 3, "n": 2, "max_tokens": 12}


@dataclass(frozen=True)
class Request:
    token_ids: list[int]
    max_tokens: int
    priority: int


def make_requests(seed: int) -> list[Request]:
    """Inputs of 1 to MAX_LEN tokens: the patient ones fill the pools of two workers, the urgent ones follow."""
    rng = random.Random(seed)

    def request(length: int, priority: int) -> Request:
        return Request([rng.randrange(10, VOCAB_SIZE) for _ in range(length)], 60 + length % 30, priority)

    return [request(length, 10) for length in PATIENT_LENGTHS] + [request(length, 0) for length in URGENT_LENGTHS]


async def run_all(
    stack: Stack, client: AsyncClient, workers: list[Service], requests: list[Request]
) -> list[GenerateResult]:
    """Run all requests at once. The workers are stopped until the requests of low priority fill their pools and the
    others wait; so these preempt. Then one worker is killed.
    """

    def run(request: Request) -> asyncio.Task[GenerateResult]:
        options = {"max_tokens": request.max_tokens, "ignore_eos": True, "priority": request.priority}
        return asyncio.create_task(client.generate(token_ids=request.token_ids, temperature=0.0, **options))

    for worker in workers:
        worker.signal(signal.SIGSTOP)
    patient = [run(request) for request in requests if request.priority]
    await stack.until(client, lambda schedulers: num_open(schedulers) == len(patient) and are_full(schedulers[0]))
    urgent = [run(request) for request in requests if not request.priority]
    (before,) = await stack.until(client, lambda schedulers: num_open(schedulers) == len(requests))
    for worker in workers:
        worker.signal(signal.SIGCONT)
    await stack.until(client, lambda schedulers: schedulers[0].steps >= before.steps + 15)
    workers[0].kill()
    return await asyncio.gather(*patient, *urgent)


def are_full(scheduler: SchedulerStatus) -> bool:
    """Whether no pool has room for the longest urgent request."""
    return all(worker.blocks_free + worker.blocks_cached < MAX_LEN // BLOCK_SIZE for worker in scheduler.workers)


def num_open(schedulers: tuple[SchedulerStatus, ...]) -> int:
    return schedulers[0].num_waiting + schedulers[0].num_running


def outputs_of(result: GenerateResult) -> list[list[int]]:
    return [list(sample.token_ids) for sample in result.samples]


def start_worker(stack: Stack, scheduler: Service, model_dir: Path, *flags: str) -> Service:
    return stack.start_worker(scheduler, model_dir, *WORKER_FLAGS, *flags)


def encoder_inputs(port: int) -> int:
    """Encoder inputs that a worker has computed."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        found = re.search(r"^quire_worker_encoder_inputs_total (\S+)$", page.read().decode(), re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=() if shape.name in NOT_DEEP else pytest.mark.deep, id=shape.name)
        for shape in TEXT_SHAPES
    ],
)
async def test_outputs_equal_transformers_also_after_preemption_and_a_kill(shape: TextShape, tmp_path: Path) -> None:
    model_dir = make_text_checkpoint(tmp_path / "model", shape)
    requests = make_requests(TEXT_SHAPES.index(shape))
    reference = TextReference(model_dir)
    expected = [reference.greedy(request.token_ids, request.max_tokens) for request in requests]
    beams = [reference.generate(r.token_ids, 12, num_beams=3, num_return_sequences=2) for r in requests[:2]]
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        workers = [start_worker(stack, scheduler, model_dir) for _ in range(2)]
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client:
            await stack.until(client, lambda schedulers: len(schedulers[0].workers) == 2)
            searches = [client.generate(token_ids=r.token_ids, **BEAMS) for r in requests[:2]]
            assert [outputs_of(result) for result in await asyncio.gather(*searches)] == beams
            results = await run_all(stack, client, workers, requests)
            (status,) = await wait_idle(stack, client)
    assert [list(result.token_ids) for result in results] == expected
    assert len({tuple(output) for output in expected}) > len(expected) // 2  # the outputs depend on the inputs
    assert [result.usage.prompt_tokens for result in results] == [len(request.token_ids) for request in requests]
    assert status.preemptions >= 1
    assert sum(sample.preemptions for result in results for sample in result.samples) >= 1


async def test_the_encoder_runs_once_for_samples_beams_and_repeated_inputs(tmp_path: Path) -> None:
    model_dir = make_text_checkpoint(tmp_path / "model", TEXT_SHAPES[2])
    port = free_port()
    rng = random.Random(5)
    prompt = [rng.randrange(10, VOCAB_SIZE) for _ in range(70)]
    penalized = TextReference(model_dir).generate(prompt, 10, repetition_penalty=1.7, eos_token_id=None)[0]
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        start_worker(stack, scheduler, model_dir, "--metrics-listen", f"127.0.0.1:{port}")
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client:
            first = await client.generate(token_ids=prompt, n=4, max_tokens=10, seed=1)
            assert encoder_inputs(port) == 1
            again = await client.generate(token_ids=prompt, max_tokens=10, beam_width=4)
            assert encoder_inputs(port) == 1
            other = await client.generate(token_ids=[*prompt[:-1], 11], max_tokens=10)
            assert encoder_inputs(port) == 2
            options = {"max_tokens": 10, "temperature": 0.0, "repetition_penalty": 1.7, "ignore_eos": True}
            assert list((await client.generate(token_ids=prompt, **options)).token_ids) == penalized
    assert first.samples[0].usage.cached_tokens == 0
    assert again.usage.cached_tokens == 70
    assert other.usage.cached_tokens == 0


async def test_requests_that_do_not_fit_are_refused_with_the_limit(tmp_path: Path) -> None:
    model_dir = make_text_checkpoint(tmp_path / "model", TEXT_SHAPES[0])
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        start_worker(stack, scheduler, model_dir)
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client:
            for message, options in (
                (f"prompt has {MAX_LEN + 1} tokens; the encoder .* takes at most {MAX_LEN}", {"length": MAX_LEN + 1}),
                (f"ask for at most {MAX_LEN - 1}", {"max_tokens": MAX_LEN}),
                ("prompt_logprobs is set", {"prompt_logprobs": 1}),
            ):
                length = options.pop("length", 5)
                with pytest.raises(InvalidRequest, match=message):
                    await client.generate(token_ids=[7] * length, **{"max_tokens": 4} | options)
            with pytest.raises(InvalidRequest, match="no chat template"):
                await client.chat([{"role": "user", "content": "hello"}], max_tokens=4)
            with pytest.raises(NotConfigured, match="has an encoder and a decoder: it generates text"):
                await client.embed(["the quick brown fox"])
            assert (await client.generate("the quick brown fox", max_tokens=4)).text is not None
