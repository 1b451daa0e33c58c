"""Builds requests from keyword options, for both clients."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from google.protobuf.message import Message as ProtoMessage
from quire.v1 import inference_pb2 as pb

from quire_client.audio import Audio
from quire_client.chat_requests import ChatOptions, Messages, fill_chat, read_image
from quire_client.embeddings import PromptEmbeddings
from quire_client.errors import invalid
from quire_client.images import Image
from request_fields.fields import FIELDS, Field, Kind

Prompt = str | Iterable[int] | PromptEmbeddings | Audio  # text, token ids, input embeddings, or speech

MAX_CHARS_SHOWN = 80
AUDIO_FORMATS = {"wav": pb.AUDIO_FORMAT_WAV, "pcm_f32": pb.AUDIO_FORMAT_PCM_F32}


class GenerateOptions(ChatOptions, total=False):
    """Keyword options of every generation. An unset option takes the model's default, then the server's."""

    model: str  # name of a model or of an adapter; optional if the gateway serves one model
    request_id: str  # at most 64 characters of [A-Za-z0-9._:-]; default: chosen by the server
    # Request fields: written by scripts/docs_tables.py
    temperature: float  # Divides the logits. 0 is greedy. From 0 to 2. Default 1.
    # Keep the smallest set of tokens whose probability reaches top_p. 1 is off. Above 0 and at most 1. Default 1.
    top_p: float
    top_k: int  # Keep the k most likely tokens. 0 is off. Default 0.
    # Drop tokens less likely than min_p times the most likely token. Applied before top_k and top_p. 0 is off. From 0
    # to 1. Default 0.
    min_p: float
    # Drop tokens less likely than top_a times the square of the highest probability. Applied after min_p, to the
    # probabilities of the tokens that it keeps. 0 is off. From 0 to 1. Default 0.
    top_a: float
    # The same seed gives the same tokens: the token at output position p of sample i is a function of the logits, seed,
    # i and p. Unset: the gateway draws one and returns it in Accepted.
    seed: int
    n: int  # Samples of one prompt; the prompt is computed once. At least 1. Default 1.
    # Compute this many samples and return the n with the highest sums of log probabilities, in decreasing order, when
    # all have ended. At least n, and at most the rows of a worker. Unset: n. From 1 to 20.
    best_of: int
    # Divides positive logits and multiplies others, for each token in the prompt or the output. 1 is off. From 0.01 to
    # 100. Default 1.
    repetition_penalty: float
    # Subtracted from the logit of each token in the output, once per occurrence. 0 is off. From -2 to 2. Default 0.
    frequency_penalty: float
    presence_penalty: float  # Subtracted from the logit of each token in the output. 0 is off. From -2 to 2. Default 0.
    # Added to the logits of these tokens, before the penalties. From -100 to 100, at most 1024 items.
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]  # Only these tokens can be sampled. Empty: all. At most 65536 items.
    banned_token_ids: Sequence[int]  # These tokens cannot be sampled. At most 1024 items.
    # Strings that the output does not contain. Each is tokenized with and without a leading space; the last token of
    # each result cannot be sampled after the tokens before it. The same text from other tokens is not detected. At most
    # 128 items, 1 to 128 characters each.
    bad_words: str | Sequence[str]
    # Beam search with this many beams, at most the rows of a worker: the n best sequences are sent when the search
    # ends. Not with parameters of sampling, stop strings, grammars or log probabilities (docs/beam-search.md). 0 and 1
    # are off. From 0 to 64. Default 0.
    beam_width: int
    # With beam_width: a sequence's score is the sum of log probabilities / (output tokens ^ length_penalty). From -10
    # to 10. Default 1.
    length_penalty: float
    early_stopping: bool | str  # With beam_width: when the search ends, as in transformers. Unset: false.
    # The distribution whose log probabilities are returned: `raw`, of the model's logits, or `processed`, after
    # penalties, bans, temperature and filters. Unset: the gateway's --logprobs-mode (docs/rollouts.md).
    logprobs_mode: str
    # The last k tokens of the prompt count as output: with output.prompt_logprobs, their log probabilities are the bits
    # that Generate returns for them with the same parameters. Shorter than the prompt.
    num_forced_tokens: int
    # Return a digest of the model's logits with each log probability: xxh3_64 of all of them as float32.
    logits_digests: bool
    json_schema: str | Mapping[str, Any]  # The output is JSON that matches this JSON Schema. At most 128 KiB.
    json_object: bool  # The output is a JSON object.
    regex: str  # The output matches this regular expression as a whole. At most 128 KiB.
    choice: str | Sequence[str]  # The output is one of these strings. At most 1024 items, 1 to 1024 characters each.
    grammar: str  # The output matches this grammar, in llguidance's variant of Lark or in GBNF. At most 128 KiB.
    # False: the worker computes no drafts of this request (docs/speculation.md). The tokens are the same. Unset: true.
    speculative: bool
    # Maximum output tokens. 0 computes the prompt, which fills the prefix cache, and returns no token. Unset: as many
    # as fit after the prompt in max_model_len and the KV pool.
    max_tokens: int
    # Minimum number of output tokens; at most max_tokens. Before that, EOS and stop_token_ids cannot be sampled, and
    # stop strings are not matched. Default 0.
    min_tokens: int
    # Strings that end the output, matched in the output text only. The text is cut before the match. At most 16 items,
    # 1 to 256 characters each.
    stop: str | Sequence[str]
    # Token ids that end the output. The id is in token_ids but not in the text. At most 256 items.
    stop_token_ids: Sequence[int]
    ignore_eos: bool  # Continue past the model's end-of-sequence ids. Default false.
    include_stop_in_output: bool  # Keep the matched stop string in the text. Default false.
    send_text: bool  # Send the text. Default true.
    send_token_ids: bool  # Send the token ids. Default true.
    skip_special_tokens: bool  # Leave special tokens out of the text. Default true.
    # Send the text as parts: reasoning, content and tool calls (docs/chat.md). The SDK's default for chats: true.
    # Default false.
    parse_chat: bool
    # Return the log probability of each output token and of this many most likely tokens. At most the gateway's
    # --max-logprobs, 20 by default. Unset: none. From 0 to 128.
    logprobs: int
    # Return the log probability of each prompt token except the first, and of this many most likely tokens. The prompt
    # is computed without the prefix cache. Unset: none. From 0 to 128.
    prompt_logprobs: int
    priority: int  # Requests with a lower number run first. From -1000 to 1000. Default 0.
    cache_salt: str  # Requests with different salts share no cached blocks. At most 128 bytes.
    determinism: str  # `exact` is refused where workers run `best_effort`. Unset: either.
    # The tenant whose share of the workers the request uses; requests without one have a common share. Where requests
    # have owners, it is the owner (docs/keys.md); else it is not verified. At most 128 bytes.
    tenant_id: str
    # A name of the conversation that the request is a turn of. Its cached blocks are evicted as late as blocks that
    # were used twice; those of an earlier turn that a later turn no longer has, as those of other requests. At most 128
    # bytes.
    conversation: str
    truncate_prompt_tokens: int  # Keep only the last k tokens of the prompt. Unset: all. At least 1.
    # Keep a record of the request in Redis, so that a client can continue it by its id (docs/resume.md). Refused with
    # FAILED_PRECONDITION if the gateways keep no records. Default false.
    resumable: bool
    # Return a signed receipt of each sample (docs/receipts.md). Sets output.logprobs, if it is unset, and
    # sampling.logits_digests. Refused with FAILED_PRECONDITION by gateways without --receipt-key-file.
    receipt: bool
    # Continue this session (docs/sessions.md): the prompt is the session's prompt, its output, and then the new input.
    # Fields that are not set have the session's values. Empty: the prompt is complete. At most 64 bytes.
    session_id: str
    session_sample: int  # With session_id: the sample whose output is continued. Default 0.
    # Name of a LoRA adapter of the model (docs/adapters.md). Empty: none, or the adapter that `model` names. At most
    # 512 bytes.
    adapter: str
    # Encoded images, one for each placeholder of a prompt of text or tokens, in order (docs/images.md). Chats have
    # images in their parts.
    images: Sequence[Image | bytes | str | PathLike[str]]
    # End of request fields
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
        setattr(message, name, _enum_number(field, value))
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
