"""The table of request fields: complete, consistent with the protocol, and what its checks and defaults say."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from quire_client.requests.generate import GenerateOptions

from request_fields import checks
from request_fields.fields import BY_PATH, FIELDS, SAMPLER_FIELDS, FieldError, Kind, SamplingParams, sampling_params

MESSAGES = {
    "sampling": types.SamplingParams,
    "stop": types.StopParams,
    "output": pb.OutputParams,
    "scheduling": pb.SchedulingParams,
}
ELSEWHERE = {"request_id", "model", "prompt", "continuation", "joins_events"}  # not parameters of the answer


def test_every_field_of_the_protocol_has_a_row() -> None:
    """A field added to the protocol is served or refused, never ignored."""
    known = {f"{message}.{field.name}" for message, type_ in MESSAGES.items() for field in type_.DESCRIPTOR.fields}
    known |= {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} - ELSEWHERE - set(MESSAGES)
    assert known == set(BY_PATH)
    assert len(BY_PATH) == len(FIELDS)


def test_types_are_those_of_the_protocol() -> None:
    for field in FIELDS:
        owner = MESSAGES.get(field.message, pb.GenerateRequest)
        descriptor = owner.DESCRIPTOR.fields_by_name[field.name]
        number = {
            Kind.FLOAT: descriptor.TYPE_FLOAT,
            Kind.INT32: descriptor.TYPE_INT32,
            Kind.UINT32: descriptor.TYPE_UINT32,
            Kind.UINT64: descriptor.TYPE_UINT64,
            Kind.BOOL: descriptor.TYPE_BOOL,
            Kind.ENUM: descriptor.TYPE_ENUM,
            Kind.STRING: descriptor.TYPE_STRING,
            Kind.STRINGS: descriptor.TYPE_STRING,
            Kind.TOKEN_IDS: descriptor.TYPE_UINT32,
            Kind.BLOBS: descriptor.TYPE_BYTES,
            Kind.BIASES: descriptor.TYPE_MESSAGE,
            Kind.COUNTS: descriptor.TYPE_MESSAGE,
        }[field.kind]
        assert descriptor.type == number, field.path


def test_the_samplers_parameters_are_those_of_the_table() -> None:
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(SAMPLER_FIELDS)


def test_the_sdk_has_an_option_for_every_field() -> None:
    assert {field.option for field in FIELDS} <= set(GenerateOptions.__annotations__)


def test_fields_are_described_and_applied_by_a_service() -> None:
    for field in FIELDS:
        assert field.doc, field.path
        assert field.applied_by, field.path


@pytest.mark.parametrize("field", [f for f in FIELDS if f.low is not None], ids=lambda field: field.path)
def test_numbers_at_their_limits_pass_and_beyond_are_refused(field: Any) -> None:
    if field.kind is Kind.BIASES:  # the limits of its values
        field = dataclasses.replace(field, kind=Kind.FLOAT)
    step = 1e-6 if field.kind is Kind.FLOAT else 1
    good = [field.low + step if field.excludes_low else field.low, field.default, field.high]
    for value in good:
        if value is not None:
            checks.check_value(field, value)
    bad = [field.low if field.excludes_low else field.low - step]
    bad += [] if field.high is None else [field.high + step]
    bad += [math.nan, math.inf, -math.inf] if field.kind is Kind.FLOAT else []
    for value in bad:
        with pytest.raises(FieldError, match=rf"^{field.path} is .*; must be .*(from|above|at least) ") as caught:
            checks.check_value(field, value)
        assert caught.value.field == field.path


def test_parameters_left_out_take_their_defaults() -> None:
    assert sampling_params({}) == SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    assert sampling_params({"top_k": 3, "n": 2}).top_k == 3


def test_defaults_come_from_request_then_model_then_table() -> None:
    asked = types.SamplingParams(temperature=0, n=3)
    announced = types.SamplingParams(temperature=0.5, top_k=7, seed=8, n=9, repetition_penalty=1.5)
    values = checks.resolve_sampling(asked, announced, drawn_seed=4)
    given = {name: value for name, value in values.items() if value is not None}
    assert given == {
        "temperature": 0, "top_p": 1.0, "top_k": 7, "min_p": 0.0, "top_a": 0.0, "seed": 4, "n": 3,
        "repetition_penalty": 1.5, "frequency_penalty": 0.0, "presence_penalty": 0.0, "beam_width": 0,
        "length_penalty": 1.0,
    }  # fmt: skip


def test_defaults_of_a_checkpoint() -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_k": -1, "top_p": 0, "min_p": None, "max_length": 5}
    assert checks.default_sampling(config) == SamplingParams(0.6, 0, 1.0, 0.0, 0)
    assert checks.default_sampling({"top_k": 50.0}).top_k == 50
    assert checks.default_sampling({"repetition_penalty": 1.05}).repetition_penalty == 1.05
    assert checks.default_sampling({"do_sample": False, "temperature": 0.6}).temperature == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"top_p": 1.5}, "top_p is 1.5; it must be above 0 and at most 1"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"min_p": math.nan}, "min_p is nan; it must be a number"),
        ({"top_k": -2}, "top_k is -2; it must be from 0 to 4294967295"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be from 0.01 to 100"),
        ({"top_k": True}, "top_k is True; it must be a number"),
    ],
)
def test_a_bad_setting_of_a_checkpoint_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checks.default_sampling(config)
