"""/v1/decisions, as OpenAI's clients send it: questions about one input, answered with probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from quire.v1 import inference_pb2 as pb
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway_svc.http.fields import DECISIONS, ignored_names, set_parameters
from gateway_svc.http.json_text import Json, encode, flag, invalid, list_of, object_of, one_of, text, text_at
from gateway_svc.http.openai.bodies import body_of
from gateway_svc.http.replies import Read, json_reply
from gateway_svc.http.responses.bodies import items_of, messages_of, part_of
from gateway_svc.pipeline.decisions import MAX_QUESTIONS, DecisionPipeline
from gateway_svc.request.threads import Lane

LISTS = {"choice": ("choices", "value"), "score": ("levels", "label"), "predicate": ("", "")}  # and keys of an answer
ANSWER_BYTES = 2 << 10  # work of encoding an answer, as bytes of text


def decision_routes(pipeline: DecisionPipeline, lane: Lane, read: Read) -> list[Route]:
    """The endpoint."""

    async def decisions(request: Request) -> Response:
        """Answer questions about one input."""
        asked, questions, ignored = await read(request, decisions_of)
        reply = await pipeline.decide(asked)
        return json_reply(await lane.run(ANSWER_BYTES * len(questions), _encoded, questions, reply), ignored)

    return [Route("/v1/decisions", decisions, methods=["POST"])]


def decisions_of(data: bytes) -> tuple[pb.DecideRequest, Sequence[Json], list[str]]:
    """Parse a body: also returns its questions, and the names of ignored fields. Raises InvalidRequestError."""
    body = body_of(data)
    asked = pb.DecideRequest()
    asked.request.model = text(body, "model")
    asked.request.prompt.chat.messages.extend(messages_of(items_of(body.get("input"))))
    asked.request.receipt = flag(body, "receipt", default=False)
    set_parameters(DECISIONS, body, asked.request)
    questions = list_of("questions", body.get("questions"), "questions")
    for i, question in enumerate(questions[: MAX_QUESTIONS + 1]):
        asked.questions.append(_question_of(f"questions[{i}]", object_of(f"questions[{i}]", question)))
    return asked, questions, ignored_names(DECISIONS, body)


def _question_of(where: str, question: Json) -> pb.Question:
    field, key = LISTS[one_of(f"{where}.type", question.get("type"), LISTS)]
    text(question, "name", where)
    parts, name = question.get("instructions"), f"{where}.instructions"
    parts = [{"type": "input_text", "text": parts}] if isinstance(parts, str) else list_of(name, parts, "parts")
    found = pb.Question(instructions=[part_of(f"{name}[{i}]", part) for i, part in enumerate(parts)])
    if field:
        where = f"{where}.{field}"
        if not (given := list_of(where, question.get(field), "objects")):
            raise invalid(where, "is empty; send at least two objects")
        choices = [_choice_of(f"{where}[{i}]", object_of(f"{where}[{i}]", one), key) for i, one in enumerate(given)]
        getattr(found, field).extend(choices)
    return found


def _choice_of(where: str, choice: Json, key: str) -> pb.Choice:
    """A choice or a level. The boolean true is another choice than the text."""
    is_flag = key == "value" and isinstance(choice.get(key), bool)
    label = f"{json.dumps(choice[key])} (boolean)" if is_flag else text_at(where, choice, key)
    return pb.Choice(label=label, description=text(choice, "description", where))


def _encoded(questions: Sequence[Json], reply: pb.DecideResponse) -> bytes:
    usages = [answer.usage for answer in reply.answers]
    names = "prompt_tokens", "cached_tokens", "output_tokens"
    given, cached, made = (sum(getattr(one, name) for one in usages) for name in names)
    usage = {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": given + made,
    }
    answers = [_answer(question, answer) for question, answer in zip(questions, reply.answers, strict=True)]
    return encode({"id": reply.request_id, "model": reply.model, "answers": answers, "usage": usage})


def _answer(question: Json, answer: pb.Answer) -> Json:
    """Confidence is the largest probability. A score is the mean of the levels, which count from 0."""
    chances, (field, key) = [min(1.0, math.exp(logprob)) for logprob in answer.logprobs], LISTS[question["type"]]
    shown: Json = {"type": question["type"], "name": question.get("name")}
    if answer.receipt:
        shown["receipt"] = answer.receipt
    if not field:
        return {**shown, "probability": chances[0]}
    rows: list[dict[str, Any]] = [
        {"value": i, key: one[key], "probability": chance}  # the value of a choice replaces its index
        for i, (one, chance) in enumerate(zip(question[field], chances, strict=True))
    ]
    best = chances.index(max(chances))
    mean = math.fsum(i * chance for i, chance in enumerate(chances))
    of_kind = {"choice": rows[best]["value"]} if key == "value" else {"score": mean}
    return {**shown, **of_kind, "confidence": chances[best], "probabilities": rows}
