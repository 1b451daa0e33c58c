"""Requests of gateways: a Submit becomes the core's group.

A gateway has checked what a request means, and a worker checks every row before it touches its pool. Here is only what
the other two cannot check: what the core's own state depends on, and what would make a worker refuse a whole step,
which ends its lease. A gateway that lies about the rest gets failed rows, or an exception that ends its own stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from quire.internal.v1 import inputs_pb2, pooling_pb2, scheduler_pb2, worker_pb2
from quire.v1 import types_pb2

from prefix_index.hashing import encoder_digest, root_key
from request_fields import checks
from request_fields.fields import MAX_BANNED_IDS, FieldError, StopCondition, has_grammar, stop_condition
from request_fields.parameters import BeamParams, beam_params, grammar_of
from scheduler_svc.core.features.adapters import UsesAdapter
from scheduler_svc.core.features.beams import Beams
from scheduler_svc.core.features.draft_bytes import DraftBytes
from scheduler_svc.core.features.encoder import EncoderPositions
from scheduler_svc.core.features.inputs import Inputs
from scheduler_svc.core.features.pooled import PooledRequest
from scheduler_svc.core.features.prompt_logprobs import PromptDelivery
from scheduler_svc.core.features.public_prefix import PublicPrefix
from scheduler_svc.core.sequence import NO_FEATURES, Feature, Features, SequenceGroup
from step_protocol.columns import U32, WireError, u32_from_bytes, u32_to_bytes
from step_protocol.proto import DIGEST_BYTES
from step_protocol.types import POOLING_KINDS, POOLING_TASKS
from svc_common.errors import InvalidRequestError
from svc_common.observe.tracing import valid_traceparent

MAX_KEPT = 256  # results of checks
MAX_KEPT_BYTES = 1024  # parameters larger than this are checked each time


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parts of a group that follow from its sampling and stop parameters, without the seed."""

    n: int
    stop: StopCondition
    beams: BeamParams | None
    banned_ids: bytes  # packed ids that cannot be sampled before `stop.min_tokens`


class SubmitReader:
    """Converts the Submits for one model. Clients repeat their parameters, so it keeps what follows from them."""

    def __init__(self, info: types_pb2.ModelInfo) -> None:
        self._info = info
        self._kept: dict[tuple[bytes, bytes], Parameters] = {}

    def group(self, submit: scheduler_pb2.Submit, *, owner: int, origin: str = "") -> SequenceGroup:
        """The core's group. Raises InvalidRequestError with the field's name.

        The core itself checks that the request fits a pool and that its id is free, and sets `arrival`.
        """
        info, given = self._info, self._parameters(submit)
        prompt = _prompt(submit.prompt_token_ids)
        options = _options(submit, given)
        features = _features(submit, given, prompt, info, options)
        if given.beams is None and submit.continuation.samples:
            outputs, finished = _continuation(submit.continuation, given.n, given.stop.max_tokens)
        else:  # a beam search starts again: the client does not have all beams
            outputs, finished = (), frozenset()
        return SequenceGroup(
            request_id=submit.request_id,
            prompt=prompt,
            stop=given.stop,
            owner=owner,
            handle=submit.handle,
            n=given.n,
            priority=submit.priority,
            conversation=submit.conversation,
            root_key=_root_key(submit, prompt, info),
            options=options,
            features=Features(*features) if features else NO_FEATURES,
            outputs=outputs,
            finished_samples=finished,
            takes_over=submit.takes_over,
            origin=origin,
            tenant_id=submit.tenant_id,
            timeout_s=submit.deadline_ms / 1000 if submit.HasField("deadline_ms") else None,
            traceparent=valid_traceparent(submit.traceparent) if submit.traceparent else "",
        )

    def _parameters(self, submit: scheduler_pb2.Submit) -> Parameters:
        sampling = submit.sampling
        if not sampling.HasField("seed"):
            raise InvalidRequestError("sampling.seed is unset; the gateway must set it", field="sampling.seed")
        seed = sampling.seed
        sampling.ClearField("seed")  # it may have any value
        key = (sampling.SerializeToString(), submit.stop.SerializeToString())
        sampling.seed = seed
        found = self._kept.get(key)
        if found is not None:
            return found
        found = _parameters(submit, self._info)
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        if len(key[0]) + len(key[1]) <= MAX_KEPT_BYTES:
            self._kept[key] = found
        return found


