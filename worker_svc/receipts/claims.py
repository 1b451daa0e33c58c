"""Statements of a receipt about its answer, checked against each other and a model's facts before tokens are computed.

ReceiptError: no server makes such a receipt. `open_points` names what is neither wrong nor provable here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from google.protobuf.json_format import ParseDict, ParseError
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from request_fields import checks
from request_fields.fields import BY_PATH, FieldError, FinishReason, StopCondition, has_grammar, stop_condition
from request_fields.parameters import ONLY_WITH_BEAMS
from request_fields.receipts import Receipt, ReceiptError
from worker_svc.engine.config import EngineInfo

MAX_SAMPLES = 1 << 16  # rows that a scheduler lets a worker have
TEXTS = ("model", "revision", "weights_digest", "numerics", "build", "dtype", "quantization", "kv_cache_dtype",
         "determinism", "adapter", "request_id", "time")  # fmt: skip
ENDS = {reason.value for reason in FinishReason} - {"error"}


class Texts(Protocol):
    """The tokenizer of the model."""

    def texts(self, token_ids: Sequence[int]) -> list[bytes]: ...

    def token_ids(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive output tokens that one version of the weights has computed."""

    start: int
    end: int
    weights_digest: str
    revision: str
    keeps_kv: bool = False  # from keys and values of earlier weights, so they cannot be computed again


@dataclass(frozen=True, slots=True)
class ReceiptParameters:
    """The parameters of the request."""

    sampling: types.SamplingParams
    stop: types.StopParams
    condition: StopCondition
    bad_words_ids: Sequence[Sequence[int]]


