"""Checks a request before any work is done for it.

Types, ranges and unsupported fields follow from `request_fields`. Conditions that need the prompt or the model are
checked when the request is planned. A message has the field's path, its value, the limit, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request.field_errors import FieldErrors, check_cost, invalid
from gateway_svc.request.prompts.readers import check_prompt
from request_fields import checks
from request_fields.fields import has_grammar
from request_fields.parameters import Grammar, grammar_of
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
    """Check the ids of an Abort."""
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
