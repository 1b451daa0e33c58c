"""Converts protos to the SDK's types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage
from quire.v1 import inference_pb2 as pb
from quire.v1 import rollouts_pb2, session_pb2, types_pb2

from quire_client.types import (
    AbortResult,
    EmbedResult,
    FinishReason,
    LatencyHistogram,
    ModelInfo,
    OpenRequest,
    Result,
    Sample,
    SchedulerStatus,
    SessionInfo,
    SessionSample,
    Status,
    TensorChecksum,
    TokenLogprob,
    TopLogprob,
    Usage,
    WeightsStatus,
    WeightVersion,
    WeightVersionSpan,
    WorkerStatus,
)

R = TypeVar("R", bound=Result)

FINISH_REASONS = {
    types_pb2.FINISH_REASON_EOS: FinishReason.EOS,
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORTED: FinishReason.ABORTED,
    types_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}

WORKER_STATES = {
    types_pb2.WORKER_STATE_LOADING: "loading",
    types_pb2.WORKER_STATE_READY: "ready",
    types_pb2.WORKER_STATE_DRAINING: "draining",
    types_pb2.WORKER_STATE_LOST: "lost",
    types_pb2.WORKER_STATE_JOINING: "joining",
}

WORKER_ROLES = {types_pb2.WORKER_ROLE_PREFILL: "prefill", types_pb2.WORKER_ROLE_DECODE: "decode"}


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
        weight_versions=tuple(map(_span, finished.weight_versions)),
        score=finished.score if finished.HasField("score") else None,
        cumulative_logprob=finished.cumulative_logprob if finished.HasField("cumulative_logprob") else None,
    )


def session(message: session_pb2.Session) -> SessionInfo:
    """A session."""
    samples = tuple(result(SessionSample, sample) for sample in message.samples)
    return result(SessionInfo, message, samples=samples)


def _span(span: types_pb2.WeightVersionSpan) -> WeightVersionSpan:
    return result(WeightVersionSpan, span, weights=result(WeightVersion, span.weights))


def tensors(messages: Iterable[rollouts_pb2.TensorChecksum]) -> tuple[TensorChecksum, ...]:
    return tuple(result(TensorChecksum, message) for message in messages)


def weights_status(response: rollouts_pb2.GetWeightsResponse) -> WeightsStatus:
    weights = result(WeightVersion, response.weights)
    return result(WeightsStatus, response, weights=weights, tensors=tensors(response.tensors))


def result(kind: type[R], message: ProtoMessage, **others: Any) -> R:
    """A result from the fields of a message that have the names of its own. `others`: the remaining ones."""
    for name in kind.__slots__:
        if name not in others:
            value = getattr(message, name)
            others[name] = value if isinstance(value, str | bytes | int | float) else tuple(value)
    return kind(**others)


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
    info = model.info
    return result(
        ModelInfo,
        info,
        name=info.model,
        ready_workers=model.ready_workers,
        determinism="exact" if info.determinism == types_pb2.DETERMINISM_EXACT else "best_effort",
        quantization=info.quantization or None,
        adapters=tuple(adapter.name for adapter in info.adapters),
    )


def models(response: pb.ListModelsResponse) -> tuple[ModelInfo, ...]:
    return tuple(model_info(model) for model in response.models)


def status(response: pb.GetStatusResponse) -> Status:
    pinned = response.pinned_sessions if response.HasField("pinned_sessions") else None
    schedulers = tuple(scheduler_status(s) for s in response.schedulers)
    owners = {pins.owner: pins.num_sessions for pins in response.pins_by_owner}
    return Status(schedulers, response.open_streams, response.is_summary, pinned, owners)


def scheduler_status(message: pb.SchedulerStatus) -> SchedulerStatus:
    return result(
        SchedulerStatus,
        message,
        workers=tuple(worker_status(worker) for worker in message.workers),
        first_token=result(LatencyHistogram, message.first_token),
        slowest=tuple(result(OpenRequest, request) for request in message.slowest),
    )


def worker_status(message: pb.WorkerInfo) -> WorkerStatus:
    state, role = WORKER_STATES.get(message.state, "unknown"), WORKER_ROLES.get(message.role, "both")
    return result(WorkerStatus, message, state=state, role=role)
