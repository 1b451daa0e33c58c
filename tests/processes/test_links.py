"""Every link over mutual TLS, with tokens, keys and a Redis with TLS: renewals under load, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from quire_cli.certificate_authority import Authority, issue_all, write
from quire_client import AsyncClient, PermissionDenied, Tls, Unauthenticated
from quire_client.demo import demo_model_dir

from tests.processes.port_proxy import PortProxy
from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack

ROLES = ("gateway", "scheduler", "worker")
KEY, ADMIN_KEY = "a-key-for-inference", "a-key-for-operators"
SIM = ("--executor", "sim", "--sim-step-ms", "2")
EXPIRED = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
LOG_DEADLINE_S = 30.0
DAYS = 30.0
NAME = "--internal-tls-worker-name={id}.quire-worker"


class Files:
    """The files of a deployment: certificates of a CA that can be replaced, tokens and keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority.create()
        self.put("ca.crt", self.authority.pair.cert)
        issue_all(self.authority, folder, hosts=("127.0.0.1",), worker_ids=("worker-0",), days=DAYS)
        self.put("tokens", "".join(f"{role} {role}-token-0123456789\n" for role in ROLES).encode())
        for name, key in (("keys", KEY), ("admin-keys", ADMIN_KEY)):
            (folder / name).mkdir()
            (folder / name / "me").write_text(key)

    def path(self, name: str) -> Path:
        return self.folder / name

    def put(self, name: str, content: bytes) -> None:
        """Replace a file at once, as a kubelet does."""
        self.path(f"{name}.new").write_bytes(content)
        self.path(f"{name}.new").rename(self.path(name))

    def flags(self, role: str, name: str | None = None) -> tuple[str, ...]:
        cert = self.path(name or role)
        return (
            f"--internal-tls-cert-file={cert}.crt",
            f"--internal-tls-key-file={cert}.key",
            f"--internal-tls-ca-file={self.path('ca.crt')}",
            f"--token-file={self.path('tokens')}",
        )

    def redis_flags(self, role: str, port: int) -> tuple[str, ...]:
        return (
            f"--redis=rediss://127.0.0.1:{port}/0",
            f"--redis-tls-ca-file={self.path('ca.crt')}",
            f"--redis-tls-cert-file={self.path(role)}.crt",
            f"--redis-tls-key-file={self.path(role)}.key",
        )

    def gateway_flags(self) -> tuple[str, ...]:
        return (
            f"--tls-cert-file={self.path('server.crt')}",
            f"--tls-key-file={self.path('server.key')}",
            f"--tls-client-ca-file={self.path('ca.crt')}",
            f"--api-keys={self.path('keys')}",
            f"--admin-listen=127.0.0.1:{free_port()}",
            f"--admin-keys={self.path('admin-keys')}",
            f"--http-listen=127.0.0.1:{free_port()}",
        )

    def client(self) -> Tls:
        """The TLS settings of a client, with the certificate of a gateway: the public port asks for any of the CA."""
        return Tls(self.path("ca.crt"), self.path("gateway.crt"), self.path("gateway.key"))

    def redis_context(self) -> ssl.SSLContext:
        """Redis' side: its certificate, and clients of the CA."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.path("ca.crt"))
        context.load_cert_chain(self.path("server.crt"), self.path("server.key"))
        context.verify_mode = ssl.CERT_REQUIRED
        return context


class System:
    """One process of each service, and Redis behind a TLS port."""

    def __init__(self, files: Files, redis: RedisServer, stack: Stack) -> None:
        self.files, self.stack = files, stack
        self._redis = redis
        self._redis_port = free_port()
        self._proxy: PortProxy | None = None

    async def start(self) -> None:
        await self.open_redis()
        files, stack, port = self.files, self.stack, self._redis_port
        flags = (*files.flags("scheduler"), *files.redis_flags("scheduler", port), NAME)
        self.scheduler = stack.start_scheduler(*flags)
        own = files.flags("worker", "worker-worker-0")
        self.worker = stack.start_worker(self.scheduler, demo_model_dir(), *SIM, *own)
        flags = (*files.flags("gateway"), *files.redis_flags("gateway", port), *files.gateway_flags())
        self.gateway = stack.start_gateway(self.scheduler, flags=flags)

    async def open_redis(self) -> None:
        """Accept connections to Redis with the certificates that the files have now; closes earlier connections."""
        await self.close()
        self._proxy = PortProxy(lambda: asyncio.open_connection("127.0.0.1", self._redis.port))
        await self._proxy.start("127.0.0.1", self._redis_port, ssl=self.files.redis_context())

    async def close(self) -> None:
        if self._proxy is not None:
            await self._proxy.close()

    def flag(self, name: str) -> str:
        return next(word for word in self.gateway.command if word.startswith(f"{name}=")).partition("=")[2]

    async def connect(self) -> AsyncClient:
        """A client of the gateway, when it serves a model and Redis answers."""
        client = await AsyncClient.connect(
            self.gateway.address, tls=self.files.client(), api_key=KEY, connect_timeout_s=60.0, timeout_s=60.0
        )
        async with asyncio.timeout(60.0):
            while not await client.models():  # noqa: ASYNC110 - the state is in another process
                await asyncio.sleep(0.05)
        for service in (self.scheduler, self.gateway):
            await until_logged(service, "redis answers")
        return client


async def until_logged(service: Service, words: str, since: int = 0) -> str:
    """The first line with these words after byte `since` of the log."""
    deadline = time.monotonic() + LOG_DEADLINE_S
    while time.monotonic() < deadline:
        for line in service.log()[since:].splitlines():
            if words in line:
                return line
        await asyncio.sleep(0.05)
    raise AssertionError(f"{service.name} did not log {words!r}\n{service.log()}")


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[System]:
    with RedisServer(folder) as redis, Stack(folder) as stack:
        system = System(Files(folder), redis, stack)
        try:
            await system.start()
            yield system
        finally:
            await system.close()


async def test_all_certificates_and_the_ca_are_replaced_under_load(tmp_path: Path) -> None:
    async with running(tmp_path) as system, await system.connect() as client:
        options = {"token_ids": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "temperature": 0.0}
        expected = (await client.generate(**options)).token_ids
        is_done = asyncio.Event()
        numbers: list[int] = []

        async def load() -> None:
            while not is_done.is_set():
                result = await client.generate(**options, resumable=True)
                assert result.token_ids == expected
                numbers.append(len(result.token_ids))

        async def progress() -> None:
            goal = len(numbers) + 4
            async with asyncio.timeout(60.0):
                while len(numbers) < goal:  # noqa: ASYNC110 - progress of other tasks
                    await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(load())
            await progress()
            await replace_the_ca(system, progress)
            is_done.set()


async def replace_the_ca(system: System, progress: Callable[[], object]) -> None:
    """First all trust both CAs, then all certificates are of the new one, then the old one is removed."""
    files, newer = system.files, Authority.create()
    old_ca = files.authority.pair.cert
    files.put("ca.crt", old_ca + newer.pair.cert)
    await new_connections(system)
    await progress()
    issue_all(newer, files.folder, hosts=("127.0.0.1",), worker_ids=("worker-0",), days=DAYS)
    await new_connections(system)
    await progress()
    files.put("ca.crt", newer.pair.cert)
    files.authority = newer
    await new_connections(system)
    await progress()


async def new_connections(system: System) -> None:
    """End the connections of all links but that of the client, whose stream the gateway keeps."""
    await system.open_redis()
    for service in (system.worker, system.scheduler):
        service.kill()
        service.start()
    async with asyncio.timeout(60.0), await system.connect() as client:  # also a new client
        while not (await client.models())[0].ready_workers:  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.05)


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    async with running(tmp_path) as made:
        yield made


async def test_refusals_name_their_reasons(system: System) -> None:
    """At the gateway's ports, and in the log of a service whose link fails."""
    async with await system.connect():
        await check_clients(system)
        check_http(system)
    files, since = system.files, {}
    for service in (system.scheduler, system.gateway):
        since[service.name] = len(service.log())

    # The worker's certificate has expired.
    expired = files.authority.issue("quire-worker", "worker-0.quire-worker", ends_at=EXPIRED)
    write(files.path("worker-worker-0"), expired)
    system.worker.kill()
    before = len(system.worker.log())
    system.worker.start()
    path = files.path("worker-worker-0.crt")
    await until_logged(
        system.worker, f"refuse the certificate of --internal-tls-cert-file {path}: certificate has expired"
    )
    await until_logged(system.worker, "is not available (UNAVAILABLE)", before)
    issue_all(files.authority, files.folder, hosts=("127.0.0.1",), worker_ids=("worker-0",), days=DAYS)

    # The scheduler has a certificate of another CA: gateway and worker refuse it.
    write(files.path("scheduler"), Authority.create().issue("quire-scheduler"))
    system.scheduler.kill()
    system.scheduler.start()
    reason = "unable to get local issuer certificate"
    await until_logged(system.scheduler, f"{files.path('scheduler')}.crt: {reason}")
    await until_logged(system.gateway, reason, since["gateway-0"])
    await until_logged(system.worker, f"is not available (UNAVAILABLE: its certificate is refused: {reason})")
    await until_logged(system.scheduler, "redis does not answer")

    # It has the role of a worker.
    write(files.path("scheduler"), files.authority.issue("quire-worker"))
    system.scheduler.kill()
    system.scheduler.start()
    await until_logged(system.scheduler, "certificate is not valid for 'quire-scheduler'")
    await until_logged(system.worker, "is not available (UNAVAILABLE: its certificate is for another role or id)")

    # All is well again, without a restart of the others.
    write(files.path("scheduler"), files.authority.issue("quire-scheduler"))
    system.scheduler.kill()
    system.scheduler.start()
    async with await system.connect() as client:
        assert (await client.generate(token_ids=[1], max_tokens=2, ignore_eos=True)).token_ids


