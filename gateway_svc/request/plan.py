"""Plans a request: checks it against its model and applies all defaults. The plan is all that later stages read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash
from quire.internal.v1 import inputs_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request import encoder
from gateway_svc.request.encoder import EncoderPlan
from gateway_svc.request.field_errors import FieldErrors, check_token_ids, invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.prompts.reader import PromptInput
from gateway_svc.request.public_prefixes import num_public_tokens
from gateway_svc.request.resume import resume_plan
from gateway_svc.request.sandbox.grammar_checker import GrammarChecker
from gateway_svc.request.threads import Lane
from gateway_svc.request.tools import AnswerPlan, answer_grammar, answer_plan, set_budget, tag_grammar
from gateway_svc.request.validation import Replay, ResumePlan, SamplingPlan, new_request, sampling_plan
from gateway_svc.text.detokenizer import SampleText
from gateway_svc.text.stop_strings import StoppedText, StopStrings
from request_fields.parameters import Grammar, GrammarKind


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompt, and what its cached blocks depend on."""

    ids: array[int]
    inputs: tuple[inputs_pb2.CarriedInput, ...] = ()  # the prompt's positions without a token
    cache_salt: str = ""  # salt of the request, or one that also depends on the tenant
    encoder: EncoderPlan | None = None  # set if `ids` are the input of an encoder
    num_public_tokens: int = 0  # the first tokens: their full blocks do not depend on the salt

    @property
    def column(self) -> array[int]:
        """The prompt that schedulers get."""
        return self.ids if self.encoder is None else self.encoder.column(self.ids)


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The parts of each sample that the client gets."""

    wants_text: bool
    wants_token_ids: bool
    skip_special_tokens: bool
    joins_events: bool  # events that are ready at the same time are sent as one message
    answer: AnswerPlan | None = None  # how the text is parsed; None: it is sent unchanged
    logprobs: int | None = None  # number of most likely tokens to send with each output token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for prompt tokens
    wants_receipt: bool = False


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A request that passed every check, with all defaults applied."""

    request_id: str
    model: ServedModel
    scheduling: pb.SchedulingParams
    prompt: PromptPlan
    sampling: SamplingPlan
    output: OutputPlan
    resume: ResumePlan
    draft_token_ids: bytes = b""  # u32[]: an old answer, which workers propose as drafts

    def new_texts(self, num_samples: int) -> list[SampleText | None]:
        """A text per sample; None if neither the client nor a stop string needs text."""
        tokenizer, stop, answer = self.model.text.tokenizer, self.sampling.stop, self.output.answer
        if tokenizer is None or not (self.output.wants_text or stop.stop):
            return [None] * num_samples
        visible = frozenset(() if answer is None else answer.format.markers)
        skips = self.output.skip_special_tokens
        texts = [tokenizer.new_detokenizer(skip_special_tokens=skips, visible=visible) for _ in range(num_samples)]
        if not stop.stop:
            return list(texts)
        stops, first_stop = StopStrings(stop.stop), self.sampling.condition.min_tokens
        include = stop.include_stop_in_output
        return [StoppedText(text, stops.new_matcher(include_stop=include), first_stop=first_stop) for text in texts]


class Planner:
    """Plans requests. Grammars are compiled in sandbox processes, large requests are checked in threads."""

    def __init__(self, grammars: GrammarChecker, lane: Lane) -> None:
        self._grammars = grammars
        self._lane = lane

    async def plan(
        self,
        request: pb.GenerateRequest,
        model: ServedModel,
        prompt: PromptInput,
        *,
        request_id: str,
        grammar: Grammar | None,
        cache_salt: str,
        replay: Replay | None,
    ) -> GenerationPlan:
        """The plan of a request whose fields are checked. `replay`: it continues from its record.

        Raises InvalidRequestError with the invalid field, or OverloadedError if too many grammars are being checked.
        """
        if replay is None and request.prompt.HasField("chat"):
            size = len(request.prompt.chat.tools_json) + request.sampling.ByteSize()
            grammar = await self._lane.run(size, answer_grammar, request, model, prompt.tools, prompt.ids, grammar)
        if grammar is not None and grammar.kind is GrammarKind.STRUCTURAL_TAG:
            grammar = await self._lane.run(len(grammar.text), tag_grammar, grammar, model)
        if grammar is not None:
            grammar = await self._grammars.check(grammar, model)
        variables = request.prompt.chat.template_kwargs_json
        return await self._lane.run(
            request.continuation.ByteSize() + request.sampling.ByteSize() + (len(variables) if variables else 0),
            plan_generation,
            request,
            model,
            prompt,
            request_id=request_id,
            drawn_seed=xxhash.xxh3_64_intdigest(request_id.encode()),  # a retry with the same id has the same answer
            grammar=grammar,
            cache_salt=cache_salt,
            replay=replay,
        )


