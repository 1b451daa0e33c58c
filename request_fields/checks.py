"""Checks and defaults derived from the table of request fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from request_fields.fields import (
    BY_PATH,
    FIELDS,
    NUMBERS,
    SAMPLER_FIELDS,
    Field,
    FieldError,
    Kind,
    ProtoMessage,
    SamplingParams,
    fields_of,
    sampling_params,
)
from request_fields.parameters import ONLY_WITH_BEAMS, check_beam_fields

UNUSED_SETTINGS = {"num_beams": 1}  # key of generation_config.json -> value that turns it off
MESSAGES = {field.message for field in FIELDS}
SAMPLING = fields_of("sampling")
# check_beam_fields refuses no request without one of these.
BEAM_FIELDS = {"beam_width", *(BY_PATH[path].name for path in ONLY_WITH_BEAMS)}
SAMPLED_IDS = [name for name, field in SAMPLING.items() if field.kind in (Kind.TOKEN_IDS, Kind.BIASES)]


def check_fields(request: ProtoMessage) -> None:
    """Check every field that a GenerateRequest or Submit sets. Raises FieldError."""
    _check_message(request, CHECKS)


def _check_message(message: ProtoMessage, checks: Mapping[str, Any]) -> None:
    for descriptor, value in message.ListFields():
        check = checks.get(descriptor.name)
        if isinstance(check, dict):
            _check_message(value, check)
        elif check is not None:
            check(value)


def check_beams(request: ProtoMessage) -> None:
    """Check the fields that a client sets in a GenerateRequest against its beam_width. Raises FieldError."""
    for descriptor, value in request.ListFields():
        if descriptor.name == "sampling" and not BEAM_FIELDS.isdisjoint(values_set(value)):
            check_beam_fields({field.path: value for field, value in _fields_set(request, "")})


def _fields_set(message: ProtoMessage, prefix: str) -> Iterator[tuple[Field, Any]]:
    for descriptor, value in message.ListFields():
        path = f"{prefix}{descriptor.name}"
        if path in BY_PATH:
            yield BY_PATH[path], value
        elif path in MESSAGES:
            yield from _fields_set(value, f"{path}.")


def check_value(field: Field, value: Any) -> None:
    """Check one value against its row. Raises FieldError."""
    check = _check_of(field)
    if check is not None:
        check(value)


def _check_of(field: Field) -> Callable[[Any], None] | None:
    """The check of a field's values; None if all values are valid."""
    if field.kind in NUMBERS or field.kind is Kind.ENUM:
        return partial(_check_number, field)
    if field.kind is Kind.BIASES:
        return partial(_check_biases, field)
    if field.counts is not None:
        return partial(_check_counts, field, field.counts)
    if field.max_items is not None:
        return partial(_check_list, field)
    return None if field.max_bytes is None else partial(_check_size, field, field.max_bytes)


def _check_size(field: Field, max_bytes: int, text: str) -> None:
    if (size := len(text.encode())) > max_bytes:
        raise FieldError(field.path, f"has {size} bytes; at most {max_bytes} are allowed")


def _check_number(field: Field, value: float) -> None:
    low = -math.inf if field.low is None else field.low
    high = math.inf if field.high is None else field.high
    if low <= value <= high and not (field.excludes_low and value == low):  # false for NaN
        return
    shown, noun = (f"{value:g}", "a number ") if field.kind is Kind.FLOAT else (str(value), "")
    raise FieldError(field.path, f"is {shown}; must be {noun}{field.allowed}")


def _check_list(field: Field, items: Sequence[Any]) -> None:
    if field.max_items is not None and len(items) > field.max_items:
        noun = "strings" if field.kind is Kind.STRINGS else "ids"
        raise FieldError(field.path, f"has {len(items)} {noun}; at most {field.max_items} are allowed")
    if field.max_chars is None:
        return
    for i, text in enumerate(items):
        if not text:
            raise FieldError(f"{field.path}[{i}]", "is empty; leave it out or give at least one character")
        if len(text) > field.max_chars:
            raise FieldError(f"{field.path}[{i}]", f"has {len(text)} characters; at most {field.max_chars} are allowed")


def _check_biases(field: Field, biases: Mapping[int, float]) -> None:
    _check_list(field, tuple(biases))
    for token_id, bias in biases.items():
        _check_number(replace(field, path=f"{field.path}[{token_id}]", kind=Kind.FLOAT), bias)


