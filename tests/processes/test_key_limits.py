"""The limits of an owner hold for four gateways together, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from quire_client import AsyncClient, Overloaded
from quire_client.demo import demo_model_dir

from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Stack

RATE = 20  # requests per second
TOKENS_PER_REQUEST = 2
NUM_GATEWAYS = 4
SIM = ("--executor", "sim", "--sim-step-ms", "1")


REQUESTS, TOKENS = f"requests_per_s = {RATE}", f"tokens_per_min = {RATE * 60 * TOKENS_PER_REQUEST}"


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (REQUESTS, 6),
        pytest.param(REQUESTS, 60, marks=pytest.mark.deep),
        pytest.param(TOKENS, 60, marks=pytest.mark.deep),
    ],
)
async def test_a_rate_holds_for_four_gateways(
    tmp_path: Path, limit: str, seconds: float, record_testsuite_property: Callable[[str, object], None]
) -> None:
    (tmp_path / "keys").mkdir()
    for owner in ("limited", "free"):
        (tmp_path / "keys" / owner).write_text(f"key-of-{owner}")
    limits = tmp_path / "limits.toml"
    limits.write_text(f"[owners.limited]\n{limit}\nmodels = ['demo']\n")
    redis, https = RedisServer(tmp_path), [f"127.0.0.1:{free_port()}" for _ in range(NUM_GATEWAYS)]
    redis.start()
    flags = ("--api-keys", str(tmp_path / "keys"), "--key-limits", str(limits), "--redis", redis.url)
    try:
        with Stack(tmp_path) as stack:
            scheduler = stack.start_scheduler()
            stack.start_worker(scheduler, demo_model_dir(), *SIM, "--model-name", "demo")
            gateways = [stack.start_gateway(scheduler, flags=(*flags, "--http-listen", http)) for http in https]
            for gateway in gateways:
                gateway.wait_ready()
            began = time.monotonic()
            num_done = await load([gateway.address for gateway in gateways], "key-of-limited", seconds)
            took = time.monotonic() - began  # the last requests may end later than `seconds`
            record_testsuite_property(f"{limit}, {seconds} s", num_done / seconds)
            # The bucket is full at the beginning: 1 s of requests or 2 s of tokens.
            burst = 0 if seconds >= 60 else RATE
            assert RATE * seconds * 0.95 <= num_done <= (RATE * took + burst) * 1.05 + 1
            async with await AsyncClient.connect(gateways[0].address, api_key="key-of-free") as client:
                for _ in range(2 * RATE):
                    await client.generate(token_ids=[5], max_tokens=1)
            if limit == TOKENS:
                return
            loading = asyncio.create_task(load([gateway.address for gateway in gateways], "key-of-limited", seconds))
            code, body, headers = await asyncio.to_thread(post_until_limited, https[0])
            await loading
            assert (code, body["error"]["code"]) == (429, "rate_limit_exceeded")
            assert f"requests per second: {RATE}" in body["error"]["message"]
            assert int(headers["retry-after-ms"]) > 0
    finally:
        redis.stop()


async def load(addresses: list[str], key: str, seconds: float) -> int:
    """Send requests on two connections to each gateway, without long pauses. Returns the number of served requests."""
    until, counts = time.monotonic() + seconds, []

    async def send_until(address: str) -> None:
        num_done = 0
        async with await AsyncClient.connect(address, api_key=key, retry=None) as client:
            while time.monotonic() < until:
                try:
                    await client.generate(token_ids=[5], max_tokens=1)
                    num_done += 1
                except Overloaded:
                    await asyncio.sleep(0.02)
        counts.append(num_done)

    await asyncio.gather(*(send_until(address) for address in 2 * addresses))
    return sum(counts)


def post_until_limited(http: str) -> tuple[int, dict, dict]:
    body = json.dumps({"model": "demo", "prompt": [5], "max_tokens": 1}).encode()
    headers = {"Authorization": "Bearer key-of-limited", "Content-Type": "application/json"}
    for _ in range(10 * RATE):
        try:
            urllib.request.urlopen(urllib.request.Request(f"http://{http}/v1/completions", body, headers), timeout=30)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error), dict(error.headers)
    raise AssertionError("the limit was not reached")
