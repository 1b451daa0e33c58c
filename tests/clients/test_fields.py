"""Every field of every body has an effect through the whole path: the answer with the field differs from the answer
without it. A field that the gateway, the scheduler or the worker ignores fails here.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway_svc.http.fields import ENDPOINTS
from tests.clients.conftest import MODEL

Json = dict[str, Any]

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
RESPONSES = "/v1/responses"
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
# Equal requests have equal answers: greedy, or sampled with a seed.
BASES: Mapping[str, Json] = {
    CHAT: {"messages": QUESTION, "temperature": 0, "max_tokens": 40},
    COMPLETIONS: {"prompt": "What does", "temperature": 0, "max_tokens": 40},
    RESPONSES: {"input": "What does os.path.join do?", "temperature": 0, "max_output_tokens": 40},
    TOKENIZE: {"messages": QUESTION},
    "/detokenize": {"tokens": [5]},
}
SAMPLED: Json = {"temperature": 1, "seed": 1, "ignore_eos": True}
LONG: Json = {"ignore_eos": True, "max_tokens": 60}
ENDLESS: Json = {"ignore_eos": True, "max_tokens": 3000}
SPECIAL: Json = {"allowed_token_ids": [0], "ignore_eos": True, "max_tokens": 2}
SCHEMA: Json = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
TOOL: Json = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True)
class Effect:
    """A value of a field, or a function that makes it from the answer without the field; further fields of both bodies.

    `status`: the field's only effect with the demo model is an error with this status.
    """

    value: Any
    others: Json = field(default_factory=dict)
    status: int = 200


def text_of(answer: Json) -> str:
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def words_of(answer: Json) -> str:
    """Characters in the middle of the output."""
    return text_of(answer)[4:8]


def first_word(answer: Json) -> str:
    return text_of(answer).split()[0]


def first_id(answer: Json) -> list[int]:
    return list(answer["choices"][0]["token_ids"][:1])


IDS: Json = {"return_token_ids": True}
SEEDED: Json = {"temperature": None, "seed": 1}
BEAMS: Json = {"temperature": None, "beam_width": 3}
EFFECTS: Mapping[str, Effect] = {
    "model": Effect("other", status=404),
    "messages": Effect([{"role": "user", "content": "Who are you?"}]),
    "add_generation_prompt": Effect(False),
    "continue_final_message": Effect(True, {"messages": [*QUESTION, {"role": "assistant", "content": "It"}]}),
    "chat_template": Effect("no-such-template", status=400),
    "chat_template_kwargs": Effect({"messages": []}, status=400),
    "reasoning_effort": Effect("extreme", status=400),
    "tools": Effect([TOOL], status=400),  # the template of the demo model does not use tools
    "tool_choice": Effect("sometimes", status=400),
    "parallel_tool_calls": Effect("no", status=400),
    "prompt": Effect("import"),
    "echo": Effect(True),
    "best_of": Effect(0, status=400),
    "temperature": Effect(1, {"seed": 1, **LONG}),
    "top_p": Effect(0.01, SAMPLED),
    "top_k": Effect(1, SAMPLED),
    "min_p": Effect(1, SAMPLED),
    "seed": Effect(2, SAMPLED),
    "n": Effect(2),
    "repetition_penalty": Effect(2, LONG),
    "frequency_penalty": Effect(2, LONG),
    "presence_penalty": Effect(2, LONG),
    "logit_bias": Effect({"5": 100}),
    "allowed_token_ids": Effect([5]),
    "banned_token_ids": Effect(first_id, IDS),
    "bad_words": Effect(first_word),
    "truncate_prompt_tokens": Effect(1),
    "beam_width": Effect(3, {**SEEDED, **LONG}),
    "use_beam_search": Effect(True, {**SEEDED, "n": 2}),
    "length_penalty": Effect("long", BEAMS, status=400),  # tests/processes/test_beams.py has its effect
    "early_stopping": Effect("sometimes", BEAMS, status=400),
    "max_tokens": Effect(3),
    "max_completion_tokens": Effect(3),
    "min_tokens": Effect(40, {"max_tokens": 40}),
    "stop": Effect(words_of),
    "stop_token_ids": Effect(first_id, IDS),
    "ignore_eos": Effect(True, {"max_tokens": 80}),
    "include_stop_str_in_output": Effect(True, {"stop": ["o", "e", "a"]}),
    "skip_special_tokens": Effect(False, SPECIAL),
    "priority": Effect(1001, status=400),
    "cache_salt": Effect("a" * 129, status=400),
    "response_format": Effect({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
    "structured_outputs": Effect({"choice": ["yes"]}),
    "guided_json": Effect(SCHEMA),
    "guided_json_object": Effect(True),
    "guided_regex": Effect("[0-9]{3}"),
    "guided_choice": Effect(["yes"]),
    "guided_grammar": Effect('start: "yes"'),
    "stream": Effect(True),
    "stream_options": Effect({"include_usage": True}, {"stream": True}),
    "logprobs": Effect(True),
    "top_logprobs": Effect(2, {"logprobs": True}),
    "prompt_logprobs": Effect(1),
    "return_token_ids": Effect(True),
    "timeout": Effect(0.01, ENDLESS, status=408),
    "add_special_tokens": Effect("no", {"messages": None, "prompt": "a"}, status=400),
    "return_token_strs": Effect(True),
    "tokens": Effect([6]),
}
# Fields that have another effect on another endpoint.
OWN: Mapping[tuple[str, str], Effect] = {
    (COMPLETIONS, "logprobs"): Effect(1),
    (TOKENIZE, "prompt"): Effect("import", {"messages": None, "prompt": "a"}),
    (RESPONSES, "input"): Effect("Who are you?"),
    (RESPONSES, "instructions"): Effect("Recite the Zen of Python."),
    # These need Redis; tests/processes/test_responses.py tests them.
    (RESPONSES, "previous_response_id"): Effect("resp_1", status=400),
    (RESPONSES, "store"): Effect(True, status=400),
    (RESPONSES, "background"): Effect(True, status=400),
    (RESPONSES, "tools"): Effect([{"type": "function", "name": "look", "parameters": {}}], status=400),
    (RESPONSES, "text"): Effect({"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}),
    (RESPONSES, "reasoning"): Effect({"effort": "extreme"}, status=400),
    (RESPONSES, "max_output_tokens"): Effect(3),
    (RESPONSES, "banned_token_ids"): Effect(list(range(3, 500))),
    (RESPONSES, "stop_token_ids"): Effect(list(range(3, 250))),
    (RESPONSES, "metadata"): Effect({"a": "b"}),
    (RESPONSES, "user"): Effect("me"),
    (RESPONSES, "safety_identifier"): Effect("me"),
    (RESPONSES, "prompt_cache_key"): Effect("me"),
}
RETURNED = ("metadata", "user", "safety_identifier", "prompt_cache_key")  # fields of a response without another effect
OTHER_NAMES = ("messages", "input", "store")  # a conflict of the field with one of these may name either
WITHOUT_EFFECT = [(path, row.name) for path, rows in ENDPOINTS.items() for row in rows if row.doc == "No effect."]
CASES = [
    (path, row.name)
    for path, rows in ENDPOINTS.items()
    for row in rows
    if row.is_served and (path, row.name) not in WITHOUT_EFFECT
]


def post(url: str, path: str, body: Json) -> tuple[int, Json]:
    """Status and comparable content of an answer: without id, time and cache hits."""
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            status, data = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        status, data = error.code, error.read().decode()
    if data.startswith("data: "):
        events = [json.loads(part.removeprefix("data: ")) for part in data.split("\n\n")[:-2]]
        usage = [event["usage"] for event in events if event.get("usage")]
        text = "".join(text_of_event(event) for event in events if event["choices"])
        return status, {"streamed": text, "usage": len(usage)}
    if data.startswith("event: "):
        return status, {"streamed": data.count("event: ")}
    answer = json.loads(data)
    for name in ("id", "created", "created_at", "completed_at"):
        answer.pop(name, None)
    answer["input_tokens"] = answer.pop("usage", {}).get("input_tokens")
    for item in answer.get("output", ()):
        item.pop("id", None)
    return status, answer


def text_of_event(event: Json) -> str:
    choice = event["choices"][0]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


@pytest.mark.parametrize(("path", "name"), CASES, ids=[f"{path}-{name}" for path, name in CASES])
def test_a_field_has_an_effect(url: str, path: str, name: str) -> None:
    effect = OWN.get((path, name)) or EFFECTS[name]
    without = {**BASES[path], **_renamed(path, effect.others)}
    status, answer = post(url, path, without)
    assert status == 200, answer
    assert post(url, path, without) == (200, answer)
    value = effect.value(answer) if isinstance(effect.value, Callable) else effect.value  # type: ignore[arg-type]
    status, changed = post(url, path, {**without, name: value})
    assert status == effect.status, changed
    if effect.status == 400:
        assert changed["error"]["param"].partition("[")[0].partition(".")[0] in (name, *OTHER_NAMES)
    if path == RESPONSES and name not in RETURNED:
        # The object repeats the fields of the request.
        answer, changed = ({"output": _content(part)} for part in (answer, changed))
    assert without_names(changed) != without_names(answer)


def _renamed(path: str, others: Json) -> Json:
    """The further fields as this endpoint names them."""
    names = {"max_tokens": "max_output_tokens"} if path == RESPONSES else {}
    return {names.get(name, name): value for name, value in others.items()}


def _content(answer: Json) -> Any:
    """The output of a response without ids, or the whole answer of another kind."""
    if "output" not in answer:
        return answer
    parts = [{key: value for key, value in item.items() if key != "id"} for item in answer["output"]]
    return [parts, answer["status"], answer["input_tokens"]]


@pytest.mark.parametrize(("path", "name"), WITHOUT_EFFECT)
def test_a_field_without_effect_is_accepted(url: str, path: str, name: str) -> None:
    values: Json = {"stream_options": {"include_obfuscation": False}, "include": [], "service_tier": "auto"}
    assert post(url, path, {**BASES[path], name: values[name]})[0] == 200


def without_names(answer: Json) -> str:
    """The answer as text that ignores the order of fields."""
    return json.dumps(answer, sort_keys=True)


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
