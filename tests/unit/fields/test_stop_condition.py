"""The rule that ends a sequence by its own tokens, which schedulers and gateways share."""

from __future__ import annotations

import dataclasses
from array import array

import pytest
from quire.v1 import types_pb2 as types

from request_fields import checks
from request_fields.fields import FieldError, FinishReason, Side, StopCondition, fields_of, stop_condition

EOS = (7, 8)


@pytest.mark.parametrize(
    ("stop", "last_token", "num_output", "end"),
    [
        (StopCondition(5), 1, 4, None),
        (StopCondition(5), 1, 5, FinishReason.LENGTH),
        (StopCondition(5), 1, 6, FinishReason.LENGTH),
        (StopCondition(5), 8, 1, FinishReason.EOS),
        (StopCondition(5), 8, 5, FinishReason.EOS),
        (StopCondition(5, ignore_eos=True), 8, 1, None),
        (StopCondition(5, is_constrained=True), 8, 1, FinishReason.EOS),
        (StopCondition(5, is_constrained=True, min_tokens=4), 8, 1, FinishReason.EOS),
        (StopCondition(5, is_constrained=True), 1, 4, None),
        (StopCondition(5, frozenset({3})), 3, 1, FinishReason.STOP),
        (StopCondition(5, frozenset({3})), 3, 5, FinishReason.STOP),
        (StopCondition(5, frozenset({8})), 8, 1, FinishReason.EOS),
        (StopCondition(5, frozenset({8}), ignore_eos=True), 8, 1, FinishReason.STOP),
        (StopCondition(5, frozenset({3}), min_tokens=2), 3, 2, None),
        (StopCondition(5, frozenset({3}), min_tokens=2), 3, 3, FinishReason.STOP),
        (StopCondition(5, min_tokens=2), 8, 2, None),
        (StopCondition(5, min_tokens=2), 8, 3, FinishReason.EOS),
        (StopCondition(5, min_tokens=5), 8, 5, FinishReason.LENGTH),
    ],
)
def test_eos_is_looked_at_before_stop_ids_and_these_before_the_limit(
    stop: StopCondition, last_token: int, num_output: int, end: FinishReason | None
) -> None:
    assert stop.end_of(array("I", [0] * (num_output - 1) + [last_token]), EOS) is end


def test_the_condition_has_the_fields_that_schedulers_apply() -> None:
    applied = {name for name, field in fields_of("stop").items() if Side.SCHEDULER in field.applied_by}
    assert {field.name for field in dataclasses.fields(StopCondition)} == applied | {"is_constrained"}


def test_the_condition_of_a_message() -> None:
    message = types.StopParams(max_tokens=4, stop=["x"], stop_token_ids=[3, 3, 2], ignore_eos=True)
    assert stop_condition(checks.values_set(message)) == StopCondition(4, frozenset({2, 3}), ignore_eos=True)
    assert stop_condition({"max_tokens": 0}) == StopCondition(0)


def test_a_grammar_overrides_ignore_eos() -> None:
    stop = stop_condition({"max_tokens": 3, "ignore_eos": True}, is_constrained=True)
    assert stop == StopCondition(3, is_constrained=True)


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert stop_condition({"max_tokens": 3, "min_tokens": 3}).min_tokens == 3
    with pytest.raises(FieldError, match=r"^stop\.min_tokens is 4; must be at most stop\.max_tokens, 3$"):
        stop_condition({"max_tokens": 3, "min_tokens": 4})


@pytest.mark.parametrize(
    ("stop", "ids"),
    [
        (StopCondition(5, frozenset({3})), []),
        (StopCondition(5, frozenset({3}), min_tokens=1), [3, 7, 8]),
        (StopCondition(5, frozenset({3}), ignore_eos=True, min_tokens=1), [3]),
        (StopCondition(5, ignore_eos=True, min_tokens=1), []),
    ],
)
def test_ids_that_would_end_the_sequence_are_banned(stop: StopCondition, ids: list[int]) -> None:
    assert stop.banned_ids(EOS) == ids
