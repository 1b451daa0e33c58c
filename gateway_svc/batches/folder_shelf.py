"""Files and batches in a folder, for the gateways of one machine without Redis: a database of SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from gateway_svc.batches.lines import BATCH, SWEPT, UNCHECKED, LineAnswer, TakenChunk
from gateway_svc.records.fields import owner_of
from svc_common.config import SettingError
from svc_common.errors import UnavailableError

T = TypeVar("T")

BUSY_S = 5.0  # how long a call waits for those of other gateways
OWNED = ("items", "parts", "todo", "done", "counts")
TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS items (name TEXT PRIMARY KEY, kind TEXT, owner TEXT, doc BLOB, created REAL, expires REAL,
    bytes INTEGER DEFAULT 0, is_open INTEGER DEFAULT 0) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_owner ON items (owner, kind, created);
CREATE INDEX IF NOT EXISTS by_end ON items (expires);
CREATE INDEX IF NOT EXISTS by_work ON items (name) WHERE is_open;
CREATE TABLE IF NOT EXISTS parts (name TEXT, number INTEGER, data BLOB, PRIMARY KEY (name, number));
CREATE TABLE IF NOT EXISTS todo (name TEXT, chunk INTEGER, lease REAL, PRIMARY KEY (name, chunk)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS done (name TEXT, chunk INTEGER, line INTEGER, PRIMARY KEY (name, chunk, line)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counts (name TEXT, kind TEXT, number INTEGER, PRIMARY KEY (name, kind)) WITHOUT ROWID;
"""


