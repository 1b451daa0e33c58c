"""Files and batches as JSON documents and parts, sealed by a cipher, on a shelf: in Redis or in a folder.

An *item* is a file or a batch: a document and, of a file, a list of parts that only grows. Its name is OWNER/id. A
part of an input is a *chunk*: some whole lines, the unit that a gateway takes. Leases of chunks only save work. An
answer counts if it is the first one of its line, so a gateway that has lost its lease repeats and loses nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from gateway_svc.batches.folder_shelf import FolderShelf
from gateway_svc.batches.lines import BATCH, FILE, LineAnswer
from gateway_svc.batches.redis_shelf import RedisShelf
from gateway_svc.records.cipher import Cipher, UnreadableValueError
from svc_common.errors import NotFoundError

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
        """Add an item that lives until its `deleted_at`."""
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
