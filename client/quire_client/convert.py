"""Converts protos to the SDK's types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2

from quire_client.types import (
    AbortResult,
    AdapterStatus,
    EmbedResult,
    FinishReason,
    LatencyHistogram,
    ModelInfo,
    OpenRequest,
    Sample,
    SchedulerStatus,
    ScoreResult,
    Status,
    TokenizeResult,
    TokenLogprob,
    TopLogprob,
    Usage,
    WorkerStatus,
)

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
        usage=usage(finished.usage),
        preemptions=finished.preemptions,
        message=finished.message,
        logprobs=tuple(logprobs),
        score=finished.score if finished.HasField("score") else None,
        cumulative_logprob=finished.cumulative_logprob if finished.HasField("cumulative_logprob") else None,
    )


def usage(message: types_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        output_tokens=message.output_tokens,
        recomputed_tokens=message.recomputed_tokens,
        reasoning_tokens=message.reasoning_tokens,
        discarded_tokens=message.discarded_tokens,
    )


def embed_result(response: pb.EmbedResponse) -> EmbedResult:
    vectors = tuple(tuple(item.values) for item in response.embeddings)
    counts = tuple(item.prompt_tokens for item in response.embeddings)
    return EmbedResult(vectors, counts, response.model, response.revision, response.request_id)


def score_result(response: pb.ScoreResponse) -> ScoreResult:
    scores, counts = tuple(response.scores), tuple(response.prompt_tokens)
    return ScoreResult(scores, counts, response.model, response.revision, response.request_id)


def tokenize_result(response: pb.TokenizeResponse) -> TokenizeResult:
    return TokenizeResult(tuple(response.ids), response.max_model_len)


def abort_result(responses: Iterable[pb.AbortResponse], request: pb.AbortRequest) -> AbortResult:
    """The union over all gateways; an id is unknown if no gateway knows it."""
    aborted = {request_id for response in responses for request_id in response.aborted_ids}
    ids = tuple(dict.fromkeys(request.request_ids))
    return AbortResult(tuple(i for i in ids if i in aborted), tuple(i for i in ids if i not in aborted))


def model_info(model: pb.Model) -> ModelInfo:
    info = model.info
    return ModelInfo(
        name=info.model,
        revision=info.revision,
        ready_workers=model.ready_workers,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=tuple(info.eos_token_ids),
        block_size=info.block_size,
        max_num_blocks=info.max_num_blocks,
        max_num_seqs=info.max_num_seqs,
        dtype=info.dtype,
        determinism="exact" if info.determinism == types_pb2.DETERMINISM_EXACT else "best_effort",
        quantization=info.quantization or None,
        hidden_size=info.hidden_size,
        adapters=tuple(adapter.name for adapter in info.adapters),
    )


def adapter(message: pb.Adapter) -> AdapterStatus:
    return AdapterStatus(
        name=message.name,
        model=message.model,
        digest=message.digest,
        path=message.path,
        num_workers=message.num_workers,
        num_resident=message.num_resident,
    )


def models(response: pb.ListModelsResponse) -> tuple[ModelInfo, ...]:
    return tuple(model_info(model) for model in response.models)


def status(response: pb.GetStatusResponse) -> Status:
    return Status(tuple(scheduler_status(s) for s in response.schedulers), response.open_streams, response.is_summary)


def scheduler_status(message: pb.SchedulerStatus) -> SchedulerStatus:
    return SchedulerStatus(
        address=message.address,
        model=message.model,
        connected=message.connected,
        num_waiting=message.num_waiting,
        max_waiting=message.max_waiting,
        num_running=message.num_running,
        prefix_query_tokens=message.prefix_query_tokens,
        prefix_hit_tokens=message.prefix_hit_tokens,
        preemptions=message.preemptions,
        prefix_index=message.prefix_index,
        steps=message.steps,
        workers=tuple(worker_status(w) for w in message.workers),
        pending_tokens=message.pending_tokens,
        max_waiting_tokens=message.max_waiting_tokens,
        refused_deadline=message.refused_deadline,
        output_tokens=message.output_tokens,
        finished=message.finished,
        first_token=LatencyHistogram(
            tuple(message.first_token.bounds_s), tuple(message.first_token.counts), message.first_token.sum_s
        ),
        slowest=tuple(
            OpenRequest(r.request_id, r.worker_id, r.age_s, r.prompt_tokens, r.output_tokens) for r in message.slowest
        ),
    )


def worker_status(message: pb.WorkerInfo) -> WorkerStatus:
    return WorkerStatus(
        worker_id=message.worker_id,
        address=message.address,
        state=WORKER_STATES.get(message.state, "unknown"),
        rows_used=message.rows_used,
        rows_total=message.rows_total,
        blocks_free=message.blocks_free,
        blocks_cached=message.blocks_cached,
        blocks_used=message.blocks_used,
        steps=message.steps,
        worker_epoch=message.worker_epoch,
        adapters_loaded=message.adapters_loaded,
        adapters_resident=message.adapters_resident,
        adapter_swaps=message.adapter_swaps,
    )
