"""Conversions between the gateway protocol and the core's plain data; submits.py converts requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from quire.internal.v1 import scheduler_pb2
from quire.v1 import types_pb2

from scheduler_svc.core.features.encoder import EncoderPositions
from scheduler_svc.core.messages import Deltas, Finished, merge_deltas
from scheduler_svc.core.sequence import FinishReason, SequenceGroup
from step_protocol.columns import f32_to_bytes, u32_to_bytes
from svc_common.errors import ServiceError

REASON_TO_PROTO = {reason: types_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}


# -- requests --------------------------------------------------------------------------------------------------------


def cancel_reason(cancel: scheduler_pb2.Cancel) -> FinishReason:
    """The reason of a Cancel: STOP if a stop string matched, else ABORTED."""
    return FinishReason.STOP if cancel.reason == types_pb2.FINISH_REASON_STOP else FinishReason.ABORTED


def refusal_to_proto(error: ServiceError) -> scheduler_pb2.Refusal:
    """Converts an error to the reply to one Submit."""
    return scheduler_pb2.Refusal(
        code=error.code.value[0],
        message=error.message,
        field=error.field,
        retry_after_ms=0 if error.retry_after_s is None else max(1, round(error.retry_after_s * 1000)),
    )


# -- results ---------------------------------------------------------------------------------------------------------


def deltas_to_proto(parts: Sequence[Deltas], message: scheduler_pb2.Deltas | None = None) -> scheduler_pb2.Deltas:
    """One message with the deltas of one or more updates for one gateway, in order.

    Fills `message` if it is given: a part of a larger message is filled in place, because adding it later copies it.
    """
    deltas = parts[0] if len(parts) == 1 else merge_deltas(parts)
    message = scheduler_pb2.Deltas() if message is None else message
    message.handles = u32_to_bytes(deltas.handles)
    message.offsets = u32_to_bytes(deltas.offsets)
    message.token_ids = u32_to_bytes(deltas.token_ids)
    if np.count_nonzero(deltas.sample_indices):
        message.sample_indices = u32_to_bytes(deltas.sample_indices)
    for finished in deltas.finished:
        _fill_finished(finished, message.finished.add())
    if deltas.logprobs is not None:
        deltas.logprobs.write(message.logprobs)
    if deltas.prompt is not None:
        message.prompt_handles = u32_to_bytes(deltas.prompt.handles)
        message.prompt_positions = u32_to_bytes(deltas.prompt.positions)
        deltas.prompt.columns.write(message.prompt_logprobs)
    if deltas.pooled is not None:
        message.pooled_handles = u32_to_bytes(deltas.pooled.handles)
        message.pooled_lens = u32_to_bytes(deltas.pooled.lens)
        message.pooled_values = f32_to_bytes(deltas.pooled.values)
    return message


def _num_prompt_tokens(group: SequenceGroup) -> int:
    """Tokens of the prompt. That of an encoder-decoder model is the encoder input: no padding, no decoder prompt."""
    encoder = group.features.find(EncoderPositions) if group.features.items else None
    return len(group.prompt) if encoder is None or not encoder.num_tokens else encoder.num_tokens


def _fill_finished(finished: Finished, message: scheduler_pb2.SampleFinished) -> None:
    """Fills the message of an end. Unset fields are not passed: most ends use few of them."""
    num_prompt_tokens, usage = _num_prompt_tokens(finished.group), message.usage
    message.handle = finished.group.handle
    message.sample_index = finished.sample_index
    message.reason = REASON_TO_PROTO[finished.reason]
    usage.prompt_tokens = num_prompt_tokens
    usage.cached_tokens = min(finished.num_cached_tokens, num_prompt_tokens)
    usage.output_tokens = finished.num_output_tokens
    usage.processor_seconds = finished.processor_us / 1e6
    usage.block_seconds = finished.block_s
    if finished.stop_token_id is not None:
        message.stop_token_id = finished.stop_token_id
    if finished.num_preemptions:
        message.preemptions = finished.num_preemptions
    if finished.num_recomputed_tokens:
        usage.recomputed_tokens = finished.num_recomputed_tokens
    if finished.message:
        message.message = finished.message
    if finished.score is not None and finished.logprob is not None:  # of a beam search
        message.score, message.cumulative_logprob = finished.score, finished.logprob