def _check_counts(field: Field, highest: Mapping[str, int], counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        if name not in highest:
            raise FieldError(field.path, f"has key {name[:64]!r}; its keys are {', '.join(highest)}")
        _check_number(replace(field, path=f"{field.path}.{name}", kind=Kind.UINT32, low=0, high=highest[name]), count)


def _checks_by_name() -> dict[str, Any]:
    """The checks of all fields by name; for a message, a dict of the checks of its fields."""
    checks: dict[str, Any] = {}
    for field in FIELDS:
        *messages, name = field.path.split(".")
        of_message = checks
        for message in messages:
            of_message = of_message.setdefault(message, {})
        of_message[name] = _check_of(field)
    return checks


CHECKS = _checks_by_name()


def check_sampled_ids(sampling: Any, vocab_size: int) -> None:
    """Check that the token ids of a SamplingParams message are below `vocab_size`. Raises FieldError."""
    for name in SAMPLED_IDS:
        ids = getattr(sampling, name)
        if ids and (highest := max(ids)) >= vocab_size:
            raise FieldError(f"sampling.{name}", f"contains {highest}; ids must be below vocab_size {vocab_size}")


def check_something_is_left(
    sampling: Any, bad_words_ids: Iterable[Sequence[int]], early_banned: Iterable[int], vocab_size: int
) -> None:
    """Check that the token id rules of a SamplingParams message, its bad words and min_tokens leave a token to sample.
    Raises FieldError."""
    banned = {*sampling.banned_token_ids, *(ids[0] for ids in bad_words_ids if len(ids) == 1)}
    if not (banned or sampling.allowed_token_ids):
        return
    banned.update(early_banned)
    words = "banned_token_ids, bad_words and min_tokens (EOS and stop_token_ids) ban"
    if sampling.allowed_token_ids and banned.issuperset(sampling.allowed_token_ids):
        allowed = len(set(sampling.allowed_token_ids))
        raise FieldError(
            "sampling.allowed_token_ids", f"allows {allowed} ids, but {words} all of them; allow at least one more"
        )
    if len(banned) >= vocab_size:
        raise FieldError(
            "sampling.banned_token_ids", f"leaves no id to sample: {words} all {vocab_size} ids; ban fewer"
        )


def check_sampling(params: SamplingParams) -> None:
    """Check the sampling parameters that a worker gets. Raises FieldError."""
    for name, field in SAMPLER_FIELDS.items():
        _check_number(field, getattr(params, name))


def resolve_sampling(asked: ProtoMessage, announced: ProtoMessage, *, drawn_seed: int) -> dict[str, Any]:
    """The value of every `sampling` field: the request's, else the model's, else the default."""
    values = {name: field.default for name, field in SAMPLING.items() if field.default is not None}
    values["seed"] = drawn_seed
    values |= {name: value for name, value in _values(announced).items() if SAMPLING[name].config_key}
    return values | _values(asked)


def _values(sampling: ProtoMessage) -> dict[str, Any]:
    return {name: value for name, value in values_set(sampling).items() if name in SAMPLING}


def values_set(message: ProtoMessage) -> dict[str, Any]:
    """The fields that a message sets, by name."""
    return {descriptor.name: value for descriptor, value in message.ListFields()}


def defaults_of_model(params: SamplingParams) -> dict[str, Any]:
    """The checkpoint defaults that a worker announces: only fields that generation_config.json may set."""
    return {name: getattr(params, name) for name, field in SAMPLER_FIELDS.items() if field.config_key}


def default_sampling(generation_config: Mapping[str, Any]) -> SamplingParams:
    """A checkpoint's sampling defaults. do_sample = false means greedy. Raises ValueError for an invalid value."""
    values = {
        name: _config_value(field, generation_config) for name, field in SAMPLER_FIELDS.items() if field.config_key
    }
    if generation_config.get("do_sample") is False:
        values["temperature"] = 0.0
    return sampling_params(values)


def _config_value(field: Field, config: Mapping[str, Any]) -> Any:
    value = config.get(field.config_key)
    if value is None or (value == field.config_off and not isinstance(value, bool)):
        return field.default
    where = f"generation_config.json: {field.config_key}"
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{where} is {value!r}; it must be a number")
    try:
        _check_number(field, value)
    except FieldError:
        raise ValueError(f"{where} is {value}; it must be {field.allowed}") from None
    return float(value) if field.kind is Kind.FLOAT else int(value)


def unserved_settings(generation_config: Mapping[str, Any]) -> list[str]:
    """Settings of a checkpoint, as key=value, that are not defaults of requests."""
    return [
        f"{key}={generation_config[key]}"
        for key, off in UNUSED_SETTINGS.items()
        if generation_config.get(key) not in (None, off)
    ]
