"""Redis behind a real Sentinel: its master is found, also after a failover, over TLS and with passwords."""

from __future__ import annotations

import argparse
import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme
from redis.exceptions import RedisError

from svc_common.config import add_flags
from svc_common.redis.connect import connect
from svc_common.redis.server import (
    RedisServer,
    RedisSettingsError,
    redis_flags,
    redis_server,
)
from tests.processes.port_proxy import PortProxy
from tests.processes.ports import free_port
from tests.processes.redis_server import RedisSentinel
from tests.processes.redis_server import RedisServer as RedisProcess

MASTER = "quire"
PASSWORD, OF_SENTINEL = "p@ss/word", "of-the-sentinel"
DEADLINE_S = 30.0


class WithPassword(RedisProcess):
    """A Redis with this password, also towards its master."""

    def __init__(self, folder: Path, *flags: str) -> None:
        folder.mkdir()
        super().__init__(folder, "--requirepass", PASSWORD, "--masterauth", PASSWORD, *flags)

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, password=PASSWORD, socket_timeout=60.0)


class Watched:
    """A master, its replica, and a Sentinel with a password of its own."""

    def __init__(self, folder: Path) -> None:
        self.master = WithPassword(folder / "master")
        self.replica = WithPassword(folder / "replica", "--replicaof", "127.0.0.1", str(self.master.port))
        (folder / "sentinel").mkdir()
        self.sentinel = RedisSentinel(
            folder / "sentinel", MASTER, self.master, password=PASSWORD, own_password=OF_SENTINEL
        )
        self.files = folder / "password", folder / "sentinel-password"
        for path, text in zip(self.files, (PASSWORD, OF_SENTINEL), strict=True):
            path.write_text(text + "\n")

    def server(self, scheme: str = "redis+sentinel", port: int = 0) -> RedisServer:
        """The first Sentinel of the URL does not run."""
        url = f"{scheme}://127.0.0.1:1,127.0.0.1:{port or self.sentinel.port}/{MASTER}/0"
        password, sentinel_password = self.files
        return RedisServer(url, password=password, sentinel_password=sentinel_password)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    with watched.master, watched.replica, watched.sentinel:
        yield watched


async def eventually(call: Callable[[], Awaitable[Any]], expected: Any) -> None:
    """Waits until the call returns this. Errors are those of a failover."""
    last: Any = None
    async with asyncio.timeout(DEADLINE_S):
        while last != expected:
            await asyncio.sleep(0.02)
            try:
                last = await call()
            except (RedisError, OSError) as error:
                last = error


async def test_a_client_follows_a_failover(watched: Watched) -> None:
    sentinel, replica = watched.sentinel.client(), watched.replica.client()
    client = connect(watched.server(), timeout_s=1.0)
    assert await client.set("k", "v")
    assert (await client.config_get("port"))["port"] == str(watched.master.port)
    # Sentinel may promote a replica only after it has seen it with a working link.
    await eventually(lambda: asyncio.to_thread(lambda: [s["master-link-status"] for s in _replicas(sentinel)]), ["ok"])
    await eventually(lambda: asyncio.to_thread(replica.get, "k"), b"v")
    watched.master.stop()
    await eventually(lambda: client.get("k"), b"v")
    await eventually(lambda: client.set("k", "w"), True)
    assert (await client.config_get("port"))["port"] == str(watched.replica.port)
    await client.aclose()


def _replicas(sentinel: redis.Redis) -> list[dict[str, Any]]:
    return list(sentinel.sentinel_slaves(MASTER))


@pytest.mark.parametrize("by_sentinel", [False, True])
async def test_many_calls_wait_for_a_connection(watched: Watched, by_sentinel: bool) -> None:
    server = watched.server()
    client = connect(server if by_sentinel else replace(server, url=watched.master.url), timeout_s=DEADLINE_S)
    assert len(await asyncio.gather(*(client.ping() for _ in range(500)))) == 500
    assert int((await client.info("clients"))["connected_clients"]) < 100
    await client.aclose()


async def test_sentinel_and_redis_are_reached_over_tls(tmp_path: Path, watched: Watched) -> None:
    authority = trustme.CA()
    (tmp_path / "ca.crt").write_bytes(authority.cert_pem.bytes())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1", "127.0.0.2").configure_cert(context)
    tls_port = free_port()
    proxies = {}
    for host, port, to in (
        ("127.0.0.1", tls_port, watched.sentinel),
        ("127.0.0.2", watched.master.port, watched.master),
    ):
        proxies[to] = PortProxy(lambda to=to: asyncio.open_connection("127.0.0.1", to.port))
        await proxies[to].start(host, port, ssl=context)
    client = connect(replace(watched.server("rediss+sentinel", tls_port), ca=tmp_path / "ca.crt"), timeout_s=5.0)
    client.connection_pool.sentinel_manager._force_master_ip = "127.0.0.2"  # Sentinel knows the port without TLS
    assert await client.set("k", "v")
    await client.aclose()
    for proxy in proxies.values():
        await proxy.close()


async def test_an_error_names_the_cause(watched: Watched) -> None:
    server = replace(watched.server(), url=f"redis+sentinel://127.0.0.1:{watched.sentinel.port}/other")
    client = connect(server, timeout_s=1.0)
    with pytest.raises(RedisError, match="No master found for 'other'"):
        await client.ping()
    await client.aclose()
    client = connect(replace(watched.server(), sentinel_password=None), timeout_s=1.0)
    with pytest.raises(RedisError, match=r"(?i)no master found|auth"):
        await client.ping()
    await client.aclose()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--redis", "redis+sentinel://a:1,b:2"], "redis\\+sentinel://.*MASTER"),
        (["--redis", "redis+sentinel:///m"], "is not the URL of a Redis server"),
        (["--redis", "redis+sentinel://a:x/m"], "is not the URL of a Redis server"),
        (["--redis", "redis+sentinel://a:1/m/x"], "is not the URL of a Redis server"),
        (["--redis", "redis://a:1", "--redis-sentinel-password-file", "{file}"], "names no Sentinels"),
        (["--redis", "redis+sentinel://:p@a:1/m", "--redis-password-file", "{file}"], "has a password too"),
        (["--redis", "redis+sentinel://a:1/m", "--redis-sentinel-password-file", "/none"], "--redis-sentinel-password"),
        (["--redis", "redis+sentinel://a:1/m", "--redis-tls-ca-file", "{file}"], "is not TLS"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(tmp_path: Path, flags: list[str], message: str) -> None:
    (tmp_path / "file").write_text("secret")
    parser = argparse.ArgumentParser()
    add_flags(parser, [redis_flags("tests")])
    with pytest.raises(RedisSettingsError, match=message):
        redis_server(parser.parse_args([flag.format(file=tmp_path / "file") for flag in flags]))
