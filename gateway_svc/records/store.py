"""Records as messages: what is stored for a request, sealed by a cipher, in Redis or in memory.

A *run* is one execution of the request. Only the run that claimed the record last can write output. Its lease expires
if its gateway is killed. A record is deleted some time after its last write. Its fields:

    request          RequestRecord; of a copy, what differs from the shared record
    shared           id of the record whose content and output a copy begins with
    object           the finished answer of an API, if that API stores one
    next             id of the newest record that continues it as a session
    o:<i>:<offset>   output token ids of sample i from this position on, little-endian uint32
    e:<i>            SampleEnd
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError
from quire.internal.v1 import record_pb2 as pb
from quire.v1.inference_pb2 import GenerateRequest

from gateway_svc.records.cipher import Cipher, UnreadableValueError
from gateway_svc.records.fields import END, LEASE_S, NO_LIMITS, MemoryFields, RecordLimits, Update, owner_of
from gateway_svc.records.redis_fields import RedisFields
from prefix_index.hashing import ids_from_bytes, token_bytes
from svc_common.errors import InvalidRequestError, OverloadedError

log = logging.getLogger(__name__)

OUTPUT = "o:"
SHARED = "="  # begins the ids of shared records; no client can name one


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A stored record. Output has no gaps; a sample's end is present only if all its output is present."""

    record_id: str
    content: pb.RequestRecord
    outputs: tuple[array[int], ...]
    ends: tuple[pb.SampleEnd | None, ...]
    stored_object: bytes
    has_run: bool  # a run has a lease
    is_cut: bool = False  # a sample has ended, with more output than fits in the record
    next_id: str = ""  # record of the last turn that continues it as a session

    @property
    def is_finished(self) -> bool:
        return all(end is not None for end in self.ends)

    @property
    def keeps_output(self) -> bool:
        """Whether the record gets the output: not if more than its tokens decides what is sent."""
        return keeps_output(self.content.request)


def keeps_output(request: GenerateRequest) -> bool:
    """Whether the answer is a function of its tokens: not with log probabilities, and not with best_of, where the sums
    of all samples decide which are sent.
    """
    output = request.output
    has_logprobs = output.HasField("logprobs") or output.HasField("prompt_logprobs")
    return not has_logprobs and not request.sampling.HasField("best_of")


