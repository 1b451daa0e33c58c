"""Converts bodies of HTTP requests, with structured output of OpenAI and vLLM, to protobuf requests. Pure."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.http import fields
from gateway_svc.http.fields import GUIDED, BodyField, ignored_names, path_names, set_parameter, set_parameters
from gateway_svc.http.json_text import (
    TooManyValuesError,
    decode,
    flag,
    invalid,
    list_of,
    number_of,
    object_of,
    optional,
    shown,
    text,
    text_of,
    token_ids,
)
from gateway_svc.http.openai.chat import chat_of
from gateway_svc.request.field_errors import check_cost
from request_fields.fields import FieldError
from svc_common.errors import InvalidRequestError

COMPLETION_MAX_TOKENS = 16  # default max_tokens of /v1/completions, as in OpenAI's API
ROLLOUT_IGNORED = {"detokenize", "output_kind"}  # the answer never has text
LOGPROBS = BodyField("logprobs", "output.logprobs")
MAX_TIMEOUT_S = 86400
MAX_INPUTS = 2048
MAX_PROMPTS = 1024  # number of prompts in one body
RESPONSE_FORMAT, STRUCTURED_OUTPUTS = "response_format", "structured_outputs"
RESPONSE_FORMATS = "text, json_object, json_schema and structural_tag"
OF_KEY = {row.name.removeprefix("guided_"): row for row in GUIDED}  # keys of structured_outputs
PREFIX, SUFFIX = "{prefix}", "{suffix}"
INFILL_FORMATS = (  # special tokens and the texts between them
    ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),  # Codestral
)


@dataclass(frozen=True, slots=True)
class Generation:
    """A parsed body of a completions endpoint."""

    requests: tuple[pb.GenerateRequest, ...]  # one per prompt, without request_id
    has_echo: bool  # the prompt is returned in front of the output
    returns_token_ids: bool
    returns_prompt_logprobs: bool
    is_stream: bool
    includes_usage: bool
    has_continuous_usage: bool
    timeout_s: float | None
    suffix: str  # text after the output
    ignored: tuple[str, ...]  # names of fields that have no effect here
    names: Mapping[str, str]  # field names in the body, by field path in GenerateRequest

    @property
    def model(self) -> str:
        return self.requests[0].model

    @property
    def num_logprobs(self) -> int | None:
        """The number of most likely tokens at each position; None: no log probabilities."""
        output = self.requests[0].output
        return output.logprobs if output.HasField("logprobs") else None

    @property
    def n(self) -> int:
        """Choices per prompt."""
        sampling = self.requests[0].sampling
        return sampling.n if sampling.HasField("n") else 1


def body_of(data: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises InvalidRequestError."""
    try:
        body = decode(data)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except TooManyValuesError as error:
        raise InvalidRequestError(f"the body is too large: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequestError(f"the body is {shown(body)}; must be a JSON object")
    return body


def chat_generation(data: bytes) -> Generation:
    """Parse a body of /v1/chat/completions. Raises InvalidRequestError."""
    body = body_of(data)
    chat, ignored = chat_of(body)
    asked = _generation(fields.CHAT, body, [pb.Prompt(chat=chat)], ignored=ignored)
    for request in asked.requests:
        request.output.parse_chat = True
        _set_chat_logprobs(body, request)
    return asked


def completion_generation(data: bytes) -> Generation:
    """Parse a body of /v1/completions. Raises InvalidRequestError."""
    return completion_of(body_of(data))


def rollout_generation(data: bytes) -> Generation:
    """Parse a body of /inference/v1/generate: token ids in, token ids out. Raises InvalidRequestError."""
    body = body_of(data)
    ids, params = body.get("token_ids"), object_of("sampling_params", body.get("sampling_params") or {})
    if not isinstance(ids, list) or not ids:
        raise invalid("token_ids", f"is {shown(ids)}; must be a list of token ids")
    own = {row.name: body[row.name] for row in fields.ROLLOUT if row.name in body}
    kept = {name: value for name, value in params.items() if name not in ROLLOUT_IGNORED}
    asked = completion_of({**kept, **own, "prompt": token_ids("token_ids", ids), "return_token_ids": True})
    for request in asked.requests:
        request.output.text = False
    unknown = (name for name in ignored_names(fields.ROLLOUT, body))
    ignored = [name for name in asked.ignored if name not in ("token_ids", "sampling_params")]
    return replace(asked, ignored=(*ignored, *unknown))


def completion_of(body: dict[str, Any]) -> Generation:
    """The generation of a decoded body of /v1/completions. Raises InvalidRequestError."""
    asked = _generation(fields.COMPLETION, body, _completion_prompts(body))
    for request in asked.requests:
        if not request.stop.HasField("max_tokens"):
            request.stop.max_tokens = COMPLETION_MAX_TOKENS
    return asked


def tokenize_request(data: bytes) -> tuple[pb.TokenizeRequest, list[str]]:
    """Parse a body of /tokenize. Also returns the names of ignored fields. Raises InvalidRequestError."""
    body = body_of(data)
    request = pb.TokenizeRequest(
        model=text(body, "model"),
        add_special_tokens=flag(body, "add_special_tokens", default=True),
        token_strings=flag(body, "return_token_strs", default=False),
    )
    ignored: list[str] = []
    if body.get("messages") is None:
        request.prompt.text = text_of("prompt", body.get("prompt"))
    else:
        chat, ignored = chat_of(body)
        request.prompt.chat.CopyFrom(chat)
    return request, [*ignored_names(fields.TOKENIZE, body), *ignored]


def detokenize_request(data: bytes) -> tuple[pb.DetokenizeRequest, list[str]]:
    """Parse a body of /detokenize. Also returns the names of ignored fields. Raises InvalidRequestError."""
    body = body_of(data)
    ids = token_ids("tokens", list_of("tokens", body.get("tokens"), "token ids"))
    request = pb.DetokenizeRequest(model=text(body, "model"), ids=ids)
    return request, ignored_names(fields.DETOKENIZE, body)


def with_token_ids(asked: Generation) -> Generation:
    """The same generation with `return_token_ids`, for a model without a tokenizer: its answers have no text."""
    for request in asked.requests:
        request.output.token_ids = True
    return replace(asked, returns_token_ids=True)


def with_suffix(asked: Generation, has_token: Callable[[str], bool]) -> Generation:
    """The generation whose output stands between prompt and suffix. Raises InvalidRequestError."""
    if asked.has_echo:
        raise invalid("suffix", "is set, and echo is true; set only one of them")
    for request in asked.requests:
        if not request.prompt.HasField("text"):
            raise invalid("suffix", "is set, but a prompt is not a text; send texts, or leave suffix unset")
        prompt = infill_prompt(request.prompt.text, asked.suffix, has_token)
        if prompt is None:
            raise invalid("suffix", "is set, but the model's vocabulary has no tokens for infilling; leave it unset")
        request.prompt.text = prompt
    return asked


def infill_prompt(prefix: str, suffix: str, has_token: Callable[[str], bool]) -> str | None:
    """The prompt whose answer stands between prefix and suffix; None if the vocabulary has no tokens for it."""
    given = {PREFIX: prefix, SUFFIX: suffix}
    for format in INFILL_FORMATS:
        if all(has_token(part) for part in format if part not in given):
            return "".join(given.get(part, part) for part in format)
    return None


def _generation(
    rows: tuple[BodyField, ...], body: dict[str, Any], prompts: Sequence[pb.Prompt], *, ignored: Sequence[str] = ()
) -> Generation:
    request = pb.GenerateRequest(model=text(body, "model"))
    set_parameters(rows, body, request)
    names = _set_grammar(body, request)
    _set_beam_search(body, request)
    is_stream = flag(body, "stream", default=False)
    includes_usage, is_continuous = _stream_options(body, is_stream=is_stream)
    returns_token_ids = flag(body, "return_token_ids", default=False)
    if is_stream:
        _check_stream(request)
    # Token ids are needed to count tokens in each chunk; otherwise only the final usage has a count.
    request.output.token_ids = is_continuous or returns_token_ids
    has_echo, returns_prompt_logprobs = flag(body, "echo", default=False), request.output.HasField("prompt_logprobs")
    names = {"prompt.embeddings": "prompt_embeds"} | path_names(rows, body) | names
    if has_echo and request.output.logprobs >= request.output.prompt_logprobs and request.output.HasField("logprobs"):
        request.output.prompt_logprobs = request.output.logprobs
        names["output.prompt_logprobs"] = LOGPROBS.name
    _check_cost(request, prompts, names)
    return Generation(
        requests=tuple(_with_prompt(request, prompt) for prompt in prompts),
        has_echo=has_echo,
        returns_token_ids=returns_token_ids,
        returns_prompt_logprobs=returns_prompt_logprobs,
        is_stream=is_stream,
        includes_usage=includes_usage,
        has_continuous_usage=is_continuous,
        timeout_s=_timeout_of(body),
        suffix=text(body, "suffix"),
        ignored=(*ignored_names(rows, body), *ignored),
        names=names,
    )


def _check_cost(request: pb.GenerateRequest, prompts: Sequence[pb.Prompt], names: Mapping[str, str]) -> None:
    try:
        check_cost(request, prompts)
    except FieldError as error:
        name = names.get(error.field, error.field)
        raise InvalidRequestError(str(error).replace(error.field, name, 1), field=name) from None


def _check_stream(request: pb.GenerateRequest) -> None:
    """Check that the fields of a request can be combined with `stream`."""
    if request.output.HasField("prompt_logprobs"):
        raise invalid("prompt_logprobs", "is set, but streams do not support it; remove it or set stream to false")
    sampling = request.sampling
    if sampling.best_of > max(1, sampling.n):
        words = f"is {sampling.best_of}, more than n, which is {max(1, sampling.n)}: such choices are not streamed"
        raise invalid("best_of", f"{words}; set stream to false or remove best_of")


def _set_chat_logprobs(body: Mapping[str, Any], request: pb.GenerateRequest) -> None:
    """Apply `logprobs`, which is a flag in chats. `top_logprobs` is the number of most likely tokens."""
    output = request.output
    if flag(body, "logprobs", default=False):
        if not output.HasField("logprobs"):
            set_parameter(LOGPROBS, 0, request)
        return
    if output.logprobs:
        raise invalid("top_logprobs", f"is {output.logprobs}, but logprobs is not true; set logprobs to true")
    output.ClearField("logprobs")


def _set_beam_search(body: Mapping[str, Any], request: pb.GenerateRequest) -> None:
    """Apply vLLM's `use_beam_search`. Its clients send the number of beams as n, and temperature 0."""
    if not flag(body, "use_beam_search", default=False):
        return
    sampling = request.sampling
    if not sampling.HasField("beam_width"):
        sampling.beam_width = max(1, sampling.n)
    if sampling.beam_width < 2:
        raise invalid("use_beam_search", "is true, but there is one beam; set n or beam_width to at least 2")
    if sampling.temperature == 0:
        sampling.ClearField("temperature")


def _with_prompt(request: pb.GenerateRequest, prompt: pb.Prompt) -> pb.GenerateRequest:
    own = pb.GenerateRequest()
    own.CopyFrom(request)
    own.prompt.CopyFrom(prompt)
    return own


def _stream_options(body: Mapping[str, Any], *, is_stream: bool) -> tuple[bool, bool]:
    options = optional(object_of, "stream_options", body.get("stream_options"))
    if options is None:
        return False, False
    if not is_stream:
        raise invalid("stream_options", "is set, but stream is not true; remove stream_options or set stream to true")
    includes_usage = flag(options, "include_usage", default=False)
    return includes_usage, includes_usage and flag(options, "continuous_usage_stats", default=False)


def _timeout_of(body: Mapping[str, Any]) -> float | None:
    value = number_of(body.get("timeout"))
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value <= MAX_TIMEOUT_S:
        raise invalid("timeout", f"is {shown(value)}; must be a number of seconds above 0 and at most {MAX_TIMEOUT_S}")
    return float(value)


def _completion_prompts(body: Mapping[str, Any]) -> list[pb.Prompt]:
    """The prompts of `prompt_embeds`, then those of `prompt`."""
    embeds, prompt = body.get("prompt_embeds"), body.get("prompt")
    if embeds is None:
        return _prompts_of(prompt)
    if flag(body, "echo", default=False):
        raise invalid("echo", "is true, but prompt_embeds have no text; set echo to false")
    if not isinstance(embeds, str | list) or not embeds:
        raise invalid("prompt_embeds", "must be a base64 string or a list of base64 strings")
    prompts = [_embeddings_prompt(embeds)] if isinstance(embeds, str) else [_embeddings_prompt(one) for one in embeds]
    prompts += [] if prompt is None or prompt == "" else _prompts_of(prompt)
    if len(prompts) > MAX_PROMPTS:
        raise invalid("prompt_embeds", f"and prompt have {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed")
    return prompts


def _embeddings_prompt(value: Any) -> pb.Prompt:
    try:
        return pb.Prompt(embeddings=base64.b64decode(text_of("prompt_embeds", value), validate=True))
    except ValueError as error:
        raise invalid("prompt_embeds", f"is not base64: {error}") from None


def pooled_inputs(value: Any, name: str = "input") -> list[pb.Prompt]:
    """The `input` of embeddings: as a prompt, with more items."""
    return _prompts_of(value, name, MAX_INPUTS)


def _prompts_of(prompt: Any, name: str = "prompt", most: int = MAX_PROMPTS) -> list[pb.Prompt]:
    """A string, a list of strings, a list of ids or a list of lists of ids."""
    if isinstance(prompt, str):
        return [pb.Prompt(text=prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise invalid(name, "must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not isinstance(prompt[0], str | list):
        return [_ids_prompt(name, prompt)]
    if len(prompt) > most:
        raise invalid(name, f"has {len(prompt)} items; at most {most} are allowed: send them in parts")
    return [_one_prompt(f"{name}[{i}]", item) for i, item in enumerate(prompt)]


def _one_prompt(where: str, item: Any) -> pb.Prompt:
    if isinstance(item, str):
        return pb.Prompt(text=item)
    if isinstance(item, list):
        return _ids_prompt(where, item)
    raise invalid(where, f"is {shown(item)}; must be a string or a list of token ids")


def _ids_prompt(where: str, ids: list[Any]) -> pb.Prompt:
    return pb.Prompt(tokens=types.TokenIds(ids=token_ids(where, ids)))


def _set_grammar(body: Mapping[str, Any], request: pb.GenerateRequest) -> dict[str, str]:
    """Set the grammar that the body asks for by response_format or structured_outputs. Returns the names in the body,
    by field path in GenerateRequest. Raises InvalidRequestError, also if the body asks for several grammars.
    """
    asked = [*_of_response_format(body), *_of_structured_outputs(body)]
    guided = [(row, body[row.name]) for row in GUIDED if body.get(row.name) not in (None, False)]
    names = [row.name for row, _ in [*guided, *asked]]
    if len(names) > 1:
        raise invalid(names[1], f"is set together with {names[0]}; set only one of them")
    if any(value in ([], "") for _, value in [*guided, *asked]):
        raise invalid(names[0], "is empty; give it a value, or leave it out")
    for row, value in asked:
        set_parameter(row, value, request)
    return {row.path: row.name for row, _ in asked}


def _of_response_format(body: Mapping[str, Any]) -> Iterator[tuple[BodyField, Any]]:
    value = optional(object_of, RESPONSE_FORMAT, body.get(RESPONSE_FORMAT))
    if value is None or value.get("type") == "text":
        return
    if value.get("type") == "json_object":
        yield BodyField(f"{RESPONSE_FORMAT}.type", "sampling.json_object"), True
    elif value.get("type") == "json_schema":
        inner = optional(object_of, f"{RESPONSE_FORMAT}.json_schema", value.get("json_schema")) or {}
        name = f"{RESPONSE_FORMAT}.json_schema.schema"
        if optional(object_of, name, inner.get("schema")) is None:
            raise invalid(name, "is not set; give a JSON Schema")
        yield BodyField(name, "sampling.json_schema"), inner["schema"]
    elif value.get("type") == "structural_tag":
        yield BodyField(RESPONSE_FORMAT, "sampling.structural_tag"), value
    else:
        raise invalid(f"{RESPONSE_FORMAT}.type", f"is {shown(value.get('type'))}; must be one of {RESPONSE_FORMATS}")


def _of_structured_outputs(body: Mapping[str, Any]) -> Iterator[tuple[BodyField, Any]]:
    for key, value in (optional(object_of, STRUCTURED_OUTPUTS, body.get(STRUCTURED_OUTPUTS)) or {}).items():
        if value is None or value is False:
            continue
        name = f"{STRUCTURED_OUTPUTS}.{key}"
        if key not in OF_KEY:
            raise invalid(name, f"is not served; the fields are {', '.join(sorted(OF_KEY))}")
        yield BodyField(name, OF_KEY[key].path), value
