"""The fields of records: what is stored, and how in the memory of one gateway process, for a machine without Redis."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from svc_common.errors import OverloadedError

MAX_LISTED = 1000  # sessions of an owner that a list has
LEASE_S = 3.0  # a run renews its lease every second
TTL_S = 3600.0
MAX_BYTES = 4 << 20
END = "e:"  # begins the names of fields with the end of a sample


@dataclass(frozen=True, slots=True)
class Update:
    """New output of a run. `columns`: token ids by sample and output position."""

    record_id: str
    run: str
    columns: Mapping[tuple[int, int], bytes] = field(default_factory=dict)
    ends: Mapping[int, bytes] = field(default_factory=dict)
    releases: bool = False  # the run has ended


class Lifetime(NamedTuple):
    """Seconds until a record is deleted, and until its pin ends."""

    expires_in_s: float
    pinned_for_s: float


class RecordLimits(NamedTuple):
    """Limits of all records of one owner. None: no limit."""

    record_bytes: int | None = None
    max_records: int | None = None

    def allow(self, num_bytes: int, number: int) -> bool:
        """Whether records of this size and number are allowed."""
        is_small = self.record_bytes is None or num_bytes <= self.record_bytes
        return is_small and (self.max_records is None or number <= self.max_records)


NO_LIMITS = RecordLimits()


def owner_of(record_id: str) -> str:
    """The owner in the id of a record, OWNER/request_id; empty if callers are not identified."""
    return record_id.rpartition("/")[0]


@dataclass(slots=True)
class _Record:
    fields: dict[str, bytes]
    run: str
    lease_until: float
    expires_at: float
    size: int = 0
    pinned_until: float = 0.0
    refs: int = 0  # number of copies that share it


class MemoryFields:
    """Records of this process, at most `total_bytes`: the records that were written longest ago make room, unless their
    request is open or they are pinned. They end with the process. Times are seconds of `clock`. `max_bytes` limits a
    record: output above it is not stored.
    """

    def __init__(
        self,
        total_bytes: int,
        *,
        ttl_s: float = TTL_S,
        max_bytes: int = MAX_BYTES,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes = min(max_bytes, total_bytes)
        self._total_bytes = total_bytes
        self._ttl_s = ttl_s
        self._lease_s = lease_s
        self._clock = clock
        self._records: OrderedDict[str, _Record] = OrderedDict()  # the one written longest ago first
        self._size = 0
        self._lists: dict[str, dict[str, None]] = {}  # ids of sessions by owner, the newest last

    async def close(self) -> None:
        self._records.clear()

    async def create(
        self, record_id: str, request: bytes, run: str, *, shared_id: str = "", limits: RecordLimits = NO_LIMITS
    ) -> bool:
        """Create or replace a record, and give its lease to this run. False if its owner has reached a limit.

        A record that others share lives as long as they do, and ends with the last one that is deleted.
        Raises OverloadedError if open requests leave no room.
        """
        owner = owner_of(record_id)
        others = [one.size for name, one in self._records.items() if owner_of(name) == owner and name != record_id]
        if not limits.allow(len(request) + sum(others), 1 + len(others)):
            return False
        self._remove(record_id)
        if shared_id and self._find(shared_id) is None:
            return False
        if not self._make_room(len(request), keep=shared_id):
            raise OverloadedError(
                f"the records of open requests need more than {self._total_bytes} bytes (--record-memory); retry when "
                "some have ended, or start the gateways with --redis",
                retry_after_s=self._lease_s,
            )
        now = self._clock()
        self._records[record_id] = _Record({}, run, now + self._lease_s, now + self._ttl_s)
        self._put(self._records[record_id], "request", request)
        if shared_id:
            self._put(self._records[record_id], "shared", shared_id.encode())
            self._records[shared_id].refs += 1
        return True

    async def claim(self, record_id: str, run: str, *, by_force: bool) -> bool:
        """Give the lease to this run. False if another run has it or there is no record. `by_force`: end that lease."""
        record = self._find(record_id)
        if record is None or (not by_force and record.run != run and record.lease_until > self._clock()):
            return False
        record.run = run
        self._touch(record_id, record, self._lease_s)
        return True

    async def write(self, updates: Sequence[tuple[Update, Mapping[str, bytes]]]) -> list[bool]:
        """Store fields and renew leases. False for a run that has lost its record."""
        return [self._write(update, fields) for update, fields in updates]

    def _write(self, update: Update, fields: Mapping[str, bytes]) -> bool:
        record = self._find(update.record_id)
        if record is None or record.run != update.run:
            return False
        for name, value in fields.items():
            fits = record.size + len(value) <= self.max_bytes and self._make_room(len(value), keep=update.record_id)
            if fits or name.startswith(END):
                self._put(record, name, value)
        self._touch(update.record_id, record, 0.0 if update.releases else self._lease_s)
        return True

    async def put_object(self, record_id: str, value: bytes) -> bytes | None:
        """Store the field `object` unless the record has one. Returns the stored one; None if there is no record."""
        record = self._find(record_id)
        if record is None:
            return None
        if "object" not in record.fields and self._make_room(len(value), keep=record_id):
            self._put(record, "object", value)
        self._touch(record_id, record, record.lease_until - self._clock())
        return record.fields.get("object")

    async def delete(self, record_id: str) -> bool:
        """Delete a record. False if there is none."""
        is_known = self._find(record_id) is not None
        self._remove(record_id)
        return is_known

    async def load(self, record_id: str) -> tuple[Mapping[str, bytes], bool]:
        """The fields of a record, and whether a run has a lease. No fields if there is no record."""
        record = self._find(record_id)
        return ({}, False) if record is None else (dict(record.fields), record.lease_until > self._clock())

    async def is_open(self, record_id: str) -> bool:
        """Whether a run has not ended its lease of the record, also if that has expired: its gateway or Redis was lost
        before all output was stored. Reads nothing else."""
        record = self._find(record_id)
        return record is not None and record.lease_until > self._clock()

    async def pin(self, record_id: str, ttl_s: float, limit: int) -> bool:
        """Keep a record for at least this time. False if its owner has `limit` other pinned records."""
        record, now = self._find(record_id), self._clock()
        if record is None:
            return True
        others = {name: one for name, one in self._pinned() if one is not record}
        is_full = record.size + sum(one.size for one in others.values()) > self._total_bytes // 2
        num_pins = sum(owner_of(name) == owner_of(record_id) and not one.refs for name, one in others.items())
        if ttl_s and (is_full or num_pins >= limit):
            return False
        record.pinned_until = now + ttl_s if ttl_s else 0.0
        self._touch(record_id, record, record.lease_until - now)
        return True

    async def num_pinned(self) -> dict[str, int]:
        """Pinned records of each owner that has any."""
        return Counter(owner_of(name) for name, record in self._pinned() if not record.refs)

    def _pinned(self) -> list[tuple[str, _Record]]:
        now = self._clock()
        return [(name, record) for name, record in self._records.items() if record.pinned_until > now]

    async def lifetimes(self, record_ids: Sequence[str]) -> list[Lifetime | None]:
        """When each record ends; None for one that does not exist."""
        now, found = self._clock(), [self._find(record_id) for record_id in record_ids]
        return [
            None if record is None else Lifetime(record.expires_at - now, max(0.0, record.pinned_until - now))
            for record in found
        ]

    async def enlist(self, owner: str, record_id: str, instead_of: str) -> None:
        """Put a record into the owner's list of sessions; another one, which it continues, leaves it."""
        ids = self._lists.setdefault(owner, {})
        ids.pop(instead_of, None)
        ids.pop(record_id, None)
        if (base := self._find(instead_of)) is not None:
            self._put(base, "next", record_id.encode())
        ids[record_id] = None
        for oldest in list(ids)[:-MAX_LISTED]:
            del ids[oldest]

    async def listed(self, owner: str) -> list[str]:
        """The ids in the owner's list, the newest first. Some may have ended."""
        return list(reversed(self._lists.get(owner, {})))

    def _find(self, record_id: str) -> _Record | None:
        record = self._records.get(record_id)
        if record is not None and record.expires_at <= self._clock():
            self._remove(record_id)
            return None
        return record

    def _put(self, record: _Record, name: str, value: bytes) -> None:
        growth = len(value) - len(record.fields.get(name, b""))
        record.fields[name] = value
        record.size += growth
        self._size += growth

    def _touch(self, record_id: str, record: _Record, lease_s: float) -> None:
        """A record expires a time after its last write, and is the last one to make room."""
        now = self._clock()
        record.lease_until, record.expires_at = now + lease_s, max(now + self._ttl_s, record.pinned_until)
        self._records.move_to_end(record_id)
        if (shared := self._shared(record)) is not None:
            shared.expires_at = max(shared.expires_at, record.expires_at)
            shared.pinned_until = max(shared.pinned_until, record.pinned_until)

    def _shared(self, record: _Record) -> _Record | None:
        """The record that a copy shares."""
        return self._records.get(record.fields.get("shared", b"").decode())

    def _make_room(self, num_bytes: int, keep: str = "") -> bool:
        """Remove records that no run writes until there is room. False if there is none."""
        now = self._clock()
        while self._size + num_bytes > self._total_bytes:
            others = (
                name
                for name, record in self._records.items()
                if name != keep and not record.refs and max(record.lease_until, record.pinned_until) <= now
            )
            if (oldest := next(others, None)) is None:
                return False
            self._remove(oldest)
        return True

    def _remove(self, record_id: str) -> None:
        record = self._records.pop(record_id, None)
        self._size -= record.size if record else 0
        if record is not None and (shared := self._shared(record)) is not None:
            shared.refs -= 1
            if not shared.refs:
                self._remove(record.fields["shared"].decode())
        owner = owner_of(record_id)
        ids = self._lists.get(owner, {})
        if ids.pop(record_id, 0) is None and not ids:
            del self._lists[owner]
