"""Structured output in HTTP bodies: OpenAI's response_format, vLLM's structured_outputs and guided fields. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire.v1 import inference_pb2 as pb

from gateway_svc.http.fields import GUIDED, BodyField, invalid, set_parameter, shown

RESPONSE_FORMAT, STRUCTURED_OUTPUTS = "response_format", "structured_outputs"
FORMATS = "text, json_object and json_schema"
OF_KEY = {row.name.removeprefix("guided_"): row for row in GUIDED}  # keys of structured_outputs


def set_grammar(body: Mapping[str, Any], request: pb.GenerateRequest) -> dict[str, str]:
    """Set the grammar that the body asks for by response_format or structured_outputs. Returns the names in the body,
    by field path in GenerateRequest. Raises InvalidRequestError, also if the body asks for several grammars.
    """
    asked = [*_of_response_format(body), *_of_structured_outputs(body)]
    names = [row.name for row in GUIDED if body.get(row.name) not in (None, False)] + [row.name for row, _ in asked]
    if len(names) > 1:
        raise invalid(names[1], f"is set together with {names[0]}; set only one of them")
    for row, value in asked:
        set_parameter(row, value, request)
    return {row.path: row.name for row, _ in asked}


def _of_response_format(body: Mapping[str, Any]) -> Iterator[tuple[BodyField, Any]]:
    value = _object(RESPONSE_FORMAT, body.get(RESPONSE_FORMAT))
    if value is None or value.get("type") == "text":
        return
    if value.get("type") == "json_object":
        yield BodyField(f"{RESPONSE_FORMAT}.type", "sampling.json_object"), True
    elif value.get("type") == "json_schema":
        inner = _object(f"{RESPONSE_FORMAT}.json_schema", value.get("json_schema")) or {}
        name = f"{RESPONSE_FORMAT}.json_schema.schema"
        if _object(name, inner.get("schema")) is None:
            raise invalid(name, "is not set; give a JSON Schema")
        yield BodyField(name, "sampling.json_schema"), inner["schema"]
    else:
        raise invalid(f"{RESPONSE_FORMAT}.type", f"is {shown(value.get('type'))}; must be one of {FORMATS}")


def _of_structured_outputs(body: Mapping[str, Any]) -> Iterator[tuple[BodyField, Any]]:
    for key, value in (_object(STRUCTURED_OUTPUTS, body.get(STRUCTURED_OUTPUTS)) or {}).items():
        if value is None or value is False:
            continue
        name = f"{STRUCTURED_OUTPUTS}.{key}"
        if key not in OF_KEY:
            raise invalid(name, f"is not served; the fields are {', '.join(sorted(OF_KEY))}")
        yield BodyField(name, OF_KEY[key].path), value


def _object(name: str, value: Any) -> dict[str, Any] | None:
    if value is None or isinstance(value, dict):
        return value
    raise invalid(name, f"is {shown(value)}; must be an object")
