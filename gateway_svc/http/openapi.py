"""Describes the API in the format OpenAPI 3.1. Fields of bodies come from the tables in fields.py. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway_svc.http.audio import PLAIN, SEGMENTED
from gateway_svc.http.fields import ALIASES, ENDPOINTS, BodyField
from request_fields.fields import BY_PATH, BodyForm, Field, Kind

Schema = dict[str, Any]


def _object(optional: Mapping[str, Schema] | None = None, **required: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def _list(items: Schema, **limits: Any) -> Schema:
    return {"type": "array", "items": items, **limits}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
TOKEN_IDS = _list({"type": "integer", "minimum": 0, "maximum": 2**32 - 1})
ERROR_STATUSES = {
    "400": "An invalid value, or a field that is not supported.",
    "401": "No API key or token, or one that is not accepted.", "404": "An unknown path or model.",
    "405": "The path does not accept the method.",
    "408": "The body did not arrive in time, or the time in `timeout` has passed.",
    "409": "The request is in use or was taken over.", "413": "The body is too large.",
    "429": "A limit is reached; retry later.", "503": "No process can serve the request now; retry later.",
}  # fmt: skip

KINDS: Mapping[Kind, Schema] = {
    Kind.FLOAT: {"type": "number"}, Kind.INT32: {"type": "integer"}, Kind.UINT32: {"type": "integer", "minimum": 0},
    Kind.UINT64: {"type": "integer", "minimum": 0}, Kind.BOOL: FLAG, Kind.STRING: TEXT, Kind.STRINGS: _list(TEXT),
    Kind.TOKEN_IDS: TOKEN_IDS, Kind.BIASES: {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,10}$"}},
}  # fmt: skip
PART = _object({"text": TEXT}, type=TEXT)
MESSAGE = _object(
    {
        "content": {"anyOf": [TEXT, _list(PART), {"type": "null"}]},
        "tool_calls": _list(OBJECT),
        **dict.fromkeys(("tool_call_id", "name", "reasoning", "reasoning_content"), TEXT),
    },
    role={"enum": ["system", "developer", "user", "assistant", "tool"]},
)
SOME_TEXT: Schema = {**TEXT, "minLength": 1}
SOME_IDS: Schema = {**TOKEN_IDS, "minItems": 1}
# Body fields without a request field. A field in neither table may have any type.
OWN: Mapping[str, Schema] = {
    "model": TEXT, "messages": _list(MESSAGE, minItems=1),
    "prompt": {"anyOf": [some for one in (SOME_TEXT, SOME_IDS) for some in (one, _list(one, minItems=1))]},
    "tokens": TOKEN_IDS, "token_ids": SOME_IDS, "sampling_params": OBJECT, "stream": FLAG,
    "stream_options": {**OBJECT, "properties": {"include_usage": FLAG, "continuous_usage_stats": FLAG}},
    "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": 86400}, "echo": FLAG, "return_token_ids": FLAG,
    "return_token_strs": FLAG, "add_special_tokens": FLAG, "add_generation_prompt": FLAG,
    "continue_final_message": FLAG, "chat_template_kwargs": OBJECT, "chat_template": TEXT,
    "reasoning_effort": {"enum": ["none", "minimal", "low", "medium", "high", "xhigh"]},
    "input": {"anyOf": [SOME_TEXT, _list(OBJECT, minItems=1)]}, "system": {"anyOf": [TEXT, _list(PART)]},
    "thinking": OBJECT, "output_config": OBJECT, "output_format": OBJECT, "instructions": TEXT,
    "previous_response_id": TEXT, "store": FLAG, "background": FLAG,
    "metadata": {"type": "object", "maxProperties": 16, "additionalProperties": {**TEXT, "maxLength": 512}},
    "tools": _list(OBJECT), "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, OBJECT]},
    "parallel_tool_calls": FLAG,
}  # fmt: skip
# Bodies that are forms.
AUDIO_FORM = _object(
    {
        **dict.fromkeys(("model", "language", "prompt"), TEXT),
        "response_format": {"enum": [*PLAIN, *SEGMENTED]},
        "timestamp_granularities[]": _list({"enum": ["segment"]}),
        "stream": FLAG,
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    },
    file={**TEXT, "format": "binary"},
)
FILE_FORM = _object({"purpose": {"enum": ["batch"]}}, file={**TEXT, "format": "binary"})
FORMS: Mapping[str, Schema] = {
    "/v1/files": FILE_FORM,
    "/v1/audio/transcriptions": AUDIO_FORM,
    "/v1/audio/translations": AUDIO_FORM,
}
REQUIRED: Mapping[str, Sequence[str]] = {
    "/v1/chat/completions": ["messages"], "/v1/completions": ["prompt"], "/v1/responses": ["input"],
    "/v2/embed": ["texts"], "/v1/messages": ["messages", "max_tokens"], "/v1/messages/count_tokens": ["messages"],
    "/detokenize": ["tokens"], "/inference/v1/generate": ["token_ids"],
}  # fmt: skip

USAGE = _object(
    {
        "prompt_tokens_details": {**OBJECT, "properties": {"cached_tokens": COUNT}},
        "completion_tokens_details": {**OBJECT, "properties": {"reasoning_tokens": COUNT}},
    },
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
)
MODEL = _object(
    {"context_length": COUNT, "context_window": COUNT}, id=TEXT, object={"const": "model"}, created=COUNT,
    owned_by=TEXT, max_model_len=COUNT,
)  # fmt: skip


def _completion(kind: str, choice: Schema) -> Schema:
    reasons = {"enum": ["stop", "length", "abort", "tool_calls"]}
    return _object(
        {"system_fingerprint": TEXT},
        id=TEXT,
        object={"const": kind},
        created=COUNT,
        model=TEXT,
        choices=_list(_object(index=COUNT, finish_reason=reasons, **choice)),
        usage=USAGE,
    )


OPTIONAL_TEXT: Schema = {"type": ["string", "null"]}
# Schemas of successful answers; an endpoint that is not listed answers with some object.
ANSWERS: Mapping[str, Schema] = {
    "/v1/chat/completions": _completion(
        "chat.completion", {"message": _object(role={"const": "assistant"}, content=OPTIONAL_TEXT)},
    ),
    "/v1/completions": _completion("text_completion", {"text": TEXT}),
    "/inference/v1/generate": _completion("rollout", {"token_ids": TOKEN_IDS}),
    "/v1/models": _object(object={"const": "list"}, data=_list(MODEL)), "/v1/models/{model}": MODEL,
    "/v1/messages": _object(
        id=TEXT, type={"const": "message"}, role={"const": "assistant"}, model=TEXT, content=_list(OBJECT),
        stop_reason=OPTIONAL_TEXT, usage=_object(input_tokens=COUNT, output_tokens=COUNT),
    ),
    "/v1/messages/count_tokens": _object(input_tokens=COUNT),
    "/tokenize": _object(count=COUNT, max_model_len=COUNT, tokens=TOKEN_IDS), "/detokenize": _object(prompt=TEXT),
    "/tokenizer_info": _object(
        eos_token=OPTIONAL_TEXT, bos_token=OPTIONAL_TEXT, pad_token=OPTIONAL_TEXT, chat_template=OPTIONAL_TEXT,
    ),
    "/v1/audio/transcriptions": _object(text=TEXT), "/v1/audio/translations": _object(text=TEXT),
    "/v1/responses/input_tokens": _object(object={"const": "response.input_tokens"}, input_tokens=COUNT),
    **dict.fromkeys(("/health", "/ping"), _object(status=TEXT)), "/load": _object(server_load=COUNT),
    "/version": _object(version=TEXT),
}  # fmt: skip
STREAMS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/inference/v1/generate"),
    *("/v1/responses", "/v1/responses/{response_id}"),
)
TEXTS = ("/metrics",)  # the answer is plain text
OPEN = ("/health", "/ping")  # need no API key
QUERY: Mapping[str, Sequence[str]] = {
    "/tokenizer_info": ["model"],
    "/v1/responses/{response_id}": ["stream", "starting_after"],
    "/v1/responses/{response_id}/input_items": ["limit", "order", "after"],
}


def document(endpoints: Iterable[tuple[str, str, str]], version: str) -> Schema:
    """The description. `endpoints`: path, method and meaning of each."""
    paths: dict[str, Schema] = {}
    for path, method, meaning in endpoints:
        paths.setdefault(path, {})[method.lower()] = _operation(path, method, meaning)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version, "description": "OpenAI-compatible HTTP API; docs/http.md."},
        "paths": paths,
        "components": {
            "schemas": {"Error": _error_schema()},
            "responses": {status: _error(words) for status, words in ERROR_STATUSES.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, method: str, meaning: str) -> Schema:
    name = path.strip("/").replace("/", "_").replace("{", "").replace("}", "").replace(".", "_")
    operation: Schema = {
        "operationId": f"{method.lower()}_{name}",
        "summary": meaning,
        "parameters": [*_path_parameters(path), *_query_parameters(path)],
        "responses": {
            "200": _answer(path),
            **{one: {"$ref": f"#/components/responses/{one}"} for one in ERROR_STATUSES},
        },
    }
    if path in OPEN:
        operation["security"] = []
    if method == "POST":
        content_type = "multipart/form-data" if path in FORMS else "application/json"
        schema = FORMS[path] if path in FORMS else _body(path)
        operation["requestBody"] = {"required": True, "content": {content_type: {"schema": schema}}}
    return operation


def _path_parameters(path: str) -> list[Schema]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}} for name in names]


def _query_parameters(path: str) -> list[Schema]:
    return [{"name": name, "in": "query", "schema": TEXT} for name in QUERY.get(path, ())]


def _answer(path: str) -> Schema:
    if path in TEXTS:
        return {"description": "The answer.", "content": {"text/plain": {"schema": TEXT}}}
    content = {"application/json": {"schema": ANSWERS.get(path, OBJECT)}}
    if path in STREAMS:
        content["text/event-stream"] = {"schema": _object(data=TEXT)}  # schema of one event
    return {"description": "The answer.", "content": content}


def _error(words: str) -> Schema:
    return {"description": words, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}


def _error_schema() -> Schema:
    return _object(error=_object(message=TEXT, type=TEXT, param=OPTIONAL_TEXT, code=OPTIONAL_TEXT))


def _body(path: str) -> Schema:
    """The schema of a body. Unknown fields are ignored; null means: not set."""
    path = ALIASES.get(path, path)
    rows = ENDPOINTS.get(path, ())
    return {
        "type": "object",
        "required": list(REQUIRED.get(path, ())),
        "properties": {row.name: _field(row, is_required=row.name in REQUIRED.get(path, ())) for row in rows},
    }


def _field(row: BodyField, *, is_required: bool) -> Schema:
    field = BY_PATH.get(row.path)
    meaning = " ".join(words for words in (field.doc if field else "", row.doc) if words)
    if not row.is_served:
        return {"enum": [*(row.only or ()), None], "description": "Not supported: only this value is accepted."}
    schema = OWN.get(row.name) or (_of_request_field(field) if field else {})
    described = {"description": meaning} if meaning else {}
    return {**schema, **described} if is_required or not schema else {**described, "anyOf": [schema, {"type": "null"}]}


def _of_request_field(field: Field) -> Schema:
    schema = _value_schema(field)
    match field.http.form if field.http else BodyForm.PLAIN:
        case BodyForm.MINUS_1_IS_OFF:
            return {**schema, "minimum": -1}
        case BodyForm.SIGNED:
            return {**schema, "minimum": -(2**63)}
        case BodyForm.ONE_OR_LIST:
            return {"anyOf": [TEXT, schema]}
        case BodyForm.OBJECT_OR_TEXT:
            return {"anyOf": [TEXT, OBJECT]}
    return schema


def _value_schema(field: Field) -> Schema:
    """The values of a field in the protocol."""
    if field.kind is Kind.ENUM:
        return {"enum": list(field.values or {})}
    if field.kind is Kind.BIASES:
        bias = {"type": "number", "minimum": field.low, "maximum": field.high}
        return {**KINDS[field.kind], "additionalProperties": bias, "maxProperties": field.max_items}
    if field.counts is not None:
        counts = {name: {"type": "integer", "minimum": 0, "maximum": high} for name, high in field.counts.items()}
        return {"type": "object", "properties": counts, "additionalProperties": False}
    limits = {
        "exclusiveMinimum" if field.excludes_low else "minimum": field.low,
        "maximum": field.high,
        "maxItems": field.max_items,
        "items": None if field.max_chars is None else {**TEXT, "minLength": 1, "maxLength": field.max_chars},
    }
    return {**KINDS[field.kind], **{name: limit for name, limit in limits.items() if limit is not None}}
