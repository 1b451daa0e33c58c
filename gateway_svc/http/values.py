"""Reads values of a JSON body by type. An error names the field, what it is, and what it must be. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from request_fields.fields import MAX_UINT32, Kind
from svc_common.errors import InvalidRequestError

Json = dict[str, Any]
T = TypeVar("T")

INTEGERS = (Kind.INT32, Kind.UINT32, Kind.UINT64)
NUMBERS = (Kind.FLOAT, *INTEGERS)
NUMBER = re.compile(r" *[+-]?[0-9]{1,30}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,3})? *")
BOOLEANS = {"true": True, "false": False, "1": True, "0": False}  # values of a query
MAX_SHOWN = 80  # characters of a wrong value in an error


def invalid(field: str, words: str) -> InvalidRequestError:
    """The error for a field of a body."""
    return InvalidRequestError(f"{field} {words}", field=field)


def object_of(name: str, value: Any) -> Json:
    """An object. Raises InvalidRequestError, as all functions here do."""
    if not isinstance(value, dict):
        raise invalid(name, f"is {shown(value)}; must be an object")
    return value


def list_of(name: str, value: Any, items: str = "") -> list[Any]:
    """A list. `items`: what it must contain, for the error."""
    if not isinstance(value, list):
        raise invalid(name, f"is {shown(value)}; must be a list{items and f' of {items}'}")
    return value


def text_of(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(name, f"is {shown(value)}; must be a string")
    return value


def one_of(name: str, value: Any, choices: Collection[str]) -> str:
    """One of these strings."""
    if not isinstance(value, str) or value not in choices:
        raise invalid(name, f"is {shown(value)}; must be one of {', '.join(choices)}")
    return value


def optional(read: Callable[[str, Any], T], name: str, value: Any) -> T | None:
    """Reads a value with `read`; null is None."""
    return None if value is None else read(name, value)


def text(body: Mapping[str, Any], name: str, where: str = "") -> str:
    """A string field of a body, or of the object at `where`; "" if it is not set."""
    return optional(text_of, f"{where}.{name}" if where else name, body.get(name)) or ""


def text_at(where: str, item: Mapping[str, Any], name: str) -> str:
    """A string field that the object at `where` must have."""
    return text_of(f"{where}.{name}", item.get(name))


def flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A boolean field of the body."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise invalid(name, f"is {shown(value)}; must be true or false")
    return default if value is None else value


def typed_value(name: str, kind: Kind, value: Any) -> Any:
    """The value as the protocol's type. Raises InvalidRequestError."""
    if kind in NUMBERS:
        value = number_of(value)
    if kind is Kind.FLOAT and type(value) in (int, float):
        return _as_float(name, value)
    if kind in INTEGERS and (type(value) is int or (type(value) is float and value.is_integer())):
        return int(value)
    if kind is Kind.BOOL and type(value) is bool:
        return value
    if kind is Kind.STRING and type(value) is str:
        return value
    if kind is Kind.STRINGS and type(value) is list and all(type(item) is str for item in value):
        return value
    if kind is Kind.TOKEN_IDS and type(value) is list:
        return token_ids(name, value)
    if kind is Kind.BIASES and type(value) is dict:
        return _biases(name, value)
    if kind is Kind.COUNTS and type(value) is dict:
        return {key: typed_value(f"{name}.{key}", Kind.UINT32, count) for key, count in value.items()}
    raise invalid(name, f"is {shown(value)}; must be {WORDS[kind]}")


WORDS = {
    Kind.FLOAT: "a number", **dict.fromkeys(INTEGERS, "an integer"), Kind.BOOL: "true or false",
    Kind.STRING: "a string", Kind.STRINGS: "a string or a list of strings", Kind.TOKEN_IDS: "a list of token ids",
    Kind.BIASES: "an object of token ids and numbers", Kind.COUNTS: "an object of integers",
}  # fmt: skip


def number_of(value: Any) -> Any:
    """The number that a string contains, as vLLM accepts it; other values unchanged."""
    if not isinstance(value, str) or not NUMBER.fullmatch(value):
        return value
    return float(value) if set(value) & set(".eE") else int(value)


def _biases(name: str, values: dict[str, Any]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, value in values.items():
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(MAX_UINT32))):
            raise invalid(name, f'has key {shown(key)}; a key must be a token id as a string, such as "42"')
        biases[token_ids(name, [int(key)])[0]] = typed_value(f"{name}[{key}]", Kind.FLOAT, value)
    return biases


def _as_float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise invalid(name, f"is {shown(value)}, which is out of range for a number") from None


def token_ids(name: str, values: list[Any]) -> list[int]:
    """A list of token ids. Raises InvalidRequestError that names the first element that is not a token id."""
    for i, value in enumerate(values):
        if type(value) is not int or not 0 <= value <= MAX_UINT32:
            raise invalid(f"{name}[{i}]", f"is {shown(value)}; must be a token id, an integer from 0 to {MAX_UINT32}")
    return values


def shown(value: Any) -> str:
    """A value of a body as text for an error, shortened."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)[: MAX_SHOWN + 1]
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
