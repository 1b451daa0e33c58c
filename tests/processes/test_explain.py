"""`quire explain` with real services: the distribution gives the token and its log probability, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import quire_cli as cli
from quire_client import Client, GenerateResult
from quire_client.demo import demo_model_dir

from tests.processes.stack import Stack

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}'
CHAT = {"messages": "What does os.path.join do?"}
KINDS: tuple[dict[str, Any], ...] = (
    {"prompt": "Return the", "temperature": 1.0},
    {"prompt": "Return the", "temperature": 0.0, "min_tokens": 10},
    {"prompt": "Once", "temperature": 0.7, "top_k": 5, "n": 3},
    {
        "prompt": "Once",
        "temperature": 1.3,
        "top_p": 0.8,
        "min_p": 0.02,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.2,
    },
    {"token_ids": [5, 6, 7, 8, 9], "temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {9: 3.0}, "n": 2},
    {"prompt": "a", "temperature": 1.0, "json_schema": SCHEMA},
    {"prompt": "a", "temperature": 1.0, "regex": "[a-f]{4,30}", "bad_words": ["ab"]},
    {**CHAT, "temperature": 1.5, "top_a": 0.1},
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("explain")
    with Stack(root) as stack:
        scheduler = stack.start_scheduler()
        worker = stack.start_worker(scheduler, demo_model_dir(), "--num-blocks", "300", "--max-num-seqs", "8")
        gateway = stack.start_gateway(scheduler, flags=("--record-memory", "64M"))
        worker.wait_ready()
        gateway.wait_ready()
        yield gateway.address


def explain(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["explain", *map(str, words)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def answers(target: str, seed: int) -> list[tuple[GenerateResult, GenerateResult, GenerateResult]]:
    """A stored answer of each kind, and the same with both kinds of log probabilities."""
    with Client.connect(target) as client:
        found = []
        for kind in KINDS:
            given: dict[str, Any] = {"max_tokens": 30, "seed": seed, **kind}
            scored = (client.generate(**given, logprobs=20, logprobs_mode=mode) for mode in ("raw", "processed"))
            found.append((client.generate(**given, resumable=True), *scored))
    return found


def check(found: dict[str, Any], raw: Any, final: Any) -> None:
    """Compares an explanation with the generated log probabilities."""
    assert (found["token_id"], found["logprob"], found["raw_logprob"]) == (final.token_id, final.logprob, raw.logprob)
    assert found["num_kept"] == final.num_kept
    by_id = {token["token_id"]: token for token in found["tokens"]}
    for name, entry in (("raw", raw), ("final", final)):
        for top in entry.top:
            assert by_id[top.token_id][name] in (top.logprob, None)
            assert by_id[top.token_id][name] is not None or top.logprob == -float("inf")
    scored = [token for token in found["tokens"] if token["score"] is not None]
    assert scored[0]["token_id"] == final.token_id, "the largest score is that of the token"
    assert found["margin"] is None or found["margin"] >= 0


@pytest.mark.parametrize("rounds", [2, pytest.param(42, marks=pytest.mark.deep)])
def test_a_stored_answer_is_explained(target: str, capsys: pytest.CaptureFixture[str], rounds: int) -> None:
    rng, num_margins = random.Random(1), 0
    for seed in range(rounds):
        for stored, raw, final in answers(target, seed):
            for _ in range(3):
                sample = rng.choice(stored.samples)
                place = rng.randrange(len(sample.token_ids))
                flags = "--target", target, "--sample", sample.index, "--token", place
                found = explain(capsys, stored.request_id, *flags)
                i = sample.index
                check(found, raw.samples[i].logprobs[place], final.samples[i].logprobs[place])
                num_margins += found["margin"] is not None
    assert num_margins > rounds * len(KINDS)


def test_a_change_of_nothing_gives_the_same_output(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, (stored, _, _) in zip(KINDS, answers(target, 7), strict=True):
        for sample in stored.samples:
            flags = "--target", target, "--token", 3, "--sample", sample.index, "--what-if"
            same = explain(capsys, stored.request_id, *flags, "seed=7")["what_if"]
            assert tuple(same["token_ids"]) == sample.token_ids[3:]
            assert same["first_difference"] is None
            banned = f"banned_token_ids=[{sample.token_ids[3]}]"
            if not {"json_schema", "regex"} & set(kind):
                assert explain(capsys, stored.request_id, *flags, banned)["what_if"]["first_difference"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["unknown"], "no record"),
        (["{id}", "--token", "99"], "--token 99: the sample has 4 output tokens"),
        (["{id}", "--sample", "2"], "--sample 2: the answer has 1 samples"),
        (["{id}", "--what-if", "temperature=cold"], "Expecting value"),
        (["{id}", "--what-if", "temperatur=1"], "did you mean temperature"),
    ],
)
def test_what_cannot_be_explained_is_named(
    target: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with Client.connect(target) as client:
        stored = client.generate("Once", max_tokens=4, ignore_eos=True, resumable=True)
    assert cli.main(["explain", *(word.format(id=stored.request_id) for word in words), "--target", target]) > 0
    assert message in capsys.readouterr().err
