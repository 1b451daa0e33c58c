"""The rule that ends a sequence by its own tokens, which schedulers and gateways share."""

from __future__ import annotations

import dataclasses
import random
from array import array

import numpy as np
import pytest
from quire.v1 import types_pb2 as types

from request_fields import checks
from request_fields.fields import (
    BY_PATH,
    FieldError,
    FinishReason,
    RepetitionDetection,
    Side,
    StopCondition,
    fields_of,
    stop_condition,
)

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


def _repeats(output: list[int], detection: RepetitionDetection) -> bool:
    """The rule word by word: some pattern stands at the end, min_count times in a row."""
    low, high, count = max(detection.min_pattern_size, 1), detection.max_pattern_size, detection.min_count
    return any(
        len(output) >= size * count and output[-size * count :] == output[-size:] * count
        for size in range(low, high + 1)
    )


def test_an_output_ends_at_its_first_repetition() -> None:
    """Random outputs of few ids, as each type of array that services have, against the rule word by word."""
    rng, found = random.Random(5), 0
    for _ in range(3000):
        size = rng.randint(1, 5)
        detection = RepetitionDetection(size, rng.randint(0, size), rng.randint(2, 4))
        stop = StopCondition(99, repetition_detection=detection, min_tokens=rng.choice((0, 0, 9)))
        output = [rng.choice((1, 2, 70000)) for _ in range(rng.randint(1, 24))]
        expected = FinishReason.REPETITION if _repeats(output, detection) and len(output) >= stop.min_tokens else None
        found += expected is not None
        ids = array("I", output)
        for view in (ids, memoryview(ids), np.array(output, dtype=np.uint32)):
            assert stop.end_of(view, EOS) is expected
    assert found > 300


def test_max_tokens_and_eos_are_looked_at_before_repetitions() -> None:
    stop = StopCondition(3, repetition_detection=RepetitionDetection(1, 0, 2))
    assert stop.may_end_anywhere
    assert stop.end_of(array("I", [1, 1]), EOS) is FinishReason.REPETITION
    assert stop.end_of(array("I", [1, 1, 1]), EOS) is FinishReason.LENGTH
    assert stop.end_of(array("I", [8, 8]), EOS) is FinishReason.EOS


def _read(message: types.StopParams) -> StopCondition:
    checks.check_value(BY_PATH["stop.repetition_detection"], message.repetition_detection)
    return stop_condition(checks.values_set(message))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"max_pattern_size": 3, "min_count": 1}, r"min_count is 1; must be from 2 to 32$"),
        ({"max_pattern_size": 3}, r"min_count is 0; must be from 2 to 32$"),
        ({"min_pattern_size": 3}, r"min_pattern_size is 3; must be at most max_pattern_size, 0$"),
        ({"max_pattern_size": 129, "min_count": 2}, r"max_pattern_size is 129; must be from 0 to 128$"),
        ({"size": 1}, r"has key 'size'; its keys are max_pattern_size, min_pattern_size, min_count$"),
    ],
)
def test_wrong_repetitions_are_refused(counts: dict[str, int], message: str) -> None:
    request = types.StopParams(max_tokens=4, repetition_detection=counts)
    with pytest.raises(FieldError, match=r"^stop\.repetition_detection.*" + message):
        _read(request)


def test_a_pattern_size_of_0_is_off() -> None:
    request = types.StopParams(max_tokens=4, repetition_detection={"max_pattern_size": 0, "min_count": 3})
    assert _read(request) == StopCondition(4)


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
