"""Moves of blocks under one lease: how each answer, and a missing one, ends."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
from quire.internal.v1 import worker_pb2

from scheduler_svc.core.features.block_moves import BlockMove
from scheduler_svc.core.features.block_sources import BlockSource
from scheduler_svc.workers.block_calls import BlockCalls
from scheduler_svc.workers.seals import BlockKeys, LeaseIds
from scheduler_svc.workers.wire import ORIGIN

KEYS = BlockKeys(lambda: [b"k" * 32])


class Stub:
    """A worker that gives one answer."""

    def __init__(self, answer: worker_pb2.FetchBlocksResponse | grpc.StatusCode) -> None:
        self._answer = answer

    async def FetchBlocks(self, request: worker_pb2.FetchBlocksRequest) -> worker_pb2.FetchBlocksResponse:
        if isinstance(self._answer, grpc.StatusCode):
            raise grpc.aio.AioRpcError(self._answer, grpc.aio.Metadata(), grpc.aio.Metadata(), "details")
        return self._answer


def make_move(source: BlockSource | None = None) -> BlockMove:
    ids = np.arange(3, dtype=np.int64)
    return BlockMove(7, "w0", 0, ids, [bytes([i]) * 16 for i in range(3)], np.zeros((3, 4), np.uint32), source)


async def ends_of(answer: Any, *, keys: BlockKeys | None = None, source: BlockSource | None = None) -> list[Any]:
    """The reports of one fetch: (move id, blocks), or the reason for which the lease ends."""
    reports: list[Any] = []
    calls = BlockCalls(Stub(answer), worker_pb2.Fence(), "w0", keys)  # type: ignore[arg-type]
    has_ended = asyncio.Event()

    def end(report: Any) -> None:
        reports.append(report)
        has_ended.set()

    calls.on_moved = lambda move_id, count, took_s: end((move_id, count))
    calls.on_broken = end
    calls.fetch(make_move(source), "source:1")
    async with asyncio.timeout(10):
        await has_ended.wait()
    return reports


@pytest.mark.parametrize(("answered", "counted"), [(3, 3), (1, 1), (0, 0), (4, 0)])
async def test_the_blocks_that_arrived_count(answered: int, counted: int) -> None:
    assert await ends_of(worker_pb2.FetchBlocksResponse(num_fetched=answered)) == [(7, counted)]


@pytest.mark.parametrize("code", [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT])
async def test_a_refused_fetch_moves_nothing(code: grpc.StatusCode) -> None:
    assert await ends_of(code) == [(7, 0)]


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL])
async def test_a_fetch_without_an_answer_ends_the_lease(code: grpc.StatusCode) -> None:
    """The worker may still write to the blocks, so they must not be used again under this lease."""
    (reason,) = await ends_of(code)
    assert code.name in reason


async def test_a_record_of_a_tier_needs_a_seal() -> None:
    digests = make_move().digests
    seals = [
        (5).to_bytes(8, "little") + KEYS.tags(LeaseIds(9, 5), [block], [digest])
        for block, digest in zip((4, 5, 6), digests, strict=True)
    ]
    origins = [ORIGIN.pack(9, block, seal) for block, seal in zip((4, 5, 6), seals, strict=True)]
    sealed = worker_pb2.FetchBlocksResponse(num_fetched=3, origins=b"".join(origins))
    assert await ends_of(sealed, keys=KEYS) == [(7, 3)]
    forged = worker_pb2.FetchBlocksResponse(
        num_fetched=3, origins=origins[0] + ORIGIN.pack(9, 5, bytes(24)) + origins[2]
    )
    assert await ends_of(forged, keys=KEYS) == [(7, 1)]
    assert await ends_of(worker_pb2.FetchBlocksResponse(num_fetched=3), keys=KEYS) == [(7, 0)]
    source = BlockSource("w1", 2, np.arange(3))
    assert await ends_of(worker_pb2.FetchBlocksResponse(num_fetched=3), keys=KEYS, source=source) == [(7, 3)]
