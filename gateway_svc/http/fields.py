"""The fields of HTTP bodies: one row each, per endpoint.

A row with a `path` sets that field of GenerateRequest. `request_fields` has its type, limits and form, and the rows
that all generations have. Rows with `only` are not supported: any other value is refused. The others are read by
`bodies.py` and `chat.py`. A field without a row is ignored and listed in the response header `x-ignored-fields`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message

from gateway_svc.http.json_text import invalid, shown, typed_value
from request_fields.checks import check_value
from request_fields.fields import BY_PATH, FIELDS, GRAMMAR_FIELDS, BodyForm, Field, FieldError, Kind
from svc_common.errors import InvalidRequestError


def _predicted(value: Any) -> Any:
    """The text of OpenAI's `prediction`; other values unchanged."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, list):
        return content if isinstance(content, str) else value
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join(map(str, texts)) if len(texts) == len(content) and None not in texts else value


CONVERSIONS: Mapping[BodyForm, Callable[[Any], Any]] = {  # to the value in the protocol; other values stay as they are
    BodyForm.PLAIN: lambda value: value,
    BodyForm.MINUS_1_IS_OFF: lambda value: 0 if value == -1 else value,
    BodyForm.SIGNED: lambda value: value + 2**64 if type(value) is int and -(2**63) <= value < 0 else value,
    BodyForm.ONE_OR_LIST: lambda value: [value] if isinstance(value, str) else value,
    BodyForm.OBJECT_OR_TEXT: lambda value: json.dumps(value) if isinstance(value, dict) else value,
    BodyForm.TEXT_OR_PREDICTION: _predicted,
}


@dataclass(frozen=True, slots=True)
class BodyField:
    """One field of a body. null means: not set."""

    name: str
    path: str = ""  # path of the field in GenerateRequest
    doc: str = ""
    only: tuple[Any, ...] | None = None  # for unsupported fields: the only values accepted, which disable the feature

    @property
    def is_served(self) -> bool:
        return self.only is None


def _rows_of(field: Field) -> Iterator[BodyField]:
    """The rows of a field that all generations have."""
    if http := field.http:
        values = f"{_values_of(field)}." if field.kind is Kind.ENUM else ""
        keys = "Keys are token ids as strings." if field.kind is Kind.BIASES else ""
        doc = " ".join(words for words in (http.form.value, values, keys, http.doc) if words)
        yield BodyField(http.name or field.name, field.path, doc)
        if http.alias:
            yield BodyField(http.alias, field.path, f"Has precedence over {field.name}.")


def _values_of(field: Field) -> str:
    """The values of an enum in words."""
    *values, last = map(json.dumps, field.values or {})
    return f"{', '.join(values)} or {last}"


