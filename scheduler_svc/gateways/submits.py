"""Requests of gateways: all checks of a Submit, and its conversion to the core's group.

Clients repeat their parameters, so results of checks are kept: a Submit with the sampling and stop parameters of an
earlier one needs no further check of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from quire.internal.v1 import scheduler_pb2
from quire.v1 import types_pb2

from prefix_index.hashing import root_key
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
from scheduler_svc.core.features.adapters import UsesAdapter
from scheduler_svc.core.features.beams import Beams
from scheduler_svc.core.features.encoder import EncoderPositions
from scheduler_svc.core.features.inputs import Inputs
from scheduler_svc.core.features.prompt_logprobs import PromptDelivery
from scheduler_svc.core.sequence import NO_FEATURES, Feature, Features, RowOptions, SequenceGroup
from scheduler_svc.gateways.encoders import check_encoder
from scheduler_svc.gateways.inputs import check_inputs, check_vocab, images_of
from scheduler_svc.gateways.pooling import pooling_of
from step_protocol.columns import U32, WireError, u32_from_bytes, u32_to_bytes
from svc_common.errors import InvalidRequestError
from svc_common.tracing import valid_traceparent

DIGEST_BYTES = 16
MAX_REQUEST_ID_CHARS = 256
MAX_TENANT_ID_CHARS = 256
MAX_CACHE_SALT_BYTES = 4096
MAX_KEPT = 256  # results of checks
MAX_KEPT_BYTES = 1024  # parameters larger than this are checked each time


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parts of a group that follow from its sampling and stop parameters, without the seed."""

    n: int
    stop: StopCondition
    beams: BeamParams | None
    options: RowOptions


class SubmitReader:
    """Converts the Submits for one model. Owns the kept results of checks."""

    def __init__(self, info: types_pb2.ModelInfo) -> None:
        self._info = info
        window = info.attention_window or None
        self._limits = SizeLimits.of_pool(info.max_model_len, info.max_num_blocks, info.block_size, window)
        self._vocab_size = info.vocab_size
        self._kept: dict[tuple[bytes, bytes], Parameters] = {}

    def group(self, submit: scheduler_pb2.Submit, *, owner: int, origin: str = "") -> SequenceGroup:
        """The core's group. Raises InvalidRequestError with the field's name.

        The core itself checks that the request fits a pool and that its id is free, and sets `arrival`.
        """
        _check_request_id(submit.request_id)
        given = self._parameters(submit)
        prompt = _prompt(submit.prompt_token_ids)
        num_input_bytes = check_inputs(submit.inputs, prompt, self._info)
        num_encoder_tokens, encoder = check_encoder(submit, prompt, given.stop.max_tokens, self._info)
        if not self._limits.fits(len(prompt), given.stop.max_tokens):
            with _field_errors():
                self._limits.resolve(len(prompt), given.stop.max_tokens)
        outputs, finished = _continuation(submit.continuation, given.n, given.stop.max_tokens, self._vocab_size)
        if given.beams is not None:  # the search starts again: the client does not have all beams
            outputs, finished = (), frozenset()
        features = self._features(submit, given.beams, prompt, num_input_bytes, num_encoder_tokens)
        logprobs = _num_logprobs(submit, "logprobs", self._info)
        return SequenceGroup(
            request_id=submit.request_id,
            prompt=prompt,
            stop=given.stop,
            owner=owner,
            handle=submit.handle,
            n=given.n,
            priority=submit.priority,
            root_key=_root_key(submit, encoder),
            sampling=submit.sampling,
            options=given.options if logprobs is None else replace(given.options, logprobs=logprobs),
            features=Features(*features) if features else NO_FEATURES,
            outputs=outputs,
            finished_samples=finished,
            takes_over=submit.takes_over,
            origin=origin,
            tenant_id=_tenant_id(submit.tenant_id),
            timeout_s=submit.deadline_ms / 1000 if submit.HasField("deadline_ms") else None,
            traceparent=valid_traceparent(submit.traceparent) if submit.traceparent else "",
        )

    def _features(
        self,
        submit: scheduler_pb2.Submit,
        beams: BeamParams | None,
        prompt: U32,
        num_input_bytes: int,
        num_encoder_tokens: int,
    ) -> list[Feature]:
        """What the request uses besides tokens; empty for most requests."""
        info, features = self._info, list[Feature]()
        if beams is not None:
            features.append(Beams(beams))
        if info.is_encoder:
            features.append(EncoderPositions(len(prompt)))
        elif num_encoder_tokens:
            features.append(EncoderPositions(num_encoder_tokens, submit.encoder))
        if num_input_bytes:
            images = images_of(submit.inputs, info)
            features.append(Inputs(submit.inputs, num_input_bytes, images.spans, images.work))
        num_top = _num_prompt_logprobs(submit, info)
        if num_top is not None:
            features.append(PromptDelivery(num_top, max(1, submit.continuation.num_prompt_logprobs)))
        pooling = pooling_of(submit, info)
        if pooling is not None:
            features.append(pooling)
        if submit.adapter_digest:
            features.append(UsesAdapter(_adapter(submit.adapter_digest)))
        return features

    def _parameters(self, submit: scheduler_pb2.Submit) -> Parameters:
        if not submit.sampling.HasField("seed"):
            raise InvalidRequestError("sampling.seed is unset; the gateway must set it", field="sampling.seed")
        if submit.bad_words_ids:
            return self._check(submit)
        sampling = submit.sampling
        seed = sampling.seed
        sampling.ClearField("seed")  # it may have any value
        key = (sampling.SerializeToString(), submit.stop.SerializeToString())
        sampling.seed = seed
        found = self._kept.get(key)
        if found is not None:
            return found
        found = self._check(submit)
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        if len(key[0]) + len(key[1]) <= MAX_KEPT_BYTES:
            self._kept[key] = found
        return found

    def _check(self, submit: scheduler_pb2.Submit) -> Parameters:
        info = self._info
        with _field_errors():
            checks.check_fields(submit)
        n = submit.sampling.n if submit.sampling.HasField("n") else 1
        if not 1 <= n <= info.max_num_seqs:
            raise InvalidRequestError(f"sampling.n is {n}; must be from 1 to {info.max_num_seqs}", field="sampling.n")
        stop = _stop_condition(submit.stop, info.vocab_size, is_constrained=has_grammar(submit.sampling))
        beams = _beams(submit.sampling, stop.max_tokens, info)
        options = RowOptions(_banned_ids(stop, info), stop.min_tokens, _bad_words_ids(submit, stop, info))
        return Parameters(n, stop, beams, options)


