"""Checks the fields of a request before any work is done for it, and later its parameters against its model.

Types, ranges and unsupported fields follow from `request_fields`. A message has the field's path, its value, the limit,
and what to do. Clients repeat their parameters, so the results of their check are kept with the model: a request with
the same parameters needs no further check of them.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request.field_errors import FieldErrors, check_cost, check_token_ids, invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.prompts.readers import check_prompt
from request_fields import checks
from request_fields.fields import GRAMMAR_FIELDS, MAX_BAD_WORD_IDS, StopCondition, has_grammar, stop_condition
from request_fields.parameters import BeamParams, Grammar, beam_params, grammar_of
from svc_common.errors import NotConfiguredError

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
DEFAULT_MAX_LOGPROBS = 20
LOGPROBS_MODES = {"raw": types.LOGPROBS_MODE_UNSPECIFIED, "processed": types.LOGPROBS_MODE_PROCESSED}
MAX_ABORT_IDS = 10_000
MAX_ID_CHARS_SHOWN = 80


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of this gateway for a request."""

    min_priority: int = -1000
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    logprobs_mode: types.LogprobsMode.ValueType = types.LOGPROBS_MODE_UNSPECIFIED  # the default
    signs_receipts: bool = False


DEFAULT_LIMITS = RequestLimits()


def check_generate(
    request: pb.GenerateRequest, limits: RequestLimits = DEFAULT_LIMITS, *, is_new: bool = True
) -> Grammar | None:
    """All checks that do not depend on the model. Returns the grammar, not compiled. A record sets every field, so how
    fields are combined is checked only in a new request. Sets `logprobs_mode` if only the gateway has one.

    Raises InvalidRequestError.
    """
    check_prompt(request.prompt)
    if request.media and request.prompt.WhichOneof("kind") not in ("text", "tokens"):
        raise invalid("media", "is for prompt.text and prompt.tokens; send the images of a chat in its parts")
    with FieldErrors():
        checks.check_fields(request)
        if is_new:
            checks.check_beams(request)
        check_cost(request, (request.prompt,))
        grammar = grammar_of(request.sampling) if has_grammar(request.sampling) else None
    check_priority(request.scheduling.priority, limits)
    _check_logprobs(request.output, limits.max_logprobs)
    if request.sampling.num_forced_tokens:
        _check_forced(request)
    if request.receipt:
        _prepare_receipt(request, limits)
    if is_new and limits.logprobs_mode and not request.sampling.logprobs_mode:
        request.sampling.logprobs_mode = limits.logprobs_mode
    return grammar


def check_priority(priority: int, limits: RequestLimits) -> None:
    """Check that the request is not more urgent than this gateway allows."""
    if priority < limits.min_priority:
        raise invalid(
            "scheduling.priority",
            f"is {priority}; must be at least {limits.min_priority} on this gateway (--min-priority); lower is more "
            "urgent",
        )


def _check_logprobs(output: pb.OutputParams, max_logprobs: int) -> None:
    """Check that the request asks for no more log probabilities per token than this gateway allows."""
    for name, num_top in (("logprobs", output.logprobs), ("prompt_logprobs", output.prompt_logprobs)):
        if num_top > max_logprobs:
            raise invalid(
                f"output.{name}", f"is {num_top}; must be at most {max_logprobs} on this gateway (--max-logprobs)"
            )


def _check_forced(request: pb.GenerateRequest) -> None:
    """Forced tokens are those of one sample, and scored with the prompt."""
    sampling = request.sampling
    for field, is_wrong, words in (
        ("output.prompt_logprobs", not request.output.HasField("prompt_logprobs"), "is unset; set it to score them"),
        ("sampling.n", max(sampling.n, sampling.best_of) > 1, "is above 1; send a request per sample"),
    ):
        if is_wrong:
            raise invalid(field, f"{words}: sampling.num_forced_tokens is {sampling.num_forced_tokens}")


def _prepare_receipt(request: pb.GenerateRequest, limits: RequestLimits) -> None:
    """A receipt needs a key, samples as workers compute them, and digests of their logits."""
    if not limits.signs_receipts:
        raise NotConfiguredError(
            "receipt is set, but this gateway signs no receipts; start it with --receipt-key-file, or leave the field "
            "unset",
            field="receipt",
        )
    if request.sampling.best_of > max(1, request.sampling.n):
        raise invalid("receipt", "is set together with sampling.best_of; leave one of them unset")
    if not request.output.HasField("logprobs"):
        request.output.logprobs = 0
    request.sampling.logits_digests = True


def check_request_id(request_id: str) -> None:
    """Check the client's request id; it may be empty."""
    if request_id:
        check_id("request_id", request_id)


