"""Checks a request before any work is done for it.

Types, ranges and unsupported fields follow from `request_fields`. Conditions on the prompt, the model or several fields
are checked here. A message has the field's path, its value, the limit, and what to do.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quire.internal.v1 import inputs_pb2, scheduler_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request import encoder
from gateway_svc.request.chat_request import AnswerPlan, answer_plan, check_chat
from gateway_svc.request.encoder import EncoderPlan, decoder_start, encoder_plan
from gateway_svc.request.image_prompt import has_images, text_size
from gateway_svc.request.models import ServedModel
from gateway_svc.request.parameters import FieldErrors, check_token_ids, invalid, parameters_of
from gateway_svc.request.prompt_input import PromptInput, check_embeddings
from request_fields import checks
from request_fields.beams import BeamParams
from request_fields.fields import StopCondition
from request_fields.grammar import Grammar
from request_fields.grammar import grammar_of as read_grammar
from svc_common.errors import ContextLengthError

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
MAX_CONTINUATION_IDS = 4 << 20  # number of output ids of all samples together
MAX_TOKENIZE_BYTES = 4 << 20
MAX_DETOKENIZE_IDS = 1 << 20
MAX_ABORT_IDS = 10_000
MIN_CHAT_LIMIT_BYTES = 1 << 20  # a template may drop part of a chat, so a large chat may have few tokens
MAX_ID_CHARS_SHOWN = 80


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
class GenerationPlan:
    """A request that passed every check, with all defaults applied."""

    request_id: str
    model: ServedModel
    prompt_ids: array[int]
    inputs: tuple[inputs_pb2.CarriedInput, ...]  # the prompt's positions without a token
    sampling: types.SamplingParams  # every served field set
    bad_words_ids: tuple[tuple[int, ...], ...]  # token ids of sampling.bad_words
    stop: types.StopParams  # max_tokens set
    stop_condition: StopCondition  # the part of `stop` that depends on token ids only
    scheduling: pb.SchedulingParams
    cache_salt: str  # that of `scheduling`, or one that also depends on the tenant
    wants_text: bool
    answer: AnswerPlan | None  # how the text is parsed; None: it is sent unchanged
    wants_token_ids: bool
    skip_special_tokens: bool
    joins_events: bool  # events that are ready at the same time are sent as one message
    outputs: tuple[array[int], ...]  # [n] output ids from the continuation
    finished: tuple[bool, ...]  # [n] whether the continuation has the sample as finished
    beams: BeamParams | None = None
    replay: Replay | None = None  # None: the client has all of `outputs`
    logprobs: int | None = None  # number of most likely tokens to send with each output token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for prompt tokens
    cumulative_logprobs: tuple[float, ...] = ()  # [n] sums over `outputs`
    num_prompt_logprobs: int = 0  # prompt tokens whose log probabilities the client has, the first token included
    best_of: BestOf | None = None  # None: all computed samples are sent
    encoder: EncoderPlan | None = None  # set if `prompt_ids` are the input of an encoder

    @property
    def column(self) -> array[int]:
        """The prompt that schedulers get."""
        return self.prompt_ids if self.encoder is None else self.encoder.column(self.prompt_ids)

    @property
    def computed(self) -> tuple[Sequence[array[int]], Sequence[bool]]:
        """Per sample that a scheduler computes: its output so far, and whether it has ended."""
        if self.best_of is None:
            return self.outputs, self.finished
        num = self.best_of.num_computed
        return [array("I") for _ in range(num)], [all(self.finished)] * num


def check_generate(request: pb.GenerateRequest, *, is_new: bool = True) -> Grammar | None:
    """All checks that do not depend on the model. Returns the grammar, not compiled. A record sets every field, so how
    fields are combined is checked only in a new request.

    Raises InvalidRequestError.
    """
    check_prompt(request.prompt)
    if request.media and request.prompt.WhichOneof("kind") not in ("text", "tokens"):
        raise invalid("media", "is for prompt.text and prompt.tokens; send the images of a chat in its parts")
    with FieldErrors():
        checks.check_fields(request)
        if is_new:
            checks.check_beams(request)
        return read_grammar(request.sampling)


def check_priority(priority: int, min_priority: int) -> None:
    """Check that the request is not more urgent than this gateway allows."""
    if priority < min_priority:
        raise invalid(
            "scheduling.priority",
            f"is {priority}; must be at least {min_priority} on this gateway (--min-priority); lower is more urgent",
        )


def check_logprobs(output: pb.OutputParams, max_logprobs: int) -> None:
    """Check that the request asks for no more log probabilities per token than this gateway allows."""
    for name, num_top in (("logprobs", output.logprobs), ("prompt_logprobs", output.prompt_logprobs)):
        if num_top > max_logprobs:
            raise invalid(
                f"output.{name}", f"is {num_top}; must be at most {max_logprobs} on this gateway (--max-logprobs)"
            )


def check_request_id(request_id: str) -> None:
    """Check the client's request id; it may be empty."""
    if request_id:
        _check_id("request_id", request_id)