def plan_generation(
    request: pb.GenerateRequest,
    model: ServedModel,
    prompt: PromptInput,
    *,
    request_id: str,
    drawn_seed: int,
    grammar: Grammar | None = None,
    cache_salt: str = "",
    replay: Replay | None = None,
) -> GenerationPlan:
    """Check a request against its model and apply defaults. `drawn_seed` is used if the request has no seed. `grammar`
    is the request's grammar after its check, `cache_salt` the salt of its cached blocks.

    Raises InvalidRequestError with the invalid field.
    """
    ids, stop = prompt.ids, request.stop
    if prompt.inputs:
        _check_with_inputs(request, prompt, model)
    else:
        if request.HasField("truncate_prompt_tokens"):
            ids = ids[-request.truncate_prompt_tokens :]
        check_token_ids("prompt", ids, model)
    check_determinism(request.scheduling.determinism, model)
    if request.sampling.num_forced_tokens and request.sampling.num_forced_tokens >= len(ids):
        words = f"is {request.sampling.num_forced_tokens}; must be less than the prompt's {len(ids)} tokens"
        raise invalid("sampling.num_forced_tokens", words)
    start = encoder.decoder_start(request.prompt, model) if model.info.HasField("encoder") else None
    if start is None:
        with FieldErrors():
            max_tokens = model.limits.resolve(len(ids), stop.max_tokens if stop.HasField("max_tokens") else None)
    else:
        max_tokens = encoder.resolve_max_tokens(stop, len(ids), start, model)
        encoder.check_output(request.output)
    is_plain = grammar is None or grammar.kind is GrammarKind.LARK  # another grammar has no reasoning
    asks_budget = request.sampling.HasField("thinking_token_budget") or request.sampling.thinking_end_ids
    may_think = request.prompt.HasField("chat") or asks_budget
    if may_think and replay is None and is_plain:
        set_budget(request, model, prompt.tools, ids, max_tokens)
    sampling = sampling_plan(request, model, max_tokens, grammar, drawn_seed=drawn_seed)
    continues = request.HasField("continuation") or replay is not None or sampling.params.best_of > 0
    column, num_public = array("I", ids), 0
    if model.public_prefixes and start is None and cache_salt and not request.scheduling.cache_salt:
        num_public = num_public_tokens(column, model.public_prefixes)
    encoder_plan = None if start is None else encoder.encoder_plan(len(ids), max_tokens, start, grammar, model)
    return GenerationPlan(
        request_id,
        model,
        request.scheduling,
        PromptPlan(column, prompt.inputs, cache_salt, encoder_plan, num_public),
        sampling,
        _output_plan(request, model, prompt, ids),
        resume_plan(request, model, sampling, len(ids), replay) if continues else new_request(sampling),
    )


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


def check_determinism(asked: int, model: ServedModel) -> None:
    """Refuse EXACT for a model whose workers run BEST_EFFORT."""
    if asked == types.DETERMINISM_EXACT and model.info.determinism != types.DETERMINISM_EXACT:
        raise invalid(
            "scheduling.determinism",
            f"is EXACT, but the workers of model {model.name!r} run BEST_EFFORT; "
            "leave the field unset, or start the workers with --determinism exact",
        )


def _output_plan(
    request: pb.GenerateRequest, model: ServedModel, prompt: PromptInput, ids: Sequence[int]
) -> OutputPlan:
    output = request.output
    if request.receipt and (prompt.inputs or request.prompt.HasField("audio")):
        raise invalid("receipt", "is set, but the prompt has positions without a token; leave the field unset")
    if output.logprobs or output.prompt_logprobs:
        _check_num_top(output, model)
    wants_text = (not output.HasField("text") or output.text) and model.text.tokenizer is not None
    return OutputPlan(
        wants_text=wants_text,
        wants_token_ids=not output.HasField("token_ids") or output.token_ids,
        skip_special_tokens=not output.HasField("skip_special_tokens") or output.skip_special_tokens,
        joins_events=request.joins_events,
        answer=answer_plan(request, model, prompt.tools, ids) if wants_text and output.parse_chat else None,
        logprobs=output.logprobs if output.HasField("logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        wants_receipt=request.receipt,
    )


def _check_num_top(output: pb.OutputParams, model: ServedModel) -> None:
    for name, num_top in (("logprobs", output.logprobs), ("prompt_logprobs", output.prompt_logprobs)):
        if num_top > model.info.vocab_size:
            raise invalid(f"output.{name}", f"is {num_top}; must be at most vocab_size, {model.info.vocab_size}")
