"""The calls that list the blocks of one leased worker and move others into its pool, and the watch of its tier."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import grpc
from quire.internal.v1 import worker_pb2, worker_pb2_grpc

from scheduler_svc.core.features.block_moves import BlockMove
from scheduler_svc.core.messages import CachedBlock, WorkerCapacity
from scheduler_svc.core.policy import TierKind
from scheduler_svc.workers.seals import BlockKeys
from scheduler_svc.workers.wire import DIGEST_BYTES, cached_blocks_from_proto, fetch_to_proto, num_fetched
from step_protocol.columns import WireError

log = logging.getLogger(__name__)

# The worker has refused the fetch and writes nothing. After any other error it may still write to the blocks.
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
LIST_TIMEOUT_S = 60.0

TierCall = grpc.aio.UnaryStreamCall[worker_pb2.WatchTierRequest, worker_pb2.WatchTierResponse]
OnMoved = Callable[[int, int, float], None]  # move id, leading blocks that arrived, seconds
OnTier = Callable[[Mapping[bytes, TierKind | None]], None]  # which tier holds each of these blocks now


class BlockCalls:
    """Moves blocks under one lease. `on_moved` reports the end of each move, `on_tier` the content of the tiers.

    A fetch has no deadline here, because its blocks must not be used again before the worker has answered: the worker
    limits it. If the answer cannot arrive, `on_broken` must end the lease; later writes of the worker are refused then.
    """

    def __init__(
        self,
        stub: worker_pb2_grpc.WorkerServiceAsyncStub,
        fence: worker_pb2.Fence,
        worker_id: str,
        keys: BlockKeys | None,
    ) -> None:
        self._stub = stub
        self._fence = fence
        self._worker_id = worker_id
        self._keys = keys
        self._tasks: set[asyncio.Task[None]] = set()
        self._tier: TierCall | None = None
        self._listed: dict[bytes, TierKind | None] = {}
        self.on_moved: OnMoved = lambda move_id, num_moved, took_s: None
        self.on_tier: OnTier = lambda tiers: None
        self.on_broken: Callable[[str], None] = lambda reason: None

    def fetch(self, move: BlockMove, source_address: str) -> None:
        """Start a move."""
        self._start(self._fetch(move, source_address))

    async def list_pool(self, worker: WorkerCapacity) -> list[CachedBlock]:
        """The cached blocks of the worker's pool that have a valid seal. Raises WireError as soon as the messages list
        more blocks than the worker has."""
        messages: list[worker_pb2.ListBlocksResponse] = []
        num_listed, most = 0, worker.num_blocks
        async for message in self._stub.ListBlocks(
            worker_pb2.ListBlocksRequest(fence=self._fence), timeout=LIST_TIMEOUT_S
        ):
            num_here = len(message.block_ids) // 4 if isinstance(message, worker_pb2.ListBlocksResponse) else 0
            num_listed += num_here
            if not num_here or num_listed > most:
                words = f"an empty or undecodable message, or more than the {most} blocks of the pool"
                raise WireError(f"ListBlocks sent {words}")
            messages.append(message)
        size, epoch = worker.block_size, worker.worker_epoch
        blocks = cached_blocks_from_proto(
            messages, block_size=size, num_blocks=most, worker_epoch=epoch, keys=self._keys
        )
        if ignored := num_listed - len(blocks):
            log.warning("worker %s: ignored %d cached blocks that have no valid seal", self._worker_id, ignored)
        return blocks

    async def list_tier(self) -> None:
        """Read which blocks the tier holds, so that the first sequence that is placed on the worker can have them."""
        self._tier = self._stub.WatchTier(worker_pb2.WatchTierRequest(fence=self._fence))
        async with asyncio.timeout(LIST_TIMEOUT_S):
            while isinstance(message := await self._tier.read(), worker_pb2.WatchTierResponse):
                self._listed |= _tiers(message)
                if message.is_listed:
                    return

    def follow_tier(self) -> None:
        """Report the content of the tier, and each change."""
        self.on_tier(self._listed)
        self._listed = {}
        self._start(self._follow())

    def close(self) -> None:
        """The lease has ended."""
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(self, move: BlockMove, source_address: str) -> None:
        loop, count = asyncio.get_running_loop(), 0
        started_at = loop.time()
        request = fetch_to_proto(move, self._fence, source_address)
        try:
            response = await self._stub.FetchBlocks(request)
            count = num_fetched(response, move, self._keys)
            if response.message:
                log.info(
                    "worker %s: fetched %d of %d blocks: %s",
                    self._worker_id,
                    count,
                    move.num_items,
                    response.message,
                )
        except grpc.aio.AioRpcError as error:
            if error.code() not in REFUSALS:
                self.on_broken(f"a fetch of blocks was not answered: {error.code().name}: {error.details()}")
                return
            log.warning("worker %s: blocks did not move: %s: %s", self._worker_id, error.code().name, error.details())
        except WireError as error:
            log.error("worker %s: blocks did not move: %s", self._worker_id, error)
        self.on_moved(move.move_id, count, loop.time() - started_at)

    async def _follow(self) -> None:
        """If the call breaks, the list grows old: blocks that the tier has removed are misses."""
        if self._tier is None:
            return
        try:
            while isinstance(message := await self._tier.read(), worker_pb2.WatchTierResponse):
                self.on_tier(_tiers(message))
        except grpc.aio.AioRpcError as error:
            log.info("worker %s: changes of its tier end: %s", self._worker_id, error.details())


def _tiers(message: worker_pb2.WatchTierResponse) -> dict[bytes, TierKind | None]:
    columns = (message.added, TierKind.DISK), (message.added_to_memory, TierKind.MEMORY), (message.removed, None)
    return {
        digests[start : start + DIGEST_BYTES]: kind
        for digests, kind in columns
        for start in range(0, len(digests), DIGEST_BYTES)
    }
