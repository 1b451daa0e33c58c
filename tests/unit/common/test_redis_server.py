"""The connection to a real Redis: settings that are refused, TLS with both certificates, renewals and the password."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio
import trustme
from quire_cli.commands import doctor
from redis.exceptions import RedisError

from gateway_svc.records.redis_fields import RedisFields
from svc_common.config import add_flags
from svc_common.errors import UnavailableError
from svc_common.redis.connect import connect, warn_of_eviction
from svc_common.redis.server import Availability, RedisServer, RedisSettingsError, redis_flags, redis_server
from tests.processes.port_proxy import PortProxy
from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer as RedisProcess

DEADLINE_S = 60.0
PASSWORD = "p@ss/word"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path_factory.mktemp("redis")) as process:
        yield process


class TlsRedis:
    """Redis behind a TLS port that requires client certificates, and the files of one client."""

    def __init__(self, folder: Path, process: RedisProcess) -> None:
        self._folder = folder
        self._process = process
        self._proxy: PortProxy | None = None
        self.port = free_port()
        self.authority = trustme.CA()
        self.write_ca(self.authority)
        self.write_client(self.authority)

    @property
    def server(self) -> RedisServer:
        ca, cert, key = (self._folder / name for name in ("ca.crt", "tls.crt", "tls.key"))
        return RedisServer(f"rediss://127.0.0.1:{self.port}/0", ca, cert, key)

    def write_ca(self, *authorities: trustme.CA) -> None:
        replace(self._folder / "ca.crt", b"".join(authority.cert_pem.bytes() for authority in authorities))

    def write_client(self, authority: trustme.CA, **lifetime: datetime.datetime) -> None:
        issued = authority.issue_cert("quire-scheduler", **lifetime)
        replace(self._folder / "tls.crt", b"".join(part.bytes() for part in issued.cert_chain_pems))
        replace(self._folder / "tls.key", issued.private_key_pem.bytes())

    async def start(self, *, clients_of: trustme.CA | None = None, **lifetime: datetime.datetime) -> None:
        """Accept connections, with a certificate of the authority; closes those of an earlier start."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.authority.issue_cert("127.0.0.1", **lifetime).configure_cert(context)
        (clients_of or self.authority).configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        await self.stop()
        self._proxy = PortProxy(lambda: asyncio.open_connection("127.0.0.1", self._process.port))
        await self._proxy.start("127.0.0.1", self.port, ssl=context)

    async def stop(self) -> None:
        if self._proxy is not None:
            await self._proxy.close()


def replace(path: Path, content: bytes) -> None:
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").rename(path)


@pytest.fixture
async def tls(tmp_path: Path, process: RedisProcess) -> AsyncIterator[TlsRedis]:
    made = TlsRedis(tmp_path, process)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@contextlib.asynccontextmanager
async def client_of(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(server, DEADLINE_S)
    try:
        yield client
    finally:
        await client.aclose()


async def error_of(server: RedisServer) -> str:
    async with client_of(server) as client:
        with pytest.raises((RedisError, OSError)) as failed:
            await client.ping()
    return str(failed.value)


async def test_both_ends_check_certificates(tls: TlsRedis) -> None:
    async with client_of(tls.server) as client:
        assert await client.ping()


async def test_an_error_says_which_certificate_is_wrong(tls: TlsRedis, caplog: pytest.LogCaptureFixture) -> None:
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=9)
    expired = {"not_before": past, "not_after": past + datetime.timedelta(days=1)}
    other = trustme.CA()

    tls.write_ca(other)
    assert "CERTIFICATE_VERIFY_FAILED" in await error_of(tls.server)
    tls.write_ca(tls.authority)
    assert "certificate is not valid for 'localhost'" in await error_of(named("localhost", tls.server))
    await tls.start(**expired)
    assert "certificate has expired" in await error_of(tls.server)
    await tls.start()

    without = RedisServer(tls.server.url, tls.server.ca)
    assert "Redis may require a client certificate: set --redis-tls-cert-file" in await error_of(without)
    tls.write_client(other)
    refused = f"Redis may not accept the certificate of --redis-tls-cert-file {tls.server.cert}: check its expiry date"
    assert refused in await error_of(tls.server)
    tls.write_client(tls.authority, **expired)
    assert refused in await error_of(tls.server)

    state = Availability("")
    state.went_down(RedisError(await error_of(tls.server)))
    assert "redis does not answer (Error" in caplog.text
    assert refused in caplog.text


@pytest.mark.parametrize(("policy", "is_safe"), [("allkeys-lru", False), ("volatile-lru", True)])
async def test_an_evicting_redis_is_reported_and_its_refusals_have_no_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str, is_safe: bool
) -> None:
    flags = ("--maxmemory", "64mb", "--maxmemory-policy", policy)
    with RedisProcess(tmp_path, *flags) as process, process.client() as owner:
        client = connect(process.url, timeout_s=30.0)
        await warn_of_eviction(client)
        found = await asyncio.to_thread(doctor.check_redis, process.url)
        assert found.state == (doctor.OK if is_safe else doctor.FALLBACK)
        assert ("set maxmemory-policy volatile-lru" in caplog.text) is not is_safe
        assert ("set maxmemory-policy volatile-lru" in found.detail) is not is_safe
        owner.config_set("maxmemory-policy", "noeviction")
        owner.config_set("maxmemory", 1)
        state = Availability("")
        fields = RedisFields(process.url, timeout_s=30.0)
        with pytest.raises(UnavailableError, match="refuses a call; retry later"):
            await fields.create("r", b"TOPSECRET", "run")
        pipeline = client.pipeline(transaction=False)
        pipeline.hset("key", "field", "TOPSECRET caused error: OOM")
        with pytest.raises(RedisError) as failed:
            await pipeline.execute()
        state.went_down(failed.value)
        assert "redis refuses a call (OutOfMemoryError" in caplog.text
        assert "TOPSECRET" in str(failed.value)
        assert "TOPSECRET" not in caplog.text
        await fields.close()
        await client.aclose()


