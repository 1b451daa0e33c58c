"""Requests to encoder-decoder models: the prompt is the encoder's input, and the decoder starts with ids of the model.

The prompt that schedulers get is: the encoder input, padding up to a whole block, the decoder's prompt
(docs/adr/0052-encoders-and-pooled-rows.md).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from quire.internal.v1 import encoder_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request.field_errors import invalid
from gateway_svc.request.models import ServedModel
from request_fields.parameters import Grammar
from svc_common.errors import ContextLengthError

TRANSCRIBE = "transcribe"
MAX_TEXT_CHARS = 4096  # limit for the text before speech


@dataclass(frozen=True, slots=True)
class DecoderStart:
    """How the decoder of a request starts."""

    prompt_ids: tuple[int, ...]
    first_ids: tuple[tuple[int, ...], ...] = ()  # the only ids that can be the first output tokens, by position


@dataclass(frozen=True, slots=True)
class EncoderPlan:
    """The encoder input of a request, for a scheduler."""

    num_padding: int
    decoder_ids: tuple[int, ...]
    message: encoder_pb2.EncoderInput

    def column(self, prompt_ids: array[int]) -> array[int]:
        """The prompt that schedulers get, for an encoder input."""
        return prompt_ids + array("I", [0] * self.num_padding) + array("I", self.decoder_ids)


def decoder_start(prompt: pb.Prompt, model: ServedModel) -> DecoderStart:
    """How the decoder of a model with an encoder starts."""
    info = model.info.encoder
    if info.HasField("audio"):
        return _speech_start(prompt.audio, model)
    first = ((info.forced_bos_token_id,),) if info.HasField("forced_bos_token_id") else ()
    return DecoderStart(tuple(info.decoder_start_ids), first)


def _speech_start(audio: pb.Audio, model: ServedModel) -> DecoderStart:
    """Text before the speech, start, language, task and no timestamps. The model detects a language that is not given:
    then these ids are its first output tokens.
    """
    known = model.info.encoder.audio
    start = (*_text_before(audio, model), *model.info.encoder.decoder_start_ids)
    task = known.task_ids.get(audio.task or TRANSCRIBE)
    after = () if task is None or not known.language_ids else (task,)
    if known.HasField("no_timestamps_id"):
        after = (*after, known.no_timestamps_id)
    if not known.language_ids:
        return DecoderStart((*start, *after))
    if audio.language:
        return DecoderStart((*start, known.language_ids[audio.language], *after))
    languages = tuple(sorted(set(known.language_ids.values())))
    return DecoderStart(start, (languages, *((id_,) for id_ in after)))


def _text_before(audio: pb.Audio, model: ServedModel) -> list[int]:
    """The ids of the text before the speech: its end, in less than half of the decoder's positions, as in Whisper."""
    if not audio.prompt:
        return []
    info, field = model.info.encoder, "prompt.audio.prompt"
    if not info.audio.HasField("previous_id"):
        raise invalid(field, f"is set, but model {model.name!r} takes no text before the speech; leave it unset")
    if len(audio.prompt) > MAX_TEXT_CHARS:
        raise invalid(field, f"has {len(audio.prompt)} characters; at most {MAX_TEXT_CHARS} are allowed")
    ids = model.require_tokenizer(field).encode(f" {audio.prompt.strip()}", add_special_tokens=False)
    return [info.audio.previous_id, *ids[-(info.max_decoder_tokens // 2 - 1) :]]


def resolve_max_tokens(stop: types.StopParams, num_prompt: int, start: DecoderStart, model: ServedModel) -> int:
    """The limit on output tokens, checked against the lengths of encoder, decoder and KV pool."""
    info = model.info.encoder
    if num_prompt > info.max_tokens:
        raise ContextLengthError(
            f"prompt has {num_prompt} tokens; the encoder of model {model.name!r} takes at most {info.max_tokens}: "
            "shorten the prompt",
            field="prompt",
            limit=info.max_tokens,
        )
    num_slots = _padded(num_prompt, model) + len(start.prompt_ids)
    room = info.max_decoder_tokens - len(start.prompt_ids)
    room = min(room, model.limits.pool_tokens + 1 - num_slots)
    if room < 1:
        raise ContextLengthError(
            f"prompt has {num_prompt} tokens; with the decoder's prompt it takes {num_slots} slots, and the largest KV "
            f"pool has {model.limits.pool_tokens}: shorten the prompt, or start the workers with a higher --num-blocks",
            field="prompt",
            limit=model.limits.pool_tokens,
        )
    if not stop.HasField("max_tokens"):
        return room
    if stop.max_tokens > room:
        raise ContextLengthError(
            f"stop.max_tokens is {stop.max_tokens}; the decoder of model {model.name!r} takes "
            f"{info.max_decoder_tokens} tokens with its prompt of {len(start.prompt_ids)}: ask for at most {room}",
            field="stop.max_tokens",
            limit=info.max_decoder_tokens,
        )
    return stop.max_tokens


def encoder_plan(
    num_prompt: int, max_tokens: int, start: DecoderStart, grammar: Grammar | None, model: ServedModel
) -> EncoderPlan:
    """The encoder input of a request. A grammar decides alone where outputs begin and end."""
    info = model.info.encoder
    allowed: dict[int, Sequence[int]] = {}
    if grammar is None and max_tokens:
        allowed |= {position: ids for position, ids in enumerate(start.first_ids) if position < max_tokens}
        if info.HasField("forced_eos_token_id"):
            allowed[max_tokens - 1] = (info.forced_eos_token_id,)
    message = encoder_pb2.EncoderInput(
        num_tokens=num_prompt,
        allowed=[encoder_pb2.AllowedIds(position=position, ids=ids) for position, ids in allowed.items()],
        banned_ids=info.suppress_ids,
        first_banned_ids=info.begin_suppress_ids,
        first_banned_at=len(start.first_ids) if info.HasField("audio") else 0,
    )
    return EncoderPlan(_padded(num_prompt, model) - num_prompt, start.prompt_ids, message)


def check_output(output: pb.OutputParams) -> None:
    """Check that the request asks for nothing that encoder inputs do not have."""
    if output.HasField("prompt_logprobs"):
        raise invalid(
            "output.prompt_logprobs", "is set, but the prompt is the input of an encoder; leave the field unset"
        )


def _padded(num_prompt: int, model: ServedModel) -> int:
    size = model.info.block_size
    return -(-num_prompt // size) * size
