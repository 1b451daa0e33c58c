"""Checks and defaults derived from the table of request fields."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from request_fields.fields import (
    BY_PATH,
    FIELDS,
    NUMBERS,
    SAMPLER_FIELDS,
    Field,
    FieldError,
    Kind,
    SamplingParams,
    sampling_params,
    served,
)

MESSAGES = {field.message for field in FIELDS}
SERVED_SAMPLING = served("sampling")


class Message(Protocol):
    """The methods of a protobuf message that are used here."""

    def ListFields(self) -> Sequence[tuple[Any, Any]]: ...


def check_fields(request: Message) -> None:
    """Check every field that a GenerateRequest or Submit sets. Raises FieldError."""
    for field, value in _fields_set(request, ""):
        check_value(field, value)


def _fields_set(message: Message, prefix: str) -> Iterator[tuple[Field, Any]]:
    for descriptor, value in message.ListFields():
        path = f"{prefix}{descriptor.name}"
        if path in BY_PATH:
            yield BY_PATH[path], value
        elif path in MESSAGES:
            yield from _fields_set(value, f"{path}.")


def check_value(field: Field, value: Any) -> None:
    """Check one value against its row. Raises FieldError."""
    if not field.is_served:
        if value != field.off:
            raise FieldError(field.path, "is not served by this version; leave it unset", is_unserved=True)
    elif field.kind in NUMBERS or field.kind is Kind.ENUM:
        _check_number(field, value)
    elif field.max_items is not None:
        _check_list(field, value)
    elif field.max_bytes is not None and len(value.encode()) > field.max_bytes:
        raise FieldError(field.path, f"has {len(value.encode())} bytes; at most {field.max_bytes} are allowed")


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


def check_sampling(params: SamplingParams) -> None:
    """Check the sampling parameters that a worker gets. Raises FieldError."""
    for name, field in SAMPLER_FIELDS.items():
        _check_number(field, getattr(params, name))


def resolve_sampling(asked: Message, announced: Message, *, drawn_seed: int) -> dict[str, Any]:
    """The value of every served `sampling` field: the request's, else the model's, else the default."""
    values = {name: field.default for name, field in SERVED_SAMPLING.items()} | {"seed": drawn_seed}
    values |= {name: value for name, value in _values(announced).items() if SERVED_SAMPLING[name].config_key}
    return values | _values(asked)


def _values(sampling: Message) -> dict[str, Any]:
    return {name: value for name, value in values_set(sampling).items() if name in SERVED_SAMPLING}


def values_set(message: Message) -> dict[str, Any]:
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
    """Settings of a checkpoint, as key=value, that need a field which is not served."""
    fields = (field for field in FIELDS if field.config_key and not field.is_served)
    return [
        f"{field.config_key}={generation_config[field.config_key]}"
        for field in fields
        if generation_config.get(field.config_key) not in (None, field.config_off)
    ]
