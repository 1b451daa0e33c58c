"""Checks of the pooling of a Submit."""

from __future__ import annotations

from quire.internal.v1 import pooling_pb2, scheduler_pb2
from quire.v1 import types_pb2

from scheduler_svc.core.features.pooled import Pooled
from svc_common.errors import InvalidRequestError

MAX_LOGITS = 64
KINDS = (types_pb2.POOLING_KIND_LAST, types_pb2.POOLING_KIND_MEAN, types_pb2.POOLING_KIND_CLS)


def pooling_of(submit: scheduler_pb2.Submit, info: types_pb2.ModelInfo) -> Pooled | None:
    """What a request returns instead of tokens; None if it generates. Raises InvalidRequestError with the field."""
    if not submit.HasField("pooling"):
        if info.is_encoder or (info.HasField("pooling") and not info.pooling.generates):
            raise InvalidRequestError(f"model {info.model!r} generates no tokens; use Embed or Score", field="model")
        return None
    _check(submit, info)
    message = submit.pooling
    last = message.kind == types_pb2.POOLING_KIND_LAST
    is_vector = message.task == pooling_pb2.POOLING_TASK_VECTOR
    return Pooled(message, may_hit=not info.is_encoder and (last or not is_vector))


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
