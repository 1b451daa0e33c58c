"""Thinking budgets: after how many tokens the reasoning of an answer is ended, and with which tokens. A worker applies
them (step_protocol/features.py). No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.v1 import inference_pb2 as pb

from gateway_svc.request.field_errors import invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.tools import ChatTools, is_reasoning_begun, parse_json
from gateway_svc.text.bundle import Tokenizer
from gateway_svc.text.chat_output import ChatFormat
from gateway_svc.text.reasoning import ReasoningFormat
from request_fields.fields import MAX_MARKER_IDS, MAX_THINKING_LAST_IDS, MAX_UINT32

FIELD = "sampling.thinking_token_budget"
MARKERS = "thinking_start_ids", "thinking_end_ids", "thinking_last_ids", "thinking_repeats"


def set_budget(
    request: pb.GenerateRequest, model: ServedModel, tools: ChatTools, prompt_ids: Sequence[int], max_tokens: int
) -> None:
    """Set the budget of a new request and the token ids of the markers: the budget that it asks for, else that of its
    template's variables, but not so much that --min-answer-tokens do not fit in `max_tokens`.

    Raises InvalidRequestError if the request asks for a budget that the model cannot have, or for a part of one.
    """
    sampling, settings, chat = request.sampling, model.parsers.thinking, request.prompt.chat
    is_asked = sampling.HasField("thinking_token_budget")
    needed = "thinking_end_ids" if not sampling.thinking_end_ids else "" if is_asked else "thinking_token_budget"
    for name in MARKERS if needed else ():
        if getattr(sampling, name):
            raise invalid(f"sampling.{name}", f"is set, but sampling.{needed} is not; set both or none")
    if not (is_asked or chat.template_kwargs_json or (settings.answer_tokens and request.prompt.HasField("chat"))):
        return
    if sampling.thinking_end_ids or sampling.beam_width > 1:
        return  # the client has its own markers, or beams, for which `checks` refuses a budget
    found = model.chat_format(chat.chat_template, has_tools=bool(tools.given))
    variables = parse_json("template_kwargs_json", chat.template_kwargs_json, dict, "an object") or {}
    budget = sampling.thinking_token_budget if is_asked else _budget_of(variables, found.reasoning, settings.budgets)
    if budget is None and not settings.answer_tokens:
        return
    tokenizer = model.require_tokenizer(FIELD) if is_asked else model.text.tokenizer
    if found.reasoning is None or tokenizer is None or not (ends := _end_ids(found, tokenizer)):
        if is_asked:
            raise invalid(FIELD, f"is set, but {_why_not(found, model)}; leave it unset, or send thinking_end_ids")
        return
    prompt = prompt_ids[: len(prompt_ids) - sampling.num_forced_tokens]
    if not is_reasoning_begun(chat, found, tokenizer, prompt):
        start = tokenizer.encode(found.reasoning.start, add_special_tokens=False)
        sampling.thinking_start_ids.extend(start[:MAX_MARKER_IDS])
    last = tokenizer.encode(settings.end_text, add_special_tokens=False)[:MAX_THINKING_LAST_IDS]
    if settings.answer_tokens:
        taken = len(sampling.thinking_start_ids) + len(last) + 1 + settings.answer_tokens
        budget = min(MAX_UINT32 if budget is None else budget, max(0, max_tokens - taken))
    sampling.thinking_token_budget = budget or 0
    sampling.thinking_end_ids.extend(ends)
    sampling.thinking_last_ids.extend(last if budget else ())
    sampling.thinking_repeats = found.reasoning.repeats


def _budget_of(
    variables: Mapping[str, Any], format: ReasoningFormat | None, chosen: Mapping[str, int | None]
) -> int | None:
    """The budget that the variables of a template mean: `thinking_budget`, else that of `reasoning_effort`."""
    budget, effort = variables.get("thinking_budget"), variables.get("reasoning_effort")
    if type(budget) is int and 0 <= budget <= MAX_UINT32:
        return budget
    return None if format is None or not isinstance(effort, str) else {**format.budgets, **chosen}.get(effort)


def _end_ids(format: ChatFormat, tokenizer: Tokenizer) -> list[int]:
    """The token of the end marker, and those of the markers of calls that end reasoning; empty: it is not one token."""
    end = None if format.reasoning is None else tokenizer.token_id(format.reasoning.end)
    stops = () if format.tools is None else map(tokenizer.token_id, format.tools.ends_reasoning)
    return [] if end is None else [end, *(id_ for id_ in stops if id_ is not None)]


def _why_not(format: ChatFormat, model: ServedModel) -> str:
    if format.reasoning is None:
        return f"the format of reasoning of model {model.name!r} is not known (--reasoning-parser of the gateway)"
    return f"the end marker {format.reasoning.end} is not one token of model {model.name!r}"
