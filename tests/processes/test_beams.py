"""Beam search with real services, compared with `generate(num_beams=...)` of transformers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from quire_client import AsyncClient, FinishReason, GenerateResult, InvalidRequest
from transformers import AutoModelForCausalLM

from tests.processes.models import EOS_ID, VOCAB_SIZE, make_checkpoint
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack, wait_idle

BLOCK_SIZE = 16
RNG = random.Random(3)
PROMPT = [RNG.randrange(3, VOCAB_SIZE) for _ in range(21)]
LONG_PROMPT = [RNG.randrange(3, VOCAB_SIZE) for _ in range(1000)]
ENDS = [EOS_ID, *range(100, 180)]  # many ends: most searches end early
LONG_SEARCH = {"token_ids": PROMPT, "beam_width": 4, "n": 4, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), max_model_len=2048)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def start_worker(stack: Stack, scheduler: Service, model_dir: Path) -> Service:
    flags = ("--dtype", "float32", "--num-blocks", "400", "--block-size", str(BLOCK_SIZE), "--max-num-seqs", "8")
    return stack.start_worker(scheduler, model_dir, *flags)


def searched(
    model: Any, prompt: list[int], width: int, max_tokens: int, **settings: Any
) -> list[tuple[list[int], float]]:
    """Output tokens and score of each sequence that transformers returns."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, num_beams=width,
            num_return_sequences=width, do_sample=False, pad_token_id=0, output_scores=True,
            return_dict_in_generate=True, **{"eos_token_id": ENDS} | settings,
        )  # fmt: skip
    outputs = [until_end(sequence[len(prompt) :].tolist()) for sequence in found.sequences]
    return list(zip(outputs, found.sequences_scores.tolist(), strict=True))


def until_end(output: list[int]) -> list[int]:
    ends = [i for i, token in enumerate(output) if token in ENDS]
    return output[: ends[0] + 1] if ends else output


def check_equal(result: GenerateResult, expected: list[tuple[list[int], float]]) -> None:
    assert [list(sample.token_ids) for sample in result.samples] == [tokens for tokens, _ in expected]
    assert [sample.score for sample in result.samples] == pytest.approx([score for _, score in expected], abs=1e-4)


async def test_results_equal_those_of_transformers(stack: Stack, model_dir: Path, reference: Any) -> None:
    scheduler = stack.start_scheduler()
    start_worker(stack, scheduler, model_dir)
    lengths = set()
    async with await stack.connect(stack.start_gateway(scheduler)) as client:
        for width in (2, 4):
            for early in (False, True, "never"):
                for penalty in (1.0, 0.0):
                    expected = searched(reference, PROMPT, width, 40, early_stopping=early, length_penalty=penalty)
                    result = await client.generate(
                        token_ids=PROMPT, beam_width=width, n=width, max_tokens=40, early_stopping=early,
                        length_penalty=penalty, stop_token_ids=ENDS[1:],
                    )  # fmt: skip
                    check_equal(result, expected)
                    lengths |= {len(sample.token_ids) for sample in result.samples}
        assert len(lengths) > 2
        greedy = await client.generate(token_ids=PROMPT, beam_width=1, temperature=0.0, max_tokens=20, ignore_eos=True)
        expected = searched(reference, PROMPT, 2, 20, eos_token_id=None)  # differs from greedy decoding
        assert [list(greedy.token_ids)] != [tokens for tokens, _ in expected][:1]


async def test_penalties_and_min_tokens_apply_to_log_probabilities(
    stack: Stack, model_dir: Path, reference: Any
) -> None:
    scheduler = stack.start_scheduler()
    start_worker(stack, scheduler, model_dir)
    async with await stack.connect(stack.start_gateway(scheduler)) as client:
        expected = searched(reference, PROMPT, 3, 30, repetition_penalty=1.3, min_new_tokens=12)
        result = await client.generate(
            token_ids=PROMPT, beam_width=3, n=3, max_tokens=30, repetition_penalty=1.3, min_tokens=12,
            stop_token_ids=ENDS[1:],
        )  # fmt: skip
        check_equal(result, expected)
        plain = await client.generate(token_ids=PROMPT, beam_width=3, n=3, max_tokens=30, stop_token_ids=ENDS[1:])
        assert plain.token_ids != result.token_ids


async def test_each_sample_has_reason_score_and_usage(stack: Stack, model_dir: Path) -> None:
    scheduler = stack.start_scheduler()
    start_worker(stack, scheduler, model_dir)
    async with await stack.connect(stack.start_gateway(scheduler)) as client:
        result = await client.generate(
            token_ids=PROMPT, beam_width=4, n=2, max_tokens=25, length_penalty=2.0, stop_token_ids=ENDS[1:]
        )
        assert len(result.samples) == 2
        for sample in result.samples:
            length = len(sample.token_ids)
            assert sample.usage.output_tokens == length
            assert sample.score == pytest.approx(sample.cumulative_logprob / length**2)
            is_end = sample.token_ids[-1] in ENDS[1:]
            assert sample.finish_reason is (FinishReason.STOP if is_end else FinishReason.LENGTH)
            assert sample.matched == (sample.token_ids[-1] if is_end else None)
        assert result.samples[0].score >= result.samples[1].score
        await wait_idle(stack, client)


