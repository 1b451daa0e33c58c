"""Where a request continues: the output that its client has, from a continuation or from a record."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request.field_errors import check_token_ids, invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.validation import NO_OUTPUT, BestOf, Replay, ResumePlan, SamplingPlan

MAX_CONTINUATION_IDS = 1 << 20  # number of output ids of all samples together


def resume_plan(
    request: pb.GenerateRequest, model: ServedModel, sampling: SamplingPlan, num_prompt: int, replay: Replay | None
) -> ResumePlan:
    """Where the request continues. `replay`: from its record. Raises InvalidRequestError."""
    continuation, n = request.continuation, sampling.params.n
    outputs, finished, sums, num_scored = (NO_OUTPUT,) * n, (False,) * n, (0.0,) * n, 0
    if request.HasField("continuation"):
        outputs, finished = _read_continuation(request, model, sampling.params, sampling.condition.max_tokens)
        sums, num_scored = _sums_of(continuation, n), _num_prompt_logprobs(continuation, num_prompt)
    if replay is not None:
        num_scored = num_prompt if any(replay.sent) else 0
    if not sampling.params.HasField("best_of"):
        return ResumePlan(outputs, finished, sums, num_scored, replay)
    # All samples are computed from their first token. The best are sent from the position that the client has.
    replay = replay or Replay(tuple(map(len, outputs)), (None,) * n)
    best_of = BestOf(sampling.params.best_of, outputs)
    return ResumePlan((NO_OUTPUT,) * n, finished, (0.0,) * n, num_scored, replay, best_of)


def _read_continuation(
    request: pb.GenerateRequest, model: ServedModel, sampling: types.SamplingParams, max_tokens: int
) -> tuple[tuple[array[int], ...], tuple[bool, ...]]:
    outputs = [array("I") for _ in range(sampling.n)]
    finished = [False] * sampling.n
    _check_continuation_size(request.continuation.samples, sampling.n)
    seen: set[int] = set()
    for i, sample in enumerate(request.continuation.samples):
        field = f"continuation.samples[{i}]"
        if sample.index >= sampling.n:
            raise invalid(f"{field}.index", f"is {sample.index}; sampling.n is {sampling.n}")
        if sample.index in seen:
            raise invalid(f"{field}.index", f"is {sample.index}, the same as in an earlier entry")
        if len(sample.output_token_ids) > max_tokens:
            words = f"has {len(sample.output_token_ids)} ids; max_tokens is {max_tokens}"
            raise invalid(f"{field}.output_token_ids", words)
        check_token_ids(f"{field}.output_token_ids", sample.output_token_ids, model)
        seen.add(sample.index)
        outputs[sample.index].extend(sample.output_token_ids)
        finished[sample.index] = sample.finished
    if _has_output(outputs) and sampling.temperature > 0 and not request.sampling.HasField("seed"):
        raise invalid("sampling.seed", "is not set; a continuation of sampled output needs the seed from Accepted")
    return tuple(outputs), tuple(finished)


def _sums_of(continuation: types.Continuation, n: int) -> tuple[float, ...]:
    sums = [0.0] * n
    for i, sample in enumerate(continuation.samples):
        if not math.isfinite(sample.cumulative_logprob):
            field = f"continuation.samples[{i}].cumulative_logprob"
            raise invalid(field, f"is {sample.cumulative_logprob}; must be a finite number")
        sums[sample.index] = sample.cumulative_logprob
    return tuple(sums)


def _num_prompt_logprobs(continuation: types.Continuation, num_prompt: int) -> int:
    """Prompt tokens whose log probabilities the client has: all, if it has output."""
    if any(sample.output_token_ids or sample.finished for sample in continuation.samples):
        return num_prompt
    if continuation.num_prompt_logprobs > num_prompt:
        words = f"is {continuation.num_prompt_logprobs}; must be at most {num_prompt}, the length of the prompt"
        raise invalid("continuation.num_prompt_logprobs", words)
    return continuation.num_prompt_logprobs


def _check_continuation_size(samples: Sequence[types.SampleState], n: int) -> None:
    if len(samples) > n:
        raise invalid("continuation.samples", f"has {len(samples)} entries; sampling.n is {n}")
    num_ids = sum(len(sample.output_token_ids) for sample in samples)
    if num_ids > MAX_CONTINUATION_IDS:
        words = (
            f"have {num_ids} output_token_ids together; at most {MAX_CONTINUATION_IDS} are allowed: start the request "
            "again without a continuation"
        )
        raise invalid("continuation.samples", words)


def _has_output(outputs: Iterable[array[int]]) -> bool:
    return any(len(output) > 0 for output in outputs)