def named(host: str, server: RedisServer) -> RedisServer:
    return RedisServer(server.url.replace("127.0.0.1", host), server.ca, server.cert, server.key)


async def test_certificates_are_renewed_under_load_without_an_error(tls: TlsRedis) -> None:
    """A new CA: first both are trusted, then all certificates are of the new one."""
    newer, counts = trustme.CA(), [0] * 4
    stopped = asyncio.Event()

    async def write(i: int, client: redis.asyncio.Redis) -> None:
        while not stopped.is_set():
            await client.incr(f"load:{i}")
            counts[i] += 1
            await client.connection_pool.disconnect()  # the next call opens a connection

    async def progress() -> None:
        goal = [count + 3 for count in counts]
        async with asyncio.timeout(DEADLINE_S):
            while any(count < least for count, least in zip(counts, goal, strict=True)):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(tls.server)) for _ in counts]
        async with asyncio.TaskGroup() as group:
            for i, client in enumerate(clients):
                group.create_task(write(i, client))
            await progress()
            tls.write_ca(tls.authority, newer)
            await progress()
            (tls.server.cert or Path()).write_bytes(b"half a file")
            await progress()
            tls.write_client(tls.authority)
            await progress()
            stopped.set()
        old, tls.authority = tls.authority, newer
        await tls.start(clients_of=old)
        assert await clients[0].ping(), "the new CA of the server is trusted"
        await tls.start()
        tls.write_client(newer)
        tls.write_ca(newer)
        assert all([await client.ping() for client in clients])


@pytest.mark.parametrize("user", ["", "me@"])
async def test_the_password_is_read_at_each_connection(process: RedisProcess, tmp_path: Path, user: str) -> None:
    path = tmp_path / "password"
    with process.client() as admin:
        admin.execute_command(
            "ACL", "SETUSER", user[:-1] or "default", "on", "~*", "+@all", "resetpass", f">{PASSWORD}"
        )
        try:
            path.write_text("old\n")
            server = RedisServer(f"redis://{user}127.0.0.1:{process.port}/0", password=path)
            assert "invalid username-password" in await error_of(server)
            async with client_of(server) as client:
                path.write_text(f"{PASSWORD}\n")
                assert await client.ping()
                path.write_text("")
                await client.connection_pool.disconnect()
                with pytest.raises((RedisError, OSError), match=r"--redis-password-file .* is empty"):
                    await client.ping()
        finally:
            admin.execute_command("ACL", "SETUSER", "default", "on", "nopass")


def settings(tmp_path: Path, *flags: str) -> RedisServer | None:
    parser = argparse.ArgumentParser()
    add_flags(parser, [redis_flags("tests")])
    return redis_server(parser.parse_args([flag.replace("DIR", str(tmp_path)) for flag in flags]))


def test_settings_that_do_not_fit_together(tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "password").write_text("s3cret")
    (tmp_path / "empty").write_text("")
    ca, tls = "--redis-tls-ca-file=DIR/ca.crt", "--redis=rediss://cache:6380/0"
    for flags, words in (
        ((ca,), "--redis-tls-ca-file needs --redis URL"),
        (("--redis=redis://cache:6379/0", ca), "--redis redis://cache:6379/0 is not TLS; write rediss://"),
        ((f"{tls}?ssl_cert_reqs=none", ca), "has ssl_ parameters too; remove them"),
        ((tls, "--redis-tls-cert-file=DIR/ca.crt"), "-cert-file and --redis-tls-key-file must be set together"),
        ((tls, "--redis-tls-ca-file=DIR/none"), "--redis-tls-ca-file .*none: No such file"),
        ((tls, "--redis-tls-ca-file=DIR/password"), "--redis-tls-ca-file .*password: "),
        ((tls, "--redis-tls-cert-file=DIR/ca.crt", "--redis-tls-key-file=DIR/none"), "-key-file .*none: No such"),
        (("--redis=redis://:s3cret@cache", "--redis-password-file=DIR/password"), "@cache has a password too"),
        (("--redis=redis://cache", "--redis-password-file=DIR/none"), "--redis-password-file .*none: No such file"),
        (("--redis=redis://cache", "--redis-password-file=DIR/empty"), "--redis-password-file .*empty is empty"),
    ):  # fmt: skip
        with pytest.raises(RedisSettingsError, match=words) as refused:
            settings(tmp_path, *flags)
        assert "s3cret" not in str(refused.value)
    assert settings(tmp_path) is None
    assert settings(tmp_path, tls, ca) == RedisServer("rediss://cache:6380/0", ca=tmp_path / "ca.crt")
