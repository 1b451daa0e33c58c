"""Budgets and markers that the gateway gives a request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.flags import make_parser
from gateway_svc.process.schedulers import parser_names
from gateway_svc.request.models import ServedModel
from gateway_svc.request.plan import plan_generation
from gateway_svc.request.prompts.reader import PromptInput
from gateway_svc.text.bundle import ModelText, Tokenizer
from gateway_svc.text.reasoning import ROWS, ReasoningFormat
from request_fields.parameters import Grammar, GrammarKind
from svc_common import config
from svc_common.config import SettingError
from svc_common.errors import InvalidRequestError
from tests.unit.gateway.tokenizer_kinds import byte_level

SP, FIELD = types.SamplingParams, "sampling.thinking_token_budget"


def model_of(format: ReasoningFormat, *flags: str, markers: bool = True) -> ServedModel:
    backend = byte_level()
    if markers:
        backend.add_special_tokens(list(format.markers))
    text = ModelText(Tokenizer(backend, {"default": "{{ messages }}" + format.word}))
    parsers = parser_names(config.parse(make_parser(), ["--scheduler", "a:1", *flags]))
    return ServedModel(types.ModelInfo(model="m", max_model_len=30000, vocab_size=1000, max_num_seqs=4), text, parsers)


def planned(
    model: ServedModel,
    *,
    sampling: types.SamplingParams | None = None,
    prompt: str = "hi",
    max_tokens: int = 2000,
    grammar: Grammar | None = None,
    **variables: Any,
) -> types.SamplingParams:
    message = pb.ChatMessage(role="user", content="hi")
    chat = pb.Chat(messages=[message], template_kwargs_json=json.dumps(variables) if variables else "")
    request = pb.GenerateRequest(
        prompt=pb.Prompt(chat=chat), sampling=sampling, stop=types.StopParams(max_tokens=max_tokens)
    )
    ids = model.require_tokenizer("").encode(prompt, add_special_tokens=False)
    found = plan_generation(request, model, PromptInput(ids), request_id="r", drawn_seed=1, grammar=grammar)
    return found.sampling.params


def decoded(model: ServedModel, ids: Any) -> str:
    return model.require_tokenizer("").decode(list(ids), skip_special_tokens=False)


@pytest.mark.parametrize("format", ROWS, ids=lambda format: format.name)
@pytest.mark.parametrize("budget", [0, 1, 200])
def test_each_format_has_its_markers(format: ReasoningFormat, budget: int) -> None:
    model = model_of(format, "--thinking-end-text", "Enough.")
    found = planned(model, sampling=SP(thinking_token_budget=budget))
    assert found.thinking_token_budget == budget
    assert decoded(model, found.thinking_start_ids) == format.start
    assert [decoded(model, [id_]) for id_ in found.thinking_end_ids] == [format.end]
    assert decoded(model, found.thinking_last_ids) == ("Enough." if budget else "")
    assert found.thinking_repeats == (format.name == "openai_gptoss")
    begun = planned(model, sampling=SP(thinking_token_budget=budget), prompt=f"hi{format.start}\n")
    assert not begun.thinking_start_ids
    assert begun.thinking_end_ids == found.thinking_end_ids


@pytest.mark.parametrize(
    ("variables", "budget"),
    [
        ({"thinking_budget": 33}, 33),
        ({"thinking_budget": 33, "reasoning_effort": "low"}, 33),
        ({"reasoning_effort": "low"}, 1024),
        ({"reasoning_effort": "none"}, 0),
        ({"reasoning_effort": "high"}, 77),
        ({"reasoning_effort": "medium"}, None),
        ({"reasoning_effort": "xhigh"}, None),
        ({"reasoning_effort": ["low"], "thinking_budget": True}, None),
        ({"thinking_budget": -1}, None),
        ({"other": 1}, None),
    ],
)
def test_variables_of_the_template_are_budgets(variables: dict[str, Any], budget: int | None) -> None:
    model = model_of(ROWS[0], "--thinking-budget", "high=77", "--thinking-budget", "medium=off")
    found = planned(model, **variables)
    assert (found.thinking_token_budget if found.HasField("thinking_token_budget") else None) == budget
    assert bool(found.thinking_end_ids) == (budget is not None)
    asked = planned(model, sampling=SP(thinking_token_budget=5), **variables)
    assert asked.thinking_token_budget == 5


def test_a_model_that_knows_its_effort_has_no_budget_for_it() -> None:
    model = model_of(next(format for format in ROWS if format.name == "openai_gptoss"))
    assert not planned(model, reasoning_effort="low").HasField("thinking_token_budget")
    assert planned(model, reasoning_effort="none").thinking_token_budget == 0


def test_some_of_max_tokens_stays_for_the_answer() -> None:
    model = model_of(ROWS[0], "--min-answer-tokens", "100")
    room = 2000 - 100 - 2  # and the two markers
    assert planned(model).thinking_token_budget == room
    assert planned(model, sampling=SP(thinking_token_budget=5)).thinking_token_budget == 5
    assert planned(model, sampling=SP(thinking_token_budget=5000)).thinking_token_budget == room
    assert planned(model, max_tokens=50).thinking_token_budget == 0
    assert planned(model, prompt="<think>").thinking_token_budget == room + 1


def test_a_grammar_without_reasoning_has_no_budget() -> None:
    model = model_of(ROWS[0])
    regex, lark = Grammar(GrammarKind.REGEX, "a"), Grammar(GrammarKind.LARK, "start: /a/")
    assert not planned(model, sampling=SP(thinking_token_budget=5), grammar=regex).thinking_end_ids
    assert planned(model, sampling=SP(thinking_token_budget=5), grammar=lark).thinking_end_ids


def test_own_markers_stay() -> None:
    given = SP(thinking_token_budget=5, thinking_end_ids=[9])
    found = planned(model_of(ROWS[0]), sampling=given, reasoning_effort="low")
    assert (found.thinking_token_budget, list(found.thinking_end_ids), found.thinking_start_ids) == (5, [9], [])


@pytest.mark.parametrize(
    ("given", "field", "needed"),
    [
        (SP(thinking_end_ids=[9]), "thinking_end_ids", "thinking_token_budget"),
        (SP(thinking_end_ids=[9], thinking_last_ids=[8]), "thinking_end_ids", "thinking_token_budget"),
        (SP(thinking_token_budget=5, thinking_start_ids=[9]), "thinking_start_ids", "thinking_end_ids"),
        (SP(thinking_token_budget=5, thinking_last_ids=[9]), "thinking_last_ids", "thinking_end_ids"),
        (SP(thinking_token_budget=5, thinking_repeats=True), "thinking_repeats", "thinking_end_ids"),
    ],
)
def test_markers_are_given_with_their_budget(given: types.SamplingParams, field: str, needed: str) -> None:
    """Markers of the client and of the format are not mixed."""
    with pytest.raises(InvalidRequestError, match=f"{field} is set, but sampling.{needed} is not"):
        planned(model_of(ROWS[0]), sampling=given)


def test_a_budget_that_a_model_cannot_have_is_refused_if_it_is_asked_for() -> None:
    bare, unknown = model_of(ROWS[0], markers=False), model_of(ROWS[0], "--reasoning-parser", "none")
    for model, words in ((bare, "the end marker </think> is not one token"), (unknown, "reasoning .* is not known")):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            planned(model, sampling=SP(thinking_token_budget=5))
        assert caught.value.field == FIELD
        assert not planned(model, reasoning_effort="low").HasField("thinking_token_budget")


@pytest.mark.parametrize("value", ["low", "low=", "low=-1", "low=1.5", "some=5", f"low={2**32}"])
def test_a_bad_flag_is_refused(value: str) -> None:
    with pytest.raises(SettingError, match=r"--thinking-budget is .*; must be EFFORT=TOKENS"):
        model_of(ROWS[0], "--thinking-budget", value)