SAMPLING = tuple(row for field in FIELDS if field.name not in GRAMMAR_FIELDS for row in _rows_of(field))
GUIDED = tuple(row for field in FIELDS if field.name in GRAMMAR_FIELDS for row in _rows_of(field))
STRUCTURED = (
    BodyField(
        "response_format",
        doc="Type `text`, `json_object`, `json_schema` or `structural_tag`; `strict` has no effect: schemas are "
        "enforced.",
    ),
    BodyField(
        "structured_outputs", doc="One of `json`, `json_object`, `regex`, `choice`, `grammar` and `structural_tag`."
    ),
    *GUIDED,
)
BEAMS = BodyField("use_beam_search", doc="Beam search with `beam_width` beams, or `n` if it is not set.")
STREAMING = (
    BodyField("stream", doc="Answer with server-sent events."),
    BodyField(
        "stream_options",
        doc="`include_usage`: a last chunk with the usage. `continuous_usage_stats`: also usage in every chunk.",
    ),
)
RETURN_IDS = BodyField(
    "return_token_ids", doc="Also return `prompt_token_ids`, and `token_ids` of every choice and chunk."
)
TIMEOUT = BodyField(
    "timeout", doc="Seconds until the request is cancelled and ends with error 408; above 0 and at most 86400."
)
PROMPT_LOGPROBS = (
    BodyField("prompt_logprobs", "output.prompt_logprobs", doc="Not with `stream`."),
    BodyField("logprobs_mode", "sampling.logprobs_mode"),
    BodyField("num_forced_tokens", "sampling.num_forced_tokens"),
    BodyField("logits_digests", "sampling.logits_digests", doc="16 hexadecimal digits."),
)
MODEL = BodyField("model", doc="May be left out if the gateway serves one model.")
UNSERVED = (
    BodyField("logits_processors", only=([],)),
    BodyField("return_tokens_as_token_ids", only=(False,)),
    BodyField("spaces_between_special_tokens", only=(True,)),
    BodyField("detokenize", only=(True,)),
)
TEMPLATE = (
    BodyField(
        "messages",
        doc="Roles system, developer, user, assistant and tool; content as text or as parts of type text or "
        "image_url (docs/images.md). Assistant "
        "messages may have `tool_calls` and `reasoning` (also as `reasoning_content`), tool messages `tool_call_id`.",
    ),
    BodyField(
        "add_generation_prompt",
        doc="Start an assistant turn. Default true; must not be true with `continue_final_message`.",
    ),
    BodyField("continue_final_message", doc="Continue the last message instead of starting an assistant turn."),
    BodyField("chat_template", doc="Name of a template of the model or of the gateway; templates cannot be sent."),
    BodyField("chat_template_kwargs", doc="Extra variables for the chat template."),
    BodyField(
        "reasoning_effort",
        doc="Passed to the chat template: none, minimal, low, medium, high or xhigh. `none` also sets the variable "
        "`enable_thinking` to false. It is also a thinking budget ([chat.md](chat.md)).",
    ),
)
TOOLS = (
    BodyField("tools", doc="Functions that the model may call ([chat.md](chat.md))."),
    BodyField("tool_choice", doc='`none`, `auto`, `required` or `{"type": "function", "function": {"name": ...}}`.'),
    BodyField("parallel_tool_calls", doc="Default true. False: at most one call."),
)
CHAT = (
    MODEL, *TEMPLATE, *TOOLS, *SAMPLING, BEAMS, *STRUCTURED, *STREAMING,
    BodyField("logprobs", doc="Return the log probability of each output token."),
    BodyField("top_logprobs", "output.logprobs", doc="Needs `logprobs`."), *PROMPT_LOGPROBS, RETURN_IDS, TIMEOUT,
    *UNSERVED, BodyField("include_reasoning", only=(True,)), BodyField("documents", only=([],)),
    BodyField("echo", only=(False,)), BodyField("web_search_options", only=()), BodyField("functions", only=([],)),
    BodyField("function_call", only=("none",)), BodyField("audio", only=()), BodyField("modalities", only=(["text"],)),
)  # fmt: skip
COMPLETION = (
    MODEL,
    BodyField("prompt", doc="A string, a list of strings, a list of token ids, or a list of such lists."),
    BodyField(
        "prompt_embeds",
        doc="Prompts as input embeddings: a base64 string, or a list of such strings, of a safetensors file with one "
        "tensor [positions, hidden_size]. These prompts come before those of `prompt`, which may then be left out.",
    ),
    BodyField(
        "suffix",
        doc="The text after the output, for models whose vocabulary has tokens for it (`<|fim_prefix|>` and others). "
        "The prompts are texts. Not with `echo`.",
    ),
    BodyField("echo", doc="Return the prompt in front of the output. Not with `prompt_embeds`."),
    *SAMPLING,
    BEAMS,
    *STRUCTURED,
    *STREAMING,
    BodyField("logprobs", "output.logprobs", doc="With `echo`, of the prompt's tokens too."),
    *PROMPT_LOGPROBS,
    RETURN_IDS,
    TIMEOUT,
    *UNSERVED,
)
TOKENIZE = (
    MODEL, BodyField("prompt", doc="A string, if there are no messages."),
    BodyField("add_special_tokens", doc="Default true. No effect on a chat: its template adds them."),
    BodyField("return_token_strs", doc="Also return `token_strs`, the entries of the vocabulary."), *TEMPLATE, *TOOLS,
)  # fmt: skip
DETOKENIZE = (MODEL, BodyField("tokens", doc="Token ids."))

