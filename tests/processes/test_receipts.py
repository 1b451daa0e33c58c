"""Receipts of real services: honest ones are confirmed, each kind of forgery is detected."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_client import AsyncClient, InvalidRequest, QuireError
from quire_client.demo import demo_model_dir
from safetensors.torch import load_file, save_file

from request_fields.receipts import PARTS, Receipt, ReceiptAnswer, parse_receipt, private_key, receipt_text
from tests.processes.stack import Stack
from worker_svc.receipts.verify import CONFIRMED, REFUTED, UNDECIDED, Verifier

FLAGS = ("--num-blocks", "160", "--max-num-seqs", "8")
NUM_PROMPT = 20


def openssl_key(path: Path) -> Path:
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", path], check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Receipt], Path]:
    """Receipts of requests with many kinds of parameters, some of them beside others, and the key that signed them."""
    folder = tmp_path_factory.mktemp("receipts")
    key = openssl_key(folder / "key.pem")
    with Stack(folder) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), *FLAGS)
        gateway = stack.start_gateway(scheduler, flags=("--receipt-key-file", str(key)))
        plain = stack.start_gateway(scheduler)
        texts = asyncio.run(answers(stack, gateway, plain))
    return [parse_receipt(text) for text in texts], key


async def answers(stack: Stack, gateway: Any, plain: Any) -> list[str]:
    async with await stack.connect(plain) as client:
        with pytest.raises(QuireError, match="signs no receipts"):
            await client.generate("a", max_tokens=1, receipt=True)
    async with await stack.connect(gateway) as client:
        with pytest.raises(InvalidRequest, match="best_of"):
            await client.generate("a", max_tokens=1, receipt=True, best_of=3)
        assert not (await client.generate("a", max_tokens=1)).samples[0].receipt
        rng = random.Random(5)
        results = await asyncio.gather(*(ask(client, rng, **options) for options in PARAMETERS))
    return [sample.receipt for result in results for sample in result.samples]


async def ask(client: AsyncClient, rng: random.Random, **options: Any) -> Any:
    prompt = [rng.randrange(3, 2000) for _ in range(NUM_PROMPT)]
    return await client.generate(token_ids=prompt, receipt=True, **{"max_tokens": 24, "ignore_eos": True, **options})


PARAMETERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"temperature": 1.0, "n": 3},
    {"temperature": 0.7, "top_p": 0.8, "seed": 2**64 - 1, "logprobs": 3, "logprobs_mode": "processed"},
    {"temperature": 1.3, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {
        "logit_bias": {7: 3.0}, "banned_token_ids": [9, 10], "min_tokens": 12, "stop_token_ids": [11],
        "ignore_eos": False,
    },
    {"regex": "[a-f]{3,9}-[0-9]{2}", "ignore_eos": False}, {"stop": ["e"], "bad_words": ["the", "is"]},
    {"max_tokens": 80, "temperature": 0.9},
    {"temperature": 1.0, "thinking_token_budget": 7, "thinking_end_ids": [9], "thinking_last_ids": [5, 8]},
)  # fmt: skip


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return Verifier(demo_model_dir())


def resigned(receipt: Receipt, key: Path, answer: ReceiptAnswer | None = None, /, **payload: Any) -> Receipt:
    """A receipt that the holder of the key changed and signed again."""
    facts = {name: value for name, value in receipt.payload.items() if not name.endswith("_sha256")}
    return parse_receipt(receipt_text({**facts, **payload}, answer or receipt.answer, private_key(key.read_bytes())))


def test_honest_receipts_are_confirmed(made: tuple[list[Receipt], Path], verifier: Verifier) -> None:
    receipts, _ = made
    assert len(receipts) == len(PARAMETERS) + 2
    for receipt in receipts:
        verdict = verifier.verify(receipt)
        assert verdict.code == CONFIRMED, (verdict.reason, receipt.payload["sampling"])
        if (n := len(receipt.answer.token_ids)) > 1:
            part = verifier.verify(receipt, last=n - 1)
            assert part.code == UNDECIDED
            assert f"output tokens 0 to {n - 2} were computed again and are the same; 1 of {n}" in part.reason


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_many_honest_receipts_raise_no_false_alarm(tmp_path: Path, verifier: Verifier) -> None:
    """Requests with random parameters, many at once, on two workers of which one is killed and started again."""
    key, rng = openssl_key(tmp_path / "key.pem"), random.Random(1)
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        workers = [stack.start_worker(scheduler, demo_model_dir(), *FLAGS) for _ in range(2)]
        gateway = stack.start_gateway(scheduler, flags=("--receipt-key-file", str(key)))

        async def run() -> list[str]:
            async with await stack.connect(gateway) as client:
                found: list[str] = []
                for part in range(130):
                    if part % 20 in (5, 12):
                        workers[part % 2].kill()
                        workers[part % 2].start()
                    results = await asyncio.gather(*(ask(client, rng, **drawn(rng)) for _ in range(50)))
                    found += [sample.receipt for result in results for sample in result.samples]
                return found

        receipts = [parse_receipt(text) for text in asyncio.run(run())]
    assert len(receipts) >= 10_000
    for receipt in receipts:
        assert verifier.verify(receipt).code == CONFIRMED, receipt.payload


def drawn(rng: random.Random) -> dict[str, Any]:
    """The options of a request."""
    own: dict[str, Any] = {
        "temperature": rng.choice((0, 0.5, 1.0, 1.7)),
        "n": rng.choice((1, 1, 3)),
        "max_tokens": rng.randrange(1, 40),
        "ignore_eos": rng.random() < 0.8,
    }
    optional: dict[str, Any] = {
        "top_p": rng.uniform(0.3, 1),
        "top_k": rng.randrange(1, 200),
        "min_p": rng.uniform(0, 0.2),
        "repetition_penalty": rng.uniform(0.8, 1.5),
        "frequency_penalty": rng.uniform(-0.5, 1),
        "logit_bias": {rng.randrange(2000): 4.0},
        "seed": rng.getrandbits(64),
        "logprobs_mode": rng.choice(("raw", "processed")),
        "bad_words": ["the"],
    }
    return own | {name: optional[name] for name in rng.sample(sorted(optional), 3)}


def test_forgeries_are_refuted(made: tuple[list[Receipt], Path], verifier: Verifier, tmp_path: Path) -> None:
    receipts, key = made
    sampled = receipts[1]
    ids = sampled.answer.token_ids
    edited = ReceiptAnswer(
        sampled.answer.prompt_token_ids, ids[:6] + type(ids)("I", [ids[6] ^ 1]) + ids[7:], sampled.answer.logits_digests
    )
    forged = parse_receipt(as_text(sampled, signed=sampled.signed.replace(b'"sample": 0', b'"sample": 1')))
    for name, receipt in {
        "an edited token, signed again": resigned(sampled, key, edited),
        "another seed": resigned(sampled, key, seed=sampled.payload["seed"] ^ 1),
        "another sample": resigned(sampled, key, sample=sampled.payload["sample"] + 1),
        "another temperature": resigned(sampled, key, sampling={**sampled.payload["sampling"], "temperature": 0.5}),
        "another quantization": resigned(sampled, key, quantization="int8"),
        "a changed payload": forged,
        "an edited token": parse_receipt(as_text(sampled, answer=edited)),
        "weights that it names wrongly": resigned(sampled, key, weights_digest="0" * 32),
    }.items():
        verdict = verifier.verify(receipt)
        assert verdict.code == REFUTED, name
        assert verdict.reason
    other = Verifier(
        demo_model_dir(),
        public_key=private_key(openssl_key(tmp_path / "k").read_bytes()).public_key().public_bytes_raw(),
    )
    assert "another key" in other.verify(sampled).reason


# Statements of the server that no computation shows, and settings with which it would give the same answer.
UNPROVED = {"format", "model", "build", "request_id", "time", "processor_seconds", "block_size", "max_model_len"}
# Parameters with which the sampled answer would be another one, or with which no server signs an answer.
OTHER_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "sampling": (
        {"temperature": 0.3}, {"temperature": 5}, {"temperature": "x"}, {"top_k": 1}, {"top_p": 0.05}, {"min_p": 0.9},
        {"seed": "1"}, {"seed": -1}, {"seed": None}, {"logit_bias": {"7": 60}}, {"banned_token_ids": [1 << 20]},
        {"allowed_token_ids": [5]}, {"n": 0}, {"n": 10**9}, {"n": 1e30}, {"best_of": 4}, {"beam_width": 4},
        {"length_penalty": 2.0}, {"early_stopping": 2}, {"logits_digests": False}, {"num_forced_tokens": NUM_PROMPT},
        {"regex": "[a-f]{3}"}, {"bad_words": ["the"]}, {"unknown": 1},
        {"thinking_token_budget": 3, "thinking_end_ids": [9]}, {"thinking_end_ids": [1 << 20]},
    ),
    "stop": (
        {"max_tokens": 3}, {"max_tokens": 30}, {"max_tokens": None}, {"max_tokens": -1}, {"min_tokens": 30},
        {"stop_token_ids": [1 << 20]}, {"unknown": 1},
    ),
}  # fmt: skip


def other_values(value: Any) -> list[Any]:
    """Other values of a JSON value, at its own type and at others."""
    if isinstance(value, list):
        return [value[:-1], [*value, 7], [*value, [7]], [[1 << 31]], [[]], 5]
    if isinstance(value, int | float):
        return [value + 1, value - 1, -1, 10**9, 1e30, str(value), None, [value]]
    return [f"{value}1", value[:-1], "", 5, None]


def edits(receipt: Receipt) -> Iterator[dict[str, Any]]:
    """A changed value of one field each. Another key makes a value of `sampling` and `stop` the default."""
    for name in sorted(receipt.payload.keys() - UNPROVED - {f"{part}_sha256" for part in PARTS}):
        value = receipt.payload[name]
        others = (
            [{**value, **one} for one in OTHER_PARAMETERS[name]] if isinstance(value, dict) else other_values(value)
        )
        yield from ({name: other} for other in others if other != value)
    n = len(receipt.answer.token_ids)
    own = {"version": 0, "keeps_kv": False, **{k: receipt.payload[k] for k in ("revision", "weights_digest")}}
    foreign = {**own, "weights_digest": "0" * 32}
    for spans in (
        [{**own, "start": 0, "end": 0}, {**foreign, "start": 0, "end": n}],
        [{**foreign, "start": 0, "end": n}, {**own, "start": n, "end": 0}],
        [{**foreign, "start": 0, "end": n - 1}, {**own, "start": n - 1, "end": n}],
        [{**own, "start": 0, "end": 1}, {**foreign, "start": 1, "end": n}],
        [{**own, "start": 0, "end": n + 1}],
        [{**own, "start": 0, "end": 1e30}],
        [{name: value for name, value in own.items() if name != "keeps_kv"} | {"start": 0, "end": n}],
        [{**own, "start": 0, "end": n, "keeps_kv": True}],
        [], [own], 7, {"start": 0},
    ):  # fmt: skip
        yield {"weight_versions": spans}


def test_no_edited_field_is_confirmed(made: tuple[list[Receipt], Path], verifier: Verifier) -> None:
    """Each field of receipts with many kinds of parameters, changed and signed again."""
    receipts, key = made
    sampled, constrained, stopped = receipts[1], receipts[7], receipts[8]
    changed = [(sampled, edit) for edit in edits(sampled)]
    changed += [
        (constrained, {"finish_reason": "length"}),
        (constrained, {"finish_reason": "stop"}),
        (constrained, {"sampling": {**constrained.payload["sampling"], "regex": "[a-f]{3}"}}),
        (stopped, {"finish_reason": "length"}),
        (stopped, {"finish_reason": "eos"}),
        (stopped, {"stop": {**stopped.payload["stop"], "stop": ["zzzz"]}}),
        (stopped, {"stop": {**stopped.payload["stop"], "stop": []}}),
        (stopped, {"sampling": {**stopped.payload["sampling"], "bad_words": ["of"]}}),
        (stopped, {"bad_words_ids": stopped.payload["bad_words_ids"][:-1]}),
    ]
    for receipt, payload in changed:
        verdict = verifier.verify(resigned(receipt, key, **payload))
        assert verdict.code != CONFIRMED, payload
        assert "the check failed" not in verdict.reason, payload


def test_arrays_that_contradict_their_statements_are_refuted(
    made: tuple[list[Receipt], Path], verifier: Verifier
) -> None:
    receipts, key = made
    sampled = receipts[1]
    prompt, ids, digests = (
        getattr(sampled.answer, name) for name in ("prompt_token_ids", "token_ids", "logits_digests")
    )
    counts = {"num_output_tokens": len(ids) - 4}
    cases: tuple[tuple[ReceiptAnswer, dict[str, Any], int], ...] = (
        (ReceiptAnswer(prompt, ids, digests[:0]), {}, REFUTED),
        (ReceiptAnswer(prompt, ids, digests[:0]), {"first_digest": len(ids)}, UNDECIDED),
        (ReceiptAnswer(prompt, ids, digests + digests[:1]), {}, REFUTED),
        (ReceiptAnswer(prompt, ids[:-4], digests[:-4]), {}, REFUTED),
        (ReceiptAnswer(prompt, ids[:-4], digests[:-4]), {**counts, "finish_reason": "eos"}, REFUTED),
        (ReceiptAnswer(prompt, ids[:-4], digests[:-4]), counts, UNDECIDED),  # a full pool may have ended it
        (ReceiptAnswer(prompt, ids[:-4], digests[:-4]), {**counts, "finish_reason": "aborted"}, UNDECIDED),
        (ReceiptAnswer(prompt[:-1] + type(ids)("I", [1 << 20]), ids, digests), {}, REFUTED),
        (ReceiptAnswer(prompt, ids[:-1] + type(ids)("I", [1 << 20]), digests), {}, REFUTED),
        (sampled.answer, {"max_model_len": 5}, REFUTED),
        (sampled.answer, {"bad_words_ids": [[1 << 20]]}, REFUTED),
        (sampled.answer, {"sampling": {**sampled.payload["sampling"], "n": 10**9}}, REFUTED),
        (sampled.answer, {"sampling": {**sampled.payload["sampling"], "num_forced_tokens": 99}}, REFUTED),
    )
    for answer, payload, code in cases:
        verdict = verifier.verify(resigned(sampled, key, answer, **payload))
        assert verdict.code == code, (payload, verdict)
        assert "the check failed" not in verdict.reason


def as_text(receipt: Receipt, signed: bytes | None = None, answer: ReceiptAnswer | None = None) -> str:
    """A receipt whose parts were replaced without the key."""
    own = json.loads(receipt_text({}, answer or receipt.answer, _AnyKey()))
    kept = json.loads(receipt_text({}, receipt.answer, _AnyKey(receipt.signature, receipt.public_key)))
    return json.dumps(
        {
            **own,
            **{name: kept[name] for name in ("signature", "public_key")},
            "payload": (signed or receipt.signed).decode(),
        }
    )


class _AnyKey:
    def __init__(self, signature: bytes = b"", public_key: bytes = b"") -> None:
        self._signature, self._public_key = signature, public_key

    def sign(self, data: bytes) -> bytes:
        return self._signature

    def public_key(self) -> _AnyKey:
        return self

    def public_bytes_raw(self) -> bytes:
        return self._public_key


def test_one_changed_weight_is_found_even_if_the_digest_is_kept(
    made: tuple[list[Receipt], Path], tmp_path: Path
) -> None:
    receipts, key = made
    folder = shutil.copytree(demo_model_dir(), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "layers.1" in name and "down_proj" in name)
    weights[name][3, 5] += torch.tensor(0.5, dtype=weights[name].dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    changed = Verifier(folder)
    verdict = changed.verify(receipts[0])
    assert (verdict.code, "weights" in verdict.reason) == (REFUTED, True)
    info = changed._loaded[1].info  # type: ignore[index]
    lied = [resigned(one, key, weights_digest=info.weights_digest, revision=info.revision) for one in receipts]
    assert {changed.verify(one).code for one in lied} == {REFUTED}


def test_what_cannot_be_decided_says_so(made: tuple[list[Receipt], Path], verifier: Verifier) -> None:
    receipts, key = made
    for payload, words in (
        ({"numerics": "cpu, aarch64 sve, float32"}, "computes with"),
        ({"adapter": "00" * 16}, "--adapter"),
        ({"determinism": "best_effort"}, "best_effort"),
    ):
        verdict = verifier.verify(resigned(receipts[0], key, **payload))
        assert (verdict.code, words in verdict.reason) == (UNDECIDED, True)


def test_the_commands(made: tuple[list[Receipt], Path], tmp_path: Path) -> None:
    receipts, key = made
    file = tmp_path / "receipts"
    file.write_text("".join(f"{as_text(one)}\n" for one in receipts[:2]))
    quire = [sys.executable, "-P", "-m", "quire_cli"]
    shown = subprocess.run([*quire, "receipt", "show", file, "--json"], capture_output=True, text=True, check=True)
    assert [json.loads(line)["signature"] for line in shown.stdout.splitlines()] == ["valid", "valid"]
    command: list[str | Path] = [*quire, "verify", file, "--model", demo_model_dir(), "--public-key", key]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert [json.loads(line)["verdict"] for line in checked.stdout.splitlines()] == ["confirmed", "confirmed"]
    for first, last in ((50, 10), (3, 3)):
        cut = subprocess.run([*command, "--first", str(first), "--last", str(last)], capture_output=True, check=False)
        assert (cut.returncode, b"slice is empty" in cut.stderr) == (2, True)
    behind = subprocess.run([*command, "--first", "500"], capture_output=True, text=True, check=False)
    assert (behind.returncode, "has 24 output tokens" in behind.stdout) == (2, True)
    lines = [
        as_text(resigned(receipts[0], key, numerics="other")),
        as_text(resigned(receipts[0], key, seed=1, sample=3)),
    ]
    file.write_text("".join(f"{line}\n" for line in lines[::-1]))
    both = subprocess.run(command, capture_output=True, text=True, check=False)
    assert both.returncode == REFUTED, "undecided hides no refuted receipt"
    file.write_text("nothing\n")
    assert subprocess.run([*quire, "verify", file, "--model", demo_model_dir()], check=False).returncode == 2
