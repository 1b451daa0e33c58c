"""The HTTP API of real services: the stock OpenAI client, malformed requests, lost workers and schedulers, hang-ups,
several processes, TLS, drain.
"""

from __future__ import annotations

import asyncio
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from quire_client import AsyncClient
from quire_client.demo import demo_model_dir

from tests.processes.ports import free_port
from tests.processes.stack import ROOT, Service, Stack, is_ready, wait_idle
from tests.processes.test_tls import API_KEY, NO_SCHEDULER, Files

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
MODEL = "demo"
TIMEOUT = aiohttp.ClientTimeout(total=60)
# Long enough for a kill in the middle of the stream; ignore_eos fixes the length.
LONG: dict[str, Any] = {"max_tokens": 300, "extra_body": {"ignore_eos": True}}
SAMPLED: list[dict[str, Any]] = [
    {"prompt": "What does", "temperature": 0.0},
    {"prompt": "os.path", "temperature": 1.0, "seed": 7},
    {"prompt": ["import", "def"], "temperature": 0.8, "seed": 3, "n": 2},
]


class Running:
    """A stack with HTTP, its services by name."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.scheduler = stack.start_scheduler()
        flags = ("--kv-cache-memory", "64M", "--model-name", MODEL)
        self.workers = [stack.start_worker(self.scheduler, demo_model_dir(), *flags) for _ in range(2)]
        self.gateway, self.url = start_gateway(stack, self.scheduler)

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)


def start_gateway(stack: Stack, scheduler: Service, *flags: str) -> tuple[Service, str]:
    """A gateway, and the URL of its HTTP API."""
    address = f"127.0.0.1:{free_port()}"
    return stack.start_gateway(scheduler, flags=("--http-listen", address, *flags)), f"http://{address}"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Stack(tmp_path_factory.mktemp("http")) as stack:
        yield Running(stack)


@pytest.fixture
async def grpc_client(running: Running) -> AsyncIterator[AsyncClient]:
    """A client over gRPC. After the test nothing runs and no block is in use."""
    async with await running.stack.connect(running.gateway, workers=2) as client:
        yield client
        await wait_idle(running.stack, client)


async def test_the_stock_client(running: Running, grpc_client: AsyncClient) -> None:
    expected = await grpc_client.generate(prompt="What does", temperature=0.0, max_tokens=20, ignore_eos=True)
    async with running.client() as client:
        answer = await client.completions.create(
            model=MODEL, prompt="What does", temperature=0.0, max_tokens=20, extra_body={"ignore_eos": True}
        )
        assert answer.choices[0].text == expected.text
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 20
        assert answer.system_fingerprint

        whole = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0.0)
        assert whole.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0.0, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert [model.id async for model in await client.models.list()] == [MODEL]


def test_the_example_of_the_documentation(running: Running, grpc_client: AsyncClient) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/http.md").read_text(), re.DOTALL)[0]
    code = code.replace("http://127.0.0.1:8000", running.url) + "print(answer.choices[0].message.content)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "path" in done.stdout


def test_the_stock_synchronous_client(running: Running, grpc_client: AsyncClient) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as client:
        options: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0.0}
        whole = client.chat.completions.create(**options)
        chunks = list(client.chat.completions.create(**options, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
        assert client.models.retrieve(MODEL).to_dict()["max_model_len"] > 0
        with pytest.raises(openai.BadRequestError, match="temperature is 9; must be a number from 0 to 2") as bad:
            client.chat.completions.create(**{**options, "temperature": 9})
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as too_long:
            client.chat.completions.create(**options, max_tokens=1_000_000)
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(**{**options, "model": "other"})
        assert unknown.value.code == "model_not_found"
        assert unknown.value.request_id


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b'{"messages": ',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": [[[]]]}',
        b'{"prompt": {"a": 1}}',
        b'{"prompt": "a", "n": -1}',
        b'{"prompt": "a", "max_tokens": "many"}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "stop": [1]}',
        b'{"prompt": [99999999999]}',
        b"[" * 200_000,
    ],
)
async def test_malformed_bodies_are_the_callers_mistake(
    running: Running, grpc_client: AsyncClient, body: bytes
) -> None:
    async with aiohttp.ClientSession(running.url, timeout=TIMEOUT) as session:
        for path in ("/v1/completions", "/v1/chat/completions"):
            async with session.post(path, data=body) as reply:
                assert reply.status == 400, (path, await reply.text())
                assert (await reply.json())["error"]["type"] == "invalid_request_error"


async def test_a_client_that_hangs_up_frees_its_blocks(running: Running, grpc_client: AsyncClient) -> None:
    body = {"prompt": "os", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(running.url, timeout=TIMEOUT) as session:
        async with session.post("/v1/completions", json=body, headers={"x-request-id": "from-client"}) as reply:
            assert reply.status == 200
            await reply.content.readline()
        with pytest.raises(asyncio.TimeoutError):
            await session.post("/v1/completions", json={**body, "stream": False}, timeout=aiohttp.ClientTimeout(0.5))
    await wait_idle(running.stack, grpc_client)
    log = running.gateway.log()
    assert "ended (cancelled)" in log
    assert "x-request-id from-client" in log


async def test_blocks_are_free_a_step_after_a_hang_up(tmp_path: Path) -> None:
    """Steps take 1.5 s, so the number of steps after the hang-up shows when the blocks are freed."""
    body = {"prompt": "os", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), "--executor", "sim", "--sim-step-ms", "1500")
        gateway, url = start_gateway(stack, scheduler)
        async with await stack.connect(gateway) as client, aiohttp.ClientSession(url, timeout=TIMEOUT) as session:
            async with session.post("/v1/completions", json=body) as reply:
                await reply.content.readline()
                (before,) = (await client.status()).schedulers
            assert before.workers[0].blocks_used > 0
            (after,) = await wait_idle(stack, client)
        # Two steps are in flight at the hang-up, and the next one closes the row.
        assert after.workers[0].steps - before.workers[0].steps <= 3


class StreamLoad:
    """Streamed completions: three bodies with six choices in total."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._texts: dict[tuple[int, int], str] = {}
        self._num_chunks = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._running.client() as client, asyncio.TaskGroup() as group:
            for i, body in enumerate(SAMPLED):
                group.create_task(self._read(client, i, body))

    async def _read(self, client: openai.AsyncOpenAI, i: int, body: dict[str, Any]) -> None:
        async for chunk in await client.completions.create(model=MODEL, stream=True, **body, **LONG):
            for choice in chunk.choices:
                self._texts[i, choice.index] = self._texts.get((i, choice.index), "") + choice.text
                self._num_chunks += 1

    async def reach(self, num_chunks: int) -> None:
        async with asyncio.timeout(60.0):
            while self._num_chunks < num_chunks:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert not self._task.done(), "the streams ended before anything could be killed"

    async def finish(self) -> dict[tuple[int, int], str]:
        async with asyncio.timeout(120.0):
            await self._task
        return self._texts