POOLED = (
    MODEL,
    BodyField("truncate", doc="Cut inputs that are longer than the model accepts. Default false: they are refused."),
    BodyField("truncate_prompt_tokens", doc="-1 is `truncate`; other numbers are refused."),
    BodyField("priority", "scheduling.priority"),
    BodyField("user", doc="No effect."),
)
EMBEDDINGS = (
    *POOLED,
    BodyField("input", doc="A string, a list of strings, a list of token ids, or a list of such lists; at most 2048."),
    BodyField("encoding_format", doc="`float` (the default) or `base64`: little-endian float32."),
    BodyField("dimensions", doc="Keep the first numbers of each embedding."),
    BodyField("pooling", doc="`last`, `mean` or `cls`. Default: the setting of the model."),
    BodyField("normalize", doc="Scale embeddings to length 1. Default: the setting of the model."),
    BodyField("prompt_name", doc="Name of a prompt of the model, which precedes each text."),
)
USE_ACTIVATION = BodyField("use_activation", doc="False: the outputs of the classification head. Default true.")
POOLING = (
    *POOLED,
    *(row for row in EMBEDDINGS if row.name in ("input", "encoding_format", "dimensions", "normalize", "prompt_name")),
    BodyField("task", doc="`embed` or `classify`. Default: `classify` if the model has classes, else `embed`."),
    USE_ACTIVATION,
)
CLASSIFY = (*POOLED, *(row for row in EMBEDDINGS if row.name in ("input", "prompt_name")), USE_ACTIVATION)
COHERE_EMBED = (
    MODEL,
    BodyField("texts", doc="A list of strings; at most 2048."),
    BodyField(
        "input_type",
        doc="The name of a prompt of the model, which precedes each text; `search_query` is also `query`, "
        "`search_document` also `document` or `passage`. No prompt if the model has none for it.",
    ),
    BodyField("embedding_types", doc="`float` (the default), `base64`, `binary` or `ubinary`."),
    BodyField("output_dimension", doc="Keep the first numbers of each embedding."),
    BodyField("truncate", doc="`END` (the default) cuts long texts, `NONE` refuses them."),
    BodyField("priority", "scheduling.priority"),
    BodyField("images", only=([],)),
    BodyField("inputs", only=([],)),
)
SCORE = (
    *POOLED,
    BodyField("text_1", doc="A string, or a list of as many strings as `text_2`."),
    BodyField("text_2", doc="A string or a list of strings; at most 1024."),
    BodyField("instruction", doc="What makes a document match, for models that take an instruction."),
)
DECISIONS = (
    MODEL, BodyField("input", doc="As in `/v1/responses`; parts may have the type `input_json`."),
    BodyField("questions", doc="1 to 400: predicates, choices, scores ([embeddings.md](embeddings.md#decisions))."),
    BodyField("receipt", doc="Return a signed `receipt` of each answer ([receipts.md](receipts.md))."),
    BodyField("priority", "scheduling.priority"), BodyField("cache_salt", "scheduling.cache_salt"),
    BodyField("prompt_cache_key", "scheduling.conversation"), BodyField("prompt_cache_options", doc="No effect."),
    BodyField("safety_identifier", doc="No effect."),
)  # fmt: skip
RERANK = (
    *POOLED,
    BodyField("query", doc="A string."),
    BodyField("documents", doc="Strings, or objects with `text`; at most 1024."),
    BodyField("top_n", doc="Return this many documents. Default: all."),
    BodyField("return_documents", doc="Return the texts too. Default true."),
    BodyField("instruction", doc="What makes a document match, for models that take an instruction."),
)

RESPONSES = (
    MODEL,
    BodyField("input", doc="A string, or a list of items: messages, function calls and their outputs, reasoning."),
    BodyField("instructions", doc="A system message in front of the conversation."),
    BodyField("previous_response_id", doc="A stored response whose conversation the input continues."),
    BodyField("store", doc="Keep the response. Default: true if the gateways keep records."),
    BodyField("background", doc="Answer immediately, and compute the response in the background."),
    BodyField("stream", doc="Answer with server-sent events."), BodyField("stream_options", doc="No effect."),
    BodyField("tools", doc="The client's tools ([responses.md](responses.md#tools)). `web_search` is ignored."),
    BodyField("tool_choice", doc='`none`, `auto`, `required` or `{"type": "function", "name": ...}`.'),
    BodyField("parallel_tool_calls", doc="false: at most one call."),
    BodyField("text", doc="`format`: text, json_object or json_schema."),
    BodyField("reasoning", doc="`effort` is that of `reasoning_effort` in `/v1/chat/completions`."),
    BodyField("max_output_tokens", "stop.max_tokens"),
    *(row for row in SAMPLING if row.name not in ("n", "best_of", "max_tokens", "max_completion_tokens")),
    BodyField("include", doc="`message.output_text.logprobs`: log probabilities. Other values have no effect."),
    BodyField("top_logprobs", "output.logprobs"), BodyField("metadata", doc="Returned unchanged. At most 16 strings."),
    BodyField("user", doc="Returned."), BodyField("safety_identifier", doc="Returned."),
    BodyField("service_tier", doc="No effect."),
    BodyField(
        "truncation", doc="`auto`: leave out the oldest turns of a conversation that is too long. Default: `disabled`.",
    ),
    BodyField("max_tool_calls", only=()), BodyField("conversation", only=()), BodyField("prompt", only=()),
)  # fmt: skip

