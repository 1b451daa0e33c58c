"""The check of grammars before a request is submitted: in processes with limits, once per grammar."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextvars import copy_context
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from quire.v1 import types_pb2 as types

from gateway_svc.callers.caller import Caller, current_caller
from gateway_svc.request.field_errors import FieldErrors
from gateway_svc.request.models import ServedModel, read_bundle
from gateway_svc.request.sandbox import grammar_checker
from gateway_svc.request.sandbox.grammar_checker import GrammarChecker
from gateway_svc.request.sandbox.pool import SandboxPool, SandboxProcess
from request_fields.parameters import GrammarKind, grammar_of
from svc_common.errors import InvalidRequestError, OverloadedError
from tests.unit.gateway.fakes import make_info, until

T = TypeVar("T")
SP = types.SamplingParams
# llguidance builds an automaton with a state per residue.
BOMB = json.dumps({"type": "integer", "multipleOf": 999983})
MAX_ANSWER_S = 5.0


def patterned(name: str, pattern: str, required: Sequence[str] = ()) -> str:
    integer = {"type": "integer"}
    rules = {"properties": {name: integer}, "patternProperties": {pattern: integer}, "additionalProperties": False}
    return json.dumps({**rules, "required": [name, *required]})


BAD = [
    (SP(regex="("), "sampling.regex", "cannot be used: .*unclosed group"),
    (SP(json_schema="{"), "sampling.json_schema", "cannot be used: it is not JSON"),
    (SP(json_schema="false"), "sampling.json_schema", "is a JSON bool; give an object"),
    (SP(json_schema='{"type": "text"}'), "sampling.json_schema", "Invalid type: text"),
    (SP(json_schema='{"items": {"uniqueItems": true}}'), "sampling.json_schema.items", "Unimplemented keys"),
    (SP(json_schema=patterned("s", "^s$")), "sampling.json_schema.patternProperties", "'.s.' matches only names"),
    (
        SP(json_schema=f'{{"items": {patterned("s", "^[st]$", required=["t"])}}}'),
        "sampling.json_schema.items.patternProperties",
        "remove the pattern",
    ),
    (SP(json_schema='{"enum": []}'), "sampling.json_schema", "Unsatisfiable"),
    (SP(json_schema='{"$ref": "https://example.com/a"}'), "sampling.json_schema", "does not fetch"),
    (SP(json_schema='{"not":' * 65 + "{}" + "}" * 65), "sampling.json_schema", "65 levels deep; at most 64"),
    (SP(json_schema='{"not":' * 50000 + "{}" + "}" * 50000), "sampling.json_schema", "it is not JSON: .*recursion"),
    (SP(regex=r"[^\x00-\U0010FFFF]"), "sampling.regex", "accepts no text"),
    (SP(grammar='start: start "a"'), "sampling.grammar", "accepts no text"),
    (SP(grammar="start: missing"), "sampling.grammar", "unknown name"),
    (SP(grammar='{"grammars": []}'), "sampling.grammar", "it is JSON; give a grammar in Lark or GBNF"),
    (SP(grammar='root ::= "a" ('), "sampling.grammar", "not valid GBNF"),
]
GOOD = [
    (SP(json_object=True), GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
    (SP(json_schema='{"type": "string"}'), GrammarKind.JSON_SCHEMA, '{"type": "string"}'),
    (SP(json_schema=patterned("s", "^s")), GrammarKind.JSON_SCHEMA, patterned("s", "^s")),
    (SP(json_schema=patterned("é", "^\\w$")), GrammarKind.JSON_SCHEMA, patterned("é", "^\\w$")),
    (SP(regex="a+"), GrammarKind.REGEX, "a+"),
    (SP(choice=["b", "a b", "b"]), GrammarKind.REGEX, r"b|a\ b"),
    (SP(grammar='start: "a"'), GrammarKind.LARK, 'start: "a"'),
]


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    await checker.close()


@pytest.fixture(scope="module")
def model(bundle: bytes) -> ServedModel:
    info = make_info(bundle)
    return ServedModel(info, read_bundle(bundle, info.bundle_digest))


async def check(checker: GrammarChecker, sampling: types.SamplingParams, model: ServedModel) -> tuple[GrammarKind, str]:
    with FieldErrors():
        grammar = grammar_of(sampling)
    assert grammar is not None
    return (await checker.check(grammar, model)).key


async def refusal(checker: GrammarChecker, sampling: types.SamplingParams, model: ServedModel) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        await check(checker, sampling, model)
    return caught.value


async def test_a_bad_grammar_is_refused_with_field_and_cause(checker: GrammarChecker, model: ServedModel) -> None:
    for sampling, field, words in BAD:
        error = await refusal(checker, sampling, model)
        assert error.field == field
        assert error.message.startswith(f"{field} ")
        with pytest.raises(InvalidRequestError, match=words):
            raise error


async def test_a_good_grammar_gets_the_form_that_workers_compile(checker: GrammarChecker, model: ServedModel) -> None:
    for sampling, kind, text in GOOD:
        assert await check(checker, sampling, model) == (kind, text)
    kind, lark = await check(checker, SP(grammar='root ::= "a" | [b-d]+'), model)
    assert kind is GrammarKind.LARK
    assert "start:" in lark
    assert "::=" not in lark


async def test_equal_grammars_are_compiled_once(checker: GrammarChecker, model: ServedModel) -> None:
    for sampling in (SP(regex="a+"), SP(regex="(")):
        before = checker.num_compiled
        results = [check(checker, sampling, model) for _ in range(8)]
        done = await asyncio.gather(*results, return_exceptions=True)
        assert len({str(result) for result in done}) == 1
        await asyncio.gather(check(checker, sampling, model), return_exceptions=True)
        assert checker.num_compiled == before + 1


async def test_models_do_not_share_results(checker: GrammarChecker, model: ServedModel, bundle: bytes) -> None:
    """A special token is part of one vocabulary only."""
    await check(checker, SP(regex="a"), model)
    other = ServedModel(make_info(bundle, vocab_size=600), model.text)
    await check(checker, SP(regex="a"), other)
    assert checker.num_compiled == 2


async def test_an_exploding_schema_is_refused_in_time_and_delays_no_other(
    checker: GrammarChecker, model: ServedModel
) -> None:
    await check(checker, SP(regex="warm"), model)
    started = time.monotonic()
    bomb = asyncio.create_task(refusal(checker, SP(json_schema=BOMB), model))
    for i in range(8):
        await check(checker, SP(regex=f"good{i}"), model)
        assert not bomb.done() or i > 0
    error = await bomb
    assert time.monotonic() - started < MAX_ANSWER_S
    assert error.field == "sampling.json_schema"
    assert "simplify it" in error.message
    assert await check(checker, SP(regex="after"), model) == (GrammarKind.REGEX, "after")


async def test_a_grammar_that_needs_too_much_cpu_time_is_not_compiled_again(
    checker: GrammarChecker, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "JOB", replace(grammar_checker.JOB, timeout_s=120.0))
    error = await refusal(checker, SP(json_schema=BOMB), model)
    assert "more than 0.3 s of CPU time" in error.message
    assert (await refusal(checker, SP(json_schema=BOMB), model)).message == error.message
    assert checker.num_compiled == 1


async def test_a_killed_process_is_replaced(checker: GrammarChecker, model: ServedModel) -> None:
    await check(checker, SP(regex="a"), model)
    (pid,) = checker.pids
    os.kill(pid, signal.SIGKILL)
    assert await check(checker, SP(regex="b"), model) == (GrammarKind.REGEX, "b")
    assert checker.pids != [pid]


async def test_a_process_that_dies_during_a_check_is_replaced(checker: GrammarChecker, model: ServedModel) -> None:
    await check(checker, SP(regex="a"), model)
    (pid,) = checker.pids
    os.kill(pid, signal.SIGSTOP)
    task = asyncio.create_task(check(checker, SP(regex="b"), model))
    await until(lambda: checker.num_compiled == 2)
    os.kill(pid, signal.SIGKILL)
    assert await task == (GrammarKind.REGEX, "b")


async def test_too_many_checks_are_refused(
    checker: GrammarChecker, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_RUNNING", 3)
    results = await asyncio.gather(
        *(check(checker, SP(regex=f"a{i}"), model) for i in range(12)), return_exceptions=True
    )
    errors = [result for result in results if isinstance(result, OverloadedError)]
    assert len(errors) == 12 - 3
    assert errors[0].retry_after_s


async def test_owners_have_a_share_of_the_checks_and_take_turns(
    checker: GrammarChecker, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_RUNNING", 8)
    first = [as_owner("a", check(checker, SP(regex=f"a{i}"), model)) for i in range(12)]
    other = as_owner("b", check(checker, SP(regex="b"), model))
    results = await asyncio.gather(*first, return_exceptions=True)
    assert len([result for result in results if isinstance(result, OverloadedError)]) == 12 - 2
    assert await other == (GrammarKind.REGEX, "b")

    order, pool = [], SandboxPool(lambda: SandboxProcess("none", 0), 1)

    async def work(process: SandboxProcess) -> None:
        order.append(current_caller.get().owner)

    await asyncio.gather(*(as_owner(owner, pool.run(work, MAX_ANSWER_S)) for owner in "aaaaaabb"))
    assert "".join(order) == "aababaaa"


def as_owner(owner: str, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    context = copy_context()
    context.run(current_caller.set, Caller(owner))
    return asyncio.create_task(call, context=context)


async def test_a_model_without_tokenizer_or_eos_is_named(checker: GrammarChecker, model: ServedModel) -> None:
    no_text = ServedModel(make_info(), type(model.text)(None))
    assert "has no tokenizer.json" in (await refusal(checker, SP(regex="a"), no_text)).message
    info = types.ModelInfo()
    info.CopyFrom(model.info)
    del info.eos_token_ids[:]
    error = await refusal(checker, SP(regex="a"), ServedModel(info, model.text))
    assert "no end-of-sequence id" in error.message
    small = types.ModelInfo()
    small.CopyFrom(model.info)
    small.vocab_size = 10
    assert (
        "tokenizer.json cannot be used"
        in (await refusal(checker, SP(regex="a"), ServedModel(small, model.text))).message
    )
