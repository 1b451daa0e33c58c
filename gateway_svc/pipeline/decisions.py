"""Decide: each question about a conversation is a generation of one token, whose log probabilities are the answer.

Only the labels of the answers are allowed, so their processed log probabilities are normalised. The conversation comes
first, so all questions share its cached blocks, and an answer depends on its own question only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain, product
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.callers.caller import record_request_id
from gateway_svc.pipeline.admission import CallAdmission
from gateway_svc.pipeline.generation import GenerationPipeline
from gateway_svc.request.field_errors import MAX_COST, PROMPT_COST, invalid
from gateway_svc.request.prompts.readers import check_prompt
from gateway_svc.request.threads import Lane
from gateway_svc.request.validation import check_request_id
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.text.bundle import Tokenizer
from request_fields.fields import MAX_LOGPROBS
from svc_common.errors import AbortedError, ServiceError
from svc_common.tasks import cancel

MAX_QUESTIONS = 400
MAX_OPEN = 64  # questions of one call that are computed at the same time
LABEL_BYTES = 64 << 10  # work of looking up many labels, as bytes of text
FIELDS = {"request_id", "model", "prompt", "adapter", "scheduling", "receipt"}
CHAT_FIELDS = {"messages", "template_kwargs_json", "chat_template"}
NEUTRAL: dict[str, Any] = {  # sampling parameters
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0),
    **dict.fromkeys(("seed", "top_k", "min_p", "top_a", "frequency_penalty", "presence_penalty"), 0),
    "logprobs_mode": types.LOGPROBS_MODE_PROCESSED,
}
TRUTH = (pb.Choice(label="yes"), pb.Choice(label="no"))
TASKS = {
    "": "Is this true? Answer with one of these labels:",
    "choices": "Answer with the label of the best choice:",
    "levels": "Answer with the label of the level that fits best:",
}


class DecisionPipeline:
    """Serves Decide on top of generations, with their limits, adapters, receipts and recovery."""

    def __init__(
        self, generation: GenerationPipeline, directory: ModelDirectory, admission: CallAdmission, lane: Lane
    ) -> None:
        self._generation = generation
        self._directory = directory
        self._admission = admission
        self._lane = lane
        self._limits = replace(generation.limits, max_logprobs=MAX_LOGPROBS)

    async def decide(self, asked: pb.DecideRequest, deadline: float | None = None) -> pb.DecideResponse:
        """One answer per question. Raises ServiceError, and computes nothing more after the first failure."""
        await self._lane.run(asked.ByteSize(), check_decide, asked)
        request, questions = asked.request, asked.questions
        request_id = request.request_id or f"dec-{secrets.token_hex(12)}"
        record_request_id(request_id)
        num_open = min(MAX_OPEN, self._admission.join(len(questions)))
        self._generation.streams.check_room(num_calls=num_open)
        tokenizer = self._directory.text_of(request).require_tokenizer("request.prompt.chat")
        labels = await self._lane.run(LABEL_BYTES, labels_of, tokenizer, max(len(_answers(one)) for one in questions))
        gate, response = asyncio.Semaphore(num_open), pb.DecideResponse(request_id=request_id)

        async def answer(i: int) -> pb.Answer:
            async with gate:
                one = _generation_of(request, f"{request_id}-{i}", questions[i], labels)
                return await self._answer(one, response, deadline)

        tasks = [asyncio.create_task(answer(i)) for i in range(len(questions))]
        try:
            response.answers.extend(await asyncio.gather(*tasks))
        finally:
            await cancel(*tasks)
        return response

    async def _answer(
        self, request: pb.GenerateRequest, response: pb.DecideResponse, deadline: float | None
    ) -> pb.Answer:
        answer = pb.Answer(token_ids=request.sampling.allowed_token_ids)
        async with aclosing(self._generation.generate(request, deadline=deadline, limits=self._limits)) as events:
            async for event in events:
                if event.HasField("accepted"):
                    response.model, response.revision = event.accepted.model, event.accepted.revision
                elif event.HasField("chunk"):
                    top = event.chunk.logprobs
                    found = dict(zip(top.top_token_ids, top.top_logprobs, strict=True))
                    answer.logprobs.extend(found.get(id_, -float("inf")) for id_ in answer.token_ids)
                elif (end := event.finished).reason in (types.FINISH_REASON_ABORTED, types.FINISH_REASON_ERROR):
                    kind = AbortedError if end.reason == types.FINISH_REASON_ABORTED else ServiceError
                    raise kind(end.message or "the request was aborted")
                else:
                    answer.usage.CopyFrom(end.usage)
                    answer.receipt = end.receipt
        return answer


def check_decide(asked: pb.DecideRequest) -> None:
    """All checks that do not depend on the model. Raises InvalidRequestError."""
    request, num = asked.request, len(asked.questions)
    check_prompt(request.prompt, "request.prompt")
    chat = request.prompt.chat
    for field, _ in chain(request.ListFields(), chat.ListFields()):
        if field.name not in FIELDS | CHAT_FIELDS:
            raise invalid(f"request.{field.name}", "is set, but Decide does not use it; leave it unset")
    if not chat.messages:
        raise invalid("request.prompt", "is no chat; send prompt.chat")
    if not 1 <= num <= MAX_QUESTIONS:
        raise invalid("questions", f"has {num} items; must have 1 to {MAX_QUESTIONS}: send them in parts")
    if request.request_id:
        check_request_id(f"{request.request_id}-{num - 1}")
    total = num * (PROMPT_COST + chat.ByteSize()) + sum(one.ByteSize() for one in asked.questions)
    if total > MAX_COST:
        words = f"makes {num} prompts, one per question, that count as {total} bytes; at most {MAX_COST} are allowed: "
        raise invalid("request.prompt", words + "send the questions in parts, or a shorter chat")
    for i, question in enumerate(asked.questions):
        _check_question(f"questions[{i}]", question)


def _check_question(where: str, question: pb.Question) -> None:
    if not any(part.text or part.image for part in question.instructions):
        raise invalid(f"{where}.instructions", "is empty; send a text or an image")
    if question.choices and question.levels:
        raise invalid(f"{where}.levels", "is set, and choices too; set only one of them")
    if not 2 <= (num := len(_answers(question))) <= MAX_LOGPROBS:
        raise invalid(f"{where}.{_kind(question)}", f"has {num} items; must have 2 to {MAX_LOGPROBS}")
    if len({choice.label for choice in question.choices}) < len(question.choices):
        raise invalid(f"{where}.choices", "has a choice twice; choices must be different")


def _kind(question: pb.Question) -> str:
    return "choices" if question.choices else "levels" if question.levels else ""


def _answers(question: pb.Question) -> Sequence[pb.Choice]:
    return question.choices or question.levels or TRUTH


def labels_of(tokenizer: Tokenizer, num: int) -> dict[int, str]:
    """The first `num` of A, B, .. Z, AA, AB, .. that are one token, by their ids. Raises InvalidRequestError."""
    found: dict[int, str] = {}
    for label in chain(ascii_uppercase, map("".join, product(ascii_uppercase, repeat=2)), digits, ascii_lowercase):
        id_, *more = tokenizer.encode(label, add_special_tokens=False)
        if not more:
            found.setdefault(id_, label)
        if len(found) == num:
            return found
    raise invalid("questions", f"has one with {num} possible answers; the tokenizer has tokens for {len(found)} labels")


def _generation_of(
    request: pb.GenerateRequest, request_id: str, question: pb.Question, labels: dict[int, str]
) -> pb.GenerateRequest:
    """The generation that answers a question. Many templates refuse two messages of the user in a row."""
    one, answers = pb.GenerateRequest(), _answers(question)
    one.CopyFrom(request)
    one.request_id, chat = request_id, one.prompt.chat
    chat.template_kwargs_json = chat.template_kwargs_json or '{"enable_thinking": false}'  # the first token decides
    last = chat.messages[-1] if chat.messages[-1].role == "user" else chat.messages.add(role="user")
    if last.content:
        last.parts.add(text=last.content)
        last.content = ""
    last.parts.extend(question.instructions)
    last.parts.add(text="\n".join([TASKS[_kind(question)], *_lines(labels, answers)]))
    one.sampling.MergeFrom(types.SamplingParams(**NEUTRAL, allowed_token_ids=list(labels)[: len(answers)]))
    one.stop.max_tokens = 1
    one.output.MergeFrom(pb.OutputParams(text=False, logprobs=len(answers)))
    return one


def _lines(labels: dict[int, str], answers: Sequence[pb.Choice]) -> Iterator[str]:
    for label, one in zip(labels.values(), answers, strict=False):
        yield f"{label}: {one.label} ({one.description})" if one.description else f"{label}: {one.label}"
