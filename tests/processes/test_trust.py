"""The services with certificates or tokens between them: accepted peers, refused processes, and renewed files."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme
from quire.internal.v1 import scheduler_pb2, worker_pb2
from quire_client.demo import demo_model_dir

from tests.hostile import examples
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack

ROLES = ("gateway", "scheduler", "worker")
TOKENS = {role: f"{role}-token-0123456789" for role in ROLES}
STRANGER = "stranger"
SIM = ("--executor", "sim", "--sim-step-ms", "2")
TIMEOUT_S = 60.0
SERVICES = {
    "scheduler": scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
    "worker": worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
}
CALLS = [(kind, method.name) for kind, service in SERVICES.items() for method in service.methods]
CALLERS = {"scheduler": "gateway", "worker": "scheduler"}  # the role of most methods of a service
OTHER_CALLERS = {"Register": "worker", "CountWorkers": "worker", "ReadBlocks": "worker", "LendBlocks": "scheduler"}
# Words in the logs that show an effect of a call.
EFFECTS = ("registered from", "leased", "attached", "draining", "is ready", "is lost", "left", "aborted")


class Certificates:
    """The files of one CA, with a certificate for each role."""

    def __init__(self, folder: Path, authority: trustme.CA | None = None) -> None:
        folder.mkdir()
        self.folder = folder
        self.authority = authority or trustme.CA()
        self.authority.cert_pem.write_to_path(folder / "ca.crt")
        for role in (*ROLES, STRANGER):
            self.issue(role)

    def issue(self, role: str, **lifetime: datetime.datetime) -> None:
        cert = self.authority.issue_cert(f"quire-{role}", **lifetime)
        _replace(self.folder / f"{role}.crt", b"".join(part.bytes() for part in cert.cert_chain_pems))
        _replace(self.folder / f"{role}.key", cert.private_key_pem.bytes())

    def flags(self, role: str) -> tuple[str, ...]:
        names = {"cert": f"{role}.crt", "key": f"{role}.key", "ca": "ca.crt"}
        return tuple(f"--internal-tls-{kind}-file={self.folder / name}" for kind, name in names.items())

    def credentials(self, role: str | None) -> grpc.ChannelCredentials:
        ca = (self.folder / "ca.crt").read_bytes()
        if role is None:
            return grpc.ssl_channel_credentials(ca)
        key, cert = ((self.folder / f"{role}.{end}").read_bytes() for end in ("key", "crt"))
        return grpc.ssl_channel_credentials(ca, key, cert)


def _replace(path: Path, content: bytes) -> None:
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").rename(path)


@dataclass(frozen=True)
class System:
    """One process of each kind."""

    stack: Stack
    services: dict[str, Service]
    certificates: Certificates | None = None


def start(stack: Stack, *, flags: dict[str, tuple[str, ...]]) -> dict[str, Service]:
    scheduler = stack.start_scheduler(*flags["scheduler"])
    worker = stack.start_worker(scheduler, demo_model_dir(), *SIM, *flags["worker"])
    return {
        "scheduler": scheduler,
        "worker": worker,
        "gateway": stack.start_gateway(scheduler, flags=flags["gateway"]),
    }


@pytest.fixture(scope="module")
def with_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("tls")
    certificates = Certificates(folder / "certificates")
    with Stack(folder) as stack:
        services = start(stack, flags={role: certificates.flags(role) for role in ROLES})
        services["gateway"].wait_ready()
        yield System(stack, services, certificates)


@pytest.fixture(scope="module")
def with_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("tokens")
    path = folder / "tokens"
    path.write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    with Stack(folder) as stack:
        services = start(stack, flags=dict.fromkeys(ROLES, (f"--token-file={path}",)))
        services["gateway"].wait_ready()
        yield System(stack, services)


def refusal(channel: grpc.Channel, kind: str, name: str, token: str | None = None) -> tuple[str, str]:
    """Makes a valid call of a method. Returns code and message of the error; no answer may come before it."""
    service = SERVICES[kind]
    method = service.methods_by_name[name]
    metadata = None if token is None else [("authorization", f"Bearer {token}")]
    messages = [message.SerializeToString() for message in examples.calls_of(method)[0]]
    call = channel.stream_stream(f"/{service.full_name}/{name}")(iter(messages), timeout=TIMEOUT_S, metadata=metadata)
    try:
        next(call)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    raise AssertionError(f"{name} was accepted")


@pytest.mark.parametrize(("kind", "name"), CALLS)
def test_only_the_right_certificate_may_call(with_tls: System, tmp_path: Path, kind: str, name: str) -> None:
    assert with_tls.certificates is not None
    address = with_tls.services[kind].address
    caller = OTHER_CALLERS.get(name, CALLERS[kind])
    others = [role for role in (*ROLES, STRANGER) if role != caller]
    options = [("grpc.ssl_target_name_override", f"quire-{kind}")]
    for role in others:
        with grpc.secure_channel(address, with_tls.certificates.credentials(role), options) as channel:
            code, words = refusal(channel, kind, name)
        assert (code, words) == (
            "PERMISSION_DENIED",
            f"this call is for a {caller}; the caller's certificate names quire-{role}",
        )
    foreign = Certificates(tmp_path / "foreign")
    (foreign.folder / "ca.crt").write_bytes((with_tls.certificates.folder / "ca.crt").read_bytes())
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=9)
    expired = Certificates(tmp_path / "expired", with_tls.certificates.authority)
    expired.issue(caller, not_before=past, not_after=past + datetime.timedelta(days=1))
    for credentials in (
        with_tls.certificates.credentials(None),
        foreign.credentials(caller),
        expired.credentials(caller),
    ):
        with grpc.secure_channel(address, credentials, options) as channel:
            assert refusal(channel, kind, name)[0] == "UNAVAILABLE"
    with grpc.insecure_channel(address) as channel:
        assert refusal(channel, kind, name)[0] == "UNAVAILABLE"


@pytest.mark.parametrize(("kind", "name"), CALLS)
def test_only_the_right_token_may_call(with_tokens: System, kind: str, name: str) -> None:
    caller = OTHER_CALLERS.get(name, CALLERS[kind])
    with grpc.insecure_channel(with_tokens.services[kind].address) as channel:
        assert refusal(channel, kind, name) == (
            "UNAUTHENTICATED",
            f"this call is for a {caller} and needs its token (--token-file)",
        )
        assert refusal(channel, kind, name, "x" * 20) == (
            "UNAUTHENTICATED",
            "the token of the caller is not in this service's --token-file",
        )
        for role in ROLES:
            if role != caller:
                assert refusal(channel, kind, name, TOKENS[role])[0] == "PERMISSION_DENIED"


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize("mode", ["with_tls", "with_tokens"])
async def test_a_stranger_changes_and_reads_nothing(mode: str, kind: str, request: pytest.FixtureRequest) -> None:
    """Valid calls of all methods by a process of another role, and reflection: only health answers."""
    system: System = request.getfixturevalue(mode)
    service = system.services[kind]
    async with await system.stack.connect(system.services["gateway"]):
        pass
    num_effects = count_effects(system)
    certificates = system.certificates
    options = [("grpc.ssl_target_name_override", f"quire-{kind}")]
    with (
        grpc.insecure_channel(service.address)
        if certificates is None
        else grpc.secure_channel(service.address, certificates.credentials(STRANGER), options)
    ) as channel:
        for method in SERVICES[kind].methods:
            assert refusal(channel, kind, method.name)[0] in ("UNAUTHENTICATED", "PERMISSION_DENIED")
        list_services = examples.calls_of(examples.REFLECTION.methods[0])[0][0].SerializeToString()
        reflect = channel.stream_stream(examples.path_of(examples.REFLECTION.methods[0]))
        with pytest.raises(grpc.RpcError) as caught:
            next(reflect(iter([list_services]), timeout=TIMEOUT_S))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=TIMEOUT_S)
    assert count_effects(system) == num_effects


def count_effects(system: System) -> dict[str, int]:
    """How often each kind of effect is in the logs of the services."""
    log = system.stack.logs()
    return {words: log.count(words) for words in EFFECTS}


@pytest.mark.parametrize("kind", ["with_tls", "with_tokens"])
async def test_trusted_services_serve(kind: str, request: pytest.FixtureRequest) -> None:
    system: System = request.getfixturevalue(kind)
    async with await system.stack.connect(system.services["gateway"]) as client:
        result = await client.generate(token_ids=[5, 6, 7], max_tokens=20, ignore_eos=True)
        assert len(result.token_ids) == 20
        assert (await client.status()).schedulers[0].connected


async def test_certificates_are_renewed_under_load(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    with Stack(tmp_path) as stack:
        services = start(stack, flags={role: certificates.flags(role) for role in ROLES})
        async with await stack.connect(services["gateway"]) as client:
            options = {"token_ids": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "temperature": 0.0}
            expected = (await client.generate(**options)).token_ids
            streams = [asyncio.create_task(client.generate(**options)) for _ in range(8)]
            old = {role: (certificates.folder / f"{role}.crt").read_bytes() for role in ROLES}
            for role in ROLES:
                certificates.issue(role)
            assert all((certificates.folder / f"{role}.crt").read_bytes() != old[role] for role in ROLES)
            # New connections in both directions: the worker registers again, and the scheduler leases it again.
            services["worker"].kill()
            services["worker"].start()
            services["scheduler"].kill()
            services["scheduler"].start()
            streams += [asyncio.create_task(client.generate(**options)) for _ in range(8)]
            assert [result.token_ids for result in await asyncio.gather(*streams)] == [expected] * 16


async def test_a_running_server_takes_new_certificates(with_tls: System) -> None:
    """A client with a certificate of a CA that was added while the servers ran is accepted."""
    assert with_tls.certificates is not None
    newer = trustme.CA()
    ca = with_tls.certificates.folder / "ca.crt"
    before = ca.read_bytes()
    _replace(ca, before + newer.cert_pem.bytes())
    cert = newer.issue_cert("quire-gateway")
    credentials = grpc.ssl_channel_credentials(
        before, cert.private_key_pem.bytes(), b"".join(part.bytes() for part in cert.cert_chain_pems)
    )
    options = [("grpc.ssl_target_name_override", "quire-scheduler")]
    with grpc.secure_channel(with_tls.services["scheduler"].address, credentials, options) as channel:
        path = f"/{SERVICES['scheduler'].full_name}/GetSchedulerStatus"
        assert channel.unary_unary(path)(b"", timeout=TIMEOUT_S)


def test_a_worker_refuses_a_scheduler_with_another_role(tmp_path: Path) -> None:
    """A worker does not register with a process whose certificate is that of a gateway."""
    certificates = Certificates(tmp_path / "certificates")
    with Stack(tmp_path) as stack:
        wrong_role = stack.start_scheduler(*certificates.flags("gateway"))
        worker = stack.start_worker(wrong_role, demo_model_dir(), *SIM, *certificates.flags("worker"))
        line = wait_for_line(worker, "is not available")
        assert "UNAVAILABLE" in line


def wait_for_line(service: Service, words: str) -> str:
    import time

    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        for line in service.log().splitlines():
            if words in line:
                return line
        time.sleep(0.05)
    raise AssertionError(f"{service.name} did not log {words!r}\n{service.log()}")


@pytest.mark.parametrize("kind", ["scheduler", "worker"])
def test_a_service_that_other_machines_can_reach_needs_tokens(tmp_path: Path, kind: str) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        if kind == "scheduler":
            service = stack.start_scheduler(f"--listen=0.0.0.0:{free_port()}")
        else:
            service = stack.start_worker(scheduler, demo_model_dir(), *SIM, "--listen=0.0.0.0:0")
        assert service.wait() == 2
        assert "this service does not check its peers: set --token-file" in service.log()


async def test_blocks_of_an_unknown_scheduler_are_not_adopted(tmp_path: Path) -> None:
    key = tmp_path / "keys"
    key.write_text("5a" * 32)
    prompt = {"token_ids": list(range(5, 205)), "max_tokens": 2, "ignore_eos": True}
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), *SIM)
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client:

            async def cached_tokens() -> int:
                return (await client.generate(**prompt)).usage.cached_tokens

            assert await cached_tokens() == 0
            assert await cached_tokens() > 100  # its steps carry the commits of the first request to the worker
            scheduler.kill()
            scheduler.command.append(f"--block-key-file={key}")
            scheduler.start()
            assert await cached_tokens() == 0
            assert "cached blocks that have no valid seal" in scheduler.log()
            assert await cached_tokens() > 100
            scheduler.kill()
            scheduler.start()
            assert await cached_tokens() > 100, "a scheduler with the same key adopts them"
