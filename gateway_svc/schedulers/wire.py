"""The messages that schedulers get: a plan as a Submit, journals as a Continuation."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from quire.internal.v1 import scheduler_pb2 as pb
from quire.v1 import types_pb2 as types
from xxhash import xxh3_64_intdigest

from gateway_svc.callers.caller import current_caller
from gateway_svc.request.plan import GenerationPlan
from prefix_index.hashing import token_bytes
from request_fields.fields import Side, fields_of

# Fields of StopParams that only the gateway applies.
NOT_SENT = [name for name, field in fields_of("stop").items() if field.applied_by is Side.GATEWAY]


class ProtocolError(RuntimeError):
    """The scheduler violated the protocol. The gateway closes the stream."""


def submit_from_plan(plan: GenerationPlan, *, request_id: str) -> pb.Submit:
    """The request for a scheduler, without handle, continuation and stop strings. `request_id` is the scoped id.

    If requests have owners, the tenant is the owner.
    """
    return pb.Submit(
        request_id=request_id,
        inputs=plan.prompt.inputs,
        prompt_token_ids=token_bytes(plan.prompt.column),
        encoder=None if plan.prompt.encoder is None else plan.prompt.encoder.message,
        sampling=_for_scheduler(plan),
        bad_words_ids=[types.TokenIds(ids=ids) for ids in plan.sampling.bad_words_ids],
        stop=_without_strings(plan.sampling.stop),
        priority=plan.scheduling.priority,
        conversation=_conversation_of(plan) if plan.scheduling.conversation else 0,
        cache_salt=plan.prompt.cache_salt,
        num_public_tokens=plan.prompt.num_public_tokens,
        adapter_digest=plan.model.adapter_digest,
        tenant_id=current_caller.get().owner or plan.scheduling.tenant_id,
        logprobs=0 if plan.output.logprobs is None and plan.resume.best_of is not None else plan.output.logprobs,
        prompt_logprobs=plan.output.prompt_logprobs,
        draft_token_ids=plan.draft_token_ids,
    )


def _conversation_of(plan: GenerationPlan) -> int:
    """A hint: equal numbers of different conversations cost time only."""
    scheduling = plan.scheduling
    names = current_caller.get().owner, scheduling.cache_salt, scheduling.conversation
    return xxh3_64_intdigest("\0".join(names).encode())


def _without_strings(stop: types.StopParams) -> types.StopParams:
    kept = types.StopParams()
    kept.CopyFrom(stop)
    for name in NOT_SENT:
        kept.ClearField(name)  # type: ignore[arg-type]
    return kept


def _for_scheduler(plan: GenerationPlan) -> types.SamplingParams:
    """The sampling parameters without bad_words, which are sent as ids, and with the number of samples to compute."""
    params, best_of = plan.sampling.params, plan.resume.best_of
    if not params.bad_words and best_of is None:
        return params
    kept = types.SamplingParams()
    kept.CopyFrom(params)
    kept.ClearField("bad_words")
    if best_of is not None:
        kept.n = best_of.num_computed
        kept.ClearField("best_of")
    return kept


def continuation_from_outputs(
    samples: Iterable[tuple[array[int], bool]], num_prompt_logprobs: int
) -> types.Continuation:
    """A Continuation from the samples in order: output so far, and whether the sample has finished."""
    continuation = types.Continuation(num_prompt_logprobs=num_prompt_logprobs)
    for index, (output, is_finished) in enumerate(samples):
        if output or is_finished:
            continuation.samples.add(index=index, output_token_ids=output, finished=is_finished)
    return continuation
