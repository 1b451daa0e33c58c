"""Roles, tokens, and the refusal to listen where other machines can connect."""

from __future__ import annotations

import hashlib
from pathlib import Path

import grpc
import pytest
from quire.internal.v1 import scheduler_pb2, worker_pb2
from quire_cli.certificate_authority import Authority, write

from scheduler_svc import servicer as scheduler_servicer
from svc_common.config import add_flags, make_parser, parse
from svc_common.security.tls import REREAD_S, TlsFiles
from svc_common.security.trust import (
    INTERNAL,
    TRUST_FLAGS,
    Tokens,
    Trust,
    TrustError,
    check_reach,
    is_loopback,
    make_trust,
)
from worker_svc import service as worker_service

WORKER_TOKEN, OLD_TOKEN, GATEWAY_TOKEN = "worker-token-0123456789", "worker-token-old-01234", "gateway-token-012345"


def token_file(folder: Path, *lines: str) -> Path:
    path = folder / "tokens"
    path.write_text("\n".join(lines))
    return path


def parsed(*words: str):
    parser = make_parser("scheduler", "a test")
    add_flags(parser, [TRUST_FLAGS])
    return parse(parser, list(words))


@pytest.mark.parametrize(
    ("service", "callers"),
    [
        (scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"], scheduler_servicer.CALLERS),
        (worker_pb2.DESCRIPTOR.services_by_name["WorkerService"], worker_service.CALLERS),
    ],
)
def test_every_internal_call_has_callers(service, callers: dict[str, set[str]]) -> None:
    assert set(callers) == {f"{service.full_name}/{method.name}" for method in service.methods}
    assert all(callers.values())


def test_a_token_has_a_role_and_may_be_given_as_a_digest(tmp_path: Path) -> None:
    digest = hashlib.sha256(GATEWAY_TOKEN.encode()).hexdigest()
    lines = ("# rotation: the old token stays accepted", f"worker {WORKER_TOKEN}", f"worker {OLD_TOKEN}")
    tokens = Tokens(token_file(tmp_path, *lines, "", f"gateway sha256:{digest}"))
    assert tokens.own("worker") == WORKER_TOKEN
    assert tokens.own("gateway") == "", "a digest can be checked, not sent"
    roles = [tokens.role_of(token) for token in (WORKER_TOKEN, OLD_TOKEN, GATEWAY_TOKEN, digest, "", "x" * 20)]
    assert roles == ["worker", "worker", "gateway", None, None, None]


def test_tokens_are_read_again_and_a_bad_file_keeps_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    path = token_file(tmp_path, f"worker {OLD_TOKEN}")
    tokens = Tokens(path, clock=lambda: now[0])
    path.write_text(f"worker {WORKER_TOKEN}")
    assert tokens.role_of(WORKER_TOKEN) is None
    now[0] += REREAD_S
    assert (tokens.role_of(WORKER_TOKEN), tokens.role_of(OLD_TOKEN)) == ("worker", None)
    path.write_text("worker short")
    for _ in range(2):
        now[0] += REREAD_S
        assert tokens.role_of(WORKER_TOKEN) == "worker"
    assert caplog.text.count("keeping the previous tokens") == 1
    assert "short" not in caplog.text


async def test_an_open_channel_sends_a_replaced_token(tmp_path: Path) -> None:
    """The old token may be removed while channels are open."""
    now, seen = [0.0], []
    path = token_file(tmp_path, f"worker {OLD_TOKEN}")
    trust = Trust("worker", tokens=Tokens(path, clock=lambda: now[0]))

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        seen.append(dict(context.invocation_metadata())["authorization"])
        return b""

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("q.S", {"M": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with trust.open_channel(f"127.0.0.1:{port}", "scheduler") as channel:
            call = channel.unary_unary("/q.S/M")
            await call(b"")
            path.write_text(f"worker {WORKER_TOKEN}")
            now[0] += REREAD_S
            await call(b"")
    finally:
        await server.stop(None)
    assert seen == [f"Bearer {OLD_TOKEN}", f"Bearer {WORKER_TOKEN}"]


async def test_a_channel_opens_while_the_files_are_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A certificate that does not fit its key, or is missing, leaves the previous pair in use."""
    authority = Authority.create()
    (tmp_path / "ca.crt").write_bytes(authority.pair.cert)
    for role in ("scheduler", "gateway"):
        write(tmp_path / role, authority.issue(f"quire-{role}"))
    ours, theirs = (
        Trust(role, TlsFiles(tmp_path / f"{role}.crt", tmp_path / f"{role}.key", tmp_path / "ca.crt", INTERNAL))
        for role in ("gateway", "scheduler")
    )

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return b""

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("q.S", {"M": method}),))
    port = server.add_secure_port("127.0.0.1:0", theirs.server_credentials())
    await server.start()
    try:
        for content in (None, authority.issue("quire-gateway").cert, b""):
            if content is not None:
                (tmp_path / "gateway.crt").write_bytes(content)
            async with ours.open_channel(f"127.0.0.1:{port}", "scheduler") as channel:
                assert await channel.unary_unary("/q.S/M")(b"", timeout=20) == b""
        write(tmp_path / "gateway", authority.issue("quire-gateway"))
        async with ours.open_channel(f"127.0.0.1:{port}", "scheduler") as channel:
            assert await channel.unary_unary("/q.S/M")(b"", timeout=20) == b""
    finally:
        await server.stop(None)
    assert "keeping the previous one: --internal-tls-cert-file" in caplog.text
    assert ours.reader is not None
    assert ours.reader.served.cert == (tmp_path / "gateway.crt").read_bytes()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("worker", "line 1: not `ROLE TOKEN`"),
        ("pilot 0123456789abcdef", "line 1: not `ROLE TOKEN`"),
        ("worker 0123456789abcde", "at least 16 characters"),
        ("worker 0123456789 abcdef", "line 1: not `ROLE TOKEN`"),
        (f"gateway {GATEWAY_TOKEN}", "no line `scheduler TOKEN`; this service must send one"),
    ],
)
def test_a_bad_token_file_fails_the_start(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(TrustError, match=words):
        make_trust(parsed("--token-file", str(token_file(tmp_path, line))), "scheduler")


def test_certificates_need_a_ca_and_a_name_with_the_role() -> None:
    with pytest.raises(TrustError, match="needs --internal-tls-ca-file"):
        make_trust(parsed("--internal-tls-cert-file=a", "--internal-tls-key-file=b"), "scheduler")
    with pytest.raises(TrustError, match=r"must contain \{role\}"):
        make_trust(parsed("--internal-tls-name=quire"), "scheduler")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.8.0.1:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/run/quire", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("worker-0.workers:1", False),
    ],
)
def test_only_loopback_addresses_are_unreachable_from_other_machines(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_a_reachable_port_needs_tokens_certificates_or_insecure(tmp_path: Path) -> None:
    args = parsed()
    check_reach(args, make_trust(args, "scheduler"), "127.0.0.1:50052")
    with pytest.raises(TrustError, match=r"other machines can connect to 0\.0\.0\.0:50052"):
        check_reach(args, make_trust(args, "scheduler"), "127.0.0.1:1", "0.0.0.0:50052")
    decided = parsed("--insecure")
    check_reach(decided, make_trust(decided, "scheduler"), "0.0.0.0:50052")
    with_tokens = parsed("--token-file", str(token_file(tmp_path, "scheduler 0123456789abcdef")))
    check_reach(with_tokens, make_trust(with_tokens, "scheduler"), "0.0.0.0:50052")
