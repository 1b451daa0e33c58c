"""Every field of the public protocol has an effect through real processes: the answer with the field differs from the
answer without it. A field that the gateway, the scheduler or the worker ignores fails here.

The fields are those of tests/field_coverage.py that name this file.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import ParseDict
from quire.v1 import inference_pb2 as pb
from quire_client import AsyncClient, PromptEmbeddings

from tests.processes.field_stack import MAX_NUM_SEQS, MODEL, FieldStack
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Stack, wait_idle

Json = dict[str, Any]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FieldStack]:
    folder = tmp_path_factory.mktemp("fields")
    with RedisServer(folder) as redis, Stack(folder) as stack:
        yield FieldStack(stack, redis, folder)


@pytest.fixture
async def client(running: FieldStack) -> AsyncIterator[AsyncClient]:
    async with await running.stack.connect(running.gateway) as client:
        yield client
        await wait_idle(running.stack, client)


@pytest.fixture(scope="module")
def answers() -> dict[str, Json]:
    """The answer to each body without its field, which is the same twice. Many fields have one body."""
    return {}


def merged(body: Json, more: Json) -> Json:
    """`body` with the fields of `more`, message by message. A prompt replaces the prompt."""
    both = dict(body)
    for name, value in more.items():
        is_message = name != "prompt" and isinstance(value, dict) and isinstance(both.get(name), dict)
        both[name] = merged(both[name], value) if is_message else value
    return both


@dataclass(frozen=True)
class Effect:
    """Fields of two requests: `added` are only in the second one. Equal requests have equal answers."""

    added: Json
    both: Json
    code: str = ""  # the effect is this error


def effect(added: Json, code: str = "", **both: Any) -> Effect:
    return Effect(added, both, code)


def chat(*messages: Json, **fields: Any) -> Json:
    return {"chat": {"messages": [*messages], **fields}}


def sampled(**fields: Any) -> Json:
    return {"temperature": 1, "seed": "1", **fields}


def text(words: str) -> Json:
    return {"text": words}


def continued(**fields: Any) -> Json:
    return {"samples": [{"outputTokenIds": [5, 6], **fields}]}


BASE: Json = {"prompt": text("What does"), "sampling": {"temperature": 0}, "stop": {"maxTokens": 20, "ignoreEos": True}}
ASK: Json = {"role": "user", "content": "What does len do?"}
SAY: Json = {"role": "assistant", "content": "It"}
CALL: Json = {"id": "c1", "name": "look", "arguments": "{}"}
SCHEMA = json.dumps({"enum": ["yes"]})
EMBEDDINGS = base64.b64encode(PromptEmbeddings.of(np.eye(3, 128, dtype=np.float32)).data).decode()
TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "additionalProperties": False}},
        }
        for name in ("look", "wait")
    ]
)
PARSED: Json = {"parseChat": True}
CALLING: Json = {"sampling": sampled(), "stop": {"maxTokens": 120, "ignoreEos": False}, "output": PARSED}
EXACT: Json = {"scheduling": {"determinism": "DETERMINISM_EXACT"}}
THINKING: Json = {"thinkingTokenBudget": 4, "thinkingEndIds": [6], "allowedTokenIds": [5]}
BEAMS: Json = {"temperature": None, "beamWidth": 3, "n": 3}


def spoken(**fields: Any) -> Json:
    """A chat whose second message is one of the assistant with these fields."""
    return chat(ASK, {**SAY, **fields}, ASK)


def called(**fields: Any) -> Json:
    return spoken(toolCalls=[{**CALL, **fields}])


def required(**fields: Any) -> Json:
    return chat(ASK, toolsJson=TOOLS, **{"toolChoice": "TOOL_CHOICE_REQUIRED", **fields})


GENERATE: Mapping[str, Effect] = {
    "GenerateRequest.model": effect({"model": "other"}, "NOT_FOUND"),
    "GenerateRequest.prompt": effect({"prompt": text("import")}),
    "Prompt.text": effect({"prompt": text("import")}),
    "Prompt.tokens": effect({"prompt": {"tokens": {"ids": [9]}}}, prompt=text("a")),
    "TokenIds.ids": effect({"prompt": {"tokens": {"ids": [9]}}}, prompt={"tokens": {"ids": [8, 9]}}),
    "Prompt.embeddings": effect({"prompt": {"embeddings": EMBEDDINGS}}, prompt=text("a")),
    "Prompt.chat": effect({"prompt": chat(SAY)}, prompt=chat(ASK)),
    "Chat.messages": effect({"prompt": chat(ASK, SAY, ASK)}, prompt=chat(ASK)),
    "Chat.template_kwargs_json": effect({"prompt": chat(ASK, templateKwargsJson='{"extra": "abc"}')}, prompt=chat(ASK)),
    "Chat.tools_json": effect({"prompt": chat(ASK, toolsJson=TOOLS)}, prompt=chat(ASK)),
    "Chat.continue_final_message": effect({"prompt": chat(ASK, SAY, continueFinalMessage=True)}, prompt=chat(ASK, SAY)),
    "Chat.tool_choice": effect({"prompt": required()}, prompt=chat(ASK, toolsJson=TOOLS), **CALLING),
    "Chat.tool_name": effect({"prompt": required(toolName="wait")}, prompt=required(toolName="look"), **CALLING),
    "Chat.parallel_tool_calls": effect({"prompt": required(parallelToolCalls=False)}, prompt=required(), **CALLING),
    "Chat.chat_template": effect({"prompt": chat(ASK, chatTemplate="bare")}, prompt=chat(ASK)),
    "Chat.add_generation_prompt": effect({"prompt": chat(ASK, addGenerationPrompt=False)}, prompt=chat(ASK)),
    "ChatMessage.role": effect({"prompt": chat({**ASK, "role": "tool"})}, prompt=chat(ASK)),
    "ChatMessage.content": effect({"prompt": chat({**ASK, "content": "What does max do?"})}, prompt=chat(ASK)),
    "ChatMessage.tool_calls": effect({"prompt": called()}, prompt=spoken()),
    "ChatMessage.tool_call_id": effect(
        {"prompt": chat(ASK, {"role": "tool", "content": "1", "toolCallId": "abcdefg"})},
        prompt=chat(ASK, {"role": "tool", "content": "1"}),
    ),
    "ChatMessage.name": effect({"prompt": chat({**ASK, "name": "abcdefg"})}, prompt=chat(ASK)),
    "ChatMessage.reasoning": effect({"prompt": spoken(reasoning="first this, then that")}, prompt=spoken()),
    "ChatMessage.parts": effect(
        {"prompt": chat({"role": "user", "parts": [text("a b c d")]})}, prompt=chat({"role": "user"})
    ),
    "ContentPart.text": effect(
        {"prompt": chat({"role": "user", "parts": [text("a b c d")]})},
        prompt=chat({"role": "user", "parts": [text("")]}),
    ),
    "ToolCall.id": effect({"prompt": called(id="abcdefg")}, prompt=called()),
    "ToolCall.name": effect({"prompt": called(name="wait_a_long_time")}, prompt=called()),
    "ToolCall.arguments": effect({"prompt": called(arguments='{"a": "some words"}')}, prompt=called()),
    "GenerateRequest.sampling": effect({"sampling": sampled()}),
    "SamplingParams.temperature": effect({"sampling": {"temperature": 1.5}}, sampling=sampled()),
    "SamplingParams.top_p": effect({"sampling": {"topP": 0.01}}, sampling=sampled()),
    "SamplingParams.top_k": effect({"sampling": {"topK": 1}}, sampling=sampled()),
    "SamplingParams.min_p": effect({"sampling": {"minP": 1}}, sampling=sampled()),
    "SamplingParams.top_a": effect({"sampling": {"topA": 1}}, sampling=sampled()),
    "SamplingParams.seed": effect({"sampling": {"seed": "2"}}, sampling=sampled()),
    "SamplingParams.n": effect({"sampling": {"n": 2}}, sampling=sampled()),
    "SamplingParams.repetition_penalty": effect({"sampling": {"repetitionPenalty": 3}}),
    "SamplingParams.frequency_penalty": effect({"sampling": {"frequencyPenalty": 2}}, stop={"maxTokens": 60}),
    "SamplingParams.presence_penalty": effect({"sampling": {"presencePenalty": 2}}, stop={"maxTokens": 60}),
    "SamplingParams.logit_bias": effect({"sampling": {"logitBias": {"5": 100}}}),
    "SamplingParams.allowed_token_ids": effect({"sampling": {"allowedTokenIds": [5]}}),
    "SamplingParams.banned_token_ids": effect(
        {"sampling": {"bannedTokenIds": [5]}}, sampling={"allowedTokenIds": [5, 6], "logitBias": {"5": 100}}
    ),
    "SamplingParams.bad_words": effect({"sampling": {"badWords": ["no", "account", "a", "process"]}}),
    "SamplingParams.thinking_token_budget": effect({"sampling": {"thinkingTokenBudget": 2}}, sampling=THINKING),
    "SamplingParams.thinking_start_ids": effect({"sampling": {"thinkingStartIds": [5]}}, sampling=THINKING),
    "SamplingParams.thinking_end_ids": effect({"sampling": {"thinkingEndIds": [7]}}, sampling=THINKING),
    "SamplingParams.thinking_last_ids": effect({"sampling": {"thinkingLastIds": [7]}}, sampling=THINKING),
    "SamplingParams.thinking_repeats": effect(
        {"sampling": {"thinkingRepeats": True}}, sampling={**THINKING, "thinkingStartIds": [5]}
    ),
    "SamplingParams.best_of": effect({"sampling": {"bestOf": 4}}, sampling=sampled()),
    "SamplingParams.beam_width": effect({"sampling": BEAMS}, sampling={"n": 3}),
    "SamplingParams.length_penalty": effect({"sampling": {"lengthPenalty": -5}}, sampling=BEAMS),
    "SamplingParams.early_stopping": effect(
        {"sampling": {"earlyStopping": "EARLY_STOPPING_TRUE"}},
        sampling={**BEAMS, "lengthPenalty": 5, "earlyStopping": "EARLY_STOPPING_NEVER"},
        stop={"ignoreEos": False, "maxTokens": 200},
        prompt=chat(ASK),
    ),
    "SamplingParams.json_schema": effect({"sampling": {"jsonSchema": SCHEMA}}),
    "SamplingParams.regex": effect({"sampling": {"regex": "[0-9]{3}"}}),
    "SamplingParams.grammar": effect({"sampling": {"grammar": 'start: "yes"'}}),
    "SamplingParams.choice": effect({"sampling": {"choice": ["yes"]}}),
    "SamplingParams.structural_tag": effect(
        {"sampling": {"structuralTag": '{"format": {"type": "const_string", "value": "yes"}}'}}
    ),
    "SamplingParams.json_object": effect({"sampling": {"jsonObject": True}}),
    "SamplingParams.logprobs_mode": effect(
        {"sampling": {"logprobsMode": "LOGPROBS_MODE_PROCESSED"}}, sampling=sampled(topK=3), output={"logprobs": 5}
    ),
    "SamplingParams.num_forced_tokens": effect(
        {"sampling": {"numForcedTokens": 1}}, sampling=sampled(), output={"promptLogprobs": 0}
    ),
    "SamplingParams.logits_digests": effect({"sampling": {"logitsDigests": True}}, output={"logprobs": 0}),
    "GenerateRequest.stop": effect({"stop": {"maxTokens": 3}}),
    "StopParams.max_tokens": effect({"stop": {"maxTokens": 3}}),
    "StopParams.min_tokens": effect(
        {"stop": {"minTokens": 9}}, sampling={"allowedTokenIds": [5, 6, 7]}, stop={"stopTokenIds": [5, 6]}
    ),
    "StopParams.stop": effect({"stop": {"stop": ["e"]}}),
    "StopParams.stop_token_ids": effect({"stop": {"stopTokenIds": [5]}}, sampling={"allowedTokenIds": [5]}),
    "StopParams.repetition_detection": effect(
        {"stop": {"repetitionDetection": {"max_pattern_size": 2, "min_count": 3}}}, sampling={"allowedTokenIds": [5]}
    ),
    "StopParams.ignore_eos": effect({"stop": {"ignoreEos": True}}, stop={"ignoreEos": False, "maxTokens": 80}),
    "StopParams.include_stop_in_output": effect({"stop": {"includeStopInOutput": True}}, stop={"stop": ["e"]}),
    "GenerateRequest.output": effect({"output": {"text": False}}),
    "OutputParams.text": effect({"output": {"text": False}}),
    "OutputParams.token_ids": effect({"output": {"tokenIds": False}}),
    "OutputParams.skip_special_tokens": effect(
        {"output": {"skipSpecialTokens": False}}, sampling={"allowedTokenIds": [0]}
    ),
    "OutputParams.logprobs": effect({"output": {"logprobs": 2}}),
    "OutputParams.prompt_logprobs": effect({"output": {"promptLogprobs": 0}}),
    "OutputParams.parse_chat": effect({"output": PARSED}, prompt=chat(ASK)),
    "GenerateRequest.scheduling": effect(EXACT, "INVALID_ARGUMENT"),
    "SchedulingParams.determinism": effect(EXACT, "INVALID_ARGUMENT"),
    "GenerateRequest.continuation": effect({"continuation": continued()}),
    "Continuation.samples": effect({"continuation": continued()}),
    "SampleState.index": effect({"continuation": continued(index=1)}, sampling={"n": 2}, continuation=continued()),
    "SampleState.output_token_ids": effect({"continuation": continued(outputTokenIds=[7])}, continuation=continued()),
    "SampleState.finished": effect({"continuation": continued(finished=True)}, continuation=continued()),
    "SampleState.cumulative_logprob": effect(
        {"continuation": continued(cumulativeLogprob=-9)}, continuation=continued(), output={"logprobs": 0}
    ),
    "Continuation.revision": effect({"continuation": {"revision": "other"}}, "UNAVAILABLE", continuation=continued()),
    "Continuation.num_prompt_logprobs": effect(
        {"continuation": {"numPromptLogprobs": 2}}, output={"promptLogprobs": 0}, continuation={}
    ),
    "GenerateRequest.truncate_prompt_tokens": effect({"truncatePromptTokens": 1}),
    "GenerateRequest.adapter": effect({"adapter": "a"}, "NOT_FOUND"),
}
# Requests of the other RPCs.
CALLS: Mapping[str, tuple[str, Effect]] = {
    "TokenizeRequest.model": ("Tokenize", effect({"model": "other"}, "NOT_FOUND", prompt=text("a"))),
    "TokenizeRequest.prompt": ("Tokenize", effect({"prompt": text("b")}, prompt=text("a"))),
    "TokenizeRequest.add_special_tokens": ("Tokenize", effect({"addSpecialTokens": False}, prompt=text("a"))),
    "TokenizeRequest.token_strings": ("Tokenize", effect({"tokenStrings": True}, prompt=text("a"))),
    "DetokenizeRequest.model": ("Detokenize", effect({"model": "other"}, "NOT_FOUND", ids=[5])),
    "DetokenizeRequest.ids": ("Detokenize", effect({"ids": [6]}, ids=[5])),
    "DetokenizeRequest.skip_special_tokens": ("Detokenize", effect({"skipSpecialTokens": True}, ids=[0, 5])),
    "CountTokensRequest.request": (
        "CountTokens",
        effect({"request": {"prompt": text("import os, sys")}}, request={"prompt": text("a")}),
    ),
    "GetModelRequest.model": ("GetModel", effect({"model": "other"}, "NOT_FOUND")),
}


async def answer_of(client: AsyncClient, body: Json) -> Json:
    """The answer to a request without its cut into events, request id, drawn seed and cache hits; or its error."""
    answer: Json = {"samples": {}, "prompt": []}
    try:
        async for event in client.raw.Generate(ParseDict(body, pb.GenerateRequest()), timeout=60):
            _add(answer, event)
    except grpc.aio.AioRpcError as error:
        return {"code": error.code().name, "words": error.details()}
    return answer


def _add(answer: Json, event: pb.GenerateResponse) -> None:
    if event.HasField("accepted"):
        answer["accepted"] = (event.accepted.model, event.accepted.prompt_tokens, event.accepted.n)
    elif event.HasField("prompt_logprobs"):
        answer["prompt"] += event.prompt_logprobs.token_ids
    elif event.HasField("chunk"):
        chunk = event.chunk
        sample = answer["samples"].setdefault(
            chunk.index, {"at": chunk.offset, "text": "", "ids": [], "logprobs": [], "digests": [], "parts": {}}
        )
        sample["text"] += chunk.text
        sample["ids"] += chunk.token_ids
        sample["logprobs"] += chunk.logprobs.top_logprobs
        sample["digests"] += chunk.logprobs.logits_digests
        for part in chunk.parts:
            words = part.content + part.reasoning + part.tool_call.arguments
            key = (part.item, part.WhichOneof("kind"), part.tool_call.name)
            sample["parts"][key] = sample["parts"].get(key, "") + words
    else:
        done = event.finished
        answer[f"end of {done.index}"] = (
            done.reason,
            done.stop,
            done.output_digest,
            done.score,
            done.cumulative_logprob,
        )


@pytest.mark.parametrize("name", GENERATE)
async def test_a_field_has_an_effect(client: AsyncClient, answers: dict[str, Json], name: str) -> None:
    case = GENERATE[name]
    without = merged(BASE, case.both)
    body = json.dumps(without)
    if body not in answers:
        answers[body] = await answer_of(client, without)
        assert "code" not in answers[body], answers[body]
        assert await answer_of(client, without) == answers[body]
    answer = answers[body]
    changed = await answer_of(client, merged(without, case.added))
    assert changed.get("code", "") == case.code, changed
    assert changed != answer


@pytest.mark.parametrize("name", CALLS)
async def test_a_field_of_a_call_has_an_effect(client: AsyncClient, name: str) -> None:
    rpc, case = CALLS[name]
    call = getattr(client.raw, rpc)
    without, changed = _message(rpc, case.both), _message(rpc, merged(case.both, case.added))
    answer = await call(without, timeout=60)
    if not case.code:
        assert await call(changed, timeout=60) != answer
        return
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(changed, timeout=60)
    assert caught.value.code().name == case.code


def _message(rpc: str, body: Json) -> Any:
    return ParseDict(body, getattr(pb, f"{rpc}Request")())


async def test_a_request_id_and_a_seed_are_in_the_answer(client: AsyncClient) -> None:
    result = await client.generate("a", max_tokens=1, request_id="own", model=MODEL, seed=11)
    assert (result.request_id, result.seed) == ("own", 11)


async def test_a_resumable_request_has_a_record(client: AsyncClient) -> None:
    kept = await client.generate("a", max_tokens=2, request_id="kept", resumable=True)
    await client.generate("a", max_tokens=2, request_id="lost")
    async with client.resume("kept") as stream:
        assert (await stream.result()).token_ids == kept.token_ids
    with pytest.raises(Exception, match="lost"):
        async with client.resume("lost") as stream:
            await stream.result()


async def test_joined_events_are_fewer_messages(client: AsyncClient) -> None:
    request = pb.GenerateRequest(prompt=pb.Prompt(text="a"))
    request.sampling.temperature, request.stop.max_tokens = 0.0, 3
    separate = [message async for message in client.raw.Generate(request, timeout=60)]
    request.joins_events = True
    joined = [message async for message in client.raw.Generate(request, timeout=60)]
    events = [event for message in joined for event in (message, *message.following)]
    assert len(events) > len(joined)
    assert events[-1].finished.output_digest == separate[-1].finished.output_digest
    assert not any(message.following for message in separate)


async def test_requests_with_different_salts_share_no_blocks(client: AsyncClient) -> None:
    cached = []
    for salt in ("a", "a", "b"):
        result = await client.generate("The same words again. " * 30, max_tokens=1, cache_salt=salt)
        cached.append(result.usage.cached_tokens > 0)
    assert cached == [False, True, False]


async def ends_of(client: AsyncClient, running: FieldStack, *waiting: Json) -> list[int]:
    """The order in which waiting requests end. They wait for all rows of the worker, then run one after the other.

    The order is that of the gateway's log: a client that is slow for a moment sees several ends at once.
    """
    full = {"n": MAX_NUM_SEQS, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    ids = [f"{uuid.uuid4()}" for _ in waiting]
    async with client.stream("b", max_tokens=3000, priority=-1000, tenant_id="x", **full) as first:
        await anext(aiter(first))
        tasks = []
        for count, (request_id, options) in enumerate(zip(ids, waiting, strict=True), start=1):
            call = client.generate("a", max_tokens=30, request_id=request_id, **full, **options)
            tasks.append(asyncio.create_task(call))
            await running.stack.until(client, lambda all_, count=count: all_[0].num_waiting >= count)
    await asyncio.gather(*tasks)
    logged: list[str] = []
    async with asyncio.timeout(30):
        while len(logged) < len(ids):
            await asyncio.sleep(0.01)
            logged = [found for found in re.findall(r"request (\S+) ended", running.gateway.log()) if found in ids]
    return [ids.index(request_id) for request_id in logged]


async def test_priority_and_tenant_order_the_queue(client: AsyncClient, running: FieldStack) -> None:
    """The newest of six requests ends among the last ones, unless it is more urgent or of another tenant."""
    others = [{"tenant_id": "x"}] * 5
    for last, is_early in ({}, False), ({"priority": -5}, True), ({"tenant_id": "y"}, True):
        ends = await ends_of(client, running, *others, {"tenant_id": "x"} | last)
        assert (ends.index(5) <= 2) == is_early, last


async def test_a_worker_is_drained_by_id_and_model_within_its_time(client: AsyncClient, running: FieldStack) -> None:
    """Without `timeout_s`, the worker would run until its only stream has ended."""
    for worker_id, model in (("other", MODEL), (running.worker.name, "other")):
        with pytest.raises(Exception, match="other"):
            await client.drain_worker(worker_id, model=model)
    async with client.stream("a", max_tokens=3000, ignore_eos=True) as stream:
        await anext(aiter(stream))
        await client.drain_worker(running.worker.name, model=MODEL, timeout_s=0.1)
        assert await asyncio.to_thread(running.worker.wait) == 0
    running.worker.start()
