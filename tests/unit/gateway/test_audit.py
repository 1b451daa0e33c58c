"""Lines of the audit log: one per request over gRPC and HTTP, with its caller and result, never with text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire.v1 import inference_pb2 as pb

from gateway_svc.callers.authenticator import ApiKeys, Authenticator
from gateway_svc.operators.audit import AuditLog, AuditLogError
from gateway_svc.records.recorder import OutputRecorder
from gateway_svc.records.redis_fields import RedisFields
from gateway_svc.records.store import RecordStore
from tests.processes.redis_server import RedisServer
from tests.unit.gateway.fakes import EOS, FakeScheduler, TestGateway, refused, until
from tests.unit.gateway.test_http import HttpGateway
from tests.unit.gateway.tokenizer_kinds import byte_level

KEY, SECRET = "key-of-team-a", "a very secret prompt"
IDS = byte_level().encode(SECRET, add_special_tokens=False).ids
GRPC = {"metadata": (("authorization", f"Bearer {KEY}"),), "timeout": 60}
HTTP = {"authorization": f"Bearer {KEY}", "x-request-id": "mine"}
GENERATE = "quire.v1.InferenceService/Generate"


class Audited:
    """A gateway with an audit log, over gRPC and HTTP."""

    def __init__(self, gateway: TestGateway, http: HttpGateway, audit: AuditLog, path: Path) -> None:
        self.gateway = gateway
        self.http = http
        self._audit = audit
        self._path = path

    async def lines(self, count: int) -> list[dict[str, Any]]:
        """All lines, when there are `count` of them."""
        await until(lambda: len(self._path.read_text().splitlines()) >= count)
        text = self._path.read_text()
        assert not [secret for secret in (KEY, SECRET, "very secret") if secret in text]
        lines = [json.loads(line) for line in text.splitlines()]
        assert len(lines) == count, text
        return lines


@pytest.fixture
async def audited(scheduler: FakeScheduler, redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Audited]:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "team-a").write_text(KEY)
    authenticator, recorder = (
        Authenticator(ApiKeys(tmp_path / "keys")),
        OutputRecorder(RecordStore(RedisFields(redis_server.url))),
    )
    audit = AuditLog(str(tmp_path / "audit"), "gateway-1")
    async with TestGateway(
        [scheduler.address], admit=authenticator.admit, recorder=recorder, on_call=audit.on_call
    ) as gateway:
        await gateway.ready()
        recorder.start()
        async with HttpGateway(gateway, authenticator, audit=audit) as http:
            yield Audited(gateway, http, audit, tmp_path / "audit")
        await recorder.close()
    audit.close()


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt={"text": SECRET}, **fields)


def of(line: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(line[name] for name in names)


async def test_a_line_has_the_caller_and_the_costs(audited: Audited, scheduler: FakeScheduler) -> None:
    scheduler.play([*IDS[:4], 1], EOS)
    async for _ in audited.gateway.stub.Generate(request(request_id="r"), **GRPC):
        pass
    (line,) = await audited.lines(1)
    assert of(line, "gateway", "method", "owner", "request_id", "model") == (
        "gateway-1", GENERATE, "team-a", "r", "demo",
    )  # fmt: skip
    assert of(line, "prompt_tokens", "output_tokens", "code", "finish_reason") == (len(IDS), 5, "OK", "eos")
    assert line["credential"].startswith("key:")
    assert len(line["credential"]) == 16
    assert line["peer"].startswith("127.0.0.1:")
    assert 0 < line["duration_s"] < 60
    assert line["time"].endswith("Z")
    assert line["cached_tokens"] == 3, "as the fake scheduler says"


@pytest.mark.parametrize(
    ("make", "code", "owner"),
    [
        (lambda stub: stub.Generate(request()), "UNAUTHENTICATED", ""),
        (lambda stub: stub.Generate(request(model="very secret"), **GRPC), "NOT_FOUND", "team-a"),
        (lambda stub: stub.Generate(request(request_id=SECRET), **GRPC), "INVALID_ARGUMENT", "team-a"),
        (lambda stub: stub.Generate(request(sampling={"temperature": -1}), **GRPC), "INVALID_ARGUMENT", "team-a"),
    ],
)
async def test_refused_calls_have_a_line(audited: Audited, make: Any, code: str, owner: str) -> None:
    error = await refused(make(audited.gateway.stub))
    assert error.code().name == code
    (line,) = await audited.lines(1)
    assert of(line, "method", "code", "owner", "output_tokens", "finish_reason") == (GENERATE, code, owner, 0, "")


async def test_a_request_that_cannot_be_decoded_has_a_line(audited: Audited) -> None:
    call = audited.gateway.channel.unary_unary("/quire.v1.InferenceService/Tokenize")
    with pytest.raises(grpc.aio.AioRpcError):
        await call(b"\xff\xff", metadata=GRPC["metadata"])
    (line,) = await audited.lines(1)
    assert of(line, "code", "owner") == ("INVALID_ARGUMENT", "team-a")


async def test_a_cancelled_stream_has_the_tokens_so_far(audited: Audited, scheduler: FakeScheduler) -> None:
    call = audited.gateway.stub.Generate(request(), **GRPC)
    await until(lambda: scheduler.submits)
    scheduler.send(scheduler.submits[0].handle, [7, 8, 9])
    assert (await call.read()).HasField("accepted")
    assert len((await call.read()).chunk.token_ids) == 3
    call.cancel()
    (line,) = await audited.lines(1)
    assert of(line, "code", "output_tokens", "finish_reason") == ("CANCELLED", 3, "")
    assert line["request_id"].startswith("gen-")


async def test_a_stored_response_has_a_line_for_its_computation(audited: Audited, scheduler: FakeScheduler) -> None:
    body = {"input": "a", "background": True}
    _, _, answer = await audited.http.post("/v1/responses", body, headers=HTTP)
    async with asyncio.timeout(30.0):
        await until(lambda: scheduler.submits)
    (call,) = await audited.lines(1)
    scheduler.finish(scheduler.submits[0].handle, EOS, ids=[*IDS[:4], 1])
    _, run = await audited.lines(2)
    assert of(call, "method", "output_tokens", "code") == ("http/create_response", 0, "OK")
    assert of(run, "method", "output_tokens", "code", "owner") == ("http/response_run", 5, "OK", "team-a")
    assert call["request_id"] == run["request_id"] == answer["id"]


def test_a_file_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(AuditLogError, match=r"--audit-log .*: Is a directory"):
        AuditLog(str(tmp_path), "gateway-1")
