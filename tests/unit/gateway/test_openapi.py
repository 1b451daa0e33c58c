"""openapi.json is valid, and its tables name only fields that exist."""

from __future__ import annotations

import json

import jsonschema
import pytest

from gateway_svc.http import openapi
from gateway_svc.http.fields import ENDPOINTS
from gateway_svc.http.openai.bodies import chat_generation, completion_generation
from svc_common.errors import InvalidRequestError

DESCRIBED = openapi.document([(path, "POST", "Post.") for path in ENDPOINTS], "1.0")


def body_schema(path: str) -> dict[str, object]:
    schema = DESCRIBED["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def test_the_tables_name_only_fields_of_bodies() -> None:
    names = {row.name for rows in ENDPOINTS.values() for row in rows}
    assert set(openapi.OWN) <= names
    assert set(openapi.REQUIRED) <= set(ENDPOINTS)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_schema_of_a_body_names_every_field(path: str) -> None:
    assert list(body_schema(path)["properties"]) == [row.name for row in ENDPOINTS[path]]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", 2, 2.5),
        ("top_p", 0.5, 0),
        ("top_k", -1, -2),
        ("seed", -1, "one"),
        ("max_tokens", 0, -1),
        ("stop", "a", [""]),
        ("stop", ["a"] * 16, ["a"] * 17),
        ("stop_token_ids", [1], [-1]),
        ("stream", False, 1),
        ("timeout", 0.5, 0),
        ("priority", -1000, -1001),
        ("n", 1, 0),
    ],
)
def test_a_schema_accepts_what_the_gateway_accepts(field: str, good: object, bad: object) -> None:
    for path, parse, body in (
        ("/v1/completions", completion_generation, {"prompt": "a"}),
        ("/v1/chat/completions", chat_generation, {"messages": [{"role": "user", "content": "a"}]}),
    ):
        schema = body_schema(path)
        for value in (good, None):
            jsonschema.validate({**body, field: value}, schema)
            parse(_json({**body, field: value}))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**body, field: bad}, schema)
        with pytest.raises(InvalidRequestError):
            parse(_json({**body, field: bad}))


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
