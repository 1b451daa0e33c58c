"""Conversions between the gateway protocol and the core's plain data, and all checks of gateway messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
from quire.internal.v1 import scheduler_pb2
from quire.v1 import types_pb2

from request_fields import checks
from request_fields.beams import BeamParams, beam_params
from request_fields.fields import (
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORDS,
    MAX_BANNED_IDS,
    MAX_LOGPROBS,
    FieldError,
    StopCondition,
    stop_condition,
)
from request_fields.grammar import has_grammar
from request_fields.sizes import SizeLimits
from scheduler_svc.columns import U32, WireError, u32_from_bytes, u32_to_bytes
from scheduler_svc.core.logprobs import LogprobColumns, concat_columns, concat_prompts, no_logprobs
from scheduler_svc.core.messages import Deltas, Finished
from scheduler_svc.core.sequence import FinishReason, SequenceGroup
from scheduler_svc.logprob_wire import columns_to_proto
from svc_common.errors import InvalidRequestError, QuireError, UnimplementedError

MAX_REQUEST_ID_CHARS = 256
MAX_TENANT_ID_CHARS = 256
MAX_CACHE_SALT_BYTES = 4096

REASON_TO_PROTO = {
    FinishReason.EOS: types_pb2.FINISH_REASON_EOS,
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: types_pb2.FINISH_REASON_ABORTED,
    FinishReason.ERROR: types_pb2.FINISH_REASON_ERROR,
}
REASON_FROM_PROTO = {number: reason for reason, number in REASON_TO_PROTO.items()}


# -- requests --------------------------------------------------------------------------------------------------------


def group_from_proto(
    submit: scheduler_pb2.Submit, info: types_pb2.ModelInfo, *, owner: int, origin: str = ""
) -> SequenceGroup:
    """Converts a request to the core's group. Raises InvalidRequestError or UnimplementedError with the field's name.

    The core itself checks that the request fits a pool and that its id is free, and sets `arrival`.
    """
    if not 0 < len(submit.request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(
            f"request_id has {len(submit.request_id)} characters; use 1 to {MAX_REQUEST_ID_CHARS}", field="request_id"
        )
    _check_fields(submit)
    prompt = _prompt(submit.prompt_token_ids, info.vocab_size)
    stop = _stop_condition(submit.stop, info.vocab_size, is_constrained=has_grammar(submit.sampling))
    n = submit.sampling.n if submit.sampling.HasField("n") else 1
    _check_sizes(n, len(prompt), stop.max_tokens, info)
    beams = _beams(submit.sampling, stop.max_tokens, info)
    outputs, finished = _continuation(submit.continuation, n, stop.max_tokens, info.vocab_size)
    if beams is not None:  # the search starts again: the client does not have all beams
        outputs, finished = (), frozenset()
    return SequenceGroup(
        request_id=submit.request_id,
        prompt=prompt,
        stop=stop,
        owner=owner,
        handle=submit.handle,
        n=n,
        priority=submit.priority,
        root_key=_root_key(submit.cache_salt),
        sampling=submit.sampling,
        banned_ids=_banned_ids(stop, info),
        banned_before=stop.min_tokens,
        bad_words_ids=_bad_words_ids(submit, stop, info),
        beam_params=beams,
        outputs=outputs,
        finished_samples=finished,
        takes_over=submit.takes_over,
        origin=origin,
        tenant_id=_tenant_id(submit.tenant_id),
        timeout_s=submit.deadline_ms / 1000 if submit.HasField("deadline_ms") else None,
        logprobs=_num_logprobs(submit, "logprobs", info),
        prompt_logprobs=_num_logprobs(submit, "prompt_logprobs", info),
        num_prompt_logprobs=max(1, submit.continuation.num_prompt_logprobs),
    )


@contextmanager
def _field_errors() -> Iterator[None]:
    """Converts a FieldError to the error that the gateway gets."""
    try:
        yield
    except FieldError as error:
        kind = UnimplementedError if error.is_unserved else InvalidRequestError
        raise kind(str(error), field=error.field) from None


def _prompt(data: bytes, vocab_size: int) -> U32:
    if not data:
        raise InvalidRequestError(
            "prompt_token_ids is empty; a prompt needs at least 1 token", field="prompt_token_ids"
        )
    try:
        prompt = u32_from_bytes(data, "prompt_token_ids")
    except WireError as error:
        raise InvalidRequestError(str(error), field="prompt_token_ids") from None
    _check_vocab(prompt, vocab_size, "prompt_token_ids")
    return prompt


def _check_vocab(token_ids: U32, vocab_size: int, field: str) -> None:
    highest = int(token_ids.max(initial=0))
    if highest >= vocab_size:
        raise InvalidRequestError(f"{field} contains {highest}; ids must be below vocab_size {vocab_size}", field=field)


def _root_key(cache_salt: str) -> bytes:
    key = cache_salt.encode()
    if len(key) > MAX_CACHE_SALT_BYTES:
        raise InvalidRequestError(
            f"cache_salt has {len(key)} bytes; at most {MAX_CACHE_SALT_BYTES} are allowed", field="cache_salt"
        )
    return key


def _tenant_id(tenant_id: str) -> str:
    if len(tenant_id) > MAX_TENANT_ID_CHARS:
        raise InvalidRequestError(
            f"tenant_id has {len(tenant_id)} characters; at most {MAX_TENANT_ID_CHARS} are allowed", field="tenant_id"
        )
    return tenant_id


def _check_fields(submit: scheduler_pb2.Submit) -> None:
    with _field_errors():
        checks.check_fields(submit)
    if not submit.sampling.HasField("seed"):
        raise InvalidRequestError("sampling.seed is unset; the gateway must set it", field="sampling.seed")


def _stop_condition(stop: types_pb2.StopParams, vocab_size: int, *, is_constrained: bool) -> StopCondition:
    if not stop.HasField("max_tokens"):
        raise InvalidRequestError("stop.max_tokens is unset; the gateway must set it", field="stop.max_tokens")
    if any(token_id >= vocab_size for token_id in stop.stop_token_ids):
        raise InvalidRequestError(
            f"stop.stop_token_ids contains {max(stop.stop_token_ids)}; ids must be below vocab_size {vocab_size}",
            field="stop.stop_token_ids",
        )
    with _field_errors():
        return stop_condition(checks.values_set(stop), is_constrained=is_constrained)


def _num_logprobs(
    submit: scheduler_pb2.Submit, name: Literal["logprobs", "prompt_logprobs"], info: types_pb2.ModelInfo
) -> int | None:
    if not submit.HasField(name):
        return None
    num_top: int = getattr(submit, name)
    if num_top > (most := min(MAX_LOGPROBS, info.vocab_size)):
        raise InvalidRequestError(f"{name} is {num_top}; must be at most {most}", field=name)
    return num_top


def _banned_ids(stop: StopCondition, info: types_pb2.ModelInfo) -> bytes:
    ids = [token_id for token_id in stop.banned_ids(info.eos_token_ids) if token_id < info.vocab_size]
    most = min(MAX_BANNED_IDS, info.vocab_size - 1)
    if len(ids) > most:
        raise InvalidRequestError(
            f"stop.min_tokens is {stop.min_tokens}, which bans {len(ids)} ids (EOS and stop_token_ids); "
            f"at most {most} can be banned; use fewer stop_token_ids",
            field="stop.min_tokens",
        )
    return u32_to_bytes(np.array(ids, dtype=np.uint32))


def _bad_words_ids(
    submit: scheduler_pb2.Submit, stop: StopCondition, info: types_pb2.ModelInfo
) -> tuple[types_pb2.TokenIds, ...]:
    """The bad words of a request. Checks them and all other token id rules of the request."""
    words = tuple(submit.bad_words_ids)
    if len(words) > 2 * MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words_ids has {len(words)} sequences; at most {2 * MAX_BAD_WORDS} are allowed", field="bad_words_ids"
        )
    for word in words:
        _check_bad_word(word.ids, info.vocab_size)
    with _field_errors():
        checks.check_sampled_ids(submit.sampling, info.vocab_size)
        early_banned = stop.banned_ids(info.eos_token_ids)
        checks.check_something_is_left(submit.sampling, (word.ids for word in words), early_banned, info.vocab_size)
    return words


def _check_bad_word(ids: Sequence[int], vocab_size: int) -> None:
    if not 1 <= len(ids) <= MAX_BAD_WORD_IDS:
        raise InvalidRequestError(
            f"bad_words_ids has a sequence of {len(ids)} ids; use 1 to {MAX_BAD_WORD_IDS}", field="bad_words_ids"
        )
    if max(ids) >= vocab_size:
        raise InvalidRequestError(
            f"bad_words_ids contains {max(ids)}; ids must be below vocab_size {vocab_size}", field="bad_words_ids"
        )


def _check_sizes(n: int, num_prompt: int, max_tokens: int, info: types_pb2.ModelInfo) -> None:
    if not 1 <= n <= info.max_num_seqs:
        raise InvalidRequestError(f"sampling.n is {n}; must be from 1 to {info.max_num_seqs}", field="sampling.n")
    with _field_errors():
        SizeLimits(info.max_model_len, info.max_num_blocks * info.block_size).resolve(num_prompt, max_tokens)


def _beams(sampling: types_pb2.SamplingParams, max_tokens: int, info: types_pb2.ModelInfo) -> BeamParams | None:
    with _field_errors():
        beams = beam_params(checks.values_set(sampling), max_tokens)
    if beams is not None and beams.width > info.max_num_seqs:
        raise InvalidRequestError(
            f"sampling.beam_width is {beams.width}; must be at most {info.max_num_seqs}", field="sampling.beam_width"
        )
    return beams


def _continuation(
    continuation: types_pb2.Continuation, n: int, max_tokens: int, vocab_size: int
) -> tuple[Sequence[U32], frozenset[int]]:
    if not continuation.samples:
        return (), frozenset()
    outputs: list[U32] = [np.empty(0, dtype=np.uint32) for _ in range(n)]
    seen: set[int] = set()
    for sample in continuation.samples:
        _check_sample(sample, n, max_tokens, seen)
        seen.add(sample.index)
        outputs[sample.index] = np.array(sample.output_token_ids, dtype=np.uint32)
        _check_vocab(outputs[sample.index], vocab_size, "continuation.samples.output_token_ids")
    finished = frozenset(sample.index for sample in continuation.samples if sample.finished)
    if len(finished) == n:
        raise InvalidRequestError(
            "every sample of continuation has finished; at least one must be unfinished", field="continuation"
        )
    return outputs, finished


def _check_sample(sample: types_pb2.SampleState, n: int, max_tokens: int, seen: set[int]) -> None:
    if sample.index >= n:
        raise InvalidRequestError(
            f"continuation has sample {sample.index}; must be below n, {n}", field="continuation.samples.index"
        )
    if sample.index in seen:
        raise InvalidRequestError(f"continuation has sample {sample.index} twice", field="continuation.samples.index")
    if len(sample.output_token_ids) > max_tokens:
        raise InvalidRequestError(
            f"continuation has {len(sample.output_token_ids)} tokens of sample {sample.index}; "
            f"must be at most max_tokens, {max_tokens}",
            field="continuation.samples.output_token_ids",
        )


def cancel_reason(cancel: scheduler_pb2.Cancel) -> FinishReason:
    """The reason of a Cancel: STOP if a stop string matched, else ABORTED."""
    reason = REASON_FROM_PROTO.get(cancel.reason, FinishReason.ABORTED)
    return FinishReason.STOP if reason is FinishReason.STOP else FinishReason.ABORTED


def refusal_to_proto(error: QuireError) -> scheduler_pb2.Refusal:
    """Converts an error to the reply to one Submit."""
    return scheduler_pb2.Refusal(
        code=error.code.value[0],
        message=error.message,
        field=error.field,
        retry_after_ms=0 if error.retry_after_s is None else max(1, round(error.retry_after_s * 1000)),
    )


# -- results ---------------------------------------------------------------------------------------------------------


def deltas_to_proto(parts: Sequence[Deltas]) -> scheduler_pb2.Deltas:
    """One message with the deltas of one or more updates for one gateway, in order."""
    deltas = parts[0] if len(parts) == 1 else merge_deltas(parts)
    message = scheduler_pb2.Deltas(
        handles=u32_to_bytes(deltas.handles),
        sample_indices=u32_to_bytes(deltas.sample_indices) if np.count_nonzero(deltas.sample_indices) else b"",
        offsets=u32_to_bytes(deltas.offsets),
        token_ids=u32_to_bytes(deltas.token_ids),
        finished=[_finished_to_proto(finished) for finished in deltas.finished],
    )
    if deltas.logprobs is not None:
        message.logprobs.CopyFrom(columns_to_proto(deltas.logprobs))
    if deltas.prompt is not None:
        message.prompt_handles = u32_to_bytes(deltas.prompt.handles)
        message.prompt_positions = u32_to_bytes(deltas.prompt.positions)
        message.prompt_logprobs.CopyFrom(columns_to_proto(deltas.prompt.columns))
    return message


def merge_deltas(parts: Sequence[Deltas]) -> Deltas:
    """Concatenates columns. A finish stays behind its tokens, because finishes apply after all tokens of a message."""
    return Deltas(
        owners=np.concatenate([part.owners for part in parts]),
        handles=np.concatenate([part.handles for part in parts]),
        sample_indices=np.concatenate([part.sample_indices for part in parts]),
        offsets=np.concatenate([part.offsets for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        finished=[finished for part in parts for finished in part.finished],
        logprobs=_merge_logprobs(parts),
        prompt=concat_prompts([part.prompt for part in parts if part.prompt is not None]),
    )


def _merge_logprobs(parts: Sequence[Deltas]) -> LogprobColumns | None:
    if all(part.logprobs is None for part in parts):
        return None
    return concat_columns([part.logprobs or no_logprobs(len(part.token_ids)) for part in parts])


def split_deltas(deltas: Deltas) -> dict[int, Deltas]:
    """Splits deltas by owner. With one owner, the usual case, nothing is copied."""
    if deltas.owner is not None and not deltas.finished and deltas.prompt is None:
        return {deltas.owner: deltas}
    columns = deltas.owners
    is_uniform = len(columns) > 0 and not np.count_nonzero(columns != columns[0])
    owners = {int(columns[0])} if is_uniform else set(np.unique(columns).tolist())
    if deltas.finished:
        owners |= {finished.group.owner for finished in deltas.finished}
    if deltas.prompt is not None:
        owners |= set(np.unique(deltas.prompt.owners).tolist())
    if len(owners) == 1:
        return {owners.pop(): deltas}
    return {owner: _of_owner(deltas, owner) for owner in owners}


def _of_owner(deltas: Deltas, owner: int) -> Deltas:
    mine, prompt = deltas.owners == owner, deltas.prompt
    if prompt is not None:
        is_mine = prompt.owners == owner
        prompt = prompt.select(is_mine) if is_mine.any() else None
    return Deltas(
        owners=deltas.owners[mine],
        handles=deltas.handles[mine],
        sample_indices=deltas.sample_indices[mine],
        offsets=deltas.offsets[mine],
        token_ids=deltas.token_ids[mine],
        finished=[finished for finished in deltas.finished if finished.group.owner == owner],
        logprobs=None if deltas.logprobs is None else deltas.logprobs.select(mine),
        prompt=prompt,
    )


def _finished_to_proto(finished: Finished) -> scheduler_pb2.SampleFinished:
    return scheduler_pb2.SampleFinished(
        handle=finished.group.handle,
        sample_index=finished.sample_index,
        reason=REASON_TO_PROTO[finished.reason],
        stop_token_id=finished.stop_token_id,
        usage=types_pb2.Usage(
            prompt_tokens=len(finished.group.prompt),
            cached_tokens=finished.num_cached_tokens,
            output_tokens=finished.num_output_tokens,
            recomputed_tokens=finished.num_recomputed_tokens,
        ),
        message=finished.message,
        preemptions=finished.num_preemptions,
        score=finished.score,
        cumulative_logprob=finished.logprob,
    )
