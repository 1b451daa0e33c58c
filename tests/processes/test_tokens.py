"""A gateway process that accepts JSON web tokens: over gRPC and HTTP, with new keys of the issuer, and bad settings."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from quire_client import Client, QuireError

from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack
from tests.processes.test_operator_port import NO_SCHEDULER, wait_for
from tests.unit.gateway.jwt_issuer import AUDIENCE, ISSUER, Issuer, JwksServer

FLAGS = (f"--jwt-issuer={ISSUER}", f"--jwt-audience={AUDIENCE}")


def refusal(gateway: Service, token: str) -> tuple[str, str]:
    """Code and message. A token that is accepted gets UNAVAILABLE, because there is no scheduler."""
    with Client.connect(gateway.address, api_key=token, retry=None) as client, pytest.raises(QuireError) as refused:
        client.generate(token_ids=[1], max_tokens=1)
    return refused.value.code.name, str(refused.value)


def status_over_http(address: str, token: str) -> int:
    request = urllib.request.Request(f"http://{address}/v1/models", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_tokens_over_grpc_and_http(tmp_path: Path) -> None:
    issuer, http, audit = Issuer("RS256"), f"127.0.0.1:{free_port()}", tmp_path / "audit.jsonl"
    with JwksServer(issuer.jwks()).serving() as jwks, Stack(tmp_path) as stack:
        flags = (*FLAGS, f"--jwt-jwks={jwks.url}", f"--http-listen={http}", f"--audit-log={audit}")
        gateway = stack.start_gateway(NO_SCHEDULER, flags=flags)
        wait_for(gateway, "listens on")
        assert refusal(gateway, issuer.token(tenant="team"))[0] == "UNAVAILABLE"
        expired = issuer.token(exp=time.time() - 60)
        assert refusal(gateway, expired) == ("UNAUTHENTICATED", "the token has expired; get a new one")
        assert refusal(gateway, "no token")[0] == "UNAUTHENTICATED"
        assert [status_over_http(http, token) for token in (issuer.token(), expired)] == [200, 401]
        assert gateway.terminate() == 0
        lines = [json.loads(line) for line in audit.read_text().splitlines()]
        assert {(line["owner"], line["credential"], line["code"]) for line in lines} == {
            ("team", "jwt:alice", "UNAVAILABLE"),
            ("sub:alice", "jwt:alice", "OK"),
            ("", "", "UNAUTHENTICATED"),
        }
        assert issuer.token() not in gateway.log() + audit.read_text()
        assert expired not in gateway.log() + audit.read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (FLAGS, "tokens of clients need --jwt-issuer, --jwt-audience, --jwt-jwks; set --jwt-jwks too"),
        ((*FLAGS, "--jwt-jwks=http://example.com/jwks"), "must be an https:// URL"),
        (("--isolation=tenant",), "--isolation tenant needs --api-keys or --jwt-issuer"),
        (("--audit-log=/no/such/folder/file",), "--audit-log /no/such/folder/file: No such file or directory"),
    ],
)
def test_bad_settings_stop_the_start(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    with Stack(tmp_path) as stack:
        gateway = stack.start_gateway(NO_SCHEDULER, flags=flags)
        assert gateway.wait() == 1
        assert words in gateway.log()
        assert "Traceback" not in gateway.log()