def _parameters(submit: scheduler_pb2.Submit, info: types_pb2.ModelInfo) -> Parameters:
    sampling = submit.sampling
    n = sampling.n if sampling.HasField("n") else 1
    if not 1 <= n <= info.max_num_seqs:
        raise InvalidRequestError(f"sampling.n is {n}; must be from 1 to {info.max_num_seqs}", field="sampling.n")
    if not submit.stop.HasField("max_tokens"):
        raise InvalidRequestError("stop.max_tokens is unset; the gateway must set it", field="stop.max_tokens")
    with _field_errors():
        if is_constrained := has_grammar(sampling):
            grammar_of(sampling)  # raises for what a worker would refuse
        stop = stop_condition(checks.values_set(submit.stop), is_constrained=is_constrained)
        beams = beam_params(checks.values_set(sampling), stop.max_tokens) if sampling.beam_width else None
    if beams is not None and beams.width > info.max_num_seqs:
        raise InvalidRequestError(
            f"sampling.beam_width is {beams.width}; must be at most {info.max_num_seqs}", field="sampling.beam_width"
        )
    return Parameters(n, stop, beams, _banned_ids(stop, info))


def _options(submit: scheduler_pb2.Submit, given: Parameters) -> worker_pb2.RowOpen:
    """Fields that each row of the request gets. The features add theirs."""
    return worker_pb2.RowOpen(
        request_id=submit.request_id,
        sampling=submit.sampling,
        banned_ids=given.banned_ids,
        banned_before=given.stop.min_tokens,
        bad_words_ids=submit.bad_words_ids,
        logprobs=submit.logprobs if submit.HasField("logprobs") else None,
        adapter=submit.adapter_digest,
        draft_token_ids=submit.draft_token_ids,
    )


@contextmanager
def _field_errors() -> Iterator[None]:
    """Converts a FieldError to the error that the gateway gets."""
    try:
        yield
    except FieldError as error:
        raise InvalidRequestError(str(error), field=error.field) from None


def _banned_ids(stop: StopCondition, info: types_pb2.ModelInfo) -> bytes:
    ids = [token_id for token_id in stop.banned_ids(info.eos_token_ids) if token_id < info.vocab_size]
    limit = min(MAX_BANNED_IDS, info.vocab_size - 1)
    if len(ids) > limit:
        raise InvalidRequestError(
            f"stop.min_tokens is {stop.min_tokens}, which bans {len(ids)} ids (EOS and stop_token_ids); "
            f"at most {limit} can be banned; use fewer stop_token_ids",
            field="stop.min_tokens",
        )
    return u32_to_bytes(np.array(ids, dtype=np.uint32))


def _prompt(data: bytes) -> U32:
    try:
        return u32_from_bytes(data, "prompt_token_ids")
    except WireError as error:
        raise InvalidRequestError(str(error), field="prompt_token_ids") from None