async def check_clients(system: System) -> None:
    """Wrong keys and tokens. test_tls.py has the certificates that the public port refuses."""
    files, gateway = system.files, system.gateway.address
    trusted = files.client()
    for address, key, kind in (
        (gateway, "", Unauthenticated),
        (gateway, "wrong", Unauthenticated),
        (system.flag("--admin-listen"), KEY, Unauthenticated),
        (system.flag("--admin-listen"), "", Unauthenticated),
        (gateway, KEY, PermissionDenied),
    ):
        async with await AsyncClient.connect(address, tls=trusted, api_key=key, connect_timeout_s=20.0) as client:
            with pytest.raises(kind):
                await client.drain_worker("worker-0")
    # A certificate without the token, and a token without its line.
    with secure(files, "gateway", system.scheduler) as channel:
        for token, words in ((None, "needs its token"), ("x" * 20, "not in this service's --token-file")):
            assert words in refusal(channel, token)


def check_http(system: System) -> None:
    files, url = system.files, f"https://{system.flag('--http-listen')}/v1/models"
    context = ssl.create_default_context(cafile=files.path("ca.crt"))
    with pytest.raises((urllib.error.URLError, OSError)) as refused:
        urllib.request.urlopen(url, context=context, timeout=20)
    assert "certificate required" in str(refused.value) or isinstance(refused.value, ConnectionError)
    context.load_cert_chain(files.path("gateway.crt"), files.path("gateway.key"))
    for key, code in ((KEY, 200), ("wrong", 401)):
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
        assert status_of(request, context) == code