async def test_beams_are_the_same_after_a_worker_or_scheduler_is_killed(stack: Stack, model_dir: Path) -> None:
    schedulers = [stack.start_scheduler() for _ in range(2)]
    workers = [start_worker(stack, scheduler, model_dir) for scheduler in schedulers for _ in range(2)]
    async with await stack.connect(stack.start_gateway(*schedulers), workers=2) as client:
        whole = await client.generate(**LONG_SEARCH)
        assert all(len(sample.token_ids) == 400 for sample in whole.samples)
        search = asyncio.create_task(client.generate(**LONG_SEARCH, cache_salt="worker"))
        busy = await busy_worker(stack, client)
        next(worker for worker in workers if worker.name == busy).kill()
        moved = await search
        assert moved.usage.recomputed_tokens > 0
        assert outputs(moved) == outputs(whole)
        search = asyncio.create_task(client.generate(**LONG_SEARCH, cache_salt="scheduler"))
        name = await busy_worker(stack, client)
        schedulers[int(name.removeprefix("worker-")) // 2].kill()
        assert outputs(await search) == outputs(whole)


def outputs(result: GenerateResult) -> list[tuple[tuple[int, ...], float | None]]:
    return [(sample.token_ids, sample.score) for sample in result.samples]


async def busy_worker(stack: Stack, client: AsyncClient) -> str:
    """The worker that runs the beams, some steps after it began."""
    before = {w.worker_id: w.steps for s in (await client.status()).schedulers for w in s.workers}
    found = await stack.until(
        client,
        lambda all_: any(w.rows_used == 4 and w.steps > before[w.worker_id] + 30 for s in all_ for w in s.workers),
    )
    return next(w.worker_id for s in found for w in s.workers if w.rows_used == 4)


@pytest.mark.parametrize("fields", [{"n": 4, "temperature": 1.0}, {"n": 4, "beam_width": 4}])
async def test_a_prompt_of_1000_tokens_is_stored_once(stack: Stack, model_dir: Path, fields: dict[str, Any]) -> None:
    scheduler = stack.start_scheduler()
    worker = start_worker(stack, scheduler, model_dir)
    async with await stack.connect(stack.start_gateway(scheduler)) as client:
        request = asyncio.create_task(client.generate(token_ids=LONG_PROMPT, max_tokens=400, ignore_eos=True, **fields))
        running = await stack.until(client, lambda all_: all_[0].workers[0].rows_used == 4)
        used = [running[0].workers[0].blocks_used]
        while not request.done():
            status = (await client.status()).schedulers[0].workers[0]
            used.append(status.blocks_used if status.rows_used == 4 else 0)
        assert worker.is_running
        shared, own = len(LONG_PROMPT) // BLOCK_SIZE, -(-400 // BLOCK_SIZE) + 1
        assert shared < max(used) <= shared + 4 * own
        assert (await request).samples[0].usage.prompt_tokens == 1000


async def test_http_serves_beam_search(stack: Stack, model_dir: Path) -> None:
    scheduler = stack.start_scheduler()
    start_worker(stack, scheduler, model_dir)
    url = f"http://127.0.0.1:{(port := free_port())}"
    gateway = stack.start_gateway(scheduler, flags=("--http-listen", f"127.0.0.1:{port}"))
    body = {
        "prompt": PROMPT, "max_tokens": 30, "use_beam_search": True, "n": 3, "temperature": 0, "length_penalty": 0.0,
        "early_stopping": "never", "stop_token_ids": ENDS[1:], "return_token_ids": True,
    }  # fmt: skip
    async with await stack.connect(gateway) as client, aiohttp.ClientSession(url) as session:
        expected = await client.generate(
            token_ids=PROMPT, max_tokens=30, beam_width=3, n=3, length_penalty=0.0, early_stopping="never",
            stop_token_ids=ENDS[1:],
        )  # fmt: skip
        async with session.post("/v1/completions", json=body) as reply:
            choices = (await reply.json())["choices"]
        assert [choice["token_ids"] for choice in choices] == [list(sample.token_ids) for sample in expected.samples]
        for bad, field in (({"n": 1}, "use_beam_search"), ({"early_stopping": "soon"}, "early_stopping")):
            async with session.post("/v1/completions", json=body | bad) as reply:
                assert reply.status == 400
                assert (await reply.json())["error"]["param"] == field


async def test_conflicting_fields_are_refused_by_name(stack: Stack, model_dir: Path) -> None:
    scheduler = stack.start_scheduler()
    start_worker(stack, scheduler, model_dir)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"beam_width": 2, "temperature": 0.5}, "temperature"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p"),
        ({"beam_width": 2, "stop": ["x"]}, "stop"),
        ({"beam_width": 2, "regex": "a"}, "regex"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 7}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 6, "max_tokens": 2000}, "beam_width"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ]
    async with await stack.connect(stack.start_gateway(scheduler)) as client:
        for fields, field in refused:
            with pytest.raises(InvalidRequest) as error:
                await client.generate(**{"token_ids": PROMPT, "max_tokens": 8} | fields)
            assert error.value.field_violations[0].field == field, f"{fields}: {error.value}"
        assert (await client.generate(token_ids=PROMPT, max_tokens=8, beam_width=6)).token_ids