def _features(
    submit: scheduler_pb2.Submit, given: Parameters, prompt: U32, info: types_pb2.ModelInfo, row: worker_pb2.RowOpen
) -> list[Feature]:
    """What the request uses besides tokens; empty for most requests."""
    features = list[Feature]()
    if given.beams is not None:
        features.append(Beams(given.beams))
    num_encoder_tokens = _encoder_tokens(submit, prompt, given.stop.max_tokens, info)
    if info.is_encoder:
        features.append(EncoderPositions(len(prompt)))
    elif num_encoder_tokens:
        features.append(EncoderPositions(num_encoder_tokens, submit.encoder.num_tokens))
        row.encoder.CopyFrom(submit.encoder)
    if border := _num_public_blocks(submit, info):
        features.append(PublicPrefix(border, root_key(cache_salt=submit.cache_salt.encode())))
    if submit.draft_token_ids:
        features.append(DraftBytes(len(submit.draft_token_ids)))
    if submit.inputs:
        features.append(_inputs(submit.inputs, len(prompt), info, row))
    if submit.HasField("prompt_logprobs"):
        features.append(PromptDelivery(submit.prompt_logprobs, max(1, submit.continuation.num_prompt_logprobs)))
    pooled = _pooled(submit, given.n, info)
    if pooled is not None:
        features.append(pooled)
        row.pooling.CopyFrom(submit.pooling)
    if submit.adapter_digest:
        features.append(_adapter(submit.adapter_digest))
    return features


