"""Blocks between schedulers of one model: one finds a prefix in the index, the other keeps it while it is read.

    index says which worker holds the prefix -> its scheduler keeps the blocks (LendBlocks)
    -> a worker of this scheduler reads them, as in any move -> the call ends, and with it the loan

A loan ends by its deadline too, whatever becomes of both callers. Each failure means that the blocks are computed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial

import grpc
import numpy as np
from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

from prefix_index.index import RemoteHolder
from prefix_index.redis_index import RedisPrefixIndex
from scheduler_svc.core.features.block_moves import BlockSearch
from scheduler_svc.core.features.block_sources import BlockSource, LentBlocks, LentExtras
from scheduler_svc.core.features.loans import Loan, WantedPrefix
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.step_loop import StepLoop
from scheduler_svc.workers.wire import DIGEST_BYTES
from step_protocol.columns import I64, WireError, u32_from_bytes, u32_to_bytes
from svc_common.channels import OpenChannel
from svc_common.errors import InvalidRequestError, NotFoundError
from svc_common.tasks import cancel

log = logging.getLogger(__name__)

MAX_LOAN_S = 5.0  # how long blocks are kept for another scheduler
ANSWER_S = 1.0  # until a scheduler has answered
REST_S = 10.0  # a scheduler that did not answer is not asked again
MAX_CHANNELS = 16
MAX_ASKED = 1 << 16  # blocks of one call


class OtherSchedulers:
    """Borrows blocks from the schedulers that the index names."""

    def __init__(self, step_loop: StepLoop, index: RedisPrefixIndex, open_channel: OpenChannel) -> None:
        self._step_loop = step_loop
        self._index = index
        self._open_channel = open_channel
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._resting: dict[str, float] = {}  # addresses that are not called until then
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: dict[LentBlocks, asyncio.Future[None]] = {}

    def follow(self, core: Scheduler) -> None:
        """Start the searches that the core wants, and give back what it needs no longer. Called in each turn."""
        for search in core.moves.take_searches():
            self.search(search)
        for lent in core.moves.take_read():
            self.give_back(lent)

    def search(self, search: BlockSearch) -> None:
        """Start a search. Its end is reported to the core."""
        task = asyncio.create_task(self._search(search))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def give_back(self, lent: LentBlocks) -> None:
        """The blocks need not be kept any longer."""
        read = self._reading.get(lent)
        if read is not None and not read.done():
            read.set_result(None)

    async def close(self) -> None:
        """End all calls and connections."""
        await cancel(*self._tasks)
        for channel in self._channels.values():
            await channel.close()

    async def _search(self, search: BlockSearch) -> None:
        try:
            holder = self._best(search, await self._index.find_elsewhere(search.digests))
            if holder is not None:
                await self._borrow(search, holder)
        finally:
            self._report(search, None)

    def _report(self, search: BlockSearch, lent: LentBlocks | None) -> None:
        """Another scheduler lends these blocks, or has ceased to (None)."""
        self._step_loop.report(lambda core, now: core.moves.end_search(search, lent, now))

    def _best(self, search: BlockSearch, holders: Sequence[RemoteHolder]) -> RemoteHolder | None:
        now = asyncio.get_running_loop().time()
        self._resting = {address: end for address, end in self._resting.items() if end > now}
        more = [one for one in holders if one.num_blocks > search.num_held and one.scheduler not in self._resting]
        return max(more, key=lambda one: one.num_blocks, default=None)

    async def _borrow(self, search: BlockSearch, holder: RemoteHolder) -> None:
        """Returns when the blocks are read or their time is over."""
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel(holder.scheduler))
        call = stub.LendBlocks(_request(search, holder), timeout=MAX_LOAN_S)
        try:
            async with asyncio.timeout(ANSWER_S):
                lent = _lent_from_proto(await call.read(), search, holder)
            read = self._reading[lent] = asyncio.get_running_loop().create_future()
            self._report(search, lent)
            await asyncio.wait([read], timeout=MAX_LOAN_S)
            del self._reading[lent]
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                await self._rest(holder.scheduler, f"{error.code().name}: {error.details()}")
        except (TimeoutError, WireError) as error:
            await self._rest(holder.scheduler, str(error) or f"no answer within {ANSWER_S:g} s")
        finally:
            call.cancel()

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open_channel(address)
        return channel

    async def _rest(self, address: str, reason: str) -> None:
        log.warning("scheduler %s lends no blocks, and is not asked for %g s: %s", address, REST_S, reason)
        self._resting[address] = asyncio.get_running_loop().time() + REST_S
        if (channel := self._channels.pop(address, None)) is not None:
            await channel.close()


def _request(search: BlockSearch, holder: RemoteHolder) -> scheduler_pb2.LendBlocksRequest:
    count = min(holder.num_blocks, MAX_ASKED)
    num_tokens = len(search.token_ids) // len(search.digests) * count
    return scheduler_pb2.LendBlocksRequest(
        worker_id=holder.holder.worker_id,
        worker_epoch=holder.holder.worker_epoch,
        layout=search.layout,
        hashes=b"".join(search.digests[:count]),
        token_ids=u32_to_bytes(search.token_ids[:num_tokens]),
    )


def _lent_from_proto(answer: object, search: BlockSearch, holder: RemoteHolder) -> LentBlocks:
    """Raises WireError."""
    if not isinstance(answer, scheduler_pb2.LendBlocksResponse):
        raise WireError("the call ended without an answer")
    ids, (worker_id, worker_epoch) = u32_from_bytes(answer.block_ids, "block_ids"), holder.holder
    if len(ids) > holder.num_blocks or not answer.address:
        raise WireError(f"{len(ids)} block_ids for {holder.num_blocks} hashes, at address {answer.address!r}")
    source = BlockSource(worker_id, worker_epoch, ids.astype(np.int64), answer.address)
    digests = search.digests[: len(ids)]
    return LentBlocks(source, digests, [_extras_from_proto(extras, digests) for extras in answer.extras])


def _extras_from_proto(extras: scheduler_pb2.LentExtras, digests: Sequence[bytes]) -> LentExtras:
    """Raises WireError."""
    ids, indices = u32_from_bytes(extras.block_ids, "block_ids"), u32_from_bytes(extras.indices, "indices")
    if len(ids) != len(indices) or (len(ids) and int(indices.max()) >= len(digests)):
        raise WireError(f"{len(ids)} block_ids of extras for indices {indices.tolist()[:16]} of {len(digests)} blocks")
    return LentExtras({digests[index]: block for index, block in zip(indices.tolist(), ids.tolist(), strict=True)})


def _column(values: Sequence[int] | I64) -> bytes:
    return u32_to_bytes(np.array(values, np.uint32))


async def lend(
    step_loop: StepLoop, request: scheduler_pb2.LendBlocksRequest
) -> AsyncIterator[scheduler_pb2.LendBlocksResponse]:
    """Serves LendBlocks. Raises InvalidRequestError or NotFoundError."""
    try:
        token_ids = u32_from_bytes(request.token_ids, "token_ids")
    except WireError as error:
        raise InvalidRequestError(str(error), field=error.field) from None
    count, rest = divmod(len(request.hashes), DIGEST_BYTES)
    if rest:
        raise InvalidRequestError(f"{len(request.hashes)} bytes of hashes; a hash has {DIGEST_BYTES}", field="hashes")
    if count > MAX_ASKED:
        raise InvalidRequestError(f"{count} hashes; at most {MAX_ASKED} are allowed", field="hashes")
    digests = [request.hashes[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)] for i in range(count)]
    wanted = WantedPrefix(request.worker_id, request.worker_epoch, request.layout, digests, token_ids)
    begun: asyncio.Future[tuple[Loan, str] | None] = asyncio.get_running_loop().create_future()
    step_loop.report(partial(_begin_loan, step_loop, wanted, begun))
    lent = await begun
    if lent is None:
        raise NotFoundError("this scheduler has no worker that holds these blocks and may lend them")
    loan, address = lent
    try:
        response = scheduler_pb2.LendBlocksResponse(block_ids=_column(loan.block_ids), address=address)
        for one in loan.extras:
            response.extras.add(block_ids=_column(one.ids), indices=_column(one.indices))
        yield response
        await asyncio.sleep(MAX_LOAN_S)  # the caller ends the call before
    finally:
        step_loop.report(lambda core, now: core.loans.end(loan))


def _begin_loan(
    step_loop: StepLoop,
    wanted: WantedPrefix,
    begun: asyncio.Future[tuple[Loan, str] | None],
    core: Scheduler,
    now: float,
) -> None:
    """Keep the blocks for at most MAX_LOAN_S. The future gets the loan and the address of the worker, or None."""
    if begun.done():  # the caller was cancelled
        return
    loan = core.loans.begin(wanted)
    if loan is None:
        begun.set_result(None)
        return
    end = partial(step_loop.report, lambda core, now: core.loans.end(loan))
    asyncio.get_running_loop().call_later(MAX_LOAN_S, end)
    begun.set_result((loan, step_loop.address_of(wanted.worker_id)))
