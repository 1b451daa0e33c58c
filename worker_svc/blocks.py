"""The blocks of this worker outside its pool: what its RPCs read, write and announce.

A fetch fills blocks of the pool, by order of the scheduler:

    read and check a record -> wait until the steps that were sent before the order have run -> write the block

The scheduler has taken these blocks, so no later step names them before its answer. It learns how many of the leading
blocks arrived and commits them with a later step, like blocks that a step has filled. The first block that cannot be
had ends the fetch: those after it continue a prefix that is not there.

A write that ran after the answer could hit a block that a step uses by then. So the answer is sent when the last write
has run: writes and steps run in one thread, in the order in which they were queued.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import grpc
import numpy as np
from quire.internal.v1 import scheduler_pb2, worker_pb2
from quire.v1 import types_pb2

from prefix_index.hashing import layout_digest
from request_fields.sizes import blocks_before
from step_protocol.columns import U32, WireError, u32_from_bytes
from step_protocol.messages import StepBatch
from svc_common.errors import InvalidRequestError, ServiceError, StaleEpochError, UnavailableError
from svc_common.memory import keep_freed_memory
from svc_common.observe.metrics import Row
from svc_common.tasks import cancel, one_ahead
from worker_svc.engine.config import EngineInfo
from worker_svc.engine.decoder.pool.block_payload import Filled, Movable
from worker_svc.engine.step_runner import is_out_of_memory
from worker_svc.kv_store.block_store import READ_BYTES, BlockStore, Committed
from worker_svc.kv_store.disk_tier import DiskTier
from worker_svc.kv_store.memory_tier import MemoryTier
from worker_svc.kv_store.nixl_memory import REST_S, NixlAgent, NixlError
from worker_svc.kv_store.outlets import Answer, Messages, Outlet, OverNixl, Shared, SharedMemory, find_shared_memory
from worker_svc.kv_store.record import BadRecordError, Found, Origin, RecordFormat, WantedBlock
from worker_svc.kv_store.tier import Tier
from worker_svc.seals import Seals
from worker_svc.steps.executor import StepExecutor
from worker_svc.steps.lease import Lease
from worker_svc.wire import SentRecords, records_from_wire

log = logging.getLogger(__name__)

DIGEST_BYTES = 16
READ_BLOCKS = "/quire.internal.v1.WorkerService/ReadBlocks"
CALL_BYTES = 128 << 20  # of records between workers of one call, so of their shared memory
MAX_MAPPED = 4  # memories of other workers
MAX_CHANNELS = 16  # to other workers that are kept
PROGRESS_S = 0.001  # between looks at what NIXL receives
WATCH_PAUSE_S = 0.1  # changes of the tier are sent together
MAX_LISTED = 1 << 14  # digests in one message
FETCH_TIMEOUT_S = 60.0
ROLES = {
    "both": types_pb2.WORKER_ROLE_UNSPECIFIED,
    "prefill": types_pb2.WORKER_ROLE_PREFILL,
    "decode": types_pb2.WORKER_ROLE_DECODE,
}

OpenWorker = Callable[[str, str], grpc.aio.Channel]  # from address and worker id


@dataclass(frozen=True, slots=True)
class MovementSettings:
    """As the flags of the same names."""

    kv_host_memory: int | None = None  # bytes
    kv_disk: Path | None = None
    kv_disk_size: int = 0  # bytes
    kv_transfer: bool = False
    kv_nixl: bool = False
    role: str = "both"

    @property
    def has_tier(self) -> bool:
        return bool(self.kv_host_memory) or self.kv_disk is not None

    @property
    def is_on(self) -> bool:
        return self.has_tier or self.kv_transfer


class FetchEndedError(Exception):
    """A block cannot be had; the message says why. It and the blocks after it are computed again."""


Checked: TypeAlias = tuple[list[Found], FetchEndedError | None]  # leading blocks, and what is wrong with the next one


@dataclass(slots=True)
class TransferCounts:
    """Blocks that came from other workers, or went to them."""

    blocks_in: int = 0
    blocks_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    num_refused: int = 0  # records that were not those of the wanted blocks
    num_ended: int = 0  # fetches that got fewer blocks than they wanted


@dataclass(slots=True)
class Order:
    """A fetch, as the scheduler orders it."""

    block_ids: list[int]
    wanted: list[WantedBlock]
    after_step_id: int
    source: worker_pb2.BlockSource | None
    written: list[Found] = field(default_factory=list)


@dataclass(slots=True)
class OpenChannel:
    """A connection to another worker."""

    channel: grpc.aio.Channel
    num_calls: int = 0


class WorkerBlocks:
    """Owns the tier of this worker and its exchange of blocks with other workers. Does nothing unless a flag asks."""

    def __init__(self, executor: StepExecutor, settings: MovementSettings, open_worker: OpenWorker) -> None:
        self.counts = TransferCounts()
        self.store: BlockStore | None = None
        self._executor = executor
        self._settings = settings
        self._open_worker = open_worker
        self._records: RecordFormat | None = None
        self._seals = Seals()  # written and read by the model thread
        self._blocks_before: list[int] = []  # of the windows of cache groups
        self._memory: SharedMemory | None = None  # of the last call, for the next one
        self._nixl: NixlAgent | None = None
        self._mapped: dict[str, memoryview] = {}  # memory of readers by its name, a random one; last used last
        self._channels: dict[tuple[str, str], OpenChannel] = {}  # last used last
        self._senders = ThreadPoolExecutor(1, thread_name_prefix="block-sender")
        self._receivers = ThreadPoolExecutor(1, thread_name_prefix="block-receiver")
        self.num_reads = 0  # other workers that read blocks now

    # -- start and end ------------------------------------------------------------------------------------------------

    async def start(self, info: EngineInfo) -> scheduler_pb2.BlockMovement | None:
        """The model is loaded, or its weights have changed: open its tier. Returns what this worker announces; None:
        its blocks cannot move.
        """
        if not self._settings.is_on:
            return None
        if self.store is not None:
            store, self.store, self._executor.on_step = self.store, None, None
            await asyncio.get_running_loop().run_in_executor(self._senders, partial(store.close, is_last=False))
        blocks = self._executor.movable_blocks()
        if blocks is None or info.num_snapshots == 0:
            log.warning(
                "--kv-host-memory, --kv-disk, --kv-transfer and --role have no effect: blocks of this model or backend "
                "cannot move yet"
            )
            return None
        if self._settings.kv_transfer:
            keep_freed_memory()
        if self._settings.kv_nixl and self._nixl is None:
            self._nixl = await asyncio.get_running_loop().run_in_executor(self._senders, _nixl_agent)
        self._blocks_before = [blocks_before(group.attention_window, info.block_size) for group in info.groups]
        revision = info.weights_revision or info.revision
        self._records = RecordFormat(layout_digest(revision, info.numerics, blocks.layout), blocks)
        if self._settings.has_tier:
            await self._open_tiers(self._records)
        return scheduler_pb2.BlockMovement(
            layout=self._records.layout,
            block_bytes=max(1, blocks.payload_bytes),
            has_tier=self.store is not None,
            can_transfer=self._settings.kv_transfer,
            role=ROLES[self._settings.role],
        )

    async def _open_tiers(self, records: RecordFormat) -> None:
        settings, tiers = self._settings, list[Tier]()
        if settings.kv_disk is not None:
            tiers.append(DiskTier(settings.kv_disk, settings.kv_disk_size, records.layout, lambda d: store.report(d)))
        if settings.kv_host_memory:
            below = tiers[0] if tiers else None
            tiers.insert(0, MemoryTier(settings.kv_host_memory, below, lambda d: store.report(d)))
        store = BlockStore(records, tiers)
        await asyncio.get_running_loop().run_in_executor(self._senders, store.start)
        self.store, self._executor.on_step = store, self._offer
        for tier in tiers:
            num_blocks, used = len(tier.digests()), tier.num_bytes / 2**30
            log.info("%s tier: %d blocks of this model, %.1f GiB used", tier.name, num_blocks, used)

    async def close(self) -> None:
        """Stop all threads and calls."""
        self._executor.on_step = None
        for used in self._channels.values():
            await used.channel.close()
        self._senders.shutdown(wait=False, cancel_futures=True)
        self._receivers.shutdown(wait=False, cancel_futures=True)
        if self._memory is not None:
            self._memory.close()
        if self.store is not None:
            await asyncio.to_thread(self.store.close)

    async def clear_tiers(self) -> None:
        """Forget the blocks of the tiers."""
        if self.store is not None:
            await asyncio.get_running_loop().run_in_executor(self._senders, self.store.clear)

    def _offer(self, batch: StepBatch, scheduler_epoch: int, tags: bytes) -> None:
        """Called in the model thread for each step that commits blocks or opens rows."""
        store, records = self.store, self._records
        if store is None or records is None:
            return
        block_size = records.blocks.block_size
        if len(batch.commit_blocks):
            self._seals.note(scheduler_epoch, batch.commit_blocks, tags)
            seals = self._seals.of(batch.commit_blocks)
            store.offer(Committed(self._executor.worker_epoch, batch.commit_blocks, batch.commit_digests, seals))
        for opened in batch.opens:
            end = opened.num_computed_tokens // block_size
            self._use(store, records, opened.block_table[:end][::-1])  # so that the tail of a prefix leaves first
            for table, num_before in zip(opened.group_tables, self._blocks_before, strict=False):
                self._use(store, records, table[max(0, end - num_before) : end][::-1])
            if opened.snapshot is not None and records.others:
                self._use(store, records, np.array([records.others[-1].first_id + opened.snapshot], np.uint32))

    def _use(self, store: BlockStore, records: RecordFormat, ids: U32) -> None:
        """A row starts from what has these ids, of one kind."""
        if not len(ids):
            return
        of_kind = records.of(int(ids[0]))
        first = np.uint32(of_kind.first_id)
        used, digests = of_kind.blocks.digests_of(ids - first)
        if len(used):
            store.offer(Committed(self._executor.worker_epoch, used + first, digests, self._seals.of(used + first)))

    def _movable(self) -> RecordFormat:
        if self._records is None:
            raise UnavailableError(
                "this worker moves no blocks; start it with --kv-host-memory, --kv-disk or --kv-transfer"
            )
        return self._records

    def metrics(self) -> Iterator[Row]:
        """The current values of the metrics of tiers and transfers."""
        if self._records is None:
            return
        transfers, store = self.counts, self.store
        if store is not None:
            yield "worker_kv_tier_queued_blocks", (), store.num_queued
            for tier in store.tiers:
                counts, name = tier.counts, tier.name
                yield "worker_kv_tier_bytes", (name,), tier.num_bytes
                yield "worker_kv_tier_writable", (name,), float(tier.is_writer)
                yield "worker_kv_tier_reads_total", (name, "hit"), counts.num_hits
                yield "worker_kv_tier_reads_total", (name, "miss"), counts.num_misses
                yield "worker_kv_tier_reads_total", (name, "corrupt"), counts.num_corrupt
                yield "worker_kv_tier_read_seconds_total", (name,), counts.read_s
                yield "worker_kv_tier_read_bytes_total", (name,), counts.bytes_read
                yield "worker_kv_tier_written_bytes_total", (name,), counts.bytes_written
                yield "worker_kv_tier_dropped_blocks_total", (name,), counts.num_dropped
                yield "worker_kv_tier_errors_total", (name,), counts.num_errors
        yield "worker_kv_transfer_bytes_total", ("in",), transfers.bytes_in
        yield "worker_kv_transfer_bytes_total", ("out",), transfers.bytes_out
        yield "worker_kv_transfer_refused_blocks_total", (), transfers.num_refused

    # -- fetching -----------------------------------------------------------------------------------------------------

    async def fetch(self, request: worker_pb2.FetchBlocksRequest) -> worker_pb2.FetchBlocksResponse:
        """Fill blocks of the pool. Whatever fails, the blocks before it count."""
        records, lease = self._movable(), self._executor.check_fence(request.fence)
        order, message = self._order(request, records), ""
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                await self._fetch(order, lease, records)
        except FetchEndedError as error:
            message = str(error)
        except TimeoutError:
            message = f"not all blocks arrived within {FETCH_TIMEOUT_S:g} s"
        if len(order.written) < len(order.wanted):
            self.counts.num_ended += 1
        origins = b"" if order.source is not None else b"".join(found.origin for found in order.written)
        return worker_pb2.FetchBlocksResponse(num_fetched=len(order.written), origins=origins, message=message)

    def _order(self, request: worker_pb2.FetchBlocksRequest, records: RecordFormat) -> Order:
        """Raises InvalidRequestError for columns that contradict each other or the pool."""
        try:
            ids, tokens = u32_from_bytes(request.block_ids, "block_ids"), u32_from_bytes(request.token_ids, "token_ids")
        except WireError as error:
            raise InvalidRequestError(str(error), field=error.field) from None
        count = len(ids)
        if len(set(ids.tolist())) < count or (count and int(ids.max()) >= records.end_id):
            raise InvalidRequestError(
                f"block_ids must be distinct and below {records.end_id}, got {ids.tolist()[:16]}", field="block_ids"
            )
        ends = np.cumsum([records.of(block).blocks.block_size for block in ids.tolist()], dtype=np.int64)
        if len(request.hashes) != count * DIGEST_BYTES or len(tokens) != ends[-1:].sum():
            raise InvalidRequestError(
                f"{count} block_ids with {len(request.hashes)} bytes of hashes and {len(tokens)} token_ids; "
                f"a block has {DIGEST_BYTES} bytes and {records.blocks.block_size} tokens",
                field="block_ids",
            )
        rows = np.split(tokens, ends[:-1])  # of no tokens: one row
        wanted = [
            WantedBlock(digest, row, block)
            for digest, row, block in zip(split(request.hashes), rows, ids.tolist(), strict=False)
        ]
        source = request.source if request.HasField("source") else None
        return Order(ids.tolist(), wanted, request.after_step_id, source)

    async def _fetch(self, order: Order, lease: Lease, records: RecordFormat) -> None:
        source = order.source
        found = self._from_tier(order, records) if source is None else self._from_worker(order, source, records)
        async with contextlib.aclosing(found):
            async for batch in found:  # each is written before the next one is read
                await self._write(order, batch, lease, records)

    async def _write(self, order: Order, batch: list[Found], lease: Lease, records: RecordFormat) -> None:
        """Write blocks of one format that follow those that are written to the pool."""
        if not batch:
            return
        wanted = order.wanted[len(order.written) :][: len(batch)]
        target = records.of(wanted[0].block_id)
        filled = [
            Filled(one.block_id - target.first_id, one.tokens, found.payload)
            for one, found in zip(wanted, batch, strict=True)
        ]
        write = await _writing(target.blocks, filled)
        await self._executor.write_blocks(lease, order.after_step_id, write)
        order.written += batch

    async def _from_tier(self, order: Order, records: RecordFormat) -> AsyncGenerator[list[Found], None]:
        if self.store is None:
            raise FetchEndedError("this worker has no tier")
        loop, store = asyncio.get_running_loop(), self.store
        parts = [order.wanted[place] for _, place in records.parts(order.block_ids, READ_BYTES)]
        reads = [loop.run_in_executor(store.readers, store.read_all, part) for part in parts]
        try:
            for part, read in zip(parts, reads, strict=True):
                found = await read
                yield found
                if len(found) < len(part):
                    raise FetchEndedError("the tier does not have a block, or its record is damaged")
        finally:
            for read in reads:
                read.cancel()

    async def _from_worker(
        self, order: Order, source: worker_pb2.BlockSource, records: RecordFormat
    ) -> AsyncGenerator[list[Found], None]:
        num_found = 0
        try:
            async with self._connected(source.address, source.worker_id) as channel:
                for of_part, place in records.parts(order.block_ids, CALL_BYTES):
                    part = order.wanted[place]
                    request = worker_pb2.ReadBlocksRequest(
                        worker_epoch=source.worker_epoch,
                        layout=records.layout,
                        block_ids=source.block_ids[4 * place.start : 4 * place.stop],
                        hashes=b"".join(wanted.digest for wanted in part),
                    )
                    async with contextlib.aclosing(self._read_part(channel, request, part, of_part)) as batches:
                        async for found in batches:
                            yield found
                            num_found += len(found)
                    if num_found < place.stop:
                        return
        except grpc.aio.AioRpcError as error:
            raise FetchEndedError(f"worker {source.worker_id}: {error.code().name}: {error.details()}") from None

    @contextlib.asynccontextmanager
    async def _connected(self, address: str, worker_id: str) -> AsyncGenerator[grpc.aio.Channel, None]:
        """Keeps channels for the next fetches: a drain makes many, and a handshake takes longer than most of them. A
        channel is closed only while no call uses it, because the calls would be cancelled.
        """
        key, channels = (address, worker_id), self._channels
        used = channels.pop(key, None) or OpenChannel(self._open_worker(address, worker_id))
        channels[key] = used
        used.num_calls += 1
        try:
            yield used.channel
        except grpc.aio.AioRpcError:  # the next fetch does not wait until this channel connects again
            channels.pop(key, None)
            raise
        finally:
            used.num_calls -= 1
            if len(channels) > MAX_CHANNELS and channels.get(key) is used:
                del channels[key]
            if not used.num_calls and channels.get(key) is not used:
                await used.channel.close()

    async def _read_part(
        self,
        channel: grpc.aio.Channel,
        request: worker_pb2.ReadBlocksRequest,
        part: Sequence[WantedBlock],
        records: RecordFormat,
    ) -> AsyncGenerator[list[Found], None]:
        """The blocks of one call: from memory that a source on this host shares, else from its messages. Some arrive
        and are checked while those before them are written. The last ones are written when the memory is given back.
        """
        async with self._memory_for(request, len(part) * records.num_bytes) as memory:
            read = channel.unary_stream(
                READ_BLOCKS,
                request_serializer=worker_pb2.ReadBlocksRequest.SerializeToString,
                response_deserializer=records_from_wire,
            )
            messages = read(request, timeout=FETCH_TIMEOUT_S)
            async with contextlib.aclosing(one_ahead(self._received(messages, memory, part, records))) as batches:
                async for checked in batches:
                    found, error = await checked
                    yield found
                    if error is not None:
                        raise error

    async def _received(
        self,
        messages: AsyncIterable[SentRecords | None],
        memory: memoryview | None,
        part: Sequence[WantedBlock],
        records: RecordFormat,
    ) -> AsyncGenerator[asyncio.Future[Checked], None]:
        """The blocks of each message. They are checked in the order in which they arrive."""
        loop, sent, start, size = asyncio.get_running_loop(), list[memoryview](), 0, records.num_bytes
        async for message in messages:
            if message is None:
                raise FetchEndedError("the source sent a message that cannot be decoded")
            if message.num_shared and memory is not None:
                data = memory[start * size : (start + message.num_shared) * size]
            else:
                sent.append(message.data)
                if sum(map(len, sent)) < size:
                    continue
                data = sent[0] if len(sent) == 1 else memoryview(b"".join(sent))
            wanted = part[start : start + len(data) // size]
            if not wanted:
                raise FetchEndedError("the source sent more blocks than were wanted")
            yield loop.run_in_executor(self._receivers, self._unpack_all, records, data, wanted)
            sent, start = [], start + len(wanted)

    @contextlib.asynccontextmanager
    async def _memory_for(
        self, request: worker_pb2.ReadBlocksRequest, num_bytes: int
    ) -> AsyncGenerator[memoryview | None, None]:
        """Memory for the answer to a request, which gets its name; None if this system has none. After a call that has
        not ended as it should, the source may still write to it.
        """
        memory, self._memory = self._memory, None
        try:
            if memory is None or len(memory.view) < num_bytes:
                memory = SharedMemory(max(num_bytes, CALL_BYTES))
        except (OSError, AttributeError):
            yield None
            return
        request.memory.pid, request.memory.descriptor, request.memory.name = memory.pid, memory.descriptor, memory.name
        try:
            async with self._open_for_nixl(memory, request):
                yield memory.view
        except BaseException:
            self._close_memory(memory)
            raise
        if self._memory is None:
            self._memory = memory
        else:
            self._close_memory(memory)

    @contextlib.asynccontextmanager
    async def _open_for_nixl(
        self, memory: SharedMemory, request: worker_pb2.ReadBlocksRequest
    ) -> AsyncGenerator[None, None]:
        if self._nixl is None:
            yield
            return
        with contextlib.suppress(NixlError):
            request.nixl_memory.CopyFrom(self._nixl.register(memory.view))
        task = asyncio.create_task(_progress(self._nixl))
        try:
            yield
        finally:
            await cancel(task)

    def _close_memory(self, memory: SharedMemory) -> None:
        memory.close()
        if self._nixl is not None:
            self._nixl.forget(memory.view)

    def _unpack_all(self, records: RecordFormat, data: memoryview, wanted: Sequence[WantedBlock]) -> Checked:
        """The blocks of some records, up to one that is not the wanted block."""
        found, size = list[Found](), records.num_bytes
        for start, one in zip(range(0, len(data), size), wanted, strict=False):
            try:
                found.append(self._unpack(records, data[start : start + size], one))
            except FetchEndedError as error:
                return found, error
        return found, None

    def _unpack(self, records: RecordFormat, record: memoryview, wanted: WantedBlock) -> Found:
        try:
            found = records.unpack(record, wanted)
        except BadRecordError as error:
            self.counts.num_refused += 1
            raise FetchEndedError(f"a block from another worker is not used: {error}") from None
        self.counts.blocks_in += 1
        self.counts.bytes_in += len(record)
        return found

    # -- serving ------------------------------------------------------------------------------------------------------

    async def read(self, request: worker_pb2.ReadBlocksRequest) -> AsyncIterator[Answer]:
        """The records of committed blocks, for another worker."""
        records = self._movable()
        if not self._settings.kv_transfer:
            raise UnavailableError("this worker serves no blocks; start it with --kv-transfer")
        if request.worker_epoch != self._executor.worker_epoch:
            raise StaleEpochError("worker_epoch is not that of this process", field="worker_epoch")
        if request.layout != records.layout:
            raise StaleEpochError("layout is not that of this worker's blocks", field="layout")
        ids, digests = _block_ids(request), split(request.hashes)
        if len(digests) != len(ids):
            raise InvalidRequestError(f"{len(ids)} block_ids with {len(digests)} hashes", field="hashes")
        self.num_reads += 1
        try:
            wanted = list(zip(ids.tolist(), digests, strict=True))
            async with contextlib.aclosing(one_ahead(self._packed(records, wanted, request))) as parts:
                async for packed in parts:
                    for answer in await packed:
                        yield answer
        except NixlError as error:
            log.warning("%s; blocks go by gRPC for %g s", error, REST_S)
            raise UnavailableError(str(error)) from None
        finally:
            self.num_reads -= 1

    def _outlet(self, request: worker_pb2.ReadBlocksRequest, num_bytes: int) -> Outlet:
        memory = self._find(request.memory, num_bytes) if request.memory.pid and num_bytes else None
        if memory is not None:
            return Shared(memory)
        if self._nixl is not None and request.HasField("nixl_memory") and not self._nixl.is_resting:
            return OverNixl(self._nixl, request.nixl_memory)
        return Messages()

    def _find(self, named: worker_pb2.SharedMemory, size: int) -> memoryview | None:
        """The memory of a reader. It stays mapped for the next calls, because a new mapping costs more than the copies:
        each page of it is found at its first use.
        """
        found = self._mapped.pop(named.name, None)
        if found is None or len(found) < size:
            found = find_shared_memory(named.pid, named.descriptor, named.name, size)
        if found is None:
            return None
        self._mapped[named.name] = found
        if len(self._mapped) > MAX_MAPPED:
            del self._mapped[next(iter(self._mapped))]
        return found

    async def _packed(
        self, records: RecordFormat, wanted: Sequence[tuple[int, bytes]], request: worker_pb2.ReadBlocksRequest
    ) -> AsyncGenerator[asyncio.Future[list[Answer]], None]:
        """The answers for each part of the wanted blocks, which one thread makes one after the other."""
        loop = asyncio.get_running_loop()
        outlet = self._outlet(request, sum(records.of(block).num_bytes for block, _ in wanted))
        for of_part, found in records.parts([block for block, _ in wanted], outlet.part_bytes):
            yield loop.run_in_executor(self._senders, self._pack_part, outlet, of_part, wanted[found])

    def _pack_part(self, outlet: Outlet, records: RecordFormat, wanted: Sequence[tuple[int, bytes]]) -> list[Answer]:
        """The answers for these blocks: none after a block that was not there, because the call may have ended."""
        if outlet.has_ended:
            return []
        size = records.num_bytes
        count, answers = outlet.send(partial(self._pack_all, records, wanted), len(wanted), size)
        self.counts.blocks_out += count
        self.counts.bytes_out += count * size
        outlet.has_ended = count < len(wanted)
        return answers

    def _pack_all(self, records: RecordFormat, wanted: Sequence[tuple[int, bytes]], into: memoryview) -> int:
        """Write the records of these blocks, one after the other. Returns how many, up to one that is not there."""
        places = np.frombuffer(into, np.uint8)[: len(wanted) * records.num_bytes].reshape(len(wanted), -1)
        with records.reading(wanted) as reading:
            for count, ((block, digest), place) in enumerate(zip(wanted, places, strict=True)):
                if not reading.pack(digest, Origin(self._executor.worker_epoch, block), place):
                    return count
        return len(wanted)

    # -- announcing ---------------------------------------------------------------------------------------------------

    async def watch(self, request: worker_pb2.WatchTierRequest) -> AsyncIterator[worker_pb2.WatchTierResponse]:
        """What the tier holds, then each change."""
        lease, store = self._executor.check_fence(request.fence), self.store
        if store is None:
            raise UnavailableError("this worker has no tier; start it with --kv-host-memory or --kv-disk")
        loop, has_changed, changes = asyncio.get_running_loop(), asyncio.Event(), dict[bytes, str | None]()
        end: list[ServiceError] = []

        def change(digest: bytes, tier: str | None) -> None:
            changes[digest] = tier
            has_changed.set()

        def end_watch(error: ServiceError) -> None:
            end.append(error)
            has_changed.set()

        def on_change(digest: bytes, tier: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(change, digest, tier)

        held = store.watch(on_change)
        unwatch = lease.watch(end_watch)
        try:
            for message in _tiers_to_proto(held):
                yield message
            yield worker_pb2.WatchTierResponse(is_listed=True)
            while not end:
                await has_changed.wait()
                await asyncio.sleep(WATCH_PAUSE_S)
                has_changed.clear()
                news = changes.copy()
                changes.clear()
                for message in _tiers_to_proto(news):
                    yield message
            raise end[0]
        finally:
            store.unwatch(on_change)
            unwatch()


async def _writing(blocks: Movable, filled: list[Filled]) -> Callable[[], None]:
    """What fills the blocks. Copies to a device are made before."""
    try:
        return await asyncio.to_thread(blocks.writing, filled) if blocks.is_on_device else blocks.writing(filled)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise FetchEndedError(f"no memory for blocks that arrived: {error}") from error


def _nixl_agent() -> NixlAgent | None:
    try:
        return NixlAgent()
    except NixlError as error:
        log.warning("--kv-nixl has no effect, blocks go by gRPC: %s", error)
        return None


async def _progress(agent: NixlAgent) -> None:
    while True:
        agent.progress()
        await asyncio.sleep(PROGRESS_S)


def _tiers_to_proto(tiers: Mapping[bytes, str | None]) -> Iterator[worker_pb2.WatchTierResponse]:
    """The tier of each of these digests."""
    found = list(tiers.items())
    for start in range(0, len(found), MAX_LISTED):
        columns: dict[str | None, bytearray] = {tier: bytearray() for tier in (MemoryTier.name, DiskTier.name, None)}
        for digest, tier in found[start : start + MAX_LISTED]:
            columns[tier] += digest
        in_memory, on_disk, removed = map(bytes, columns.values())
        yield worker_pb2.WatchTierResponse(added=on_disk, removed=removed, added_to_memory=in_memory)


def _block_ids(request: worker_pb2.ReadBlocksRequest) -> U32:
    try:
        return u32_from_bytes(request.block_ids, "block_ids")
    except WireError as error:
        raise InvalidRequestError(str(error), field=error.field) from None


def split(hashes: bytes) -> Sequence[bytes]:
    """The digests of a column."""
    return [hashes[start : start + DIGEST_BYTES] for start in range(0, len(hashes), DIGEST_BYTES)]