def check_resume(request: pb.ResumeRequest) -> None:
    """Check the form of a Resume."""
    _check_id("request_id", request.request_id)
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
        _check_id(f"request_ids[{i}]", request_id)


def check_tokenize(prompt: pb.Prompt) -> None:
    """Check the size and the form of a Tokenize prompt."""
    size = prompt.ByteSize()
    if size > MAX_TOKENIZE_BYTES:
        raise invalid("prompt", f"has {size} bytes; Tokenize accepts at most {MAX_TOKENIZE_BYTES}: send it in parts")
    check_prompt(prompt)
    if (kind := prompt.WhichOneof("kind")) in ("embeddings", "audio"):
        raise invalid(f"prompt.{kind}", f"is set, but {kind} has no tokens; send text or a chat")
    if has_images(prompt.chat):
        raise invalid("prompt.chat", "has images, which have no tokens; send the chat without them")


def check_detokenize(ids: Sequence[int]) -> None:
    """Check the number of ids of a Detokenize."""
    if len(ids) > MAX_DETOKENIZE_IDS:
        raise invalid("ids", f"has {len(ids)} ids; Detokenize accepts at most {MAX_DETOKENIZE_IDS}: send them in parts")


def check_prompt(prompt: pb.Prompt, field: str = "prompt") -> None:
    """Check the form of an input: one kind, not empty, known roles."""
    kind = prompt.WhichOneof("kind")
    if kind is None:
        raise invalid(field, "is not set; send prompt.text, tokens, chat, embeddings or audio")
    if kind == "text" and not prompt.text:
        raise invalid(f"{field}.text", "is empty; send at least one character")
    if kind == "tokens" and not prompt.tokens.ids:
        raise invalid(f"{field}.tokens.ids", "is empty; send at least one token id")
    if kind == "embeddings" and not prompt.embeddings:
        raise invalid(f"{field}.embeddings", "is empty; send a file in the safetensors format")
    if kind == "audio" and not prompt.audio.data:
        raise invalid(f"{field}.audio.data", "is empty; send a WAV file, or samples with format PCM_F32")
    if kind == "chat":
        check_chat(prompt.chat)


