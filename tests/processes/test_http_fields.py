"""Every field of every HTTP body has an effect through real processes: the answer with the field differs from the
answer without it. A field that the gateway, the scheduler or the worker ignores fails here.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from quire_client import PromptEmbeddings

from gateway_svc.http.fields import ENDPOINTS
from tests.field_coverage import OWN_ENDPOINTS
from tests.processes.field_stack import MODEL, FieldStack
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Stack

Json = dict[str, Any]

CHAT, COMPLETIONS, RESPONSES, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
# Equal requests have equal answers: greedy, or sampled with a seed.
BASES: Mapping[str, Json] = {
    CHAT: {"messages": QUESTION, "temperature": 0, "max_tokens": 40},
    COMPLETIONS: {"prompt": "What does", "temperature": 0, "max_tokens": 40},
    RESPONSES: {"input": "What does os.path.join do?", "temperature": 0, "max_output_tokens": 40},
    MESSAGES: {"messages": QUESTION, "temperature": 0, "max_tokens": 40},
    COUNT_TOKENS: {"messages": QUESTION},
    TOKENIZE: {"messages": QUESTION},
    "/detokenize": {"tokens": [5]},
}
SAMPLED: Json = {"temperature": 1, "seed": 1, "ignore_eos": True}
LONG: Json = {"ignore_eos": True}
LONGER: Json = {"ignore_eos": True, "max_tokens": 500}
SPECIAL: Json = {"allowed_token_ids": [0], "ignore_eos": True}
TWO_IDS: Json = {"allowed_token_ids": [5, 6], "logit_bias": {"5": 100}, "ignore_eos": True}
# Beams that end at different lengths: the longest one is the best.
BEAMS: Json = {"beam_width": 3, "temperature": None, "early_stopping": "never", "length_penalty": 10, "max_tokens": 100}
CHAT_TEXT = "<|im_start|>user\nWhat does os.path.join do?<|im_end|>\n<|im_start|>assistant\n"
ENDED_BEAMS: Json = {"beam_width": 3, "temperature": None, "length_penalty": 5, "early_stopping": "never"}
SCHEMA: Json = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
NO_ARGUMENTS: Json = {"type": "object", "additionalProperties": False}
TOOLS: list[Json] = [
    {"type": "function", "function": {"name": name, "parameters": NO_ARGUMENTS}} for name in ("look", "wait")
]
CALLING: Json = {"tools": TOOLS, "tool_choice": "required", "temperature": 1, "seed": 7, "max_tokens": 120}
FUNCTIONS: list[Json] = [{"type": "function", "name": name, "parameters": NO_ARGUMENTS} for name in ("look", "wait")]
RESPONSE_CALLING: Json = {"tools": FUNCTIONS, "tool_choice": "required", "temperature": 1, "seed": 7}
RESPONSE_CALLING |= {"max_tokens": 120}
OWN_TOOLS: list[Json] = [{"name": name, "input_schema": NO_ARGUMENTS} for name in ("look", "wait")]
MESSAGE_CALLING: Json = {**CALLING, "tools": OWN_TOOLS, "tool_choice": {"type": "any"}}
EMBEDDINGS = base64.b64encode(PromptEmbeddings.of(np.eye(3, 128, dtype=np.float32)).data).decode()


@dataclass(frozen=True)
class Effect:
    """A value of a field, or a function that makes it from the answer without the field; further fields of both bodies.

    `status`: the field's only effect with the demo model is an error with this status.
    """

    value: Any
    others: Json = field(default_factory=dict)
    status: int = 200


def text_of(answer: Json) -> str:
    if answer.get("type") == "message":
        return str(answer["content"][0]["text"])
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def words_of(answer: Json) -> str:
    """Characters in the middle of the output."""
    return text_of(answer)[4:8]


def first_word(answer: Json) -> str:
    return text_of(answer).split()[0]


def response_id(answer: Json) -> str:
    return str(answer["kept id"])


EFFECTS: Mapping[str, Effect] = {
    "model": Effect("other", status=404), "messages": Effect([{"role": "user", "content": "Who are you?"}]),
    "add_generation_prompt": Effect(False),
    "continue_final_message": Effect(True, {"messages": [*QUESTION, {"role": "assistant", "content": "It"}]}),
    "chat_template": Effect("bare"), "chat_template_kwargs": Effect({"extra": "abc"}),
    "reasoning_effort": Effect("high"), "tools": Effect(TOOLS), "tool_choice": Effect("none", CALLING),
    "parallel_tool_calls": Effect(False, CALLING), "prompt": Effect("import"), "prompt_embeds": Effect(EMBEDDINGS),
    "echo": Effect(True), "suffix": Effect("b", status=400), "truncation": Effect("some", status=400),
    "best_of": Effect(6, SAMPLED), "temperature": Effect(1, {"seed": 1, **LONG}), "top_p": Effect(0.01, SAMPLED),
    "top_k": Effect(1, SAMPLED), "min_p": Effect(1, SAMPLED), "top_a": Effect(1, SAMPLED), "seed": Effect(2, SAMPLED),
    "n": Effect(2), "beam_width": Effect(3, {"temperature": None, "n": 2, "seed": 1, **LONG}),
    "use_beam_search": Effect(True, {"temperature": None, "n": 2, "seed": 1, **LONG}),
    "length_penalty": Effect(-10, BEAMS), "early_stopping": Effect(True, ENDED_BEAMS),
    "repetition_penalty": Effect(2, LONG), "frequency_penalty": Effect(2, LONG), "presence_penalty": Effect(2, LONG),
    "logit_bias": Effect({"5": 100}), "allowed_token_ids": Effect([5]), "banned_token_ids": Effect([5], TWO_IDS),
    "bad_words": Effect(first_word), "truncate_prompt_tokens": Effect(2), "max_tokens": Effect(3),
    "max_completion_tokens": Effect(3),
    "min_tokens": Effect(9, {"allowed_token_ids": [5, 6, 7], "stop_token_ids": [5, 6]}), "stop": Effect(words_of),
    "stop_token_ids": Effect([5], TWO_IDS), "thinking_token_budget": Effect(5, status=400),
    "repetition_detection": Effect({"max_pattern_size": 3, "min_count": 4}, TWO_IDS), "ignore_eos": Effect(True),
    "include_stop_str_in_output": Effect(True, {"stop": ["o", "e", "a"]}),
    "skip_special_tokens": Effect(False, SPECIAL), "priority": Effect(1001, status=400),
    "cache_salt": Effect("a" * 129, status=400), "speculative": Effect("sometimes", status=400),
    "draft_of": Effect("no-such-record", status=404), "draft_token_ids": Effect([-1], status=400),
    "draft_text": Effect(5, status=400), "prediction": Effect({"type": "content", "content": 5}, status=400),
    "response_format": Effect({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
    "structured_outputs": Effect({"choice": ["yes"]}), "guided_json": Effect(SCHEMA),
    "guided_json_object": Effect(True), "structural_tag": Effect({"format": {"type": "const_string", "value": "yes"}}),
    "guided_regex": Effect("[0-9]{3}"), "guided_choice": Effect(["yes"]), "guided_grammar": Effect('start: "yes"'),
    "stream": Effect(True), "stream_options": Effect({"include_usage": True}, {"stream": True}),
    "logprobs": Effect(True), "top_logprobs": Effect(2, {"logprobs": True}),
    "logprobs_mode": Effect("processed", {**SAMPLED, "logprobs": True}),
    "num_forced_tokens": Effect(1, {**SAMPLED, "prompt_logprobs": 0}),
    "logits_digests": Effect(True, {"logprobs": True}), "prompt_logprobs": Effect(1), "return_token_ids": Effect(True),
    "timeout": Effect(0.01, LONGER, status=408), "add_special_tokens": Effect(False, {"messages": None, "prompt": "a"}),
    "return_token_strs": Effect(True), "tokens": Effect([6]), "input": Effect("What does len do?"),
    "instructions": Effect("Answer in a few words."), "previous_response_id": Effect(response_id),
    "store": Effect(False), "background": Effect(True),
    "text": Effect({"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}),
    "reasoning": Effect({"effort": "high"}), "max_output_tokens": Effect(3), "metadata": Effect({"a": "b"}),
    "user": Effect("u"), "safety_identifier": Effect("s"), "prompt_cache_key": Effect("k" * 129, status=400),
    "include": Effect(["message.output_text.logprobs"]), "service_tier": Effect("auto"),
    "system": Effect("Answer in a few words."), "stop_sequences": Effect(lambda answer: [words_of(answer)]),
    "thinking": Effect({"type": "disabled"}), "output_config": Effect({"effort": "max"}),
    "output_format": Effect({"type": "json_schema", "schema": SCHEMA}),
}  # fmt: skip
# Fields that have another effect on another endpoint.
OWN: Mapping[tuple[str, str], Effect] = {
    (COMPLETIONS, "logprobs"): Effect(1),
    (COMPLETIONS, "logprobs_mode"): Effect("processed", {**SAMPLED, "logprobs": 1}),
    (COMPLETIONS, "logits_digests"): Effect(True, {"logprobs": 1}),
    (COMPLETIONS, "length_penalty"): Effect(-10, {**BEAMS, "prompt": CHAT_TEXT}),
    (RESPONSES, "prompt_cache_key"): Effect("k"),
    (RESPONSES, "stream_options"): Effect({"include_obfuscation": False}),
    (RESPONSES, "top_logprobs"): Effect(2),
    (RESPONSES, "tools"): Effect(FUNCTIONS),
    (RESPONSES, "tool_choice"): Effect("none", RESPONSE_CALLING),
    (RESPONSES, "parallel_tool_calls"): Effect(False, RESPONSE_CALLING),
    **{(path, "tools"): Effect(OWN_TOOLS) for path in (MESSAGES, COUNT_TOKENS)},
    (MESSAGES, "include_stop_str_in_output"): Effect(True, {"stop_sequences": ["o", "e", "a"]}),
    (MESSAGES, "tool_choice"): Effect({"type": "none"}, MESSAGE_CALLING),
    (COUNT_TOKENS, "tool_choice"): Effect({"type": "none"}, {"tools": OWN_TOOLS}),
    (TOKENIZE, "tool_choice"): Effect("none", {"tools": TOOLS}),
    (TOKENIZE, "parallel_tool_calls"): Effect("no", status=400),
    (TOKENIZE, "prompt"): Effect("import", {"messages": None, "prompt": "a"}),
}
CASES = [
    (path, row.name) for path, rows in ENDPOINTS.items() for row in rows if row.is_served and path not in OWN_ENDPOINTS
]
NO_EFFECT = {(path, row.name) for path, rows in ENDPOINTS.items() for row in rows if row.doc == "No effect."}
# Fields of a response object that repeat the body.
REPEATED = {"metadata", "user", "safety_identifier", "prompt_cache_key", "store", "background"}


def effect_of(path: str, name: str) -> Effect | None:
    return OWN.get((path, name)) or EFFECTS.get(name)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fields")
    with RedisServer(folder) as redis, Stack(folder) as stack:
        yield FieldStack(stack, redis, folder).url


def post(url: str, path: str, body: Json) -> tuple[int, Json]:
    """Status and comparable content of an answer: without ids, times, cache hits and repeated parameters."""
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            status, data = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        status, data = error.code, error.read().decode()
    if data.startswith(("data: ", "event: ")):
        return status, streamed(data)
    answer = json.loads(data)
    if answer.get("object") == "response":
        return status, comparable_response(answer)
    for name in ("id", "created"):
        answer.pop(name, None)
    usage = answer.get("usage") or {}
    answer["usage"] = usage.get("prompt_tokens", usage.get("input_tokens", 0) + usage.get("cache_read_input_tokens", 0))
    for block in answer.get("content", ()):
        block.pop("id", None)
    for choice in answer.get("choices", ()):
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id")
    return status, answer


def comparable_response(answer: Json) -> Json:
    kept = {name: answer.get(name) for name in REPEATED}
    kept["output"] = [{name: value for name, value in item.items() if "id" not in name} for item in answer["output"]]
    kept["tokens"] = (answer.get("usage") or {}).get("input_tokens")
    return kept | {"status": answer["status"], "kept id": answer["id"]}


def streamed(data: str) -> Json:
    """Text and number of usages of a stream."""
    lines = [line.removeprefix("data: ") for line in data.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    text = "".join(text_of_event(event) for event in events if event.get("choices"))
    return {"streamed": text, "usage": sum(bool(event.get("usage")) for event in events)}


def text_of_event(event: Json) -> str:
    choice = event["choices"][0]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


@pytest.mark.parametrize(("path", "name"), CASES, ids=[f"{path}-{name}" for path, name in CASES])
def test_a_field_has_an_effect(url: str, path: str, name: str) -> None:
    effect = effect_of(path, name)
    assert effect is not None
    without = {**BASES[path], **renamed(path, effect.others)}
    answer = answer_without(url, path, json.dumps(without))
    value = effect.value(answer) if isinstance(effect.value, Callable) else effect.value  # type: ignore[arg-type]
    status, changed = post(url, path, {**without, name: value})
    assert status == effect.status, changed
    assert (text_without_id(changed) != text_without_id(answer)) == ((path, name) not in NO_EFFECT)
    if effect.status == 400:
        assert changed["error"]["param"].partition("[")[0].partition(".")[0] in (name, "messages")


@cache
def answer_without(url: str, path: str, body: str) -> Json:
    """The answer to a body, which is the same twice. Many fields have one body without them."""
    (status, answer), again = (post(url, path, json.loads(body)) for _ in range(2))
    assert status == 200, answer
    assert (again[0], text_without_id(again[1])) == (200, text_without_id(answer))
    return answer


def renamed(path: str, others: Json) -> Json:
    """The further fields as this endpoint names them."""
    names = {"max_tokens": "max_output_tokens"} if path == RESPONSES else {}
    return {names.get(name, name): value for name, value in others.items()}


def text_without_id(answer: Json) -> str:
    """The answer as text that ignores the order of fields."""
    return json.dumps({name: value for name, value in answer.items() if name != "kept id"}, sort_keys=True)


def test_the_model_is_named_in_answers(url: str) -> None:
    for path in (CHAT, COMPLETIONS):
        assert post(url, path, {**BASES[path], "model": MODEL})[1]["model"] == MODEL


def test_a_cache_salt_separates_cached_blocks(url: str) -> None:
    body = {"prompt": "The same words again. " * 30, "max_tokens": 1}
    for salt, is_cached in (("a", False), ("a", True), ("b", False)):
        request = urllib.request.Request(f"{url}{COMPLETIONS}", json.dumps({**body, "cache_salt": salt}).encode())
        with urllib.request.urlopen(request, timeout=60) as reply:
            usage = json.load(reply)["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == is_cached
