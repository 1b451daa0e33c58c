"""Files and batches of the current caller: their flags, their life, and how they are stored: as JSON documents and
parts, sealed by a cipher, on a shelf in Redis or in a folder.

An *item* is a file or a batch: a document and, of a file, a list of parts that only grows. Its name is OWNER/id. A
part of an input is a *chunk*: some whole lines, the unit that a gateway takes. Leases of chunks only save work. An
answer counts if it is the first one of its line, so a gateway that has lost its lease repeats and loses nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway_svc.batches.folder_shelf import FolderShelf
from gateway_svc.batches.lines import BATCH, FILE, MESSAGES, URLS, LineAnswer
from gateway_svc.batches.redis_shelf import RedisShelf
from gateway_svc.callers.caller import current_caller, record_target, scoped
from gateway_svc.records.cipher import Cipher, UnreadableValueError, make_cipher
from gateway_svc.request.field_errors import invalid
from gateway_svc.request.validation import REQUEST_ID
from svc_common.config import OFF, Flag, FlagGroup, in_range, path, size_bytes
from svc_common.errors import InvalidRequestError, NotConfiguredError, NotFoundError, OverloadedError
from svc_common.redis.server import RedisServer

log = logging.getLogger(__name__)

LEASE_S = 10.0
PAGE = 32  # parts that are read at once

Json = dict[str, Any]


class BatchStore:
    """Items as documents. `shelf` has the other methods; all raise UnavailableError if it does not answer."""

    def __init__(self, shelf: RedisShelf | FolderShelf, cipher: Cipher) -> None:
        self.shelf = shelf
        self._cipher = cipher

    async def create(self, name: str, doc: Json, limit: int) -> bool:
        """Add an item that lives until its `deleted_at`; one that exists stays as it is."""
        return await self.shelf.create(kind_of(name), name, self._seal(name, doc), doc["deleted_at"], limit)

    async def drop(self, name: str) -> None:
        """Delete an item with all that belongs to it."""
        await self.shelf.drop(kind_of(name), name)

    async def find(self, *names: str) -> list[Json]:
        """The documents with `bytes` and `counts`, without those that do not exist or cannot be read."""
        found = []
        for name, item in zip(names, await self.shelf.load(names), strict=True):
            try:
                found += [] if item is None else [self._opened(name, *item)]
            except UnreadableValueError as error:
                log.error("%s cannot be read: %s", name, error)
        return found

    async def change(self, name: str, change: Callable[[Json], None]) -> Json:
        """Change a document. Raises NotFoundError."""
        while (found := (await self.shelf.load([name]))[0]) is not None:
            doc = json.loads(self._cipher.open(found[0], name.encode()))
            change(doc)
            if await self.shelf.swap(name, found[0], self._seal(name, doc), doc["deleted_at"]):
                return {**doc, "bytes": found[1], "counts": found[2]}
        raise NotFoundError(f"{name.rpartition('/')[2]} was deleted")

    async def add(self, name: str, part: bytes) -> bool:
        """Append a part. False if there is no such file."""
        return await self.shelf.add(name, self._cipher.seal(part, name.encode()), len(part))

    async def parts(self, name: str, start: int = 0, count: int = PAGE) -> list[bytes]:
        """Parts of a file from an index on; none after its end."""
        return [self._cipher.open(part, name.encode()) for part in await self.shelf.parts(name, start, count)]

    async def put(self, name: str, doc: Json, chunk: int, line: int, result: tuple[str, bytes]) -> None:
        """Store the result of a line of a chunk, once."""
        kind, data = result
        file = beside(name, doc["output" if kind == "succeeded" else "errors"])
        await self.shelf.put(
            name, chunk, LineAnswer(line, kind, self._cipher.seal(data, file.encode()), len(data)), file
        )

    def _seal(self, name: str, doc: Json) -> bytes:
        return self._cipher.seal(json.dumps(doc).encode(), name.encode())

    def _opened(self, name: str, doc: bytes, num_bytes: int, counts: Mapping[str, int]) -> Json:
        return {**json.loads(self._cipher.open(doc, name.encode())), "bytes": num_bytes, "counts": counts}


def kind_of(name: str) -> str:
    """FILE or BATCH, by the id in a name."""
    return FILE if name.rpartition("/")[2].startswith(FILE) else BATCH


def beside(name: str, item_id: str) -> str:
    """The name of another item of the same owner."""
    return name[: name.rfind("/") + 1] + item_id


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

    async def create(
        self, endpoint: object, file_id: str, window: object, own: Mapping[str, Any], *, key: str = ""
    ) -> Json:
        """Start a batch over a file. A call with the `key` of an earlier one returns its batch."""
        found = WINDOW.fullmatch(window) if isinstance(window, str) else None
        window_s = int(found[1]) * UNITS_S[found[2]] if found else 0
        if not 0 < window_s <= self.limits.ttl_s:
            words = f"must be a time such as 24h of at most {self.limits.ttl_s:.0f} s (--batch-ttl-s)"
            raise invalid("completion_window", f"is {str(window)[:80]!r}; {words}")
        if endpoint not in URLS:
            raise invalid("endpoint", f"is {str(endpoint)[:80]!r}; must be one of {', '.join(URLS)}")
        if (await self.find(FILE, file_id, "input_file_id"))["purpose"] != BATCH:
            raise invalid("input_file_id", f"is {file_id!r}; must be a file with the purpose batch")
        now, end = int(time.time()), hashlib.sha256(key.encode()).hexdigest()[:24] if key else secrets.token_hex(12)
        doc = {
            "id": f"{'msgbatch' if endpoint == MESSAGES else 'batch'}_{end}",
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
        made = await self.find(BATCH, doc["id"])
        if any(made[name] != doc[name] for name in ("endpoint", "input", "window")):
            raise invalid("Idempotency-Key", f"was sent with another batch, {doc['id']}; send a new key")
        return made

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


BATCH_FLAGS = FlagGroup("files and batches of --http-listen, in Redis or in a folder (docs/batches.md)", (
    Flag("--batch-dir", path,
        "without --redis: folder of the files and batches, which the gateways of one machine may share. Unset: none",
        metavar="DIR",
    ),
    Flag("--batch-concurrency", in_range(int, 0, 100_000),
        "lines of batches that this gateway has open at the same time. 0: other gateways answer them", default=64,
    ),
    Flag("--batch-max-lines", in_range(int, 1, 1_000_000), "limit of the requests in one batch", default=50_000),
    Flag("--batch-max-bytes", size_bytes,
        "limit on the size of all files of one owner; with its results, an owner may exceed it", default="1G",
    ),
    Flag("--batch-max-files", in_range(int, 1, 100_000), "limit of the files, and of the batches, of one owner",
        default=1000,
    ),
    Flag("--batch-ttl-s", in_range(float, 60.0, 365 * 86_400.0),
        "a file is deleted this long after its upload, and a batch with its results this long after its "
        "completion_window, which is at most as long", default=7 * 86_400.0,
    ),
))  # fmt: skip


def make_batches(args: argparse.Namespace, redis: RedisServer | None) -> Batches:
    """Files and batches of this deployment. Raises SettingError."""
    limits = BatchLimits(args.batch_max_lines, args.batch_max_bytes, args.batch_max_files, args.batch_ttl_s)
    if args.http_listen == OFF or (redis is None and args.batch_dir is None):
        return Batches(None, limits)
    shelf = RedisShelf(redis, namespace=args.redis_namespace) if redis else FolderShelf(args.batch_dir)
    return Batches(BatchStore(shelf, make_cipher(args.record_key_file)), limits)