def integer(values: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """A number of the payload. Raises ReceiptError."""
    value = values.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ReceiptError(f"{name} is {value!r}; a server writes an integer from {low} to {high}")
    return value


def check_form(receipt: Receipt) -> None:
    """Raises ReceiptError for values of other types, and for counts that contradict the arrays."""
    payload, answer = receipt.payload, receipt.answer
    num_output, num_digests = len(answer.token_ids), len(answer.logits_digests)
    if not answer.prompt_token_ids or not num_output:
        raise ReceiptError("the receipt has no prompt or no output")
    for name, count in (
        ("num_prompt_tokens", len(answer.prompt_token_ids)),
        ("num_output_tokens", num_output),
        ("first_digest", num_output - num_digests),
    ):
        if integer(payload, name, 0, count if count > 0 else 0) != count:
            raise ReceiptError(f"{name} is {payload[name]}, but the arrays say {count}")
    integer(payload, "num_claimed_tokens", 0, num_output - num_digests)
    integer(payload, "max_model_len", len(answer.prompt_token_ids) + num_output, 1 << 32)
    for name in TEXTS:
        if not isinstance(payload.get(name), str):
            raise ReceiptError(f"{name} is {payload.get(name)!r}; servers write a text")
    if payload.get("finish_reason") not in sorted(ENDS):
        raise ReceiptError(f"finish_reason is {payload.get('finish_reason')!r}; servers sign one of {sorted(ENDS)}")


def spans_of(receipt: Receipt) -> list[Span]:
    """The spans of the output, in order and without gaps. Raises ReceiptError."""
    payload, num_output, end = receipt.payload, len(receipt.answer.token_ids), 0
    try:
        last = Span(0, num_output, str(payload["weights_digest"]), str(payload["revision"]))
        if "weight_versions" not in payload:
            return [last]
        spans = [
            Span(integer(s, "start", 0, num_output), integer(s, "end", 0, num_output), s["weights_digest"],
                 s["revision"], s["keeps_kv"])
            for s in payload["weight_versions"]
        ]  # fmt: skip
        versions = [integer(s, "version", 0, 1 << 64) for s in payload["weight_versions"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise ReceiptError(f"the payload describes no spans of weights: {type(error).__name__}: {error}") from None
    if spans and spans[0].start == payload["first_digest"]:
        end = spans[0].start  # the client had the tokens before it
    for span in spans:
        if span.start != end or span.end <= span.start or type(span.keeps_kv) is not bool:
            raise ReceiptError(f"weight_versions has a span [{span.start}, {span.end}) after output token {end - 1}")
        end = span.end
    newest = spans[-1] if spans else None
    if newest is None or end != num_output or versions != sorted(versions):
        raise ReceiptError(f"weight_versions covers {end} of {num_output} output tokens, or its versions do not ascend")
    if (newest.weights_digest, newest.revision) != (last.weights_digest, last.revision):
        raise ReceiptError("weights_digest and revision are not those of the last span of weight_versions")
    return spans


def parameters_of(receipt: Receipt) -> ReceiptParameters:
    """The request's parameters, each in its range. Raises ReceiptError."""
    payload = receipt.payload
    try:
        sampling = ParseDict(payload["sampling"], types.SamplingParams())
        stop = ParseDict(payload["stop"], types.StopParams())
        checks.check_fields(pb.GenerateRequest(sampling=sampling, stop=stop))
        condition = stop_condition(checks.values_set(stop), is_constrained=has_grammar(sampling))
        bad_words_ids = [types.TokenIds(ids=ids).ids for ids in payload["bad_words_ids"]]
        seed = integer(payload, "seed", 0, (1 << 64) - 1)
    except (ParseError, FieldError, KeyError, TypeError, ValueError) as error:
        raise ReceiptError(f"the payload describes no request: {error}") from None
    n = sampling.n or 1
    beams = {path: getattr(sampling, BY_PATH[path].name) for path in ONLY_WITH_BEAMS}
    integer(payload, "sample", 0, n - 1)
    for is_wrong, words in (
        (seed != sampling.seed, f"seed is {seed}, but sampling.seed is {sampling.seed}"),
        (n > MAX_SAMPLES, f"sampling.n is {n}; workers have at most {MAX_SAMPLES} rows"),
        (not sampling.logits_digests, "sampling.logits_digests is not set, and receipts set it"),
        (sampling.HasField("best_of") or sampling.beam_width > 1, "receipts are refused with best_of and beams"),
        (any(value != (BY_PATH[path].default or 0) for path, value in beams.items()), "a parameter needs beams"),
        (sampling.num_forced_tokens >= len(receipt.answer.prompt_token_ids), "sampling.num_forced_tokens is too large"),
        (len(receipt.answer.token_ids) > condition.max_tokens, "the output has more tokens than stop.max_tokens"),
    ):
        if is_wrong:
            raise ReceiptError(f"no server signs this: {words}")
    return ReceiptParameters(sampling, stop, condition, bad_words_ids)


def check_ids(receipt: Receipt, asked: ReceiptParameters, info: EngineInfo) -> None:
    """Raises ReceiptError for token ids that the model does not have, and for rules that leave it no token."""
    size, answer = info.vocab_size, receipt.answer
    lists: dict[str, Sequence[int]] = {"prompt_token_ids": answer.prompt_token_ids, "token_ids": answer.token_ids}
    lists["stop_token_ids"] = asked.stop.stop_token_ids
    lists |= {f"bad_words_ids[{i}]": ids for i, ids in enumerate(asked.bad_words_ids)}
    for name, ids in lists.items():
        if (name.startswith("bad_words") and not ids) or (highest := max(ids, default=0)) >= size:
            raise ReceiptError(f"{name} is empty or contains {highest}; the model has {size} ids")
    try:
        checks.check_sampled_ids(asked.sampling, size)
        banned = asked.condition.banned_ids(info.eos_token_ids)
        checks.check_something_is_left(asked.sampling, asked.bad_words_ids, banned, size)
    except FieldError as error:
        raise ReceiptError(f"the payload describes no request: {error}") from None


def open_points(
    receipt: Receipt, asked: ReceiptParameters, info: EngineInfo, tokenizer: Callable[[], Texts]
) -> Iterator[str]:
    """Statements that are neither wrong nor provable here. Raises ReceiptError for an end that contradicts the ids.
    `tokenizer` raises ValueError if there is none."""
    ids, reason = receipt.answer.token_ids, receipt.payload["finish_reason"]
    eos, view = info.eos_token_ids, memoryview(ids)
    ends = ((place, asked.condition.end_of(view[: place + 1], eos)) for place in range(len(ids)))
    place, end = next(((place, end) for place, end in ends if end is not None), (len(ids) - 1, None))
    if place < len(ids) - 1:
        raise ReceiptError(f"output token {place} ends the output, but tokens follow it")
    if (first := len(ids) - len(receipt.answer.logits_digests)) > 0:
        claimed = receipt.payload["num_claimed_tokens"]
        yield f"the logits of the first {first} output tokens have no digests to compare; the client gave {claimed}"
    if asked.stop.stop or asked.sampling.bad_words or asked.bad_words_ids:
        try:
            yield from _open_texts(receipt, asked, tokenizer())
        except ValueError as error:
            yield f"texts of the request cannot be compared with token ids: {error}"
    if asked.stop.stop and reason == FinishReason.STOP.value:
        return
    if end is not None and reason != end.value:
        raise ReceiptError(f"finish_reason is {reason}, but the output ends for {end.value}")
    if end is None and reason in (FinishReason.EOS.value, FinishReason.STOP.value):
        raise ReceiptError(f"finish_reason is {reason}, but the last output token does not end the output")
    if end is None:
        yield f"finish_reason is {reason}, which does not follow from the tokens"


def _open_texts(receipt: Receipt, asked: ReceiptParameters, tokenizer: Texts) -> Iterator[str]:
    """Stop strings and bad words against the token ids. The gateway's text may differ in special tokens and the first
    space, so a difference refutes nothing."""
    ids = receipt.answer.token_ids
    texts = tokenizer.texts(ids)
    ends = list(accumulate(map(len, texts)))
    first = ends[min(asked.condition.min_tokens, len(ids)) - 1] if asked.condition.min_tokens else 0
    found = [end for word in asked.stop.stop if (end := _end_of(b"".join(texts), word.encode(), first)) is not None]
    is_stopped = bool(found) and (len(ids) == 1 or min(found) > ends[-2])
    by_id = ids[-1] in asked.condition.stop_token_ids and len(ids) > asked.condition.min_tokens
    claims_stop = receipt.payload["finish_reason"] == FinishReason.STOP.value and not by_id
    if claims_stop != is_stopped or bool(found) != is_stopped:
        yield "the stop strings were not found where the output ends"
    bare = [one.lstrip(" ") or one for one in asked.sampling.bad_words]
    variants = [*bare, *(f" {one}" for one in bare)]
    if {tuple(one) for one in asked.bad_words_ids} != {tuple(tokenizer.token_ids(word)) for word in variants}:
        yield "bad_words_ids are not the tokens of bad_words"


def _end_of(text: bytes, word: bytes, first: int) -> int | None:
    """The end of the first occurrence of a word that ends after `first`."""
    at = text.find(word, max(0, first - len(word) + 1))
    return None if at < 0 else at + len(word)
