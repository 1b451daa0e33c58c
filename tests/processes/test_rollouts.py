"""Scores of given tokens equal what Generate returned for them, bit for bit, on other workers and after a kill."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from quire_client import AsyncClient, InvalidRequest, TokenLogprob
from quire_client.demo import demo_model_dir

from tests.processes.ports import free_port
from tests.processes.stack import Stack
from tests.unit.engine.adapters import make_adapter

PROMPT = list(range(5, 45))
FLAGS = ("--num-blocks", "96", "--max-num-seqs", "6", "--max-num-batched-tokens", "48")
PARAMETERS: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.9, "seed": 11, "repetition_penalty": 1.2, "logit_bias": {9: 2.0},
    "logprobs_mode": "processed", "logits_digests": True,
}  # fmt: skip


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


KINDS = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--dtype", "bfloat16", "--quantize", "int8"),
}
REQUESTS: tuple[dict[str, Any], ...] = (
    {"n": 3},
    {"temperature": 0},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4, "min_p": 0.02, "bad_words": ["the"]},
    {"regex": "[a-f]{9,30}-[0-9]{2}", "ignore_eos": False},
    {"adapter": "poems", "top_k": 50},
)


@pytest.mark.parametrize(
    ("kind", "speculate"),
    [pytest.param(kind, speculate, marks=pytest.mark.deep) for kind in KINDS for speculate in (False, True)],
)
async def test_scores_equal_generated_values_in_any_batch(
    stack: Stack, tmp_path: Path, kind: str, speculate: bool
) -> None:
    """Generated on a worker with one thread, many rows and drafts; scored on one with two threads and short steps."""
    make_adapter(
        demo_model_dir(), tmp_path / "adapters" / "poems", r=4, strength=3.0, target_modules=["q_proj", "v_proj"]
    )
    shared = (*KINDS[kind], "--adapter-dir", str(tmp_path / "adapters"), "--num-blocks", "160")
    drafts = ("--speculate", "suffix") if speculate else ()
    scheduler = stack.start_scheduler()
    first = stack.start_worker(scheduler, demo_model_dir(), *shared, *drafts, "--threads", "1")
    gateway = stack.start_gateway(scheduler, flags=("--logprobs-mode", "processed"))
    async with await stack.connect(gateway) as client:
        await client.load_adapter("poems", "poems")
        calls = [
            client.generate(token_ids=PROMPT, max_tokens=40, logprobs=2, **{**PARAMETERS, "ignore_eos": True, **own})
            for own in REQUESTS
        ]
        results = await asyncio.gather(*calls)
        other = ("--threads", "2", "--max-num-batched-tokens", "24", "--max-num-seqs", "3")
        stack.start_worker(scheduler, demo_model_dir(), *shared, *other).wait_ready()
        first.kill()
        for own, result in zip(REQUESTS, results, strict=True):
            options = {name: value for name, value in own.items() if name != "n"}
            for sample in result.samples:
                assert await score(client, sample.token_ids, **options) == list(sample.logprobs), own


async def test_costs_of_requests_add_up_to_the_time_of_the_worker(stack: Stack) -> None:
    ports = free_port(), free_port()
    scheduler = stack.start_scheduler("--metrics-listen", f"127.0.0.1:{ports[0]}")
    stack.start_worker(scheduler, demo_model_dir(), *FLAGS, "--metrics-listen", f"127.0.0.1:{ports[1]}")
    gateway = stack.start_gateway(scheduler)
    async with await stack.connect(gateway) as client:
        results = await asyncio.gather(
            *(
                client.generate(
                    token_ids=PROMPT[: 3 + 4 * i],
                    n=1 + i % 3,
                    max_tokens=10 + 3 * i,
                    ignore_eos=True,
                    seed=i,
                    tenant_id="ab"[i % 2],
                )
                for i in range(8)
            )
        )
    usages = [sample.usage for result in results for sample in result.samples]
    assert all(usage.processor_seconds > 0 and usage.block_seconds > 0 for usage in usages)
    paid = sum(result.usage.processor_seconds for result in results)
    page = await asyncio.to_thread(metrics, ports[0])
    unattributed = value(page, "quire_unattributed_processor_seconds_total")
    assert paid + unattributed == pytest.approx(value(page, "quire_step_processor_seconds_total"), rel=1e-6)
    assert sum(values(page, "quire_tenant_processor_seconds_total")) == pytest.approx(paid, rel=1e-6)
    assert len(values(page, "quire_tenant_block_seconds_total")) == 2
    worker = await asyncio.to_thread(metrics, ports[1])
    assert paid + unattributed <= value(worker, "quire_worker_step_seconds_sum"), "with the time around the model"


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return str(reply.read(), "utf-8")


def values(page: str, name: str) -> list[float]:
    return [float(text) for text in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)]


def value(page: str, name: str) -> float:
    (found,) = values(page, name)
    return found


async def test_token_ids_in_and_out_over_http(stack: Stack) -> None:
    scheduler, address = stack.start_scheduler(), f"127.0.0.1:{free_port()}"
    stack.start_worker(scheduler, demo_model_dir(), *FLAGS)
    gateway = stack.start_gateway(scheduler, flags=("--http-listen", address))
    params = {"n": 2, "max_tokens": 6, "seed": 3, "logprobs": 0, "temperature": 0.8, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": {**params, "logprobs_mode": "processed", "detokenize": False}}
    async with await stack.connect(gateway) as client:
        expected = await client.generate(token_ids=PROMPT, logprobs_mode="processed", **params)
    status, answer = await asyncio.to_thread(post, address, {**body, "model": expected.model, "session": "a"})
    assert status == 200, answer
    assert (answer["seed"], answer["prompt_token_ids"], answer["object"]) == (3, PROMPT, "rollout")
    for choice, sample in zip(answer["choices"], expected.samples, strict=True):
        assert choice["token_ids"] == list(sample.token_ids)
        entries = choice["logprobs"]["content"]
        assert [entry["logprob"] for entry in entries] == pytest.approx([entry.logprob for entry in sample.logprobs])
        assert [entry["num_kept"] for entry in entries] == [entry.num_kept for entry in sample.logprobs]
        assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in sample.token_ids]
        assert "text" not in choice
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    _, events = await asyncio.to_thread(post, address, {**body, **streams})
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for choice in (choice for event in events for choice in event["choices"]):
        streamed[choice["index"]] += choice.get("token_ids", [])
    assert streamed == {sample.index: list(sample.token_ids) for sample in expected.samples}
    assert events[-1]["usage"]["completion_tokens"] == 12
    for wrong, name in (
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "a"}, "token_ids"),
        ({"token_ids": [5, "a"]}, "token_ids"),
        ({"sampling_params": 3}, "sampling_params"),
        ({"sampling_params": {"temperature": 9}}, "temperature"),
        ({"priority": 1001}, "priority"),
        ({"cache_salt": "a" * 129}, "cache_salt"),
        ({"timeout": 0}, "timeout"),
        ({"model": "other"}, "model"),
    ):
        status, answer = await asyncio.to_thread(post, address, {**body, **wrong})
        assert (status, answer["error"]["param"].partition("[")[0]) == (404 if name == "model" else 400, name)


def post(address: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and answer of a rollout; of a stream, its events."""
    request = urllib.request.Request(f"http://{address}/inference/v1/generate", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            status, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
    if not text.startswith("data: "):
        return status, json.loads(text)
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return status, [json.loads(line) for line in lines if line != "[DONE]"]