def check_resume(request: pb.ResumeRequest) -> None:
    """Check the form of a Resume."""
    check_id("request_id", request.request_id)
    seen: set[int] = set()
    for i, position in enumerate(request.after):
        if position.index in seen:
            raise invalid(f"after[{i}].index", f"is {position.index}, the index of an earlier entry; remove one")
        seen.add(position.index)


def sent_tokens(after: Sequence[pb.ResumePosition], n: int) -> tuple[int, ...]:
    """Per sample, the number of output tokens that the client of a Resume has."""
    for i, position in enumerate(after):
        if position.index >= n:
            raise invalid(f"after[{i}].index", f"is {position.index}; must be from 0 to {n - 1}")
    have = {position.index: position.num_tokens for position in after}
    return tuple(have.get(index, 0) for index in range(n))


def check_abort(request_ids: Sequence[str]) -> None:
    if len(request_ids) > MAX_ABORT_IDS:
        words = f"has {len(request_ids)} ids; at most {MAX_ABORT_IDS} are allowed: send them in parts"
        raise invalid("request_ids", words)
    for i, request_id in enumerate(request_ids):
        check_id(f"request_ids[{i}]", request_id)


def check_id(field: str, request_id: str) -> None:
    """Check the form of an id of a request or a session."""
    if not REQUEST_ID.fullmatch(request_id):
        shown = request_id[:MAX_ID_CHARS_SHOWN]
        raise invalid(field, f"is {shown!r}; must be 1 to 64 characters of A-Z a-z 0-9 . _ : -")


