"""The part of a gateway that answers the lines of open batches.

All gateways look for chunks that none has a lease of, and take them while fewer than `concurrency` lines wait or are
open here. A line is sent like a call of its owner, at the lowest priority, until its answer is not "retry later". Its
result is stored once, so a chunk that a second gateway answers too, after a lease has expired, changes nothing. A
batch without chunks to do has ended.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from gateway_svc.batches.batches import LEASE_S, OPEN, Batches, Json, beside, sweep
from gateway_svc.batches.lines import (
    LINE,
    UNCHECKED,
    BatchLine,
    Checker,
    Reply,
    TakenChunk,
    lines_of,
    request_of,
    result_of,
    unsent,
)
from gateway_svc.callers.caller import Caller, current_caller
from gateway_svc.records.fields import owner_of
from svc_common.errors import NotFoundError, UnavailableError
from svc_common.tasks import cancel

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.5
IDLE_S = 30.0  # how often a gateway looks for batches of others while there is none
SWEEP_S = 60.0
MAX_RETRY_S = 10.0
NO_LIMIT = 2**31  # results are stored also above the limits of an owner

Send = Callable[[str, bytes], Awaitable[Reply]]
"""Sends a body to an endpoint, as a call of the current caller."""


class BatchRunner:
    """Owns the chunks that this gateway has leased. `close` gives them back."""

    def __init__(self, batches: Batches, send: Send, concurrency: int) -> None:
        self._batches = batches
        self._store, self._shelf = batches.store, batches.store.shelf
        self._send = send
        self._concurrency = concurrency
        self._places = asyncio.Semaphore(concurrency)
        self._chunks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._waiting: dict[tuple[str, int], dict[int, BatchLine]] = {}  # lines without an answer
        self._has_chunks = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._repeat(run)) for run in (self._take, self._keep, self._sweep)]

    async def close(self) -> None:
        """Stop, and end the leases, so that other gateways take the chunks at once."""
        held = list(self._chunks)
        await cancel(*self._tasks, *self._chunks.values())
        if held:
            with suppress(UnavailableError):  # then they end by themselves
                await self._shelf.keep(held, 0)

    async def _repeat(self, run: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await run()
            except (UnavailableError, NotFoundError):
                await asyncio.sleep(POLL_S)
            except Exception:
                log.exception("batches: a step failed and is repeated")
                await asyncio.sleep(POLL_S)

    async def _take(self) -> None:
        """Take a chunk of each open batch in turn while there is room."""
        found = False
        working = await self._shelf.working()
        for name in random.sample(working, len(working)):
            if sum(map(len, self._waiting.values())) >= self._concurrency:
                break
            taken = await self._shelf.take(name, LEASE_S)
            if not taken.left:
                await self._end(name)
            elif taken.chunk is not None and (name, taken.chunk) not in self._chunks:
                found = True
                await self._begin(name, taken.chunk, taken)
        if not found:
            self._batches.started.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._batches.started.wait(), POLL_S if working else IDLE_S)

    async def _keep(self) -> None:
        await self._has_chunks.wait()
        await asyncio.sleep(LEASE_S / 3)
        if self._chunks:
            await self._shelf.keep(list(self._chunks), LEASE_S)

    async def _sweep(self) -> None:
        await sweep(self._store)
        await asyncio.sleep(SWEEP_S)

    # -- chunks -------------------------------------------------------------------------------------------------------

    async def _begin(self, name: str, chunk: int, taken: TakenChunk) -> None:
        key, doc, lines = (name, chunk), await self._doc(name), list[BatchLine]()
        if chunk != UNCHECKED:
            (part,) = await self._store.parts(beside(name, doc["input"]), chunk, 1)
            lines = await asyncio.to_thread(lambda: [LINE.decode(line) for line in lines_of(part)])
        self._waiting[key] = {i: line for i, line in enumerate(lines) if i not in taken.answered}
        task = self._chunks[key] = asyncio.create_task(self._run(name, doc, chunk))
        task.add_done_callback(lambda _: self._forget(key))
        self._has_chunks.set()

    def _forget(self, key: tuple[str, int]) -> None:
        del self._chunks[key], self._waiting[key]
        if not self._chunks:
            self._has_chunks.clear()
        self._batches.started.set()

    async def _run(self, name: str, doc: Json, chunk: int) -> None:
        try:
            if chunk == UNCHECKED:
                await self._check(name, doc)
                return
            current_caller.set(Caller(owner_of(name), f"batch:{doc['id']}", counts_apart=True))
            waiting = self._waiting[name, chunk]
            sending = [asyncio.create_task(self._line(name, doc, chunk, i)) for i in waiting]
            try:
                kind = await self._until_ended(name, sending)
            finally:
                await cancel(*sending)
            rest = [self._put(name, doc, chunk, i, (kind, unsent(line, kind))) for i, line in waiting.items()]
            await asyncio.gather(*rest)
            await _stored(lambda: self._shelf.finish(name, chunk))
        except (NotFoundError, UnavailableError) as error:
            log.warning("batch %s: %s", name, error.message)
        except Exception:
            log.exception("batch %s: chunk %d failed and is taken again when its lease expires", name, chunk)

    async def _until_ended(self, name: str, sending: list[asyncio.Task[None]]) -> str:
        """Wait for all lines, or until the batch ends before: `canceled` or `expired`. Raises a line's exception."""
        pending: Any = sending
        while pending:
            doc = await _stored(lambda: self._doc(name))
            left_s = doc["expires_at"] - time.time()
            if doc["status"] == "cancelling" or left_s <= 0:
                return "canceled" if doc["status"] == "cancelling" else "expired"
            timeout_s = min(LEASE_S / 3, left_s)
            done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        return ""

    async def _line(self, name: str, doc: Json, chunk: int, index: int) -> None:
        async with self._places:
            waiting, delay_s = self._waiting[name, chunk], 0.25
            line = waiting[index]
            body = request_of(line, doc["id"])
            while (reply := await self._send(line.url, body)).retry_after_s is not None:
                delay_s = min(MAX_RETRY_S, 2 * delay_s)
                await asyncio.sleep(max(reply.retry_after_s, delay_s * random.uniform(0.5, 1.0)))
            await self._put(name, doc, chunk, index, result_of(line, reply))
            del waiting[index]

    async def _put(self, name: str, doc: Json, chunk: int, index: int, result: tuple[str, bytes]) -> None:
        await _stored(lambda: self._store.put(name, doc, chunk, index, result))

    # -- states of a batch --------------------------------------------------------------------------------------------

    async def _check(self, name: str, doc: Json) -> None:
        """Check the input of a batch, and open its chunks, or end it with the problems."""
        source, checker = beside(name, doc["input"]), Checker(doc["endpoint"], self._batches.limits.max_lines)
        while parts := await self._store.parts(source, checker.num_chunks):
            for part in parts:
                await asyncio.to_thread(checker.check, part)
        checker.end()
        files = {of: f"file-{of}-{doc['id'].partition('_')[2]}" for of in ("output", "errors")}
        for of, file_id in files.items():
            about = {"id": file_id, "filename": f"{doc['id']}_{of}.jsonl", "purpose": "batch_output"}
            times = {"status": "processed", "created_at": doc["created_at"], "deleted_at": doc["deleted_at"]}
            if not checker.problems and not await self._store.find(beside(name, file_id)):
                await self._store.create(beside(name, file_id), about | times, NO_LIMIT)

        def begin(doc: Json) -> None:
            if checker.problems:
                doc.update(status="failed", problems=checker.problems, failed_at=int(time.time()))
                return
            doc.update(files, total=checker.num_lines)
            if doc["status"] == "validating":
                doc.update(status="in_progress", in_progress_at=int(time.time()))

        await self._store.change(name, begin)
        await self._shelf.open(name, 0 if checker.problems else checker.num_chunks)

    async def _end(self, name: str) -> None:
        """Note the end of a batch whose lines all have answers."""
        counts = (await self._doc(name))["counts"]

        def end(doc: Json) -> None:
            if doc["status"] in OPEN:
                ended = "expired" if counts.get("expired") else "completed"
                status = "cancelled" if doc["status"] == "cancelling" else ended
                doc.update({"status": status, f"{status}_at": int(time.time())})

        await self._store.change(name, end)
        await self._shelf.close_batch(name)

    async def _doc(self, name: str) -> Json:
        found = await self._store.find(name)
        if not found:
            await self._shelf.close_batch(name)
            raise NotFoundError(f"batch {name} was deleted")
        return found[0]


async def _stored(call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call that may be repeated, once the storage answers."""
    while True:
        try:
            return await call()
        except UnavailableError:
            await asyncio.sleep(POLL_S)
