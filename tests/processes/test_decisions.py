"""Decisions with real services: as OpenAI's client asks them, equal to scores, whatever is beside them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from quire.v1 import inference_pb2 as pb
from quire_client import Answer, AsyncClient, Image, InvalidRequest, Overloaded, Question, QuireError, RetryPolicy
from quire_client.demo import demo_model_dir

from request_fields.receipts import parse_receipt
from tests.processes.stack import Stack
from tests.processes.test_http import start_gateway
from tests.processes.test_receipts import openssl_key
from worker_svc.receipts.verify import CONFIRMED, Verifier

STATE = "json.dumps writes an object as JSON. " * 12
QUESTIONS: list[str | Question] = [
    "It is about JSON.",
    Question("Which module?", choices=("json", "os", "math")),
    Question("How long is it?", levels={"short": "one word", "medium": "one line", "long": "many lines"}),
    *(f"It has {i} words." for i in range(397)),
]
FLAGS = ("--kv-cache-memory", "64M", "--model-name", "demo", "--max-num-seqs", "32")
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "processed", "seed": 0}


class Running:
    def __init__(self, stack: Stack) -> None:
        self.stack, folder = stack, stack.folder
        self.scheduler = stack.start_scheduler()
        self.workers = [stack.start_worker(self.scheduler, demo_model_dir(), *FLAGS) for _ in range(2)]
        (folder / "keys").mkdir()
        for owner in ("limited", "poor"):
            (folder / "keys" / owner).write_text(f"key-of-{owner}")
        limits = "[owners.limited]\nrequests_per_s = 2\nmax_streams = 5\n[owners.poor]\ntokens_per_min = 1000\n"
        (folder / "limits.toml").write_text(limits)
        flags = ("--api-keys", str(folder / "keys"), "--key-limits", str(folder / "limits.toml"))
        self.limiting = stack.start_gateway(self.scheduler, flags=flags)
        key = openssl_key(folder / "key.pem")
        self.gateway, self.url = start_gateway(stack, self.scheduler, "--receipt-key-file", str(key))
        for service in (*self.workers, self.limiting, self.gateway):
            service.wait_ready()

    async def connect(self) -> AsyncClient:
        return await self.stack.connect(self.gateway)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Stack(tmp_path_factory.mktemp("decisions")) as stack:
        yield Running(stack)


def bits(answers: tuple[Answer, ...]) -> list[tuple[float, ...]]:
    return [answer.logprobs for answer in answers]


async def test_the_order_of_questions_and_a_killed_worker_change_nothing(running: Running) -> None:
    async with await running.connect() as client:
        found = await client.decide(STATE, QUESTIONS, timeout_s=120)
        salted = client.decide(STATE, QUESTIONS[99::-1], cache_salt="other", timeout_s=120)
        _, again = await asyncio.gather(kill_a_busy_worker(running), salted)
        alone = await client.decide(STATE, QUESTIONS[1:2], cache_salt="alone")
    assert bits(found.answers[:100]) == bits(again.answers[::-1])
    assert bits(alone.answers) == bits(found.answers[1:2])
    assert [len(answer.logprobs) for answer in found.answers[:4]] == [2, 3, 3, 2]
    assert all(math.fsum(answer.probabilities) == pytest.approx(1.0, abs=1e-5) for answer in found.answers)
    cached = sum(answer.usage.cached_tokens for answer in found.answers)
    assert cached > 0.6 * sum(answer.usage.prompt_tokens for answer in found.answers)
    assert found.answers[2].score == pytest.approx(sum(i * p for i, p in enumerate(found.answers[2].probabilities)))


async def kill_a_busy_worker(running: Running) -> None:
    async with await running.connect() as client:
        async with asyncio.timeout(60):
            while not (await client.status()).open_streams:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    running.workers[0].kill()


async def test_answers_equal_scores_and_have_receipts(running: Running, tmp_path: Path) -> None:
    """Scores: each label as the forced output of the prompt in the receipt, computed without the prefix cache."""
    async with await running.connect() as client:
        found = await client.decide(STATE, QUESTIONS[:3], receipt=True)
        for answer in found.answers:
            receipt = parse_receipt(answer.receipt)
            prompt = receipt.answer.prompt_token_ids.tolist()
            options = {**NEUTRAL, "allowed_token_ids": list(answer.token_ids), "num_forced_tokens": 1}
            scored = [
                await client.generate([*prompt, label], max_tokens=0, prompt_logprobs=0, **options)
                for label in answer.token_ids
            ]
            assert tuple(one.prompt_logprobs[-1].logprob for one in scored) == answer.logprobs
            verdict = Verifier(Path(demo_model_dir())).verify(receipt)
            assert verdict.code == CONFIRMED, verdict


async def test_openai_client_gets_decisions(running: Running) -> None:
    questions: list[Any] = [
        {"type": "predicate", "name": "about", "instructions": "It is about JSON."},
        {
            "type": "choice",
            "instructions": [{"type": "input_text", "text": "Is it?"}, {"type": "input_json", "data": {"a": 1}}],
            "choices": [{"value": True}, {"value": "true", "description": "as text"}, {"value": False}],
        },
        {"type": "score", "instructions": "How long?", "levels": [{"label": "short"}, {"label": "long"}]},
        *({"type": "predicate", "instructions": f"It has {i} words."} for i in range(397)),
    ]
    items: list[Any] = [
        {"role": "developer", "content": "Read the call."},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
        {"role": "user", "content": [{"type": "input_json", "data": [{"b": None}]}]},
    ]
    given: dict[str, Any] = {"model": "demo", "input": items}
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as client:
        found = await client.decisions.create(**given, questions=questions)
        extra = {"receipt": True, "cache_salt": "x", "priority": 1}
        options: dict[str, Any] = {"prompt_cache_key": "k", "prompt_cache_options": {}, "safety_identifier": "s"}
        again = await client.decisions.create(**given, questions=questions[:3], extra_body=extra, **options)
        wrong: Any = [questions[0], {**questions[1], "choices": [{"value": True}]}]
        with pytest.raises(openai.BadRequestError, match=r"questions\[1\].choices has 1 items"):
            await client.decisions.create(model="demo", input="a", questions=wrong)
    about, choice, score = found.answers[:3]
    assert (about.type, choice.type, score.type, about.name) == ("predicate", "choice", "score", "about")
    assert 0 < about.probability < 1
    assert [one.value for one in choice.probabilities] == [True, "true", False]
    best = max(choice.probabilities, key=lambda one: one.probability)
    assert (choice.choice, choice.confidence) == (best.value, best.probability)
    assert [(one.label, one.value) for one in score.probabilities] == [
        ("short", 0),
        ("long", 1),
    ]
    assert score.score == pytest.approx(score.probabilities[1].probability)
    assert found.usage.output_tokens == len(found.answers) == 400
    assert found.usage.input_tokens_details.cached_tokens > 0
    kept = [one.model_dump(exclude={"receipt"}) for one in again.answers]
    assert kept == [one.model_dump() for one in found.answers[:3]]
    assert all(parse_receipt(one.model_dump()["receipt"]) for one in again.answers)


async def test_a_decision_counts_as_one_request_of_its_owner(running: Running) -> None:
    async with await AsyncClient.connect(running.limiting.address, api_key="key-of-limited") as client:
        await client.decide(STATE, QUESTIONS[:30])
    retry = RetryPolicy(max_attempts=1)
    async with await AsyncClient.connect(running.limiting.address, api_key="key-of-poor", retry=retry) as client:
        with pytest.raises(Overloaded, match="tokens per minute"):
            await client.decide(STATE, QUESTIONS[:30])


@pytest.mark.parametrize(
    ("field", "error", "questions", "options"),
    [
        ("questions", InvalidRequest, [], {}),
        ("questions", InvalidRequest, ["a"] * 401, {}),
        ("questions[0].instructions", InvalidRequest, [""], {}),
        ("questions[1].choices", InvalidRequest, ["a", Question("b", choices=["c"])], {}),
        ("questions[0].levels", InvalidRequest, [Question("b", levels=[str(i) for i in range(129)])], {}),
        ("questions[0].levels", InvalidRequest, [Question("b", choices="cd", levels="ef")], {}),
        ("request_id", InvalidRequest, ["a", "b"], {"request_id": "r" * 63}),
        ("request.prompt", InvalidRequest, ["a"] * 400, {"messages": "b" * 100_000}),
        ("messages", InvalidRequest, ["a"], {"messages": []}),
        ("request.sampling", InvalidRequest, ["a"], {"temperature": 0.5}),
        ("request.tools_json", InvalidRequest, ["a"], {"tools": [{}]}),
        ("adapter", QuireError, ["a"], {"adapter": "none such"}),
        ("none such", QuireError, ["a"], {"model": "none such"}),
        ("template_kwargs", InvalidRequest, ["a"], {"template_kwargs": [1]}),
    ],
)
async def test_wrong_questions_are_refused_by_name(
    running: Running, field: str, error: type[Exception], questions: list[Any], options: dict[str, Any]
) -> None:
    async with await running.connect() as client:
        with pytest.raises(error) as caught:
            await client.decide(options.pop("messages", "state"), questions, **options)
    assert field in str(caught.value)


async def test_equal_choices_are_refused_and_many_labels_are_found(running: Running) -> None:
    async with await running.connect() as client:
        many = await client.decide("a", [Question("b", choices=[str(i) for i in range(70)])])
        assert len(set(many.answers[0].token_ids)) == 70
        request = pb.DecideRequest(request={"prompt": {"chat": {"messages": [{"role": "user", "content": "a"}]}}})
        request.questions.add(instructions=[{"text": "b"}], choices=[{"label": "c"}, {"label": "c"}])
        with pytest.raises(Exception, match="has a choice twice"):
            await client.raw.Decide(request)
        with pytest.raises(InvalidRequest, match="image"):
            await client.decide("a", [Question(["b", Image(b"no image")])])
