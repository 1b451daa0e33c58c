"""The worker process: flags, start, health, drain and shutdown."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire_client.demo import demo_model_dir

from svc_common.channels import reachable_address
from svc_common.serve import open_channel
from tests.contract.worker_fakes import SAMPLING, column

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.unit.engine.models import make_model

    return make_model(tmp_path_factory.mktemp("served") / "tiny-qwen3", "qwen3")


class Process:
    """A worker process, the lines it logs, and a channel to it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.channel: grpc.aio.Channel | None = None

    async def read_until(self, text: str) -> str:
        """The first line that holds `text`."""
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            while line := (await self.process.stderr.readline()).decode():
                self.lines.append(line)
                if text in line:
                    return line
        raise AssertionError(f"the worker ended without logging {text!r}:\n" + "".join(self.lines))

    async def connect(self) -> worker_pb2_grpc.WorkerServiceStub:
        line = await self.read_until("listens on")
        self.channel = open_channel(line.split("listens on ")[1].split(",")[0])
        return worker_pb2_grpc.WorkerServiceStub(self.channel)

    async def health(self) -> int:
        assert self.channel is not None
        stub = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service="quire.internal.v1.WorkerService")
        return (await stub.Check(request, timeout=30)).status

    async def wait(self) -> int:
        async with asyncio.timeout(30):
            assert self.process.stderr is not None
            self.lines.append((await self.process.stderr.read()).decode())
            return await self.process.wait()

    def loaded_files(self) -> str:
        return Path(f"/proc/{self.process.pid}/maps").read_text()

    @property
    def log(self) -> str:
        return "".join(self.lines)


@asynccontextmanager
async def start(model: Path, *flags: str) -> AsyncIterator[Process]:
    command = [sys.executable, "-m", "worker_svc.service", "--model", str(model), "--listen", "127.0.0.1:0"]
    command += ["--threads", "1", "--num-blocks", "64", *flags]
    process = Process(await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE))
    try:
        yield process
    finally:
        if process.process.returncode is None:
            process.process.kill()
            await process.process.wait()
        if process.channel is not None:
            await process.channel.close()


def simulated(*flags: str) -> AbstractAsyncContextManager[Process]:
    """A worker that starts at once."""
    return start(demo_model_dir(), "--executor", "sim", *flags)


async def open_row(stub: worker_pb2_grpc.WorkerServiceStub) -> worker_pb2.Fence:
    lease = await stub.Lease(worker_pb2.LeaseRequest(protocol_version=1), timeout=30)
    row_open = worker_pb2.RowOpen(
        row=0, token_ids=column([5, 6]), prompt_len=2, block_table=column([0]), sampling=SAMPLING
    )
    batch = worker_pb2.StepBatch(
        step_id=lease.next_step_id,
        fence=lease.fence,
        opens=[row_open],
        rows=column([0]),
        query_lens=column([2]),
        context_lens=column([0]),
        slot_mapping=column([0, 1]),
    )
    response = await stub.StepBatch(worker_pb2.StepBatchRequest(batch=batch), timeout=30)
    assert not response.output.errors
    return lease.fence


async def test_a_worker_serves_and_drains(tiny_model: Path) -> None:
    async with start(tiny_model) as worker:
        stub = await worker.connect()
        assert await worker.health() in (NOT_SERVING, SERVING)
        assert "tiny-qwen3 (float32, exact)" in await worker.read_until("ready after")
        assert await worker.health() == SERVING
        fence = await open_row(stub)
        worker.process.send_signal(signal.SIGTERM)
        await worker.read_until("draining")
        assert await worker.health() == NOT_SERVING
        batch = worker_pb2.StepBatch(step_id=2, fence=fence, close_rows=column([0]))
        await stub.StepBatch(worker_pb2.StepBatchRequest(batch=batch), timeout=30)
        assert await worker.wait() == 0
    assert "rows open" not in worker.log


async def test_a_simulated_worker_needs_no_torch() -> None:
    flags = ("--num-blocks", "5000", "--max-num-seqs", "512", "--max-model-len", "30000", "--sim-step-ms", "1")
    async with simulated("--max-num-batched-tokens", "4096", *flags) as worker:
        stub = await worker.connect()
        ready = await worker.read_until("ready after")
        assert "max_model_len 30000, 5000 blocks of 16 tokens, 512 rows, backend sim" in ready
        await open_row(stub)
        assert "libtorch" not in worker.loaded_files()