async def test_losing_a_worker_or_a_scheduler_changes_no_text(running: Running, grpc_client: AsyncClient) -> None:
    undisturbed = await StreamLoad(running).finish()
    assert len(undisturbed) == 6
    load = StreamLoad(running)
    await load.reach(60)
    running.workers[0].kill()
    assert await load.finish() == undisturbed
    running.workers[0].start()
    await running.stack.until(grpc_client, lambda schedulers: is_ready(schedulers, running.workers[0]))
    load = StreamLoad(running)
    await load.reach(60)
    running.scheduler.kill()
    running.scheduler.start()
    assert await load.finish() == undisturbed


async def test_sigterm_lets_streams_finish(running: Running, grpc_client: AsyncClient) -> None:
    gateway, url = start_gateway(running.stack, running.scheduler)
    gateway.wait_ready()
    body = {"prompt": "os", "max_tokens": 300, "ignore_eos": True, "stream": True}
    async with (
        aiohttp.ClientSession(url, timeout=TIMEOUT) as session,
        session.post("/v1/completions", json=body) as reply,
    ):
        await reply.content.readline()
        ending = asyncio.create_task(asyncio.to_thread(gateway.terminate))
        assert (await reply.content.read()).endswith(b"data: [DONE]\n\n")
    assert await ending == 0
    assert "Traceback" not in gateway.log()


async def test_a_second_signal_ends_streams_at_once(running: Running, grpc_client: AsyncClient) -> None:
    gateway, url = start_gateway(running.stack, running.scheduler)
    gateway.wait_ready()
    body = {"prompt": "os", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with (
        aiohttp.ClientSession(url, timeout=TIMEOUT) as session,
        session.post("/v1/completions", json=body) as reply,
    ):
        await reply.content.readline()
        gateway.signal(signal.SIGTERM)
        while "draining" not in gateway.log():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        gateway.signal(signal.SIGTERM)
        assert b'"type":"server_error"' in await reply.content.read()
    assert await asyncio.to_thread(gateway.wait) == 0
    assert "Traceback" not in gateway.log()


async def test_tls_and_api_keys(tmp_path: Path) -> None:
    files = Files(tmp_path)
    http = f"127.0.0.1:{free_port()}"
    command = [
        sys.executable,
        "-m",
        "gateway_svc.service",
        "--listen",
        "127.0.0.1:0",
        "--scheduler",
        NO_SCHEDULER,
    ]
    command += [f"--http-listen={http}", f"--tls-cert-file={files.cert}", f"--tls-key-file={files.key}"]
    command += [f"--tls-client-ca-file={files.ca}", f"--api-keys={files.keys}"]
    service = Service("gateway", command, http, tmp_path / "log")
    service.start()
    unknown = ssl.create_default_context(cafile=str(files.ca))
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(*files.client)
    key = {"authorization": f"Bearer {API_KEY}"}
    try:
        async with aiohttp.ClientSession(f"https://{http}", timeout=TIMEOUT) as session:
            await _connected(session, context)
            async with session.get("/version", ssl=context) as reply:
                assert (reply.status, (await reply.json())["error"]["code"]) == (401, "invalid_api_key")
            async with session.get("/version", ssl=context, headers=key) as reply:
                assert reply.status == 200
            async with session.get("/health", ssl=context) as reply:
                assert reply.status == 503  # there is no scheduler
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.get("/health", ssl=unknown)
        files.renew()
        assert await _served_certificate(http, context) in files.cert.read_text()
    finally:
        service.kill()


async def _connected(session: aiohttp.ClientSession, context: ssl.SSLContext) -> None:
    async with asyncio.timeout(30.0):
        while True:
            try:
                async with session.get("/health", ssl=context):
                    return
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.05)


async def _served_certificate(address: str, context: ssl.SSLContext) -> str:
    """One line of the PEM of the certificate that a new connection gets."""
    host, port = address.split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return ssl.DER_cert_to_PEM_cert(der).splitlines()[3]
