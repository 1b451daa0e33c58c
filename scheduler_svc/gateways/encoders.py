"""Checks of the encoder input of a Submit: the first positions of its prompt, if the model has an encoder."""

from __future__ import annotations

from quire.internal.v1 import encoder_pb2, scheduler_pb2
from quire.v1 import types_pb2

from prefix_index.hashing import encoder_digest
from step_protocol.columns import U32
from svc_common.errors import InvalidRequestError

MAX_RULE_IDS = 1024
MAX_ALLOWED = 16  # output positions with rules of their own


def check_encoder(
    submit: scheduler_pb2.Submit, prompt: U32, max_tokens: int, info: types_pb2.ModelInfo
) -> tuple[int, bytes]:
    """The positions of the encoder input with its padding, and its digest; 0 and b"" if the model has no encoder.

    Raises InvalidRequestError with field, value and limit.
    """
    has_encoder = info.HasField("encoder")
    if submit.HasField("encoder") != has_encoder:
        words = "has no encoder input, but" if has_encoder else "has an encoder input, but"
        what = "has an encoder" if has_encoder else "has no encoder"
        raise InvalidRequestError(f"the request {words} model {info.model!r} {what}", field="encoder")
    if not has_encoder:
        return 0, b""
    limits, encoder = info.encoder, submit.encoder
    if limits.HasField("audio") and not submit.inputs:
        raise InvalidRequestError(f"model {info.model!r} takes audio, but the request has none", field="inputs")
    least = limits.max_tokens if limits.HasField("audio") else 1
    if not least <= encoder.num_tokens <= limits.max_tokens:
        raise _invalid("num_tokens", f"is {encoder.num_tokens}; must be from {least} to {limits.max_tokens}")
    padded = -(-encoder.num_tokens // info.block_size) * info.block_size
    num_decoder = len(prompt) - padded
    if num_decoder < 1:
        raise _invalid("num_tokens", f"takes {padded} positions with padding, but the prompt has {len(prompt)}")
    if num_decoder + max_tokens > limits.max_decoder_tokens:
        raise InvalidRequestError(
            f"stop.max_tokens is {max_tokens}; the decoder's prompt has {num_decoder} tokens, and both together must "
            f"be at most {limits.max_decoder_tokens}: ask for at most {limits.max_decoder_tokens - num_decoder}",
            field="stop.max_tokens",
        )
    if submit.HasField("prompt_logprobs"):
        raise InvalidRequestError(
            "prompt_logprobs cannot be combined with an encoder input: leave it unset", field="prompt_logprobs"
        )
    _check_rules(encoder, info.vocab_size)
    return padded, encoder_digest(prompt[: encoder.num_tokens])


def _check_rules(encoder: encoder_pb2.EncoderInput, vocab_size: int) -> None:
    if len(encoder.allowed) > MAX_ALLOWED:
        raise _invalid("allowed", f"has {len(encoder.allowed)} positions; at most {MAX_ALLOWED} are allowed")
    named = [("banned_ids", encoder.banned_ids), ("first_banned_ids", encoder.first_banned_ids)]
    for name, ids in [*named, *(("allowed.ids", entry.ids) for entry in encoder.allowed)]:
        if len(ids) > MAX_RULE_IDS or (ids and max(ids) >= vocab_size) or (name == "allowed.ids" and not ids):
            raise _invalid(name, f"has {len(ids)} ids; use at most {MAX_RULE_IDS} ids below vocab_size {vocab_size}")


def _invalid(name: str, words: str) -> InvalidRequestError:
    return InvalidRequestError(f"encoder.{name} {words}", field=f"encoder.{name}")
