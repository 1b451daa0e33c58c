"""Files and batches of the current caller. Those of other owners do not exist for it."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway_svc.batches.lines import BATCH, FILE, MESSAGES, URLS
from gateway_svc.batches.store import BatchStore, Json, beside, kind_of
from gateway_svc.callers.caller import current_caller, record_target, scoped
from gateway_svc.request.field_errors import invalid
from gateway_svc.request.validation import REQUEST_ID
from svc_common.errors import InvalidRequestError, NotConfiguredError, NotFoundError, OverloadedError

PENDING_S = 3600.0  # an upload that takes longer is deleted
WINDOW = re.compile(r"([1-9]\d{0,5})([smhd])")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
FILES = ("input", "output", "errors")  # fields of a batch
OPEN = ("validating", "in_progress", "cancelling")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`max_bytes` and `max_files` (and as many batches) are limits of one owner."""

    max_lines: int
    max_bytes: int
    max_files: int
    ttl_s: float


class Batches:
    """Methods raise ServiceError. `started` is set when there is a new batch."""

    def __init__(self, store: BatchStore | None, limits: BatchLimits) -> None:
        self._store = store
        self.limits = limits
        self.started = asyncio.Event()

    @property
    def are_kept(self) -> bool:
        return self._store is not None

    @property
    def store(self) -> BatchStore:
        """Raises NotConfiguredError if this gateway keeps no files."""
        if self._store is None:
            words = "start the gateways with --redis, or those of one machine with --batch-dir"
            raise NotConfiguredError(f"this deployment keeps no files and batches; {words}")
        return self._store

    async def close(self) -> None:
        if self._store is not None:
            await self._store.shelf.close()

    async def upload(self, parts: AsyncIterator[bytes], describe: Callable[[], Json]) -> Json:
        """Store a file that arrives in parts. `describe` gives the fields of its document after the last part."""
        now = int(time.time())
        doc: Json = {"id": f"file-{secrets.token_hex(12)}", "created_at": now, "deleted_at": now + PENDING_S}
        await self._create({**doc, "status": "uploading"})
        name, number, size = scoped(doc["id"]), 0, 0
        try:
            used = await self._used()
            async for part in parts:
                number, size = number + 1, size + len(part)
                self._check(used + size, number)
                if not await self.store.add(name, part):
                    raise NotFoundError("the upload took too long, and was deleted")
            self._check(await self._used(), number)  # other uploads may have ended meanwhile
            own = {**describe(), "status": "processed", "deleted_at": now + self.limits.ttl_s}
            return await self.store.change(name, lambda doc: doc.update(own))
        except BaseException:
            await asyncio.shield(self.store.drop(name))
            raise

    async def _used(self) -> int:
        names = await self.store.shelf.names(FILE, current_caller.get().owner)
        return sum(item[1] for item in await self.store.shelf.load(names) if item is not None)

    def _check(self, used: int, num_parts: int) -> None:
        if used > self.limits.max_bytes or num_parts > self.limits.max_lines:
            raise InvalidRequestError(
                f"the files of this owner would have more than {self.limits.max_bytes} bytes (--batch-max-bytes), or "
                f"this one more than {self.limits.max_lines} lines (--batch-max-lines); delete files, or send less",
                field="file",
            )

    async def content(self, *file_ids: str) -> AsyncGenerator[bytes, None]:
        """The content of files, one after the other. That of results ends with the last one so far."""
        for file_id in file_ids:
            start = 0
            while parts := await self.store.parts(scoped(file_id), start):
                yield b"".join(parts)
                start += len(parts)

    async def delete(self, kind: str, item_id: str) -> None:
        """Delete a file, or a batch with its files. Not while a batch is open."""
        doc = await self.find(kind, item_id)
        if scoped(item_id) in await names_in_use(self.store):
            raise invalid(f"{kind}_id", f"is {item_id!r}, which belongs to an open batch; cancel it first")
        for each in {item_id, *(doc[of] for of in FILES if of in doc)}:
            await self.store.drop(scoped(each))

    async def create(self, endpoint: object, file_id: str, window: object, own: Mapping[str, Any]) -> Json:
        """Start a batch over a file."""
        found = WINDOW.fullmatch(window) if isinstance(window, str) else None
        window_s = int(found[1]) * UNITS_S[found[2]] if found else 0
        if not 0 < window_s <= self.limits.ttl_s:
            words = f"must be a time such as 24h of at most {self.limits.ttl_s:.0f} s (--batch-ttl-s)"
            raise invalid("completion_window", f"is {str(window)[:80]!r}; {words}")
        if endpoint not in URLS:
            raise invalid("endpoint", f"is {str(endpoint)[:80]!r}; must be one of {', '.join(URLS)}")
        if (await self.find(FILE, file_id, "input_file_id"))["purpose"] != BATCH:
            raise invalid("input_file_id", f"is {file_id!r}; must be a file with the purpose batch")
        now = int(time.time())
        doc = {
            "id": f"{'msgbatch' if endpoint == MESSAGES else 'batch'}_{secrets.token_hex(12)}",
            "endpoint": endpoint,
            "input": file_id,
            "window": window,
            "status": "validating",
            "created_at": now,
            "expires_at": now + window_s,
            "deleted_at": now + window_s + self.limits.ttl_s,
            "total": 0,
            **own,
        }
        await self._create(doc)
        self.started.set()
        return {**doc, "counts": {}}

    async def cancel(self, batch_id: str) -> Json:
        """End a batch. One that has ended stays as it is."""
        await self.find(BATCH, batch_id)

        def cancel(doc: Json) -> None:
            if doc["status"] in OPEN[:2]:
                doc.update(status="cancelling", cancelling_at=int(time.time()))

        return await self.store.change(scoped(batch_id), cancel)

    async def _create(self, doc: Json) -> None:
        if not await self.store.create(scoped(doc["id"]), doc, self.limits.max_files):
            words = f"this owner has {self.limits.max_files} files or batches, the limit (--batch-max-files)"
            raise OverloadedError(f"{words}; delete some, or wait until some expire", retry_after_s=60.0)

    async def find(self, kind: str, item_id: str, field: str = "") -> Json:
        """The document of a file or a batch, with `bytes` and `counts`."""
        found = list[Json]()
        if REQUEST_ID.fullmatch(item_id) and kind_of(item_id) == kind:
            record_target(item_id)
            found = await self.store.find(scoped(item_id))
        if not found or found[0]["status"] == "uploading":
            words = f"there is no {kind} {item_id[:80]!r}: it has expired or was deleted"
            raise NotFoundError(words, field=field or f"{kind}_id")
        return found[0]

    async def all(self, kind: str) -> list[Json]:
        """The files or batches of the caller, the newest first."""
        names = await self.store.shelf.names(kind, current_caller.get().owner)
        return [doc for doc in await self.store.find(*names) if doc["status"] != "uploading"]


async def names_in_use(store: BatchStore) -> set[str]:
    """All open batches and their files."""
    names = await store.shelf.working()
    docs = await store.find(*names)
    by_id = {name.rpartition("/")[2]: name for name in names}
    return {*names, *(beside(by_id[doc["id"]], doc[of]) for doc in docs for of in FILES if of in doc)}


async def sweep(store: BatchStore) -> None:
    """Delete what has expired."""
    due = await store.shelf.due(time.time())
    for name in set(due) - (await names_in_use(store) if due else set()):
        await store.drop(name)