def status_of(request: urllib.request.Request, context: ssl.SSLContext) -> int:
    try:
        with urllib.request.urlopen(request, context=context, timeout=20) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


@contextlib.contextmanager
def secure(files: Files, name: str, service: Service):
    ca, key, cert = (files.path(end).read_bytes() for end in ("ca.crt", f"{name}.key", f"{name}.crt"))
    options = [("grpc.ssl_target_name_override", f"quire-{service.name.partition('-')[0]}")]
    with grpc.secure_channel(service.address, grpc.ssl_channel_credentials(ca, key, cert), options) as channel:
        yield channel


def refusal(channel: grpc.Channel, token: str | None) -> str:
    metadata = None if token is None else [("authorization", f"Bearer {token}")]
    call = channel.unary_unary("/quire.internal.v1.SchedulerService/GetSchedulerStatus")
    with pytest.raises(grpc.RpcError) as refused:
        call(b"", timeout=20, metadata=metadata)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    return str(refused.value.details())


async def test_a_worker_has_the_id_of_its_certificate(system: System) -> None:
    """Another id is refused, and so is the address of another worker."""
    async with await system.connect():
        files = system.files
        # Its certificate names no id, or another one.
        unnamed = system.stack.start_worker(system.scheduler, demo_model_dir(), *SIM, *files.flags("worker"))
        await until_logged(unnamed, "refuses this worker: worker_id 'worker-1' needs a certificate with the name")
        unnamed.kill()
        # An impostor with a certificate of its own registers the address of worker-0.
        write(files.path("two"), files.authority.issue("quire-worker", "worker-2.quire-worker"))
        flags = (*files.flags("worker", "two"), f"--advertise={system.worker.address}")
        impostor = system.stack.start_worker(system.scheduler, demo_model_dir(), *SIM, *flags)
        assert impostor.name == "worker-2"
        await until_logged(system.scheduler, "worker worker-2 is refused")
        assert "Hostname Verification Check failed" in system.scheduler.log()
        impostor.kill()
        # The certificate at its address has expired: the scheduler says so.
        write(files.path("three"), files.authority.issue("quire-worker", "worker-3.quire-worker"))
        with expired_server(files.authority, "worker-3.quire-worker") as address:
            flags = (*files.flags("worker", "three"), f"--advertise={address}")
            worker = system.stack.start_worker(system.scheduler, demo_model_dir(), *SIM, *flags)
            line = await until_logged(system.scheduler, "worker worker-3 is refused")
            assert "CERTIFICATE_VERIFY_FAILED: certificate has expired" in line
            await until_logged(worker, "certificate has expired")
        assert system.scheduler.log().count("is ready:") == 1, "only worker-0"


@contextlib.contextmanager
def expired_server(authority: Authority, name: str) -> Iterator[str]:
    issued = authority.issue("quire-worker", name, ends_at=EXPIRED)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(issued.key, issued.cert)]))
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)
