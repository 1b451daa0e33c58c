"""Builds requests from keyword options, for both clients: generations, `embed`, `score`, `decide` and others."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Self

from google.protobuf.message import Message as ProtoMessage
from quire.v1 import inference_pb2 as pb

from quire_client.errors import invalid
from quire_client.inputs import Audio
from quire_client.options import RequestOptions
from quire_client.requests.chat import ChatOptions, Messages, fill_chat, read_image
from request_fields.fields import FIELDS, Field, Kind

if TYPE_CHECKING:
    from typing_extensions import Buffer


from collections.abc import Sequence
from typing import TypedDict

from quire.v1 import types_pb2

from quire_client.inputs import Image, Question

DTYPES = {"f": "F32", "e": "F16"}  # by format of the buffer protocol


@dataclass(frozen=True, slots=True)
class PromptEmbeddings:
    """A prompt as input embeddings [positions, hidden_size], for example of prompt tuning.

    `data` is a safetensors file with one tensor of type float32, bfloat16 or float16:

        PromptEmbeddings(safetensors.torch.save({"prompt": tensor}))
        PromptEmbeddings.of(array)  # a numpy array
    """

    data: bytes

    @classmethod
    def of(cls, rows: Buffer) -> Self:
        """From a contiguous array of float32 or float16 with two dimensions, such as a numpy array."""
        view = memoryview(rows)
        if view.ndim != 2 or view.format not in DTYPES or not view.c_contiguous or sys.byteorder != "little":
            raise invalid(
                "prompt",
                f"embeddings are an array with {view.ndim} dimensions and format {view.format!r}; must be a contiguous "
                "little-endian array of float32 or float16 with 2 dimensions; use safetensors for other types",
            )
        fields = {"dtype": DTYPES[view.format], "shape": view.shape, "data_offsets": [0, view.nbytes]}
        header = json.dumps({"prompt": fields}).encode()
        header += b" " * (-len(header) % 8)
        return cls(len(header).to_bytes(8, "little") + header + view.tobytes())


Prompt = str | Iterable[int] | PromptEmbeddings | Audio  # text, token ids, input embeddings, or speech

MAX_CHARS_SHOWN = 80
AUDIO_FORMATS = {"wav": pb.AUDIO_FORMAT_WAV, "pcm_f32": pb.AUDIO_FORMAT_PCM_F32}


class GenerateOptions(ChatOptions, RequestOptions, total=False):
    """Keyword options of every generation. An unset option takes the model's default, then the server's."""

    model: str  # name of a model or of an adapter; optional if the gateway serves one model
    request_id: str  # at most 64 characters of [A-Za-z0-9._:-]; default: chosen by the server
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
        raise TypeError(f"unknown option {', '.join(map(_with_nearest, sorted(unknown)))}")


def _with_nearest(option: str) -> str:
    near = get_close_matches(option, sorted(KNOWN | CALL), n=1)
    return f"{option}; did you mean {near[0]}?" if near else f"{option}; docs/request-fields.md lists all options"


def generate_request(
    prompt: Prompt | None, token_ids: Iterable[int] | None, messages: Messages | None, options: Mapping[str, Any]
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
        _extend(message, name, [read_image(image, option).data for image in _list(value, option)], option)
    elif field.kind in LISTS:
        _extend(message, name, _list(value, option))
    elif field.kind in (Kind.BIASES, Kind.COUNTS):
        _update(message, name, value)
    elif field.kind is Kind.ENUM:
        setattr(message, name, _enum_number(field, value))
    elif name == "json_schema" and isinstance(value, Mapping):
        setattr(message, name, _schema_text(value))
    else:
        assign(message, name, options, option)


def _list(value: Any, option: str) -> Iterable[Any]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Iterable):
        raise invalid(option, f"{option}={repr(value)[:MAX_CHARS_SHOWN]} is not a valid value: must be a list")
    return value


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
    prompt: Prompt | None, token_ids: Iterable[int] | None, messages: Messages | None, options: Mapping[str, Any]
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
    message.language, message.task, message.prompt = audio.language or "", audio.task or "", audio.prompt or ""


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


def _enum_number(field: Field, value: Any) -> int:
    values = field.values or {}
    if not isinstance(value, str | bool) or value not in values:
        raise invalid(field.option, f"{field.option} must be {' or '.join(map(str, values))}; got {value!r}")
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
        shown = f"{option}={repr(value)[:MAX_CHARS_SHOWN]}"
        raise invalid(option, f"{shown} is not a valid value: {error}{_range_of(option)}") from None


def _range_of(option: str) -> str:
    field = BY_OPTION.get(option)
    if field is None or field.low is None:
        return ""
    return f"; it must be {'above' if field.excludes_low else 'at least'} {field.low:g}"


def _extend(message: ProtoMessage, name: str, values: Iterable[Any], option: str = "") -> None:
    option = option or name
    values = list(values)
    if not values:
        return  # accessing the field would mark its message as set
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError) as error:
        raise invalid(option, f"{option} contains an invalid value: {error}") from None


def _update(message: ProtoMessage, name: str, values: Mapping[Any, float]) -> None:
    """Set a map field."""
    try:
        getattr(message, name).update(dict(values))
    except (TypeError, ValueError) as error:
        raise invalid(name, f"{name}={repr(values)[:MAX_CHARS_SHOWN]} is not a valid value: {error}") from None


EmbedInput = str | Sequence[Any]  # a text, token ids, or the messages of a conversation


class QueueOptions(TypedDict, total=False):
    """Keyword options of `embed` and `score`."""

    request_id: str  # at most 64 characters of [A-Za-z0-9._:-]; default: chosen by the server
    truncate: bool  # cut inputs that are longer than the model accepts; default: they are refused
    priority: int  # lower runs first
    tenant_id: str  # fair queueing


class EmbedOptions(QueueOptions, total=False):
    """Keyword options of `embed`. An unset option takes the model's setting."""

    pooling: str  # last, mean or cls
    normalize: bool  # embeddings have length 1
    dimensions: int  # keep the first numbers
    prompt_name: str  # name of a prompt of the model, which precedes each text, e.g. query


