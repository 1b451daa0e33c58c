"""Every field of the public protocol and of the HTTP bodies has a test through real processes, and is documented."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import session_pb2

from gateway_svc.http.fields import ENDPOINTS
from request_fields.fields import BY_PATH, FIELDS
from tests.chaos.parameters import NOT_DRAWN, PARAMETERS
from tests.field_coverage import OWN_ENDPOINTS, OWN_TESTS
from tests.processes import test_http_fields, test_request_fields

ROOT = Path(__file__).resolve().parents[3]
PARAMETER_MESSAGES = {
    "SamplingParams": "sampling.", "StopParams": "stop.", "OutputParams": "output.", "SchedulingParams": "scheduling.",
}  # fmt: skip


def protocol_fields() -> Iterator[tuple[str, str]]:
    """Message and name of every field that a client can send, over all RPCs of the public services."""
    services = [*pb.DESCRIPTOR.services_by_name.values(), *session_pb2.DESCRIPTOR.services_by_name.values()]
    todo = [m.input_type for service in services for m in service.methods]
    seen: set[str] = set()
    while todo:
        message: Any = todo.pop()
        if message.full_name in seen or message.GetOptions().map_entry:
            continue
        seen.add(message.full_name)
        for field in message.fields:
            yield message.name, field.name
            todo += [field.message_type] if field.message_type else []


def functions_of(path: str) -> set[str]:
    nodes = ast.walk(ast.parse((ROOT / path).read_text("utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def documented(page: str, table: str) -> list[tuple[str, ...]]:
    """The names in the cells of a generated table, row by row."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    found = re.search(rf"<!-- {re.escape(table)} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert found, f"{page} has no table {table!r}"
    return [tuple(re.findall(r"`([^`]+)`", line)) for line in found[1].splitlines()[2:]]


def test_every_field_of_the_protocol_has_a_test_through_real_processes() -> None:
    fields = [f"{message}.{name}" for message, name in protocol_fields()]
    covered = [*test_request_fields.GENERATE, *test_request_fields.CALLS, *OWN_TESTS]
    assert sorted(covered) == sorted(fields)


@pytest.mark.parametrize("node", sorted({*OWN_TESTS.values(), *OWN_ENDPOINTS.values()}))
def test_a_named_test_exists(node: str) -> None:
    path, _, function = node.partition("::")
    assert function in functions_of(path)


def test_every_field_of_a_body_has_a_test_through_real_processes() -> None:
    served = {(path, row.name) for path, rows in ENDPOINTS.items() for row in rows if row.is_served}
    assert set(test_http_fields.CASES) == {case for case in served if case[0] not in OWN_ENDPOINTS}
    for path, name in served - set(test_http_fields.CASES):
        test = OWN_ENDPOINTS[path].partition("::")[0]
        assert f'"{name}"' in (ROOT / test).read_text("utf-8"), f"{path} {name}"
    assert {case for case in test_http_fields.CASES if test_http_fields.effect_of(*case) is None} == set()
    unused = {name for name in test_http_fields.EFFECTS if name not in {name for _, name in served}}
    assert unused == set()
    assert set(test_http_fields.OWN) <= served


def test_every_field_of_the_protocol_is_documented() -> None:
    parameters = {row[0] for row in documented(PAGE, "request fields")}
    others = {row[:2] for row in documented(PAGE, "message fields")}
    for message, name in protocol_fields():
        path = PARAMETER_MESSAGES.get(message, "") + name
        assert path in parameters if path in BY_PATH else (message, name) in others, f"{message}.{name}"


PAGE = "request-fields.md"


def test_every_field_of_a_body_is_documented() -> None:
    refused = {row[0] for row in documented("http.md", "refused body fields")}
    for path, rows in ENDPOINTS.items():
        served = [row[0] for row in documented("http.md", f"fields of {path}")]
        assert served == [row.name for row in rows if row.is_served]
        assert {row.name for row in rows if not row.is_served} <= refused


def test_the_chaos_workload_has_every_option_that_changes_an_answer() -> None:
    drawn = {parameter.name for parameter in PARAMETERS}
    served = {field.option for field in FIELDS}
    assert drawn <= served
    assert served - drawn == set(NOT_DRAWN)
    assert all(NOT_DRAWN.values())