def _encoder_tokens(submit: scheduler_pb2.Submit, prompt: U32, max_tokens: int, info: types_pb2.ModelInfo) -> int:
    """The positions of the encoder input with its padding; 0 if the model has no encoder."""
    has_encoder = info.HasField("encoder")
    if submit.HasField("encoder") != has_encoder:
        words = "has no encoder input, but" if has_encoder else "has an encoder input, but"
        what = "has an encoder" if has_encoder else "has no encoder"
        raise InvalidRequestError(f"the request {words} model {info.model!r} {what}", field="encoder")
    if not has_encoder:
        return 0
    limits, num_tokens = info.encoder, submit.encoder.num_tokens
    if limits.HasField("audio") and not submit.inputs:
        raise InvalidRequestError(f"model {info.model!r} takes audio, but the request has none", field="inputs")
    low = limits.max_tokens if limits.HasField("audio") else 1
    padded = -(-num_tokens // info.block_size) * info.block_size
    num_decoder = len(prompt) - padded
    if not low <= num_tokens <= limits.max_tokens or num_decoder < 1:
        raise InvalidRequestError(
            f"encoder.num_tokens is {num_tokens}; must be from {low} to {limits.max_tokens}, and with padding to "
            f"{padded} less than the prompt of {len(prompt)} positions",
            field="encoder.num_tokens",
        )
    if num_decoder + max_tokens > limits.max_decoder_tokens:
        raise InvalidRequestError(
            f"stop.max_tokens is {max_tokens}; the decoder's prompt has {num_decoder} tokens, and both together must "
            f"be at most {limits.max_decoder_tokens}: ask for at most {limits.max_decoder_tokens - num_decoder}",
            field="stop.max_tokens",
        )
    return padded


def _inputs(
    inputs: Sequence[inputs_pb2.CarriedInput], prompt_len: int, info: types_pb2.ModelInfo, row: worker_pb2.RowOpen
) -> Inputs:
    """The inputs of a prompt. Their positions must ascend: the core computes chunks by them."""
    end = 0
    for i, carried in enumerate(inputs):
        if not end <= carried.start < carried.start + carried.length <= prompt_len:
            raise InvalidRequestError(
                f"inputs[{i}] has start {carried.start} and length {carried.length}; its positions must be after those "
                f"of the inputs before it, which end at {end}, and in the prompt of {prompt_len} positions",
                field=f"inputs[{i}]",
            )
        end = carried.start + carried.length
    num_bytes = sum(len(carried.data) for carried in inputs)
    images = [carried for carried in inputs if carried.kind == inputs_pb2.INPUT_KIND_IMAGE]
    if not images:
        return Inputs(inputs, num_bytes)
    if not info.HasField("images") or any(len(carried.shape) < 2 for carried in images):
        raise InvalidRequestError(f"model {info.model!r} takes no image of this shape", field="inputs")
    merge = info.images.merge_size
    spans = [(carried.start, carried.shape[0] // merge, carried.shape[1] // merge) for carried in images]
    work = tuple((carried.start, _work_of(carried, info.images)) for carried in images)
    row.images = u32_to_bytes(np.array(spans, np.uint32))
    return Inputs(inputs, num_bytes, work)


def _work_of(carried: inputs_pb2.CarriedInput, info: types_pb2.ImageInfo) -> int:
    num_patches = carried.length * info.merge_size**2
    return max(1, math.ceil(carried.length * (info.token_cost + info.attention_cost * num_patches)))


def _continuation(
    continuation: types_pb2.Continuation, n: int, max_tokens: int
) -> tuple[Sequence[U32], frozenset[int]]:
    """The output of each sample so far, and the samples that are complete."""
    outputs: list[U32] = [np.empty(0, dtype=np.uint32) for _ in range(n)]
    for sample in continuation.samples:
        if sample.index >= n:
            raise InvalidRequestError(
                f"continuation has sample {sample.index}; must be below n, {n}", field="continuation.samples.index"
            )
        if len(sample.output_token_ids) > max_tokens:
            raise InvalidRequestError(
                f"continuation has {len(sample.output_token_ids)} tokens of sample {sample.index}; "
                f"must be at most max_tokens, {max_tokens}",
                field="continuation.samples.output_token_ids",
            )
        outputs[sample.index] = np.array(sample.output_token_ids, dtype=np.uint32)
    finished = frozenset(sample.index for sample in continuation.samples if sample.finished)
    if len(finished) == n:
        raise InvalidRequestError(
            "every sample of continuation has finished; at least one must be unfinished", field="continuation"
        )
    return outputs, finished


def _root_key(submit: scheduler_pb2.Submit, prompt: U32, info: types_pb2.ModelInfo) -> bytes:
    encoder = encoder_digest(prompt[: submit.encoder.num_tokens]) if submit.HasField("encoder") else b""
    salt = b"" if _num_public_blocks(submit, info) else submit.cache_salt.encode()
    return root_key(cache_salt=salt, encoder=encoder, adapter=submit.adapter_digest)


def _num_public_blocks(submit: scheduler_pb2.Submit, info: types_pb2.ModelInfo) -> int:
    """The full blocks of the public prefix. Output is never public."""
    count, most = submit.num_public_tokens, len(submit.prompt_token_ids) // 4
    if count > most:
        raise InvalidRequestError(
            f"num_public_tokens is {count}; must be at most the prompt's {most} tokens", field="num_public_tokens"
        )
    return count // info.block_size if count else 0


def _adapter(digest: bytes) -> UsesAdapter:
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequestError(
            f"adapter_digest has {len(digest)} bytes; expected {DIGEST_BYTES}", field="adapter_digest"
        )
    return UsesAdapter(digest)


def _pooled(submit: scheduler_pb2.Submit, n: int, info: types_pb2.ModelInfo) -> PooledRequest | None:
    """What a request returns instead of tokens; None if it generates."""
    if not submit.HasField("pooling"):
        if info.is_encoder or (info.HasField("pooling") and not info.pooling.generates):
            raise InvalidRequestError(f"model {info.model!r} generates no tokens; use Embed or Score", field="model")
        return None
    message = submit.pooling
    is_vector = message.task == pooling_pb2.POOLING_TASK_VECTOR
    if message.task not in POOLING_TASKS or (is_vector and message.kind not in POOLING_KINDS):
        raise InvalidRequestError(
            f"pooling has task {message.task} and kind {message.kind}; this scheduler does not know them",
            field="pooling",
        )
    if submit.stop.max_tokens or n != 1:
        raise InvalidRequestError("a request with pooling must have max_tokens 0 and n 1", field="pooling")
    reads_last = message.kind == types_pb2.POOLING_KIND_LAST or not is_vector
    return PooledRequest(may_hit=not info.is_encoder and reads_last)
