"""Results of a GPU server beside plain generation, through all services: they equal those of a CPU worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from quire_client import AsyncClient, PromptEmbeddings

from tests.embedding_models import SIZES, make_answering_reranker, texts
from tests.processes.stack import Stack

FLAGS = (
    *("--dtype", "float32", "--block-size", "16", "--num-blocks", "80", "--max-num-seqs", "6"),
    *("--max-num-batched-tokens", "48", "--max-model-len", "128"),
)
QUERY, *TEXTS = texts(4, 20)
PATIENCE_S = 240.0  # for the interpreter on a busy machine


async def results(client: AsyncClient) -> dict[str, Any]:
    """Requests of all kinds at once."""
    embeds = torch.randn(20, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)) * 0.2
    soft = PromptEmbeddings(safetensors.torch.save({"prompt": embeds}))
    means, last, scores, search, continued, plain = await asyncio.gather(
        client.embed(TEXTS, pooling="mean", timeout_s=PATIENCE_S),
        client.embed(TEXTS, normalize=False, timeout_s=PATIENCE_S),
        client.score(QUERY, TEXTS, timeout_s=PATIENCE_S),
        client.generate(token_ids=[9, 50, 70], beam_width=3, n=3, max_tokens=6, repetition_penalty=1.2),
        client.generate(soft, max_tokens=5, temperature=0.0, ignore_eos=True),
        client.generate(token_ids=[9, 50, 70], max_tokens=8, seed=5, ignore_eos=True),
    )
    return {
        "numbers": [*means.embeddings, *last.embeddings, scores.scores, [sample.score for sample in search.samples]],
        "tokens": [list(sample.token_ids) for found in (search, continued, plain) for sample in found.samples],
    }


@pytest.mark.deep
async def test_a_gpu_worker_gives_the_results_of_a_cpu_worker(tmp_path: Path) -> None:
    make_answering_reranker(tmp_path / "model")
    found = []
    for backend in ("cpu", "cuda"):
        (tmp_path / backend).mkdir()
        with Stack(tmp_path / backend) as stack:
            scheduler = stack.start_scheduler()
            stack.start_worker(scheduler, tmp_path / "model", *FLAGS, "--backend", backend)
            async with await stack.connect(stack.start_gateway(scheduler)) as client:
                found.append(await results(client))
    cpu, gpu = found
    assert gpu["tokens"] == cpu["tokens"]
    for mine, expected in zip(gpu["numbers"], cpu["numbers"], strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-4)
