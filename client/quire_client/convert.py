"""Converts protos to the SDK's types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2

from quire_client import results
from quire_client.plain import Result
from quire_client.types import (
    AbortResult,
    EmbedResult,
    FinishReason,
    ModelInfo,
    Sample,
    Status,
    TokenLogprob,
    TopLogprob,
    Usage,
    WeightVersionSpan,
)

R = TypeVar("R", bound=Result)

FINISH_REASONS = {types_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}


def token_logprobs(message: pb.Logprobs, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """The log probabilities of consecutive tokens. `token_ids` is empty if the server did not send them."""
    count = len(message.logprobs)
    num_top = len(message.top_logprobs) // count if count else 0
    top = tuple(
        map(TopLogprob, message.top_token_ids, message.top_logprobs, message.top_token_bytes)
        if message.top_token_bytes
        else map(TopLogprob, message.top_token_ids, message.top_logprobs)
    )
    return tuple(
        TokenLogprob(
            token_id=token_ids[i] if token_ids else None,
            logprob=message.logprobs[i],
            rank=message.ranks[i],
            token=message.token_bytes[i] if message.token_bytes else b"",
            top=top[i * num_top : (i + 1) * num_top],
            raw_logprob=message.raw_logprobs[i] if message.raw_logprobs else None,
            num_kept=message.num_kept[i] if message.num_kept else None,
            logits_digest=message.logits_digests[i] if message.logits_digests else None,
        )
        for i in range(count)
    )


def sample(finished: pb.Finished, token_ids: Iterable[int], text: str, logprobs: Iterable[TokenLogprob] = ()) -> Sample:
    """A finished sample. A reason that this version does not know (newer server) becomes ERROR."""
    matched: int | str | None = None
    if finished.WhichOneof("matched") == "stop_token_id":
        matched = finished.stop_token_id
    elif finished.WhichOneof("matched") == "stop":
        matched = finished.stop
    return Sample(
        index=finished.index,
        token_ids=tuple(token_ids),
        text=text,
        finish_reason=FINISH_REASONS.get(finished.reason, FinishReason.ERROR),
        matched=matched,
        usage=result(Usage, finished.usage),
        preemptions=finished.preemptions,
        message=finished.message,
        logprobs=tuple(logprobs),
        receipt=finished.receipt,
        weight_versions=tuple(result(WeightVersionSpan, span) for span in finished.weight_versions),
        score=finished.score if finished.HasField("score") else None,
        cumulative_logprob=finished.cumulative_logprob if finished.HasField("cumulative_logprob") else None,
    )


def result(kind: type[R], message: ProtoMessage, **others: Any) -> R:
    """The result that has the fields of a message. `others`: fields with other values."""
    descriptors = message.DESCRIPTOR.fields_by_name
    for name in kind.__match_args__:
        if name in others:
            continue
        field, value = descriptors[name], getattr(message, name)
        if field.enum_type is not None or field.has_presence or field.message_type is not None:
            value = _value(message, field)
        elif not isinstance(value, str | bytes | int | float):
            value = tuple(value)
        if value is not None:
            others[name] = value
    return kind(**others)


def _value(message: ProtoMessage, field: Any) -> Any:
    """The value of a message, an enum or an optional field; None: the default of its result."""
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if field.enum_type is not None:
        unspecified, known = field.enum_type.values[0].name, field.enum_type.values_by_number.get(value)
        return known.name.removeprefix(unspecified.removesuffix("UNSPECIFIED")).lower() if value and known else None
    if field.message_type is not None:
        kind = results.MESSAGES[field.message_type.name]
        return result(kind, value) if field.has_presence else tuple(result(kind, item) for item in value)
    return value


def embed_result(response: pb.EmbedResponse) -> EmbedResult:
    vectors = tuple(tuple(item.values) for item in response.embeddings)
    counts = tuple(item.prompt_tokens for item in response.embeddings)
    return EmbedResult(vectors, counts, response.model, response.revision, response.request_id)


def abort_result(responses: Iterable[pb.AbortResponse], request: pb.AbortRequest) -> AbortResult:
    """The union over all gateways; an id is unknown if no gateway knows it."""
    aborted = {request_id for response in responses for request_id in response.aborted_ids}
    ids = tuple(dict.fromkeys(request.request_ids))
    return AbortResult(tuple(i for i in ids if i in aborted), tuple(i for i in ids if i not in aborted))


def model_info(model: pb.Model) -> ModelInfo:
    return result(
        ModelInfo,
        model.info,
        name=model.info.model,
        ready_workers=model.ready_workers,
        quantization=model.info.quantization or None,
        adapters=tuple(adapter.name for adapter in model.info.adapters),
    )


def models(response: pb.ListModelsResponse) -> tuple[ModelInfo, ...]:
    return tuple(model_info(model) for model in response.models)


def status(response: pb.GetStatusResponse) -> Status:
    owners = {pins.owner: pins.num_sessions for pins in response.pins_by_owner}
    return result(Status, response, pins_by_owner=owners)
