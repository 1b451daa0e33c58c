"""A step that runs out of memory: its rows fail and the worker continues, unless that repeats."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import torch
from quire.internal.v1 import worker_pb2
from quire_client.demo import demo_model_dir

from tests.contract.worker_fakes import BLOCK_SIZE, NUM_BLOCKS, Row, WorkerUnderTest, sampled, serve_worker
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.engine.step_runner import is_out_of_memory


@pytest.fixture(scope="module")
def shared_runner() -> ModelRunner:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
    blocks = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
    return ModelRunner(EngineConfig(model_dir=demo_model_dir(), dtype="float32", threads=1, **sizes, **blocks))


@pytest.fixture
def runner(shared_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelRunner]:
    monkeypatch.setattr(shared_runner, "_num_out_of_memory", 0)
    yield shared_runner
    shared_runner.reset_rows()


@pytest.fixture
async def worker(runner: ModelRunner) -> AsyncIterator[WorkerUnderTest]:
    async with serve_worker(runner) as served:
        await served.lease()
        yield served


def make_rows() -> list[Row]:
    return [Row(i, token_ids=[5, 6, 7, 8, 9], blocks=[4 * i, 4 * i + 1]) for i in (0, 1)]


def allocate_too_much(*_: Any) -> torch.Tensor:
    return torch.empty(math.floor(1e15))


@pytest.mark.parametrize("part", ["_model.forward", "_backend.sample", "_checker.check"])
async def test_only_the_rows_of_a_step_that_runs_out_of_memory_fail(
    worker: WorkerUnderTest, runner: ModelRunner, part: str
) -> None:
    rows, other = make_rows(), Row(4, token_ids=[5, 6, 7, 8, 9], blocks=[20, 21])
    expected = sampled(await worker.step(worker.batch([other], opens=[other])))[4]
    owner, name = part.split(".")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(runner, owner), name, allocate_too_much)
        output = await worker.step(worker.batch(rows, opens=rows))
    assert [(error.row, error.code) for error in output.errors] == [
        (0, worker_pb2.ROW_ERROR_CODE_INTERNAL),
        (1, worker_pb2.ROW_ERROR_CODE_INTERNAL),
    ]
    assert "out of memory" in output.errors[0].message
    assert not sampled(output)
    again = make_rows()
    closes = {"close_rows": b"\0\0\0\0\1\0\0\0"}
    output = await worker.step(worker.batch([*again, other], opens=again, **closes))
    assert not output.errors
    assert sampled(output)[0] == sampled(output)[1] == expected
    assert not worker.fatal


async def test_a_worker_that_stays_out_of_memory_exits(
    worker: WorkerUnderTest, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner._model, "forward", allocate_too_much)
    for i in range(2):
        row = Row(i, token_ids=[5], blocks=[i])
        assert (await worker.step(worker.batch([row], opens=[row]))).errors
    row = Row(2, token_ids=[5], blocks=[2])
    with pytest.raises(grpc.aio.AioRpcError):
        await worker.step(worker.batch([row], opens=[row]))
    assert len(worker.fatal) == 1


async def test_running_out_of_memory_in_changes_is_fatal(
    worker: WorkerUnderTest, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner._pool, "copy", allocate_too_much)
    with pytest.raises(grpc.aio.AioRpcError):
        await worker.step(worker.batch(copy_src=b"\0\0\0\0", copy_dst=b"\1\0\0\0"))
    assert len(worker.fatal) == 1


def test_other_errors_do_not_count_as_out_of_memory() -> None:
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