MAX_KEPT = 256  # results per model
MAX_KEPT_BYTES = 1024  # parameters larger than this are checked each time
NO_OUTPUT = array("I")  # never changed: journals copy the output that they begin with
BEAM_RESERVE = 4  # a fourth of the rows of a worker stays free for others: a beam search needs its rows all at once


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Checked parameters. The messages are shared by all requests with these parameters: copy before changing them."""

    params: types.SamplingParams  # every served field set
    bad_words_ids: tuple[tuple[int, ...], ...]  # token ids of params.bad_words
    stop: types.StopParams  # max_tokens set
    condition: StopCondition  # the part of `stop` that depends on token ids only
    beams: BeamParams | None

    def with_seed(self, seed: int) -> SamplingPlan:
        """The parameters of one request."""
        params = types.SamplingParams()
        params.CopyFrom(self.params)
        params.seed = seed
        return SamplingPlan(params, self.bad_words_ids, self.stop, self.condition, self.beams)


@dataclass(frozen=True, slots=True)
class Replay:
    """The state of a request that continues from its record."""

    sent: tuple[int, ...]  # [n] number of output tokens that the client has
    ends: tuple[scheduler_pb2.SampleFinished | None, ...]  # [n] how samples ended whose output is complete


@dataclass(frozen=True, slots=True)
class BestOf:
    """More samples are computed than sent. A continuation says nothing about the others, so all are computed again."""

    num_computed: int  # samples that a scheduler computes
    known: tuple[array[int], ...]  # [n] output of the best samples that the client has


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """The state in which a request starts. A new request has no output."""

    outputs: tuple[array[int], ...]  # [n] output ids that are not computed again
    finished: tuple[bool, ...]  # [n] whether the client has the end of the sample
    cumulative_logprobs: tuple[float, ...]  # [n] sums over `outputs`
    num_prompt_logprobs: int = 0  # prompt tokens whose log probabilities the client has, the first token included
    replay: Replay | None = None  # None: the client has all of `outputs`
    best_of: BestOf | None = None  # None: all computed samples are sent

    @property
    def computed(self) -> tuple[Sequence[array[int]], Sequence[bool]]:
        """Per sample that a scheduler computes: its output so far, and whether it has ended."""
        if self.best_of is None:
            return self.outputs, self.finished
        num = self.best_of.num_computed
        return [array("I") for _ in range(num)], [all(self.finished)] * num


def new_request(sampling: SamplingPlan) -> ResumePlan:
    """The start of a request of which nothing is known."""
    n = sampling.params.n
    return ResumePlan((NO_OUTPUT,) * n, (False,) * n, (0.0,) * n)


def sampling_plan(
    request: pb.GenerateRequest,
    model: ServedModel,
    max_tokens: int,
    grammar: Grammar | None = None,
    *,
    drawn_seed: int = 0,
) -> SamplingPlan:
    """The parameters of a request. `max_tokens` is resolved; `grammar` is the request's grammar after its check.
    `drawn_seed` is used if the request has no seed.

    Raises InvalidRequestError with the invalid field.
    """
    found = _kept(request, model, max_tokens) if grammar is None else _check(request, model, max_tokens, grammar)
    return found.with_seed(request.sampling.seed if request.sampling.HasField("seed") else drawn_seed)


def _kept(request: pb.GenerateRequest, model: ServedModel, max_tokens: int) -> SamplingPlan:
    """The result of an earlier request with the same parameters, if it is kept."""
    key = (_without_seed(request.sampling), request.stop.SerializeToString(), max_tokens)
    kept = model.parameters
    found: SamplingPlan | None = kept.get(key)
    if found is None:
        found = _check(request, model, max_tokens, None)
        if len(kept) >= MAX_KEPT:  # threads may add at the same time, so nothing iterates over it
            kept.clear()
        if len(key[0]) + len(key[1]) <= MAX_KEPT_BYTES:
            kept[key] = found
    return found


def _without_seed(sampling: types.SamplingParams) -> bytes:
    if sampling.HasField("seed"):
        asked, sampling = sampling, types.SamplingParams()
        sampling.CopyFrom(asked)
        sampling.ClearField("seed")
    return sampling.SerializeToString()


def _check(request: pb.GenerateRequest, model: ServedModel, max_tokens: int, grammar: Grammar | None) -> SamplingPlan:
    sampling = resolve_sampling(request.sampling, model, drawn_seed=0)
    if grammar is not None:
        _set_grammar(sampling, grammar)
    _check_num_samples(sampling, model)
    check_token_ids("stop.stop_token_ids", request.stop.stop_token_ids, model)
    if request.stop.stop:
        model.require_tokenizer("stop.stop")
    stop = types.StopParams()
    stop.CopyFrom(request.stop)
    stop.max_tokens = max_tokens
    with FieldErrors():
        condition = stop_condition(checks.values_set(stop), is_constrained=grammar is not None)
        beams = beam_params(checks.values_set(sampling), condition.max_tokens) if sampling.beam_width else None
    bad_words_ids = _tokenize_bad_words(sampling.bad_words, model)
    with FieldErrors():
        checks.check_sampled_ids(sampling, model.info.vocab_size)
        early_banned = condition.banned_ids(model.info.eos_token_ids)
        checks.check_something_is_left(sampling, bad_words_ids, early_banned, model.info.vocab_size)
    return SamplingPlan(sampling, bad_words_ids, stop, condition, beams)


def resolve_sampling(asked: types.SamplingParams, model: ServedModel, *, drawn_seed: int) -> types.SamplingParams:
    """Every supported field: the request's value, else the model's, else the default."""
    return types.SamplingParams(**checks.resolve_sampling(asked, model.info.default_sampling, drawn_seed=drawn_seed))


def _set_grammar(sampling: types.SamplingParams, grammar: Grammar) -> None:
    for name in GRAMMAR_FIELDS:
        sampling.ClearField(name)  # type: ignore[arg-type]
    setattr(sampling, grammar.kind.value, grammar.text)


def _check_num_samples(sampling: types.SamplingParams, model: ServedModel) -> None:
    """Check n, best_of and beam_width. Removes a best_of that has no effect."""
    most = model.info.max_num_seqs
    if sampling.n > most:
        raise invalid("sampling.n", f"is {sampling.n}; a worker of this model runs at most {most} at once")
    if sampling.beam_width > (share := most - most // BEAM_RESERVE):
        words = f"is {sampling.beam_width}; must be at most {share}, three quarters of a worker's rows (max_num_seqs)"
        raise invalid("sampling.beam_width", words)
    if not sampling.HasField("best_of"):
        return
    if sampling.best_of < sampling.n:
        raise invalid("sampling.best_of", f"is {sampling.best_of}; must be at least sampling.n, {sampling.n}")
    if sampling.best_of > most:
        words = f"is {sampling.best_of}; a worker of this model runs at most {most} samples at once"
        raise invalid("sampling.best_of", words)
    if sampling.best_of == sampling.n:
        sampling.ClearField("best_of")


def _tokenize_bad_words(bad_words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Token ids of each string without and with a leading space, because most tokenizers have other tokens for the
    start of a word within a text."""
    if not bad_words:
        return ()
    tokenizer = model.require_tokenizer("sampling.bad_words")
    found: dict[tuple[int, ...], None] = {}  # in order, without repetition
    for i, text in enumerate(bad_words):
        bare = text.lstrip(" ") or text
        for variant in (bare, " " + bare):
            ids = tuple(tokenizer.encode(variant, add_special_tokens=False))
            if not 1 <= len(ids) <= MAX_BAD_WORD_IDS:
                words = f"has {len(ids)} tokens; must have 1 to {MAX_BAD_WORD_IDS}"
                raise invalid(f"sampling.bad_words[{i}]", words)
            found[ids] = None
    return tuple(found)