class RecordStore:
    """Reads and writes records. Methods raise RecordsUnavailableError if the storage does not answer."""

    def __init__(
        self,
        fields: MemoryFields | RedisFields,
        *,
        cipher: Cipher | None = None,
        limits: Callable[[str], RecordLimits] = lambda owner: NO_LIMITS,
    ) -> None:
        self._fields = fields
        self._limits = limits
        self._cipher = cipher or Cipher()
        self.claim = fields.claim
        self.delete, self.close = fields.delete, fields.close
        self.is_open, self.pin = fields.is_open, fields.pin
        self.num_pinned, self.lifetimes = fields.num_pinned, fields.lifetimes
        self.enlist, self.listed = fields.enlist, fields.listed

    async def create(self, record_id: str, content: pb.RequestRecord, run: str, *, shared_id: str = "") -> None:
        """Create or replace a record, and give its lease to this run.

        Raises InvalidRequestError if it is too large, OverloadedError if its owner has too many.
        """
        value = self._seal(content.SerializeToString(), record_id, "request")
        if len(value) > self._fields.max_bytes:
            raise InvalidRequestError(
                f"the record of the request has {len(value)} bytes; at most {self._fields.max_bytes} are allowed "
                "(--max-record-bytes): shorten the request, or do not ask for a record (resumable, store)",
                field="resumable",
            )
        limits = self._limits(owner_of(record_id))
        if not await self._fields.create(record_id, value, run, shared_id=shared_id, limits=limits):
            raise OverloadedError(
                f"the stored requests and sessions of this owner need more than its limits of --key-limits allow "
                f"(record_bytes: {limits.record_bytes}, max_records: {limits.max_records}); delete some, or retry when "
                "some have expired",
                field="resumable",
                retry_after_s=LEASE_S,
                subject=f"owner:{owner_of(record_id)}",
            )

    async def share(self, record: StoredRecord) -> StoredRecord:
        """The record with this content and output that copies share. Equal ones of an owner are stored once."""
        outputs = [token_bytes(output) for output in record.outputs]
        ends = {i: end.SerializeToString() for i, end in enumerate(record.ends) if end is not None}
        parts = [record.content.SerializeToString(deterministic=True), *outputs, repr(ends).encode()]
        digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()
        owner = owner_of(record.record_id)
        shared_id, run = f"{owner}/{SHARED}{digest}" if owner else SHARED + digest, secrets.token_hex(8)
        shared = replace(record, record_id=shared_id, stored_object=b"", has_run=False)
        if not await self._fields.claim(shared_id, run, by_force=True):
            await self.create(shared_id, record.content, run)
        columns = {(i, 0): output for i, output in enumerate(outputs) if output}
        await self.write([Update(shared_id, run, columns, ends, releases=True)])
        return shared

    async def copy(self, shared: StoredRecord, record_id: str, changes: pb.RequestRecord) -> StoredRecord:
        """A new record with the content of a shared one and these changes. Its bytes are those of the changes."""
        run = secrets.token_hex(8)
        await self.create(record_id, changes, run, shared_id=shared.record_id)
        await self.write([Update(record_id, run, releases=True)])
        return replace(shared, record_id=record_id, content=_merged(shared.content, changes))

    async def write(self, updates: Sequence[Update]) -> list[bool]:
        """Store output and renew leases. False for a run that has lost its record."""
        return await self._fields.write([(update, self._sealed_output(update)) for update in updates])

    def _sealed_output(self, update: Update) -> dict[str, bytes]:
        output = {f"{OUTPUT}{sample}:{offset}": column for (sample, offset), column in update.columns.items()}
        output |= {f"{END}{sample}": end for sample, end in update.ends.items()}
        return {name: self._seal(data, update.record_id, name) for name, data in output.items()}

    async def put_object(self, record_id: str, data: bytes) -> bytes:
        """Store the finished answer unless one is stored. Returns the stored one, or `data` if there is no record."""
        found = await self._fields.put_object(record_id, self._seal(data, record_id, "object"))
        try:
            return data if found is None else self._open(found, record_id, "object")
        except UnreadableValueError:
            return data

    async def load(self, record_id: str) -> StoredRecord | None:
        """The record; None if there is none, or if it cannot be read."""
        found, has_run = await self._fields.load(record_id)
        if "request" not in found:
            return None
        own = dict(found)
        shared_id, next_id = (own.pop(name, b"").decode() for name in ("shared", "next"))
        shared = (await self._fields.load(shared_id))[0] if shared_id else {}
        if shared_id and not shared:
            return None
        try:
            values = self._opened(shared_id, shared)
            return replace(self._read(record_id, values, self._opened(record_id, own), has_run), next_id=next_id)
        except (UnreadableValueError, DecodeError, ValueError) as error:
            log.error("record %s cannot be read: %s", record_id, error)
            return None

    def _opened(self, record_id: str, found: Mapping[str, bytes]) -> dict[str, bytes]:
        return {name: self._open(value, record_id, name) for name, value in found.items()}

    def _read(
        self, record_id: str, shared: Mapping[str, bytes], own: Mapping[str, bytes], has_run: bool
    ) -> StoredRecord:
        values = {**shared, **own}
        content = _merged(
            pb.RequestRecord.FromString(shared.get("request", b"")), pb.RequestRecord.FromString(own["request"])
        )
        num_samples = max(1, content.request.sampling.n)
        columns: list[dict[int, bytes]] = [{} for _ in range(num_samples)]
        for name, value in values.items():
            if name.startswith(OUTPUT):
                sample, offset = name.removeprefix(OUTPUT).split(":")
                columns[int(sample)][int(offset)] = value
        outputs = tuple(map(_joined, columns))
        stored = [values.get(f"{END}{sample}") for sample in range(num_samples)]
        ends = tuple(_end_of(end, output) for end, output in zip(stored, outputs, strict=True))
        return StoredRecord(
            record_id,
            content,
            outputs,
            ends,
            values.get("object", b""),
            has_run,
            is_cut=any(data is not None and end is None for data, end in zip(stored, ends, strict=True)),
        )

    def _seal(self, data: bytes, record_id: str, name: str) -> bytes:
        return self._cipher.seal(data, f"{record_id} {name}".encode())

    def _open(self, value: bytes, record_id: str, name: str) -> bytes:
        return self._cipher.open(value, f"{record_id} {name}".encode())


def _merged(content: pb.RequestRecord, changes: pb.RequestRecord) -> pb.RequestRecord:
    merged = pb.RequestRecord()
    merged.CopyFrom(content)
    merged.MergeFrom(changes)
    return merged


def _joined(columns: Mapping[int, bytes]) -> array[int]:
    """The output of one sample up to the first gap. Columns of several runs may overlap."""
    output = array("I")
    for offset in sorted(columns):
        if offset > len(output):
            break
        output.extend(ids_from_bytes(columns[offset])[len(output) - offset :])
    return output


def _end_of(data: bytes | None, output: array[int]) -> pb.SampleEnd | None:
    """The end of a sample, if all its output is known."""
    end = None if data is None else pb.SampleEnd.FromString(data)
    return end if end is not None and end.num_output == len(output) else None