class ScoreOptions(QueueOptions, total=False):
    """Keyword options of `score`."""

    instruction: str  # text that says when a document matches, for models that take an instruction


POOLING = {"last": types_pb2.POOLING_KIND_LAST, "mean": types_pb2.POOLING_KIND_MEAN, "cls": types_pb2.POOLING_KIND_CLS}


def embed_request(inputs: str | Sequence[EmbedInput], model: str, options: EmbedOptions) -> pb.EmbedRequest:
    """An Embed of texts, token ids or conversations."""
    request = pb.EmbedRequest(model=model)
    for item in [inputs] if isinstance(inputs, str) else inputs:
        request.inputs.append(_embed_input(item))
    if (pooling := options.get("pooling")) is not None:
        if pooling not in POOLING:
            raise invalid("pooling", f"pooling must be one of {', '.join(POOLING)}; got {pooling!r}")
        request.pooling = POOLING[pooling]
    for name in ("normalize", "dimensions", "prompt_name", "truncate", "request_id"):
        assign(request, name, options)
    for name in ("priority", "tenant_id"):
        assign(request.scheduling, name, options)
    return request


def _embed_input(item: EmbedInput) -> pb.Prompt:
    if isinstance(item, str):
        return prompt_message(item, None, None, {})
    items = list(item)
    if items and isinstance(items[0], int):
        return prompt_message(None, items, None, {})
    return prompt_message(None, None, items, {})


def score_request(
    query: str | Sequence[str], documents: str | Sequence[str], model: str, options: ScoreOptions
) -> pb.ScoreRequest:
    """A Score of one query against all documents, or of as many queries as documents."""
    found = [documents] if isinstance(documents, str) else list(documents)
    queries = [query] * len(found) if isinstance(query, str) else list(query)
    if len(queries) != len(found):
        raise invalid("query", f"{len(queries)} queries for {len(found)} documents; give one query, or as many")
    request = pb.ScoreRequest(model=model)
    for one, document in zip(queries, found, strict=True):
        request.pairs.add(query=one, document=document)
    for name in ("instruction", "truncate", "request_id"):
        assign(request, name, options)
    for name in ("priority", "tenant_id"):
        assign(request.scheduling, name, options)
    return request


def decide_request(request: pb.GenerateRequest, questions: Iterable[str | Question]) -> pb.DecideRequest:
    """A Decide. A question that is a str is a predicate."""
    decide = pb.DecideRequest(request=request)
    decide.request.ClearField("joins_events")
    if request.output == pb.OutputParams(parse_chat=True):  # nothing that the caller has set
        decide.request.ClearField("output")
    for question in questions:
        asked = Question(question) if isinstance(question, str) else question
        parts = (asked.instructions,) if isinstance(asked.instructions, str) else asked.instructions
        decide.questions.add(choices=_choices(asked.choices), levels=_choices(asked.levels)).instructions.extend(
            pb.ContentPart(image=part.data) if isinstance(part, Image) else pb.ContentPart(text=part) for part in parts
        )
    return decide


def _choices(labels: Sequence[str] | Mapping[str, str]) -> list[pb.Choice]:
    described = labels if isinstance(labels, Mapping) else dict.fromkeys(labels, "")
    return [pb.Choice(label=label, description=words) for label, words in described.items()]
