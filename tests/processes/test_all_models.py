"""Every decoder and every kind of quantized weights through all services: greedy tokens equal those of transformers,
with prompts in chunks, prefix hits, preemption and kill -9 of the worker in one run.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.processes.killed_run import Request, run, run_with_kill
from tests.processes.models import Reference
from tests.processes.stack import Stack, wait_idle
from tests.unit.engine.models import ARCHITECTURES, RECURRENT, make_model
from tests.unit.engine.quantized import FORMATS, quantize_model

BUDGET, BLOCK_SIZE, NUM_BLOCKS = 32, 16, 22
WORKER_FLAGS = (
    *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--num-blocks", str(NUM_BLOCKS)),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", str(BUDGET), "--max-model-len", "512"),
)
# The pool holds the longest urgent request and little else, so it preempts whatever runs.
PATIENT_TOKENS, URGENT_TOKENS = 100, 12
PATIENT_LENGTHS, URGENT_LENGTHS = (60, 33, 97), (300, 5, 90)
SHARED_PREFIX = 48
HAVE_GROUPS = ("gemma3", "gemma3_vl", "gpt_oss", "llama4", "olmo3")  # two rows: the pool has cache groups
QUANTIZED = ("gptq-int4-act-order", "awq", "fp8-block", "compressed-int8-channel", "compressed-int4")
NOT_DEEP = ("qwen3", "llama", "gemma3", "gpt_oss", "nemotron_h", "awq")  # the tests of the engine have all


def make_case(name: str, folder: Path) -> tuple[Path, Path]:
    """The folder of a model, and one with the same weights that transformers can read."""
    if name in (*ARCHITECTURES, *RECURRENT):
        model_dir = make_model(folder, name)
        return model_dir, model_dir
    model_dir = make_model(folder, "llama", intermediate_size=104)
    return model_dir, quantize_model(model_dir, FORMATS[name])


def mixed_requests() -> list[Request]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 211) for _ in range(SHARED_PREFIX)]

    def prompt(length: int) -> list[int]:
        own = [rng.randrange(3, 211) for _ in range(length)]
        return own if length <= SHARED_PREFIX else shared + own[SHARED_PREFIX:]

    patient = [Request(prompt(length), PATIENT_TOKENS, is_patient=True) for length in PATIENT_LENGTHS]
    return patient + [Request(prompt(length), URGENT_TOKENS) for length in URGENT_LENGTHS]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in NOT_DEEP else pytest.mark.deep)
        for n in (*ARCHITECTURES, *RECURRENT, *QUANTIZED)
    ],
)
async def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    model_dir, reference_dir = make_case(name, tmp_path / "model")
    requests = mixed_requests()
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        rows = ("--max-num-seqs", "2") if name in HAVE_GROUPS else ()
        worker = stack.start_worker(scheduler, model_dir, *WORKER_FLAGS, *rows)
        gateway = stack.start_gateway(scheduler)
        reference = Reference(reference_dir)
        async with await stack.connect(gateway) as client:
            results = await run_with_kill(stack, client, worker, requests)
            results += [await run(client, requests[0]), await run(client, requests[-1])]
            (status,) = await wait_idle(stack, client)
    for request, result in zip((*requests, requests[0], requests[-1]), results, strict=True):
        assert isinstance(request.prompt, list)
        tokens = list(result.token_ids)
        assert len(tokens) == request.max_tokens
        assert tokens == reference.greedy_after(request.prompt, tokens), f"prompt of {len(request.prompt)} tokens"
    assert status.preemptions >= 1
    usages = [result.usage for result in results]
    assert sum(usage.recomputed_tokens for usage in usages) > 0
    computed = sum(usage.prompt_tokens - usage.cached_tokens + usage.output_tokens - 1 for usage in usages)
    assert status.steps >= computed / BUDGET  # no step exceeds the budget: long prompts are chunked
    assert results[-1].usage.cached_tokens >= BLOCK_SIZE