class FolderShelf:
    """A shelf that the gateways of this machine share, with the methods of RedisShelf. Raises SettingError."""

    def __init__(self, folder: Path) -> None:
        self._thread = ThreadPoolExecutor(1, "batches")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = self._thread.submit(_open, folder / "batches.sqlite").result()
        except (OSError, sqlite3.Error) as error:
            raise SettingError(f"--batch-dir {folder}: {error}") from None

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    async def create(self, kind: str, name: str, doc: bytes, expires_at: float, limit: int) -> bool:
        def call() -> bool:
            owner, is_batch = owner_of(name), kind == BATCH
            if self._do("SELECT 1 FROM items WHERE name = ?", name).fetchone():
                return True
            if self._do("SELECT count(*) FROM items WHERE owner = ? AND kind = ?", owner, kind).fetchone()[0] >= limit:
                return False
            values = name, kind, owner, doc, time.time(), expires_at, is_batch
            self._do("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, 0, ?)", *values)
            self._db.executemany("INSERT INTO todo VALUES (?, ?, 0)", [(name, UNCHECKED)] * is_batch)
            return True

        return await self._call(call)

    async def load(self, names: Sequence[str]) -> list[tuple[bytes, int, Mapping[str, int]] | None]:
        def call(name: str) -> tuple[bytes, int, Mapping[str, int]] | None:
            found = self._do("SELECT doc, bytes FROM items WHERE name = ?", name).fetchone()
            counts = dict(self._do("SELECT kind, number FROM counts WHERE name = ?", name).fetchall())
            return found and (*found, counts)

        return await self._call(lambda: [call(name) for name in names])

    async def swap(self, name: str, old: bytes, new: bytes, expires_at: float) -> bool:
        text = "UPDATE items SET doc = ?, expires = ? WHERE name = ? AND doc = ?"
        return await self._call(lambda: self._do(text, new, expires_at, name, old).rowcount == 1)

    async def names(self, kind: str, owner: str) -> list[str]:
        return await self._column(
            "SELECT name FROM items WHERE owner = ? AND kind = ? ORDER BY created DESC", owner, kind
        )

    async def drop(self, kind: str, name: str) -> None:
        await self._call(lambda: [self._do(f"DELETE FROM {table} WHERE name = ?", name) for table in OWNED])

    async def due(self, now: float) -> list[str]:
        return await self._column("SELECT name FROM items WHERE expires <= ? ORDER BY expires LIMIT ?", now, SWEPT)

    async def add(self, name: str, part: bytes, size: int) -> bool:
        return await self._call(lambda: self._add(name, part, size))

    def _add(self, name: str, part: bytes, size: int) -> bool:
        if not self._do("UPDATE items SET bytes = bytes + ? WHERE name = ?", size, name).rowcount:
            return False
        text = "INSERT INTO parts SELECT ?, coalesce(max(number), -1) + 1, ? FROM parts WHERE name = ?"
        self._do(text, name, part, name)
        return True

    async def parts(self, name: str, start: int, count: int) -> list[bytes]:
        text = "SELECT data FROM parts WHERE name = ? AND number >= ? ORDER BY number LIMIT ?"
        return await self._column(text, name, start, count)

    async def working(self) -> list[str]:
        return await self._column("SELECT name FROM items WHERE is_open")

    async def open(self, name: str, num_chunks: int) -> None:
        def call() -> None:
            if self._do("DELETE FROM todo WHERE name = ? AND chunk = ?", name, UNCHECKED).rowcount:
                self._db.executemany("INSERT INTO todo VALUES (?, ?, 0)", [(name, i) for i in range(num_chunks)])

        await self._call(call)

    async def take(self, name: str, lease_s: float) -> TakenChunk:
        def call() -> TakenChunk:
            now = time.time()
            (left,) = self._do("SELECT count(*) FROM todo WHERE name = ?", name).fetchone()
            found = self._do("SELECT chunk FROM todo WHERE name = ? AND lease <= ? LIMIT 1", name, now).fetchone()
            if found is None:
                return TakenChunk(None, left)
            self._do("UPDATE todo SET lease = ? WHERE name = ? AND chunk = ?", now + lease_s, name, *found)
            lines = self._do("SELECT line FROM done WHERE name = ? AND chunk = ?", name, *found)
            return TakenChunk(found[0], left, frozenset(line for (line,) in lines))

        return await self._call(call)

    async def keep(self, chunks: Sequence[tuple[str, int]], lease_s: float) -> None:
        rows = [(time.time() + lease_s if lease_s else 0.0, *chunk) for chunk in chunks]
        text = "UPDATE todo SET lease = ? WHERE name = ? AND chunk = ?"
        await self._call(lambda: self._db.executemany(text, rows))

    async def put(self, name: str, chunk: int, answer: LineAnswer, file: str) -> None:
        done = "INSERT OR IGNORE INTO done SELECT name, chunk, ? FROM todo WHERE name = ? AND chunk = ?"
        count = "INSERT INTO counts VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET number = number + 1"

        def call() -> None:
            if self._do(done, answer.line, name, chunk).rowcount:
                self._add(file, answer.data, answer.size)
                self._do(count, name, answer.kind)

        await self._call(call)

    async def finish(self, name: str, chunk: int) -> None:
        texts = [f"DELETE FROM {table} WHERE name = ? AND chunk = ?" for table in ("todo", "done")]
        await self._call(lambda: [self._do(text, name, chunk) for text in texts])

    async def close_batch(self, name: str) -> None:
        await self._call(lambda: self._do("UPDATE items SET is_open = 0 WHERE name = ?", name))

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _do(self, text: str, *values: Any) -> sqlite3.Cursor:
        return self._db.execute(text, values)

    async def _column(self, text: str, *values: Any) -> list[Any]:
        return await self._call(lambda: [row[0] for row in self._do(text, *values)])

    async def _call(self, call: Callable[[], T]) -> T:
        def transaction() -> T:
            with self._db:  # commits, or rolls back
                self._do("BEGIN IMMEDIATE")
                return call()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)
        except sqlite3.Error as error:
            words = f"the folder of files and batches (--batch-dir) cannot be used now: {error}; retry later"
            raise UnavailableError(words, retry_after_s=1.0) from None


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    db.executescript(TABLES)
    return db
