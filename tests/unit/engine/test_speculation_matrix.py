"""A batch of 32 requests with every kind of parameter: each proposer, in each number type, gives the same answers."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quire.v1.types_pb2 import LOGPROBS_MODE_PROCESSED, TokenIds
from quire_client.demo import demo_model_dir
from tokenizers import Tokenizer

from request_fields.fields import StopCondition
from tests.speculating import Answer, NoTimes, System, speculate
from tests.unit.engine.heads import add_mtp, make_eagle
from tests.unit.engine.models import make_model
from tests.unit.engine.quantized import awq, quantize_model
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner

PROPOSERS = ("suffix", "draft", "random", "mtp", "eagle")
NUMBERS = ("float32", "bfloat16", "int4")
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"seed": 1, "temperature": 1.3}, {"seed": 2, "top_p": 0.8, "top_k": 30, "min_p": 0.01},
    {"seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 0.0, "frequency_penalty": 0.3}, {"seed": 4, "logit_bias": {300: 6.0, 301: 5.0}},
    {"seed": 5, "allowed_token_ids": [300, 301, 302]},
    {"seed": 6, "banned_token_ids": [13, 300], "options": {"logprobs": 2}},
    {"seed": 7, "options": {"banned_ids": np.array([2, 0], np.uint32).tobytes(), "banned_before": 20}},
    {"temperature": 0.0, "regex": "([a-f]{3} ){4}end"}, {"seed": 8, "json_schema": SCHEMA},
    {"seed": 9, "choice": ["yes and so on", "yes and no more", "no"]}, {"seed": 10, "n": 2, "options": {"logprobs": 0}},
    {"seed": 11, "n": 3, "temperature": 0.7, "repetition_penalty": 1.1}, {"seed": 12, "speculative": False},
    {"seed": 13, "top_a": 0.2},
)  # fmt: skip
RARE: tuple[dict[str, Any], ...] = (
    {"seed": 14, "json_object": True},
    {"temperature": 0.0, "grammar": "start: WORD{6,8}\nWORD: /[a-z]{2,3} /\n"},
    {"seed": 15, "options": {"bad_words_ids": [TokenIds(ids=[300]), TokenIds(ids=[301, 302])]}},
    {"seed": 16, "logprobs_mode": LOGPROBS_MODE_PROCESSED, "top_k": 5, "options": {"logprobs": 2}},
    {"seed": 17, "logits_digests": True, "options": {"logprobs": 0}},
    {"seed": 18, "num_forced_tokens": 4, "options": {"logprobs": 0}},
)
REQUESTS = (*FIELDS, *FIELDS[: len(FIELDS) - len(RARE)], *RARE)
ROOM = {"block_size": 8, "max_num_seqs": 48, "max_num_batched_tokens": 96, "max_model_len": 160, "threads": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, and one with its tokenizer and heads, in 4 bits and in their own types."""
    folder = tmp_path_factory.mktemp("matrix")
    shutil.copytree(demo_model_dir(), folder / "float")
    sizes = {"vocab_size": 2048, "head_dim": 16, "dtype": torch.bfloat16, "eos_token_id": 2}
    target = add_mtp(make_model(folder / "heads-float", "glm4_moe", **sizes), agrees=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_dir() / name, target)
    make_eagle(folder / "eagle", target, agrees=True)
    for prefix in ("", "heads-"):
        shutil.copytree(folder / f"{prefix}float", folder / f"{prefix}int4")
        quantize_model(folder / f"{prefix}int4", awq(32))
    return folder


@cache
def prompts() -> list[list[int]]:
    """Some share a prefix, some repeat themselves."""
    encode = Tokenizer.from_file(str(demo_model_dir() / "tokenizer.json")).encode
    texts = [f"Return the number of items in {name}. " * (1 + i % 3) for i, name in enumerate(("a list", "a set"))]
    return [encode(texts[i % 2] + f"What is {i // 4}? " * (i % 4)).ids for i in range(len(REQUESTS))]


def make_runner(models: Path, numbers: str, prefix: str, **settings: Any) -> ModelRunner:
    dtype = "float32" if numbers == "float32" else "bfloat16"
    folder = models / (prefix + ("int4" if numbers == "int4" else "float"))
    return ModelRunner(EngineConfig(folder, dtype, **ROOM, **settings))


def answers_of(runner: ModelRunner, depth: int) -> list[Answer]:
    system = System(runner, depth)
    for i, prompt in enumerate(prompts()):
        stop = StopCondition(
            24 + i % 5, frozenset(range(300, 900)) if i % 7 == 1 else frozenset(), ignore_eos=i % 3 == 0
        )
        system.add(prompt, stop, **REQUESTS[i])
    return list(system.run().values())


@cache
def plain_answers(models: Path, numbers: str, prefix: str) -> list[Answer]:
    return answers_of(make_runner(models, numbers, prefix, num_blocks=800), 2)


@pytest.mark.parametrize("depth", [3, pytest.param(1, marks=pytest.mark.deep), pytest.param(2, marks=pytest.mark.deep)])
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_each_proposer_gives_the_same_answers(models: Path, numbers: str, proposer: str, depth: int) -> None:
    """Also with chunks of prompts, shared prefixes and a pool that preempts."""
    prefix = "heads-" if proposer in ("mtp", "eagle") else ""
    plain = plain_answers(models, numbers, prefix)
    assert len({answer.reason for answer in plain}) >= 3 - bool(prefix)
    folders = {"draft": models / "float", "eagle": models / "eagle"}
    text = f"{proposer}:{folders[proposer]}" if proposer in folders else proposer
    speculates = None if proposer == "random" else text
    runner = make_runner(models, numbers, prefix, num_blocks=110, speculate=speculates, max_drafts=5)
    if speculates is None:
        speculate(runner, {}, 1.0)
    else:
        runner._drafts._times = NoTimes()
    assert answers_of(runner, depth) == plain
    counts = runner.draft_counts
    assert counts is not None
    assert counts.drafted.sum() > 0
    is_alike = proposer != "random" and not (prefix and numbers == "int4")  # weights in 4 bits are other ones
    assert counts.accepted.sum() > 0 or not is_alike
