"""Thinking budgets with real services: every format and dialect, and kill -9 at the end of the budget."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from quire.v1 import types_pb2 as types
from quire_client import AsyncClient, FinishReason, GenerateResult
from tokenizers import Tokenizer

from gateway_svc.text.reasoning import ROWS, ReasoningFormat
from tests.chat_templates import HERMES
from tests.processes.models import make_checkpoint
from tests.processes.ports import free_port
from tests.processes.stack import Stack, is_ready, wait_idle

MODEL = "thinker"
WORKER = ("--dtype", "float32", "--num-blocks", "256", "--max-num-seqs", "8", "--model-name", MODEL)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if not closed %}START\n{% endif %}{# WORD #}"
HERMES_OPEN = f"{HERMES}<think>\n"
MESSAGES: Any = [{"role": "user", "content": "the quick brown fox"}]
END_TEXT = "Enough of this."
BUDGETS = [0, 1, 200]
NUM_TOKENS = 260


def template_of(format: ReasoningFormat) -> str:
    return TEMPLATE.replace("START", format.start).replace("WORD", format.word)


class Running:
    """Services whose model has the markers of all formats as tokens. Every prompt ends with a start of reasoning."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        model_dir = make_checkpoint(folder / "model")
        path = str(model_dir / "tokenizer.json")
        self.tokenizer = Tokenizer.from_file(path)
        self.tokenizer.add_special_tokens(list(dict.fromkeys(marker for format in ROWS for marker in format.markers)))
        self.tokenizer.save(path)
        self.letters = [self.tokenizer.token_to_id(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
        self.last = self.tokenizer.encode(END_TEXT).ids
        (folder / "hermes.jinja").write_text(HERMES_OPEN)
        flags = ["--chat-template", f"hermes={folder / 'hermes.jinja'}"]
        flags += ["--thinking-end-text", END_TEXT, "--http-listen", (address := f"127.0.0.1:{free_port()}")]
        for name, format in {"default": ROWS[0], **{format.name: format for format in ROWS}}.items():
            (folder / f"{name}.jinja").write_text(template_of(format))
            flags += ["--chat-template", f"{name}={folder / f'{name}.jinja'}"]
        self.stack, self.url = stack, f"http://{address}"
        self.scheduler = stack.start_scheduler()
        self.worker = stack.start_worker(self.scheduler, model_dir, *WORKER, "--speculate", "suffix")
        self.gateway = stack.start_gateway(self.scheduler, flags=tuple(flags))

    def options(self, **more: Any) -> dict[str, Any]:
        """Only letters are sampled, so only a budget ends reasoning."""
        return {"seed": 3, "temperature": 1.0, "allowed_token_ids": self.letters, "ignore_eos": True, **more}

    def closing(self, format: ReasoningFormat, budget: int) -> list[int]:
        return [*(self.last if budget else ()), self.tokenizer.token_to_id(format.end)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("thinking")
    with Stack(folder) as stack:
        yield Running(stack, folder)


@pytest.fixture
async def client(running: Running) -> AsyncIterator[AsyncClient]:
    async with await running.stack.connect(running.gateway) as client:
        yield client
        await wait_idle(running.stack, client)


async def chat(running: Running, client: AsyncClient, name: str = "", **options: Any) -> GenerateResult:
    own = {"chat_template": name, "max_tokens": NUM_TOKENS, **running.options(**options)}
    return await client.chat(MESSAGES, **own)


@pytest.mark.parametrize("format", ROWS, ids=lambda format: format.name)
async def test_reasoning_ends_with_its_budget(running: Running, client: AsyncClient, format: ReasoningFormat) -> None:
    free = (await chat(running, client, format.name)).token_ids
    for budget in BUDGETS:
        closing = running.closing(format, budget)
        end = budget + len(closing)
        for more in ({}, {"speculative": False}):
            found = await chat(running, client, format.name, thinking_token_budget=budget, **more)
            assert list(found.token_ids[:end]) == [*free[:budget], *closing]
            assert found.samples[0].usage.reasoning_tokens == end
            assert len(found.token_ids) == NUM_TOKENS
            assert found.reasoning == "".join(map(running.tokenizer.id_to_token, free[:budget])) + END_TEXT * bool(
                budget
            )
            assert running.tokenizer.decode(found.token_ids[end:]) == found.text


async def test_reasoning_that_the_model_begins_ends_too(running: Running, client: AsyncClient) -> None:
    """The bias lets the model write start markers only; the first one begins reasoning."""
    start, end = (running.tokenizer.token_to_id(marker) for marker in ("<think>", "</think>"))
    options = {"allowed_token_ids": [], "logit_bias": {start: 100.0}, "template_kwargs": {"closed": True}}
    found = await chat(running, client, thinking_token_budget=7, **options)
    assert list(found.token_ids[:8]) == [start] * 8
    assert list(found.token_ids[8 : 9 + len(running.last)]) == [*running.last, end]
    assert set(found.token_ids[9 + len(running.last) :]) == {start}


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag", "call"])
async def test_a_grammar_follows_reasoning_that_is_ended(running: Running, client: AsyncClient, kind: str) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}
    own: dict[str, Any] = {
        "json_schema": {"json_schema": schema},
        "structural_tag": {"structural_tag": json.dumps(tag)},
        "call": {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    }[kind]
    name = "hermes" if kind == "call" else ""
    found = await client.chat(
        MESSAGES, chat_template=name, max_tokens=200, temperature=1.0, seed=2, thinking_token_budget=20, **own
    )
    closing, end = running.closing(ROWS[0], 20), 20 + len(running.last)
    place = found.token_ids.index(closing[-1])
    assert end <= place <= end + 3  # the grammar completes a character before
    assert list(found.token_ids[place - len(running.last) : place + 1]) == closing
    assert found.finish_reason is FinishReason.EOS
    answer = found.tool_calls[0].arguments if kind == "call" else found.text
    assert json.loads(answer.removeprefix("<f>").removesuffix("</f>"))["a"] in ("yes", "no")


@pytest.mark.parametrize("budget", BUDGETS)
async def test_every_dialect_has_the_same_budget(running: Running, client: AsyncClient, budget: int) -> None:
    own, closing = running.options(), running.closing(ROWS[0], budget)
    whole = await chat(running, client, thinking_token_budget=budget)
    end, expected = budget + len(closing), (whole.reasoning, whole.text)
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as http:
        body = {**own, "thinking_token_budget": budget}
        answer = await http.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=NUM_TOKENS, extra_body={**body, "stream_options": None}
        )
        message: Any = answer.choices[0].message
        assert ((message.model_extra.get("reasoning") or ""), message.content) == expected
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == end
        completion = await http.completions.create(
            model=MODEL,
            prompt="the quick brown fox<think>\n",
            max_tokens=end,
            extra_body={**body, "return_token_ids": True},
        )
        assert completion.choices[0].model_extra is not None
        assert completion.choices[0].model_extra["token_ids"] == list(whole.token_ids[:end])
        response = await http.responses.create(
            model=MODEL, input=MESSAGES[0]["content"], max_output_tokens=NUM_TOKENS, extra_body=body
        )
        assert response.output_text == whole.text
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == end
        for effort in ("none",) if budget == 0 else ():
            named: Any = {"effort": effort}
            response = await http.responses.create(
                model=MODEL, input=MESSAGES[0]["content"], max_output_tokens=NUM_TOKENS, reasoning=named, extra_body=own
            )
            assert response.output_text == whole.text
    async with anthropic.AsyncAnthropic(base_url=running.url, api_key="unused", max_retries=0) as http:
        answered = await http.messages.create(
            model=MODEL,
            max_tokens=NUM_TOKENS,
            messages=MESSAGES,
            thinking={"type": "enabled", "budget_tokens": budget},
            extra_body=own,
        )
        blocks = {block.type: block for block in answered.content}
        assert (getattr(blocks.get("thinking"), "thinking", ""), getattr(blocks["text"], "text", "")) == expected
        assert json.loads(answered.to_json())["usage"]["output_tokens_details"]["thinking_tokens"] == end


@pytest.mark.parametrize("victim", ["worker", "gateway"])
async def test_a_kill_at_the_end_of_the_budget_changes_nothing(
    running: Running, client: AsyncClient, victim: str
) -> None:
    options = {"max_tokens": 600, **running.options(thinking_token_budget=200)}
    undisturbed, service, is_killed = await client.chat(MESSAGES, **options), getattr(running, victim), False
    async with client.stream_chat(MESSAGES, **options) as stream:
        async for delta in stream:
            if delta.offset + len(delta.token_ids) >= 196 and not is_killed:
                is_killed = True
                service.kill()
                service.start()
        disturbed = await stream.result()
    await running.stack.until(client, lambda schedulers: is_ready(schedulers, running.worker))
    assert is_killed
    assert disturbed.token_ids == undisturbed.token_ids
    assert (disturbed.reasoning, disturbed.text) == (undisturbed.reasoning, undisturbed.text)


async def test_a_continuation_from_any_token_at_the_border_is_equal(running: Running, client: AsyncClient) -> None:
    whole = (await chat(running, client, thinking_token_budget=20)).token_ids
    stop = types.StopParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    sampling = types.SamplingParams(
        seed=3, temperature=1.0, allowed_token_ids=running.letters, thinking_token_budget=20
    )
    for num_known in range(18, 24 + len(running.last)):
        request = request_of(sampling, stop)
        request.continuation.samples.add(index=0, output_token_ids=whole[:num_known])
        found = [id_ async for event in client.raw.Generate(request) for id_ in event.chunk.token_ids]
        assert found == list(whole[num_known:])


def request_of(sampling: types.SamplingParams, stop: types.StopParams) -> Any:
    from quire.v1 import inference_pb2 as pb

    message = pb.ChatMessage(role="user", content=MESSAGES[0]["content"])
    return pb.GenerateRequest(prompt=pb.Prompt(chat=pb.Chat(messages=[message])), sampling=sampling, stop=stop)