COUNT_TOKENS = (
    MODEL,
    BodyField(
        "messages",
        doc="Roles user, assistant and system; blocks of type text, image, document (text only), tool_use, tool_result "
        "and thinking. An assistant's text at the end is continued.",
    ),
    BodyField("system", doc="A system message: a string or blocks of text."),
    BodyField("tools", doc="Tools of the client. Tools of other types are ignored and listed in `x-ignored-fields`."),
    BodyField("tool_choice", doc="Type `auto`, `any`, `none` or `tool` with a `name`; `disable_parallel_tool_use`."),
    BodyField(
        "thinking",
        doc="Type `enabled`, `adaptive` or `disabled` is the template's variable `enable_thinking`; `budget_tokens`, 0 "
        "with `disabled`, is its variable `thinking_budget` and a thinking budget ([chat.md](chat.md)).",
    ),
    BodyField(
        "output_config",
        doc="`effort` is that of `reasoning_effort` in `/v1/chat/completions`; `format`: a JSON Schema of the answer.",
    ),
)
MESSAGES = (
    *COUNT_TOKENS, BodyField("output_format", doc="The earlier name of `output_config.format`."),
    BodyField("stop_sequences", "stop.stop"), BodyField("stream", doc="Answer with server-sent events."),
    *(row for row in SAMPLING if row.name not in ("n", "best_of", "max_completion_tokens", "stop")),
    BodyField("metadata", doc="No effect."), BodyField("service_tier", doc="No effect."),
)  # fmt: skip

ROLLOUT = (
    MODEL, BodyField("token_ids", doc="The prompt."),
    BodyField(
        "sampling_params",
        doc="An object with fields of /v1/completions: `n`, `max_tokens`, `temperature`, `logprobs` and others.",
    ),
    *STREAMING, BodyField("priority", "scheduling.priority"), BodyField("cache_salt", "scheduling.cache_salt"), TIMEOUT,
)  # fmt: skip
ENDPOINTS: Mapping[str, tuple[BodyField, ...]] = {
    "/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS, "/v1/embeddings": EMBEDDINGS, "/v2/embed": COHERE_EMBED,
    "/pooling": POOLING, "/classify": CLASSIFY, "/v1/score": SCORE, "/v1/rerank": RERANK,
    "/v1/decisions": DECISIONS,
    "/inference/v1/generate": ROLLOUT, "/tokenize": TOKENIZE, "/detokenize": DETOKENIZE,
}  # fmt: skip

ALIASES = {  # other paths of an endpoint, or endpoints with the same body
    "/score": "/v1/score",
    "/rerank": "/v1/rerank",
    "/v2/rerank": "/v1/rerank",
    "/v1/responses/input_tokens": "/v1/responses",
}


def paths_of(path: str) -> list[str]:
    """All paths of an endpoint."""
    return [path, *(alias for alias, name in ALIASES.items() if name == path)]


def set_parameters(rows: tuple[BodyField, ...], body: Mapping[str, Any], request: Message) -> None:
    """Set the fields of `request` from the rows that have a path, and refuse fields that are not supported.

    Raises InvalidRequestError.
    """
    for row in rows:
        value = body.get(row.name)
        if value is None:
            continue
        if row.path:
            set_parameter(row, value, request)
        # Types are compared too, because 0 == False.
        elif row.only is not None and not any(type(value) is type(one) and value == one for one in row.only):
            raise invalid(row.name, "is not served by this version; leave it unset")


def set_parameter(row: BodyField, value: Any, request: Message) -> None:
    """Set one field of `request`. Raises InvalidRequestError with the row's name."""
    field = replace(BY_PATH[row.path], path=row.name)  # errors name the field of the body
    convert = CONVERSIONS[field.http.form if field.http else BodyForm.PLAIN]
    typed = _enum_number(field, value) if field.kind is Kind.ENUM else typed_value(row.name, field.kind, convert(value))
    try:
        check_value(field, typed)
    except FieldError as error:
        raise InvalidRequestError(str(error), field=error.field) from None
    message, _, name = row.path.rpartition(".")
    owner = getattr(request, message) if message else request
    try:
        if isinstance(typed, list):
            getattr(owner, name).extend(typed)
        elif isinstance(typed, dict):
            getattr(owner, name).update(typed)
        else:
            setattr(owner, name, typed)
    except (ValueError, TypeError, OverflowError):
        words = f"is {shown(value)}, which is out of range for a field of type {field.kind.value}"
        raise invalid(row.name, words) from None


def _enum_number(field: Field, value: Any) -> int:
    for one, number in (field.values or {}).items():
        if type(value) is type(one) and value == one:
            return number
    raise invalid(field.path, f"is {shown(value)}; must be {_values_of(field)}")


def path_names(rows: tuple[BodyField, ...], body: Mapping[str, Any]) -> dict[str, str]:
    """Field names in the body, by field path in GenerateRequest; for errors of later checks."""
    names: dict[str, str] = {}
    for row in rows:
        if row.path and (row.path not in names or body.get(row.name) is not None):
            names[row.path] = row.name
    return names


def ignored_names(rows: tuple[BodyField, ...], body: Mapping[str, Any]) -> list[str]:
    """Fields of the body that have no row."""
    known = {row.name for row in rows}
    return [name for name in body if name not in known]
