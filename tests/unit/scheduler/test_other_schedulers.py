"""A scheduler's handling of others' answers and calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

from prefix_index.index import Holder, RemoteHolder
from scheduler_svc.core.features.block_moves import BlockSearch
from scheduler_svc.core.features.block_sources import LentBlocks
from scheduler_svc.other_schedulers import OtherSchedulers, lend
from step_protocol.columns import u32_to_bytes
from svc_common.errors import InvalidRequestError, NotFoundError
from svc_common.serve import open_channel

DIGESTS = [bytes([number]) * 16 for number in range(4)]


class Lender(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers with this, or refuses with this code."""

    def __init__(self, answer: scheduler_pb2.LendBlocksResponse | grpc.StatusCode) -> None:
        self.answer = answer
        self.asked: list[scheduler_pb2.LendBlocksRequest] = []
        self.ended = asyncio.Event()

    async def LendBlocks(self, request: scheduler_pb2.LendBlocksRequest, context: Any) -> AsyncIterator[Any]:
        self.asked.append(request)
        if isinstance(self.answer, grpc.StatusCode):
            await context.abort(self.answer, "refused")
        try:  # around the answer too: a call may be cancelled while it is being sent
            yield self.answer
            await asyncio.Event().wait()
        finally:
            self.ended.set()


class Asker:
    """Stands for the step loop and the index of a scheduler that borrows."""

    def __init__(self) -> None:
        self.found: asyncio.Queue[LentBlocks | None] = asyncio.Queue()
        self.holders: list[RemoteHolder] = []

    def report(self, event: Callable[[Any, float], None]) -> None:
        end_search = lambda search, lent, now: self.found.put_nowait(lent)  # noqa: E731
        event(SimpleNamespace(moves=SimpleNamespace(end_search=end_search)), 0.0)

    async def find_elsewhere(self, digests: list[bytes]) -> list[RemoteHolder]:
        return self.holders


@asynccontextmanager
async def serve(lender: Lender) -> AsyncIterator[tuple[Asker, OtherSchedulers]]:
    server, asker = grpc.aio.server(), Asker()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(lender, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    asker.holders = [RemoteHolder(Holder("theirs", 9), address, count) for count in (1, 3)]
    await server.start()
    others = OtherSchedulers(asker, asker, open_channel)  # type: ignore[arg-type]
    try:
        yield asker, others
    finally:
        await others.close()
        await server.stop(None)


def make_search(num_held: int = 1) -> BlockSearch:
    return BlockSearch(
        "ours", b"layout", num_held, DIGESTS, np.arange(16, dtype=np.uint32), began_at=0.0, give_up_at=1.0
    )


def answer_of(
    ids: list[int], address: str = "there:1", extras: tuple[list[int], list[int]] | None = None
) -> scheduler_pb2.LendBlocksResponse:
    """`extras`: ids and indices of one part."""
    answer = scheduler_pb2.LendBlocksResponse(block_ids=u32_to_bytes(np.array(ids, np.uint32)), address=address)
    if extras is not None:
        block_ids, indices = (u32_to_bytes(np.array(column, np.uint32)) for column in extras)
        answer.extras.add(block_ids=block_ids, indices=indices)
    return answer


async def test_the_call_lasts_until_the_blocks_are_read() -> None:
    lender = Lender(answer_of([7, 8, 9], extras=([70, 80], [1, 2])))
    async with serve(lender) as (asker, others):
        others.search(make_search())
        lent = await asker.found.get()
        assert lent is not None
        assert [one.ids for one in lent.extras] == [{DIGESTS[1]: 70, DIGESTS[2]: 80}]
        assert (lent.source.worker_epoch, lent.source.address, lent.digests) == (9, "there:1", DIGESTS[:3])
        (asked,) = lender.asked
        assert (asked.worker_id, len(asked.hashes), len(asked.token_ids)) == ("theirs", 48, 48)
        assert not lender.ended.is_set()
        others.give_back(lent)
        others.give_back(lent)
        assert await asker.found.get() is None
        await lender.ended.wait()


@pytest.mark.parametrize(
    ("answer", "is_asked_again"),
    [
        (grpc.StatusCode.NOT_FOUND, True),
        (grpc.StatusCode.UNIMPLEMENTED, False),
        (answer_of([1, 2, 3, 4]), False),
        (answer_of([1], address=""), False),
        (answer_of([1], extras=([5], [1])), False),
        (answer_of([1], extras=([5], [0, 0])), False),
        (scheduler_pb2.LendBlocksResponse(block_ids=b"123", address="there:1"), False),
    ],
)
async def test_answers_that_lend_nothing(answer: Any, is_asked_again: bool) -> None:
    lender = Lender(answer)
    async with serve(lender) as (asker, others):
        for _ in range(2):
            others.search(make_search())
            assert await asker.found.get() is None
        assert len(lender.asked) == 1 + is_asked_again


async def test_a_holder_of_no_more_blocks_is_not_asked() -> None:
    lender = Lender(answer_of([7, 8, 9]))
    async with serve(lender) as (asker, others):
        others.search(make_search(num_held=3))
        assert await asker.found.get() is None
        assert lender.asked == []


class NoLoans:
    """A step loop whose workers hold nothing."""

    def report(self, event: Callable[[Any, float], None]) -> None:
        event(SimpleNamespace(loans=SimpleNamespace(begin=lambda wanted: None)), 0.0)


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (scheduler_pb2.LendBlocksRequest(hashes=bytes(17)), InvalidRequestError, "hashes"),
        (scheduler_pb2.LendBlocksRequest(hashes=bytes(16), token_ids=b"123"), InvalidRequestError, "token_ids"),
        (scheduler_pb2.LendBlocksRequest(hashes=bytes(16), token_ids=bytes(16)), NotFoundError, ""),
    ],
)
async def test_calls_that_get_nothing(request_: Any, error: type[Exception], field: str) -> None:
    with pytest.raises(error) as found:
        await anext(lend(NoLoans(), request_))  # type: ignore[arg-type]
    assert getattr(found.value, "field", "") == field