def _check_request_id(request_id: str) -> None:
    if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(
            f"request_id has {len(request_id)} characters; use 1 to {MAX_REQUEST_ID_CHARS}", field="request_id"
        )


@contextmanager
def _field_errors() -> Iterator[None]:
    """Converts a FieldError to the error that the gateway gets."""
    try:
        yield
    except FieldError as error:
        raise InvalidRequestError(str(error), field=error.field) from None


def _prompt(data: bytes) -> U32:
    if not data:
        raise InvalidRequestError(
            "prompt_token_ids is empty; a prompt needs at least 1 token", field="prompt_token_ids"
        )
    try:
        return u32_from_bytes(data, "prompt_token_ids")
    except WireError as error:
        raise InvalidRequestError(str(error), field="prompt_token_ids") from None


def _root_key(submit: scheduler_pb2.Submit, encoder: bytes) -> bytes:
    salt = submit.cache_salt.encode()
    if len(salt) > MAX_CACHE_SALT_BYTES:
        raise InvalidRequestError(
            f"cache_salt has {len(salt)} bytes; at most {MAX_CACHE_SALT_BYTES} are allowed", field="cache_salt"
        )
    return root_key(cache_salt=salt, encoder=encoder, adapter=submit.adapter_digest)


def _adapter(digest: bytes) -> bytes:
    if digest and len(digest) != DIGEST_BYTES:
        raise InvalidRequestError(
            f"adapter_digest has {len(digest)} bytes; expected {DIGEST_BYTES}", field="adapter_digest"
        )
    return digest


def _tenant_id(tenant_id: str) -> str:
    if len(tenant_id) > MAX_TENANT_ID_CHARS:
        raise InvalidRequestError(
            f"tenant_id has {len(tenant_id)} characters; at most {MAX_TENANT_ID_CHARS} are allowed", field="tenant_id"
        )
    return tenant_id


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


def _num_prompt_logprobs(submit: scheduler_pb2.Submit, info: types_pb2.ModelInfo) -> int | None:
    num_top = _num_logprobs(submit, "prompt_logprobs", info)
    if num_top is not None and submit.inputs:
        raise InvalidRequestError(
            "prompt_logprobs cannot be combined with inputs: their positions have no token", field="prompt_logprobs"
        )
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
        check_vocab(outputs[sample.index], vocab_size, "continuation.samples.output_token_ids")
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
