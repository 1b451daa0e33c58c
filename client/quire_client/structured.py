"""Converts a dataclass or pydantic model to JSON Schema, and the text of an answer to an object."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from quire_client.errors import UnexpectedOutput, invalid
from quire_client.types import FinishReason, GenerateResult

SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
ARRAYS = (list, tuple, set, frozenset)


class MismatchError(ValueError):
    """A JSON value does not have the type that the model requires."""


def schema_of(model: type) -> dict[str, Any]:
    """The JSON Schema of a dataclass or pydantic model. Raises InvalidRequest for a type that it does not support."""
    pydantic_schema = getattr(model, "model_json_schema", None)
    if pydantic_schema is not None:
        schema: dict[str, Any] = pydantic_schema()
        return schema
    if not (isinstance(model, type) and dataclasses.is_dataclass(model)):
        raise invalid("response_model", f"response_model must be a dataclass or a pydantic model; got {model!r}")
    definitions: dict[str, Any] = {}
    schema = _schema(model, definitions)
    return {**schema, "$defs": definitions}


def with_parsed(result: GenerateResult, model: type) -> GenerateResult:
    """The result with `parsed`, the object of its first sample. Raises UnexpectedOutput."""
    try:
        parsed = parse(result.text, model)
    except ValueError as error:  # includes MismatchError and pydantic's ValidationError
        hint = "; raise max_tokens" if result.finish_reason is FinishReason.LENGTH else ""
        reason = f"the output ended with {result.finish_reason.value}{hint}"
        raise UnexpectedOutput(f"the output is not a {model.__name__}: {error}; {reason}", result=result) from error
    return dataclasses.replace(result, parsed=parsed)


def parse(text: str, model: type) -> Any:
    """The object in a JSON text. Raises ValueError."""
    pydantic_parse = getattr(model, "model_validate_json", None)
    return pydantic_parse(text) if pydantic_parse is not None else _value(json.loads(text), model, "")


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one type. Dataclasses become entries of `definitions`, so that they can be recursive."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if kind in SCALARS:
        return {"type": SCALARS[kind]}
    if kind is Any:
        return {}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _object_schema(kind, definitions)
    if origin is Literal:
        return {"enum": list(arguments)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(argument, definitions) for argument in arguments]}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(arguments[1] if arguments else Any, definitions)}
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        items = [_schema(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if isinstance(origin, type) and issubclass(origin, Collection):
        return {"type": "array", "items": _schema(arguments[0] if arguments else Any, definitions)}
    raise invalid("response_model", f"response_model has a field of type {kind!r}, which has no JSON Schema")


def _object_schema(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    reference = {"$ref": f"#/$defs/{kind.__name__}"}
    if kind.__name__ in definitions:
        return reference
    definitions[kind.__name__] = {}
    hints = typing.get_type_hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    definitions[kind.__name__] = {
        "type": "object",
        "properties": {field.name: _schema(hints[field.name], definitions) for field in fields},
        "required": [field.name for field in fields if _is_required(field)],
        "additionalProperties": False,
    }
    return reference


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(value: Any, kind: Any, path: str) -> Any:
    """A JSON value as an object of the type. Raises MismatchError with its path."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _object(value, kind, path)
    if origin in (Union, types.UnionType):
        return _first_match(value, arguments, path)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _checked(value in [member.value for member in kind], value, kind, path) and kind(value)
    if origin is Literal:
        return _checked(value in arguments, value, kind, path) and value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in SCALARS:
        _checked(type(value) is kind, value, kind, path)
        return value
    if isinstance(origin, type) and issubclass(origin, Mapping):
        _checked(isinstance(value, dict), value, kind, path)
        return {name: _value(item, (arguments or (str, Any))[1], f"{path}.{name}") for name, item in value.items()}
    if isinstance(origin, type) and issubclass(origin, Collection):
        _checked(isinstance(value, list), value, kind, path)
        return _array(value, origin, arguments, path)
    return value


def _array(values: list[Any], origin: type, arguments: tuple[Any, ...], path: str) -> Any:
    is_fixed = origin is tuple and arguments and arguments[-1] is not Ellipsis
    kinds = arguments if is_fixed else [(arguments or (Any,))[0]] * len(values)
    _checked(len(kinds) == len(values), values, origin, path)
    items = [_value(item, kind, f"{path}[{i}]") for i, (item, kind) in enumerate(zip(values, kinds, strict=True))]
    return origin(items) if origin in ARRAYS else items


def _object(value: Any, kind: type, path: str) -> Any:
    _checked(isinstance(value, dict), value, kind, path)
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    missing = [name for name, field in fields.items() if name not in value and _is_required(field)]
    unknown = sorted(set(value) - set(fields))
    if missing or unknown:
        problem = f"has no {', '.join(missing)}" if missing else f"has unknown fields: {', '.join(unknown)}"
        raise MismatchError(f"{path.lstrip('.') or kind.__name__} {problem}")
    return kind(**{name: _value(item, hints[name], f"{path}.{name}") for name, item in value.items()})


def _first_match(value: Any, kinds: tuple[Any, ...], path: str) -> Any:
    for kind in kinds:
        try:
            return _value(value, kind, path)
        except MismatchError as error:
            failure = error
    raise failure


def _checked(is_valid: bool, value: Any, kind: Any, path: str) -> bool:
    """Return True, or raise MismatchError."""
    if not is_valid:
        raise MismatchError(
            f"{path.lstrip('.') or 'the output'} is {value!r:.80}, not {getattr(kind, '__name__', kind)}"
        )
    return True