def plan_generation(
    request: pb.GenerateRequest,
    model: ServedModel,
    prompt: PromptInput,
    *,
    request_id: str,
    drawn_seed: int,
    grammar: Grammar | None = None,
    cache_salt: str = "",
) -> GenerationPlan:
    """Check a request against its model and apply defaults. `drawn_seed` is used if the request has no seed. `grammar`
    is the request's grammar after its check, `cache_salt` the salt of its cached blocks.

    Raises InvalidRequestError with the invalid field.
    """
    prompt_ids = prompt.ids
    if prompt.inputs:
        _check_with_inputs(request, prompt, model)
    else:
        if request.HasField("truncate_prompt_tokens"):
            prompt_ids = prompt_ids[-request.truncate_prompt_tokens :]
        check_token_ids("prompt", prompt_ids, model)
    check_determinism(request.scheduling.determinism, model)
    start = decoder_start(request.prompt, model)
    if start is None:
        max_tokens = resolve_max_tokens(request.stop, len(prompt_ids), model)
    else:
        max_tokens = encoder.resolve_max_tokens(request.stop, len(prompt_ids), start, model)
        encoder.check_output(request.output)
    given = parameters_of(request, model, max_tokens, grammar)
    sampling = given.sampling_with(request.sampling.seed if request.sampling.HasField("seed") else drawn_seed)
    outputs, finished = _read_continuation(request, model, sampling, given.condition.max_tokens)
    output = request.output
    _check_num_top(output, model)
    wants_text = (not output.HasField("text") or output.text) and model.text.tokenizer is not None
    plan = GenerationPlan(
        request_id=request_id,
        model=model,
        prompt_ids=array("I", prompt_ids),
        inputs=prompt.inputs,
        sampling=sampling,
        bad_words_ids=given.bad_words_ids,
        stop=given.stop,
        stop_condition=given.condition,
        scheduling=request.scheduling,
        cache_salt=cache_salt,
        wants_text=wants_text,
        answer=answer_plan(request, model, prompt_ids) if wants_text else None,
        wants_token_ids=not output.HasField("token_ids") or output.token_ids,
        skip_special_tokens=not output.HasField("skip_special_tokens") or output.skip_special_tokens,
        joins_events=request.joins_events,
        outputs=outputs,
        finished=finished,
        logprobs=output.logprobs if output.HasField("logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        cumulative_logprobs=_sums_of(request.continuation, sampling.n),
        num_prompt_logprobs=_num_prompt_logprobs(request.continuation, len(prompt_ids)),
        beams=given.beams,
        encoder=None if start is None else encoder_plan(len(prompt_ids), max_tokens, start, grammar, model),
    )
    return _as_best_of(plan) if sampling.HasField("best_of") else plan


def _check_with_inputs(request: pb.GenerateRequest, prompt: PromptInput, model: ServedModel) -> None:
    """Check the tokens between the inputs, and fields that need a token at each position."""
    for field, is_set in (
        ("truncate_prompt_tokens", request.HasField("truncate_prompt_tokens")),
        ("output.prompt_logprobs", request.output.HasField("prompt_logprobs")),
    ):
        if is_set:
            raise invalid(field, "is set, but the prompt has positions without a token; leave the field unset")
    first = 0
    for carried in prompt.inputs:
        check_token_ids("prompt", prompt.ids[first : carried.start], model)
        first = carried.start + carried.length
    check_token_ids("prompt", prompt.ids[first:], model)


def _as_best_of(plan: GenerationPlan) -> GenerationPlan:
    """All samples are computed from their first token. The best are sent from the position that the client has."""
    n = len(plan.outputs)
    return replace(
        plan,
        outputs=tuple(array("I") for _ in range(n)),
        replay=Replay(tuple(map(len, plan.outputs)), (None,) * n),
        cumulative_logprobs=(0.0,) * n,
        best_of=BestOf(plan.sampling.best_of, plan.outputs),
    )


def resolve_max_tokens(stop: types.StopParams, num_prompt: int, model: ServedModel) -> int:
    """The limit on output tokens, checked against the model's length and the pool."""
    with FieldErrors():
        return model.limits.resolve(num_prompt, stop.max_tokens if stop.HasField("max_tokens") else None)


def check_prompt_size(request: pb.GenerateRequest, model: ServedModel) -> None:
    """Refuse a prompt that is certainly too long, before it is tokenized."""
    prompt = request.prompt
    if model.info.encoder.HasField("audio") and not prompt.HasField("audio"):
        raise invalid("prompt", f"has no audio, but model {model.name!r} turns speech into text; send prompt.audio")
    if prompt.HasField("audio"):
        encoder.check_audio(prompt.audio, model)
        return
    if request.HasField("truncate_prompt_tokens"):
        if (size := text_size(prompt)) > MAX_TOKENIZE_BYTES:
            words = f"has {size} bytes; with truncate_prompt_tokens at most {MAX_TOKENIZE_BYTES} are allowed: send less"
            raise invalid("prompt", words)
        return
    kind = prompt.WhichOneof("kind")
    if kind == "embeddings":
        check_embeddings(len(prompt.embeddings), model)
        return
    if kind == "tokens":
        if len(prompt.tokens.ids) > model.limits.max_tokens:
            resolve_max_tokens(types.StopParams(), len(prompt.tokens.ids), model)
        return
    size, limit = text_size(prompt), model.max_prompt_bytes
    if kind == "chat":
        limit = max(limit, MIN_CHAT_LIMIT_BYTES)
    if size > limit:
        raise ContextLengthError(
            f"prompt.{kind} has {size} bytes, more than the {limit} bytes that max_model_len "
            f"({model.info.max_model_len} tokens) can hold: shorten the prompt",
            field=f"prompt.{kind}",
            limit=model.limits.max_tokens,
        )


def _check_id(field: str, request_id: str) -> None:
    if not REQUEST_ID.fullmatch(request_id):
        shown = request_id[:MAX_ID_CHARS_SHOWN]
        raise invalid(field, f"is {shown!r}; must be 1 to 64 characters of A-Z a-z 0-9 . _ : -")


def check_determinism(asked: int, model: ServedModel) -> None:
    """Refuse EXACT for a model whose workers run BEST_EFFORT."""
    if asked == types.DETERMINISM_EXACT and model.info.determinism != types.DETERMINISM_EXACT:
        raise invalid(
            "scheduling.determinism",
            f"is EXACT, but the workers of model {model.name!r} run BEST_EFFORT; "
            "leave the field unset, or start the workers with --determinism exact",
        )


def _read_continuation(
    request: pb.GenerateRequest, model: ServedModel, sampling: types.SamplingParams, max_tokens: int
) -> tuple[tuple[array[int], ...], tuple[bool, ...]]:
    outputs = [array("I") for _ in range(sampling.n)]
    finished = [False] * sampling.n
    if not request.continuation.samples:
        return tuple(outputs), tuple(finished)
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


def _check_num_top(output: pb.OutputParams, model: ServedModel) -> None:
    for name, num_top in (("logprobs", output.logprobs), ("prompt_logprobs", output.prompt_logprobs)):
        if num_top > model.info.vocab_size:
            raise invalid(f"output.{name}", f"is {num_top}; must be at most vocab_size, {model.info.vocab_size}")


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
