"""Bodies of HTTP requests become protobuf requests, or an error that names field and value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.http import fields
from gateway_svc.http.app import IGNORED_HEADER
from gateway_svc.http.errors import error_body, error_headers
from gateway_svc.http.openai.bodies import (
    Generation,
    chat_generation,
    completion_generation,
)
from gateway_svc.http.replies import ignored_headers
from gateway_svc.request.validation import check_generate
from request_fields.fields import BY_PATH, FIELDS, Field, Kind
from svc_common.errors import (
    ContextLengthError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServiceError,
    TakenOverError,
    UnauthenticatedError,
    UnavailableError,
)

HELLO = [{"role": "user", "content": "hello"}]
# Two values of each type that are valid for every supported field of that type.
EXAMPLES: dict[Kind, tuple[Any, Any]] = {
    Kind.FLOAT: (0.25, 0.5), Kind.INT32: (1, 2), Kind.UINT32: (1, 2), Kind.UINT64: (1, 2), Kind.BOOL: (False, True),
    Kind.STRING: ("a", "b"), Kind.STRINGS: (["a"], ["b"]), Kind.TOKEN_IDS: ([1], [2]),
    Kind.BIASES: ({"1": 0.5}, {"2": -1}),
    Kind.COUNTS: ({"max_pattern_size": 2, "min_count": 3}, {"max_pattern_size": 4, "min_count": 2}),
}  # fmt: skip
# Supported over gRPC only: a body has no field for them.
WITHOUT_BODY_FIELD = {
    "adapter",  # `model` names it
    "media",
    "receipt",
    "resumable",
    "session_id",  # `previous_response_id` names it
    "session_sample",
    "output.text",
    "output.token_ids",
    "output.parse_chat",
    "scheduling.determinism",
    "scheduling.tenant_id",
    *(f"sampling.thinking_{name}" for name in ("start_ids", "end_ids", "last_ids", "repeats")),
}


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(**body: Any) -> Generation:
    return chat_generation(json.dumps({"messages": HELLO, **body}).encode())


def completion(**body: Any) -> Generation:
    return completion_generation(json.dumps({"prompt": "hello", **body}).encode())


def refusal(**body: Any) -> tuple[str, str]:
    """Field and message of the error for a chat body."""
    with pytest.raises(InvalidRequestError) as caught:
        chat(**body)
    return caught.value.field, caught.value.message


def value_at(request: pb.GenerateRequest, path: str) -> Any:
    message, _, name = path.rpartition(".")
    value = getattr(getattr(request, message) if message else request, name)
    if BY_PATH[path].kind is Kind.BIASES:
        return {str(token_id): bias for token_id, bias in value.items()}
    return list(value) if BY_PATH[path].kind in (Kind.STRINGS, Kind.TOKEN_IDS) else value


def test_every_served_field_can_be_set() -> None:
    served = {field.path for field in FIELDS} - WITHOUT_BODY_FIELD
    for rows in (fields.CHAT, fields.COMPLETION):
        assert {row.path for row in rows if row.path and row.is_served} == served


@pytest.mark.parametrize(
    "row", [row for row in fields.SAMPLING if row.is_served and row.name != "early_stopping"], ids=lambda row: row.name
)
def test_a_field_is_set_and_its_value_matters(row: fields.BodyField) -> None:
    for value in EXAMPLES[BY_PATH[row.path].kind]:
        for make in (chat, completion):
            (request,) = make(**{row.name: value}).requests
            assert value_at(request, row.path) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), (" 1 ", 1), ("+1", 1), ("1.0", 1), ("1e0", 1), ("1.5", None), ("one", None), ("", None)],
)
def test_a_number_may_be_a_string(text: str, value: int | None) -> None:
    if value is None:
        assert refusal(max_tokens=text)[0] == "max_tokens"
        return
    (request,) = chat(max_tokens=text, temperature=text, logit_bias={"5": text}, seed=text).requests
    assert (request.stop.max_tokens, request.sampling.seed) == (value, value)
    assert dict(request.sampling.logit_bias) == {5: 1.0}
    assert chat(timeout=text).timeout_s == value
    for name, wrong in (("seed", "9" * 40), ("temperature", "nan"), ("temperature", "1_0")):
        assert refusal(**{name: wrong})[0] == name
    assert list(chat(stop="1").requests[0].stop.stop) == ["1"]


def _out_of_range(field: Field) -> Any:
    wrong: dict[Kind, Any] = {Kind.BOOL: "yes", Kind.STRING: 5, Kind.STRINGS: ["x" * 300], Kind.TOKEN_IDS: [-1]}
    return wrong.get(field.kind, field.low - 5 if field.low is not None and field.kind is not Kind.INT32 else 2**70)


@pytest.mark.parametrize("row", [row for row in fields.SAMPLING if row.name != "seed"], ids=lambda row: row.name)
def test_the_error_of_a_wrong_value_has_the_name_in_the_body(row: fields.BodyField) -> None:
    for value in (_out_of_range(BY_PATH[row.path]), {"a": 1}):
        field, message = refusal(**{row.name: value})
        assert field.partition("[")[0] == row.name
        assert message.startswith(row.name)


def test_null_is_unset() -> None:
    names = [row.name for row in fields.CHAT if row.name != "messages"]
    asked = chat(**dict.fromkeys(names))
    assert asked == chat()
    check_generate(asked.requests[0])


def test_a_number_may_be_written_as_a_float() -> None:
    assert chat(max_tokens=16.0).requests[0].stop.max_tokens == 16
    assert refusal(max_tokens=16.5) == ("max_tokens", "max_tokens is 16.5; must be an integer")
    assert refusal(temperature=True) == ("temperature", "temperature is true; must be a number")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [pb.Prompt(text="ab")]),
        (["ab", "c"], [pb.Prompt(text="ab"), pb.Prompt(text="c")]),
        ([1, 2], [pb.Prompt(tokens=types.TokenIds(ids=[1, 2]))]),
        ([[1, 2], [3]], [pb.Prompt(tokens=types.TokenIds(ids=ids)) for ids in ([1, 2], [3])]),
    ],
)
def test_prompts_of_every_form(prompt: Any, expected: list[pb.Prompt]) -> None:
    assert [request.prompt for request in completion(prompt=prompt, n=2).requests] == expected


@pytest.mark.parametrize(
    ("prompt", "field"),
    [(None, "prompt"), ([], "prompt"), ([[1], 2], "prompt[1]"), ([1, "a"], "prompt[1]"), ([["a"]], "prompt[0][0]")],
)
def test_invalid_prompts(prompt: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt=prompt)
    assert caught.value.field == field


def test_too_many_prompts() -> None:
    with pytest.raises(InvalidRequestError, match="prompt has 1025 items; at most 1024"):
        completion(prompt=["a"] * 1025)


def test_messages() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "annotations": []},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "x", "tool_call_id": "1", "name": "f"},
    ]
    asked = chat(messages=messages)
    assert list(asked.requests[0].prompt.chat.messages) == [
        pb.ChatMessage(role="developer", content="be brief"),
        pb.ChatMessage(role="user", content="a\nb"),
        pb.ChatMessage(role="assistant"),
        pb.ChatMessage(role="assistant", reasoning="Hm.", tool_calls=[pb.ToolCall(id="1", name="f", arguments="{}")]),
        pb.ChatMessage(role="tool", content="x", tool_call_id="1", name="f"),
    ]
    assert asked.ignored == ()
    assert asked.requests[0].output.parse_chat


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "messages"),
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([*HELLO, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].image_url"),
        ([{"role": "user", "content": [image_url("https://x/a.png")]}], "messages[0].content[0].image_url"),
        ([{"role": "user", "content": [image_url("data:image/png,abc")]}], "messages[0].content[0].image_url"),
        ([{"role": "user", "content": [image_url("data:image/png;base64,?")]}], "messages[0].content[0].image_url"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": 1}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], "messages[0].tool_calls[0].type"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call"),
        ([{"role": "tool", "tool_call_id": 1}], "messages[0].tool_call_id"),
    ],
)
def test_messages_that_are_refused(messages: Any, field: str) -> None:
    assert refusal(messages=messages)[0] == field


UNSERVED = [row for row in (*fields.CHAT, *fields.COMPLETION) if row.only is not None]


@pytest.mark.parametrize("row", UNSERVED, ids=lambda row: row.name)
def test_an_unsupported_field_accepts_only_values_that_disable_it(row: fields.BodyField) -> None:
    make = chat if row in fields.CHAT else completion
    for value in row.only or ():
        assert make(**{row.name: value}) == make()
    for value in (1, {"a": 1}, ["a"], "a", not (row.only or (False,))[0]):
        with pytest.raises(InvalidRequestError, match=f"{row.name} is not served by this version") as caught:
            make(**{row.name: value})
        assert caught.value.field == row.name


@pytest.mark.parametrize(
    ("biases", "field", "words"),
    [
        ([1], "logit_bias", "must be an object"),
        ({"a": 1}, "logit_bias", "has key 'a'; a key must be a token id"),
        ({"-1": 1}, "logit_bias", "has key '-1'"),
        ({"4294967296": 1}, "logit_bias[0]", "must be a token id"),
        ({"1": "x"}, "logit_bias[1]", "is 'x'; must be a number"),
        ({"1": 101}, "logit_bias[1]", "is 101; must be a number from -100 to 100"),
        ({str(i): 1 for i in range(1025)}, "logit_bias", "1025 ids; at most 1024"),
    ],
)
def test_a_wrong_logit_bias_is_named(biases: Any, field: str, words: str) -> None:
    found, message = refusal(logit_bias=biases)
    assert found == field
    assert words in message


def test_unknown_fields_are_listed_as_ignored() -> None:
    asked = chat(user="me", num_ctx=5, messages=[{"role": "user", "content": "a", "mood": "b"}])
    assert asked.ignored == ("user", "num_ctx", "messages.mood")
    assert ignored_headers(asked.ignored) == {IGNORED_HEADER: "user, num_ctx, messages.mood"}
    assert ignored_headers(["a\r\nset-cookie: b", "é"]) == {IGNORED_HEADER: "?, ?"}
    assert ignored_headers(["a"] * 40)[IGNORED_HEADER].endswith("a, ...")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"messages": "\xff"}', "not UTF-8"),
        (b'{"temperature": NaN}', "invalid character"),
        (b'{"messages": [{"role": "user", "content": "\\ud800 and"}]}', "not JSON.*surrogate"),
        (b'{"a":' * 30_000, "not JSON"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "not JSON"),
    ],
)
def test_bodies_that_are_not_json(data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        chat_generation(data)


def test_errors_use_the_field_names_of_the_body() -> None:
    error = ContextLengthError("stop.max_tokens is 9; max_model_len is 8", field="stop.max_tokens", limit=8)
    assert error_body(error, chat(max_completion_tokens=9).names) == {
        "error": {
            "message": "This model's maximum context length is 8 tokens. However, max_completion_tokens is 9; "
            "max_model_len is 8",
            "type": "invalid_request_error",
            "param": "max_completion_tokens",
            "code": "context_length_exceeded",
        }
    }
    error = InvalidRequestError("stop.stop_token_ids[3] is 9", field="stop.stop_token_ids[3]")
    assert error_body(error, chat().names)["error"]["param"] == "stop_token_ids[3]"
    error = InvalidRequestError("prompt.chat.messages[0].role is 'x'", field="prompt.chat.messages[0].role")
    assert error_body(error)["error"]["message"] == "messages[0].role is 'x'"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry"),
    [
        (ServiceError("a"), 500, "server_error", None, "false"),
        (NotFoundError("a", field="model"), 404, "not_found_error", "model_not_found", "false"),
        (OverloadedError("a", retry_after_s=0.25), 429, "rate_limit_error", "rate_limit_exceeded", "true"),
        (UnavailableError("a"), 503, "server_error", None, "true"),
        (UnauthenticatedError("a"), 401, "authentication_error", "invalid_api_key", "false"),
        (TakenOverError("a"), 409, "conflict_error", None, "false"),
    ],
)
def test_status_type_code_and_retry(error: ServiceError, status: int, kind: str, code: str | None, retry: str) -> None:
    assert error.http_status == status
    body = error_body(error)["error"]
    assert (body["type"], body["code"]) == (kind, code)
    headers = error_headers(error)
    assert headers["x-should-retry"] == retry
    if error.retry_after_s:
        assert (headers["retry-after-ms"], headers["retry-after"]) == ("250", "1")