async def test_a_drain_ends_with_the_last_row_and_delivers_pending_answers() -> None:
    async with simulated("--sim-step-ms", "700") as worker:
        stub = await worker.connect()
        await worker.read_until("ready after")
        fence = await open_row(stub)
        stream = stub.StepStream()
        decode = worker_pb2.StepBatch(
            step_id=2, fence=fence, rows=column([0]), context_lens=column([2]), slot_mapping=column([2])
        )
        await stream.write(worker_pb2.StepStreamRequest(batch=decode))
        worker.process.send_signal(signal.SIGTERM)
        await worker.read_until("draining")
        close = worker_pb2.StepBatch(step_id=3, fence=fence, close_rows=column([0]))
        await stream.write(worker_pb2.StepStreamRequest(batch=close))
        answers = [(await stream.read()).output for _ in range(2)]
        assert [(answer.step_id, len(answer.rows)) for answer in answers] == [(2, 4), (3, 0)]
        closed_at = asyncio.get_running_loop().time()
        assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        assert asyncio.get_running_loop().time() - closed_at < 3
        assert await worker.wait() == 0
    assert "rows open" not in worker.log


async def test_a_step_that_hangs_does_not_prevent_the_exit() -> None:
    async with simulated("--sim-step-ms", "600000", "--drain-timeout-s", "0.1") as worker:
        stub = await worker.connect()
        await worker.read_until("ready after")
        stepping = asyncio.ensure_future(open_row(stub))
        await worker.read_until("leased by")
        worker.process.send_signal(signal.SIGTERM)
        await worker.read_until("draining")
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.wait() == 0
        with pytest.raises(grpc.aio.AioRpcError):
            await stepping


async def test_the_process_exits_with_open_rows_after_the_timeout() -> None:
    async with simulated("--drain-timeout-s", "600") as worker:
        stub = await worker.connect()
        await worker.read_until("ready after")
        await open_row(stub)
        response = await stub.Drain(worker_pb2.DrainRequest(timeout_s=0.3), timeout=30)
        assert response.rows_left == 1
        assert await worker.wait() == 0
    assert "exiting with 1 open rows" in worker.log


async def test_an_idle_stream_does_not_delay_the_shutdown() -> None:
    async with simulated() as worker:
        stub = await worker.connect()
        await worker.read_until("ready after")
        lease = await stub.Lease(worker_pb2.LeaseRequest(protocol_version=1), timeout=30)
        idle = stub.StepStream()
        batch = worker_pb2.StepBatch(step_id=lease.next_step_id, fence=lease.fence)
        await idle.write(worker_pb2.StepStreamRequest(batch=batch))
        await idle.read()
        worker.process.send_signal(signal.SIGTERM)
        assert await idle.code() is grpc.StatusCode.UNAVAILABLE
        assert "drained" in await idle.details()
        assert await worker.wait() == 0


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (None, "does not exist"),
        ({}, "has no config.json"),
        ({"config.json": "{"}, "config.json"),
        ({"config.json": '{"architectures": ["FooForCausalLM"]}'}, "is not supported"),
    ],
)
def test_a_bad_folder_gives_one_line_and_exit_code_2(tmp_path: Path, files: dict[str, str] | None, says: str) -> None:
    folder = tmp_path / "bad"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    done = run("--model", str(folder), "--listen", "127.0.0.1:0")
    errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
    assert (done.returncode, len(errors), says in errors[0]) == (2, 1, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--block-size", "12"), "block_size must be a power of two"),
        (
            ("--max-num-seqs", "9", "--max-num-batched-tokens", "8"),
            "max_num_batched_tokens must be at least max_num_seqs 9",
        ),
        (("--pipeline-depth", "0"), "--pipeline-depth: 0 is outside 1 to 16"),
        (("--kv-cache-memory", "2Q"), "--kv-cache-memory: '2Q' is not a size"),
        (("--scheduler", "nowhere"), "--scheduler: 'nowhere' is not host:port"),
        (("--scheduler", "a:1,nowhere"), "--scheduler: 'nowhere' is not host:port"),
        (("--sim-eos-probability", "2"), "--sim-eos-probability: 2 is outside 0 to 1"),
        (("--backend", "abacus", "--listen", "127.0.0.1:0"), "abacus"),
    ],
)
def test_a_bad_setting_gives_one_line_and_exit_code_2(tiny_model: Path, flags: tuple[str, ...], says: str) -> None:
    done = run("--model", str(tiny_model), *flags)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worker_svc.service", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_flags_are_parsed_without_torch() -> None:
    code = "import sys, worker_svc.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("listen", "towards", "expected"),
    [
        ("0.0.0.0:7", "127.0.0.1:1", "127.0.0.1:7"),
        ("[::]:7", "127.0.0.1:1", "127.0.0.1:7"),
        ("10.1.2.3:7", "127.0.0.1:1", "10.1.2.3:7"),
    ],
)
def test_the_advertised_address_is_reachable(listen: str, towards: str, expected: str) -> None:
    assert reachable_address(listen, towards=towards) == expected
