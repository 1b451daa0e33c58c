"""Builds requests from keyword options, for both clients."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from google.protobuf.message import Message as ProtoMessage
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2

from quire_client.audio import Audio
from quire_client.chat_requests import ChatOptions, Messages, fill_chat, read_image
from quire_client.embeddings import PromptEmbeddings
from quire_client.errors import invalid
from quire_client.images import Image
from request_fields.fields import FIELDS, Field, Kind

Prompt = str | Iterable[int] | PromptEmbeddings | Audio  # text, token ids, input embeddings, or speech

MAX_CHARS_SHOWN = 80
AUDIO_FORMATS = {"wav": pb.AUDIO_FORMAT_WAV, "pcm_f32": pb.AUDIO_FORMAT_PCM_F32}
ENUMS: Mapping[str, Mapping[Any, int]] = {  # option -> value -> number in the protocol
    "determinism": {
        "best_effort": types_pb2.DETERMINISM_BEST_EFFORT,
        "exact": types_pb2.DETERMINISM_EXACT,
    },
    "early_stopping": {
        False: types_pb2.EARLY_STOPPING_FALSE,
        True: types_pb2.EARLY_STOPPING_TRUE,
        "never": types_pb2.EARLY_STOPPING_NEVER,
    },
}


class GenerateOptions(ChatOptions, total=False):
    """Keyword options of every generation. An unset option takes the model's default, then the server's."""

    model: str  # name of a model or of an adapter; optional if the gateway serves one model
    adapter: str  # name of a LoRA adapter of the model
    request_id: str  # at most 64 characters of [A-Za-z0-9._:-]; default: chosen by the server
    # Sampling
    temperature: float  # 0 is greedy; range [0, 2]
    top_p: float  # range (0, 1]
    top_k: int  # 0 is off
    min_p: float  # range [0, 1]
    repetition_penalty: float  # range [0.01, 100]; 1 is off
    frequency_penalty: float  # range [-2, 2]; 0 is off
    presence_penalty: float  # range [-2, 2]; 0 is off
    logit_bias: Mapping[int, float]  # by token id; range [-100, 100]
    allowed_token_ids: Sequence[int]  # only these can be sampled
    banned_token_ids: Sequence[int]  # these cannot be sampled
    bad_words: str | Sequence[str]  # strings that the output does not contain
    seed: int  # the same seed gives the same tokens; default: random, returned in the result
    n: int  # samples of one prompt
    best_of: int  # samples to compute; the n with the highest sums of log probabilities are returned; range [n, 20]
    beam_width: int  # beam search with this many beams, instead of sampling; the n best sequences are returned
    length_penalty: float  # of a beam search; range [-10, 10]
    early_stopping: bool | str  # of a beam search: False, True or "never", as in transformers
    # Structured output: at most one of these
    json_schema: str | Mapping[str, Any]  # JSON that matches this JSON Schema
    json_object: bool  # any JSON object
    regex: str  # text that matches this regular expression
    choice: Sequence[str]  # one of these strings
    grammar: str  # text of this grammar, in llguidance's variant of Lark or in GBNF
    # Prompt
    truncate_prompt_tokens: int  # keep only the last tokens of the prompt
    images: Sequence[Image | bytes | str | PathLike[str]]  # for the placeholders of a text or token prompt, in order
    # Stopping
    max_tokens: int  # default: the rest of the model's length
    min_tokens: int  # minimum number of output tokens; range [0, max_tokens]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_in_output: bool
    # Output
    send_text: bool  # default True
    send_token_ids: bool  # default True
    skip_special_tokens: bool  # default True
    parse_chat: bool  # separate reasoning, content and tool calls; default True for messages
    logprobs: int  # log probabilities of each token and of this many most likely tokens; 0: of the token only
    prompt_logprobs: int  # the same for each prompt token
    # Scheduling
    priority: int  # lower runs first; range [-1000, 1000]
    cache_salt: str  # requests with different salts share no cached blocks
    determinism: str  # exact or best_effort
    tenant_id: str  # the tenant that the request counts for in fair queueing; at most 128 bytes
    resumable: bool  # keep a record, so that resume() can continue the request
    # Additional gRPC metadata of the call, e.g. for a proxy
    metadata: Mapping[str, str] | None
    # Deadline of the request; None: no deadline
    timeout_s: float | None
    # Resuming a stream that broke; default: the settings of the client
    resume: bool
    resume_timeout_s: float
    stall_timeout_s: float | None


LISTS = (Kind.STRINGS, Kind.TOKEN_IDS)
BY_OPTION = {field.option: field for field in FIELDS}
CHAT = frozenset(ChatOptions.__annotations__)
CALL = frozenset({"metadata", "timeout_s", "resume", "resume_timeout_s", "stall_timeout_s"})  # not part of the request
KNOWN = frozenset(GenerateOptions.__annotations__) - CALL


def check_options(options: Mapping[str, Any]) -> None:
    """Raises TypeError for an unknown option."""
    unknown = set(options) - KNOWN - CALL
    if unknown:
        known = ", ".join(sorted(KNOWN | CALL))
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}; known options: {known}")


def generate_request(
    prompt: Prompt | None,
    token_ids: Iterable[int] | None,
    messages: Messages | None,
    options: Mapping[str, Any],
) -> pb.GenerateRequest:
    """A GenerateRequest. Raises TypeError for an unknown option, InvalidRequest for a value of the wrong type."""
    check_options(options)
    request = pb.GenerateRequest(joins_events=True)
    request.prompt.CopyFrom(prompt_message(prompt, token_ids, messages, options))
    assign(request, "model", options)
    assign(request, "request_id", options)
    if messages is not None:
        request.output.parse_chat = True
    for option, value in options.items():
        field = BY_OPTION.get(option)
        if field is not None and value is not None:
            _set_field(getattr(request, field.message) if field.message else request, field, options)
    return request


def _set_field(message: ProtoMessage, field: Field, options: Mapping[str, Any]) -> None:
    """Set one supported field from its option."""
    name, option = field.name, field.option
    value = options[option]
    if field.kind is Kind.BLOBS:
        _extend(message, name, [read_image(image, option).data for image in value], option)
    elif field.kind in LISTS:
        _extend(message, name, [value] if isinstance(value, str) else value)
    elif field.kind is Kind.BIASES:
        _update(message, name, value)
    elif field.kind is Kind.ENUM:
        setattr(message, name, _enum_number(option, value))
    elif name == "json_schema" and isinstance(value, Mapping):
        setattr(message, name, _schema_text(value))
    else:
        assign(message, name, options, option)


def resume_request(request_id: str, after: int | Mapping[int, int]) -> pb.ResumeRequest:
    """A ResumeRequest. Raises InvalidRequest for a value of the wrong type."""
    request = pb.ResumeRequest()
    assign(request, "request_id", {"request_id": request_id})
    for index, num_tokens in ({0: after} if isinstance(after, int) else after).items():
        position = request.after.add()
        assign(position, "index", {"after": index}, "after")
        assign(position, "num_tokens", {"after": num_tokens}, "after")
    return request


def prompt_message(
    prompt: Prompt | None,
    token_ids: Iterable[int] | None,
    messages: Messages | None,
    options: Mapping[str, Any],
) -> pb.Prompt:
    """A Prompt from exactly one of `prompt`, `token_ids` and `messages`. `prompt` may also be a list of token ids,
    PromptEmbeddings or Audio.
    """
    if prompt is not None and not isinstance(prompt, str | PromptEmbeddings | Audio) and token_ids is None:
        prompt, token_ids = None, _token_ids(prompt)
    given = [
        name
        for name, value in (("prompt", prompt), ("token_ids", token_ids), ("messages", messages))
        if value is not None
    ]
    if len(given) != 1:
        raise invalid(
            "prompt", f"give exactly one of prompt, token_ids and messages; got {' and '.join(given) or 'none'}"
        )
    chat_options = sorted(CHAT & set(options))
    if chat_options and messages is None:
        raise invalid(chat_options[0], f"{chat_options[0]} requires messages: only a chat uses the chat template")
    request = pb.Prompt()
    if messages is not None:
        fill_chat(request.chat, messages, options)
    elif token_ids is not None:
        request.tokens.SetInParent()
        _extend(request.tokens, "ids", token_ids, "token_ids")
    elif isinstance(prompt, PromptEmbeddings):
        request.embeddings = prompt.data
    elif isinstance(prompt, Audio):
        _set_audio(request.audio, prompt)
    else:
        assign(request, "text", {"prompt": prompt}, "prompt")
    return request


def _set_audio(message: pb.Audio, audio: Audio) -> None:
    if audio.format not in AUDIO_FORMATS:
        raise invalid("prompt", f"the format of audio is {audio.format!r}; must be one of {', '.join(AUDIO_FORMATS)}")
    message.data, message.format = audio.data, AUDIO_FORMATS[audio.format]
    message.language, message.task = audio.language or "", audio.task or ""


def _token_ids(prompt: Any) -> list[int]:
    try:
        ids = list(prompt)
    except TypeError:
        ids = [None]
    if all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        return ids
    hint = "; for a conversation use messages= or chat()" if any(isinstance(token, Mapping) for token in ids) else ""
    kinds = "a str, a list of token ids, PromptEmbeddings or Audio"
    raise invalid("prompt", f"prompt must be {kinds}; got {prompt!r:.80}{hint}")


def tokenize_request(
    prompt: str | None, messages: Messages | None, model: str, add_special_tokens: bool | None, options: ChatOptions
) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    request.prompt.CopyFrom(prompt_message(prompt, None, messages, options))
    return request


def detokenize_request(ids: Iterable[int], model: str, skip_special_tokens: bool) -> pb.DetokenizeRequest:
    request = pb.DetokenizeRequest(model=model, skip_special_tokens=skip_special_tokens)
    _extend(request, "ids", ids)
    return request


def _schema_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise invalid("json_schema", f"json_schema is not JSON: {error}") from None


def _enum_number(option: str, value: Any) -> int:
    values = ENUMS[option]
    if not isinstance(value, str | bool) or value not in values:
        raise invalid(option, f"{option} must be {' or '.join(map(str, values))}; got {value!r}")
    return values[value]


def assign(message: ProtoMessage, name: str, options: Mapping[str, Any], option: str = "") -> None:
    """Set a scalar field if the option is set. protobuf rejects values outside the field's type (-1, a str, ...)."""
    option = option or name
    value = options.get(option)
    if value is None:
        return
    try:
        setattr(message, name, value)
    except UnicodeEncodeError as error:
        raise invalid(option, f"{option} is not valid Unicode at character {error.start}: {error.reason}") from None
    except (TypeError, ValueError) as error:
        raise invalid(option, f"{option}={repr(value)[:MAX_CHARS_SHOWN]} is not a valid value: {error}") from None


def _extend(message: ProtoMessage, name: str, values: Iterable[Any], option: str = "") -> None:
    option = option or name
    values = list(values)
    if not values:
        return  # accessing the field would mark its message as set
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError) as error:
        raise invalid(option, f"{option} contains an invalid value: {error}") from None


def _update(message: ProtoMessage, name: str, values: Mapping[int, float]) -> None:
    """Set a map field."""
    try:
        getattr(message, name).update(dict(values))
    except (TypeError, ValueError) as error:
        raise invalid(name, f"{name}={repr(values)[:MAX_CHARS_SHOWN]} is not a valid value: {error}") from None
