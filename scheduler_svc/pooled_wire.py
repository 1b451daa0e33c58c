"""Conversions of pooled requests between the two internal protocols and the core's columns, and their checks."""

from __future__ import annotations

import numpy as np
from quire.internal.v1 import pooling_pb2, scheduler_pb2, worker_pb2
from quire.v1 import types_pb2

from scheduler_svc.core.deltas import PooledDeltas
from scheduler_svc.core.pooled import PooledRows, Pooling
from step_protocol.columns import WireError, f32_from_bytes, f32_to_bytes, u32_from_bytes, u32_to_bytes
from svc_common.errors import InvalidRequestError

MAX_NUMBERS = 1 << 16  # of one row
MAX_LOGITS = 64
KINDS = (types_pb2.POOLING_KIND_LAST, types_pb2.POOLING_KIND_MEAN, types_pb2.POOLING_KIND_CLS)


def pooling_of(submit: scheduler_pb2.Submit, info: types_pb2.ModelInfo) -> Pooling | None:
    """What a request returns instead of tokens; None if it generates. Raises InvalidRequestError with the field."""
    if not submit.HasField("pooling"):
        if info.is_encoder or (info.HasField("pooling") and not info.pooling.generates):
            raise InvalidRequestError(f"model {info.model!r} generates no tokens; use Embed or Score", field="model")
        return None
    _check(submit, info)
    message = submit.pooling
    last = message.kind == types_pb2.POOLING_KIND_LAST
    is_vector = message.task == pooling_pb2.POOLING_TASK_VECTOR
    return Pooling(message, may_hit=not info.is_encoder and (last or not is_vector))


def _check(submit: scheduler_pb2.Submit, info: types_pb2.ModelInfo) -> None:
    given, facts = submit.pooling, info.pooling
    if not info.HasField("pooling"):
        raise InvalidRequestError(f"the workers of model {info.model!r} compute no embeddings or scores", field="model")
    if submit.stop.max_tokens or (submit.sampling.HasField("n") and submit.sampling.n != 1):
        raise InvalidRequestError("a request with pooling must have max_tokens 0 and n 1", field="pooling")
    if given.task == pooling_pb2.POOLING_TASK_VECTOR:
        if given.kind not in KINDS:
            raise InvalidRequestError(f"pooling.kind is {given.kind}; must be LAST, MEAN or CLS", field="pooling")
        if given.dimensions > facts.dimensions:
            words = f"dimensions is {given.dimensions}; must be at most {facts.dimensions}"
            raise InvalidRequestError(words, field="dimensions")
    elif given.task == pooling_pb2.POOLING_TASK_CLASSES:
        if not facts.num_classes:
            raise InvalidRequestError(f"model {info.model!r} has no classification head", field="model")
    elif given.task == pooling_pb2.POOLING_TASK_LOGITS:
        _check_logits(given, info)
    else:
        raise InvalidRequestError(f"pooling.task is {given.task}; must be VECTOR, LOGITS or CLASSES", field="pooling")


def _check_logits(given: pooling_pb2.Pooling, info: types_pb2.ModelInfo) -> None:
    ids = given.token_ids
    if not info.pooling.generates:
        raise InvalidRequestError(f"model {info.model!r} has no logits", field="model")
    if not 1 <= len(ids) <= MAX_LOGITS or max(ids) >= info.vocab_size:
        raise InvalidRequestError(
            f"pooling.token_ids must have 1 to {MAX_LOGITS} ids below vocab_size {info.vocab_size}", field="pooling"
        )


def pooled_from_proto(message: worker_pb2.StepOutput) -> PooledRows | None:
    """The numbers of pooled rows in a worker's answer; None if there are none. Raises WireError."""
    if not message.pooled_rows:
        return None
    rows, lens = u32_from_bytes(message.pooled_rows, "pooled_rows"), u32_from_bytes(message.pooled_lens, "pooled_lens")
    values = f32_from_bytes(message.pooled_values, "pooled_values")
    if len(rows) != len(lens) or int(lens.sum(dtype=np.uint64)) != len(values) or len(np.unique(rows)) < len(rows):
        raise WireError(f"{len(rows)} pooled_rows, {len(lens)} pooled_lens and {len(values)} pooled_values")
    if int(lens.max()) > MAX_NUMBERS or not lens.all():
        raise WireError(f"a pooled row has {int(lens.max())} numbers; expected 1 to {MAX_NUMBERS}")
    if not np.isfinite(values).all():
        raise WireError("pooled_values has NaN or infinity")
    return PooledRows(rows, lens, values)


def pooled_to_proto(pooled: PooledDeltas, message: scheduler_pb2.Deltas) -> None:
    """Adds the numbers of requests that have ended to a message."""
    message.pooled_handles = u32_to_bytes(pooled.handles)
    message.pooled_lens = u32_to_bytes(pooled.lens)
    message.pooled_values = f32_to_bytes(pooled.values)
