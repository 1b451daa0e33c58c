"""Sessions: records of requests as values that are copied, cut, kept, listed, and continued with new input."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from quire.internal.v1 import record_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import session_pb2

from gateway_svc.answer.resuming import enlist, no_record
from gateway_svc.answer.session import (
    SessionBase,
    add_content,
    base_of,
    changes_of_copy,
    check_same_model,
    check_whole,
    continue_chat,
    inherit,
    join_prompts,
    rewound,
)
from gateway_svc.callers.caller import current_caller, record_target, scoped
from gateway_svc.pipeline.admission import CallAdmission
from gateway_svc.records.fields import LEASE_S
from gateway_svc.records.store import RecordStore, StoredRecord
from gateway_svc.request.field_errors import invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.prompts.reader import PromptInput
from gateway_svc.request.prompts.readers import PromptReaders
from gateway_svc.request.validation import check_id
from svc_common.errors import NotConfiguredError, OverloadedError, ServiceError, UnavailableError

MAX_FORKS = 64
MAX_PINS = 1000  # limit for one owner
MAX_PIN_S = 604_800.0
POLL_S = 0.02  # interval of looks at the lease, while a session is open
ID_BYTES = 12


class Sessions:
    """The sessions of all callers. `records` raises NotConfiguredError if this gateway keeps none. All methods raise
    ServiceError.
    """

    def __init__(self, admission: CallAdmission, prompts: PromptReaders, records: Callable[[], RecordStore]) -> None:
        self._admission = admission
        self._prompts = prompts
        self._lane = prompts.threads.requests
        self._records = records

    # -- new input ----------------------------------------------------------------------------------------------------

    async def continued_by(self, request: pb.GenerateRequest) -> SessionBase:
        """The session that a request continues. Gives the request the fields and the messages of that session."""
        check_id("session_id", request.session_id)
        base = base_of(request, await self._load_ended(request.session_id), self._admission.serves)
        inherit(request, base)
        if request.prompt.HasField("chat"):
            model = self._admission.model(request, "", request.adapter, alias=base.alias)
            size = 4 * len(base.output) + base.request.prompt.ByteSize()
            await self._lane.run(size, continue_chat, request, base, model)
        return base

    async def read_prompt(self, request: pb.GenerateRequest, base: SessionBase, model: ServedModel) -> PromptInput:
        """The whole prompt of a request that continues a session."""
        own = await self._prompts.read(request, model)
        if request.prompt.HasField("chat"):
            return own
        check_same_model(base, model)
        before = await self._prompts.read(base.request, model, base.ids)
        return join_prompts(request, base, before, own)

    async def _load_ended(self, session_id: str) -> StoredRecord:
        """The record of a session with all output that was sent. No gateway computes it now."""
        record = await self._load(session_id)
        if record.is_finished:
            return record
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + LEASE_S
        while await self._records().is_open(record.record_id):
            if loop.time() > give_up_at:
                raise UnavailableError(
                    f"session {session_id!r} is being computed, or was cut off before all its output was stored; wait "
                    "for its end, Resume it, or continue a checkpoint of it",
                    field="session_id",
                    retry_after_s=LEASE_S,
                )
            await asyncio.sleep(POLL_S)
        return await self._load(session_id)

    async def _load(self, session_id: str) -> StoredRecord:
        check_id("session_id", session_id)
        record_target(session_id)
        record = await self._records().load(scoped(session_id))
        if record is None:
            raise no_record(session_id, "session_id")
        return record

    # -- values -------------------------------------------------------------------------------------------------------

    async def checkpoint(self, session_id: str) -> session_pb2.Session:
        """A new session that is equal to another one."""
        async with self._admission.call():
            return (await self._copies(await self._load(session_id), session_id, 1))[0]

    async def fork(self, session_id: str, n: int) -> Sequence[session_pb2.Session]:
        """Several new sessions that are equal to another one."""
        if n > MAX_FORKS:
            raise invalid("n", f"is {n}; must be from 1 to {MAX_FORKS}")
        async with self._admission.call():
            return await self._copies(await self._load_ended(session_id), session_id, n or 1)

    async def rewind(self, session_id: str, num_tokens: int) -> session_pb2.Session:
        """A new session with the first tokens of each sample of another one."""
        async with self._admission.call():
            record = rewound(await self._load_ended(session_id), num_tokens)
            return (await self._copies(record, session_id, 1))[0]

    async def pin(self, session_id: str, ttl_s: float) -> session_pb2.Session:
        """Keep a session for at least this time."""
        if not 0 <= ttl_s <= MAX_PIN_S:
            raise invalid("ttl_s", f"is {ttl_s}; must be from 0 to {MAX_PIN_S:.0f}")
        async with self._admission.call():
            record = await self._load(session_id)
            if not await self._records().pin(record.record_id, ttl_s, MAX_PINS):
                raise OverloadedError(
                    f"{MAX_PINS} sessions are pinned, or those of a gateway without Redis need half of its "
                    "--record-memory; end a pin with ttl_s 0",
                    field="session_id",
                )
            return await self._describe(record, session_id)

    async def num_pinned(self) -> dict[str, int] | None:
        """Pinned sessions of each owner that has any; None if it is not known. Raises nothing."""
        try:
            return await self._records().num_pinned()
        except (NotConfiguredError, UnavailableError):
            return None

    async def get(self, session_id: str, *, with_content: bool) -> session_pb2.GetSessionResponse:
        """A session; `with_content`: with its request and output."""
        async with self._admission.call():
            record = await self._load(session_id)
            response = session_pb2.GetSessionResponse(session=await self._describe(record, session_id))
            if with_content:
                size = len(record.content.prompt_token_ids) + sum(4 * len(output) for output in record.outputs)
                await self._lane.run(size, add_content, response, record)
            return response

    async def list(self) -> Sequence[session_pb2.Session]:
        """The ids of the caller's sessions, the newest first, with their ends."""
        async with self._admission.call():
            ids = await self._records().listed(current_caller.get().owner)
            ends = await self._records().lifetimes(ids)
        return [
            session_pb2.Session(session_id=record_id.rpartition("/")[2], **end._asdict())
            for record_id, end in zip(ids, ends, strict=True)
            if end is not None
        ]

    async def delete(self, session_id: str) -> None:
        async with self._admission.call():
            await self._records().delete((await self._load(session_id)).record_id)

    async def _copies(self, record: StoredRecord, source_id: str, n: int) -> Sequence[session_pb2.Session]:
        """New sessions that are equal to a record. They share its content and output."""
        check_whole(record)
        records, copies = self._records(), []
        content = record_pb2.RequestRecord()
        content.CopyFrom(record.content)
        content.ClearField("notes")  # belongs to an API whose object is not copied
        shared = await records.share(replace(record, content=content))
        try:
            for _ in range(n):
                session_id = f"sess_{secrets.token_hex(ID_BYTES)}"
                changes = changes_of_copy(record, source_id, session_id)
                copies.append(await records.copy(shared, scoped(session_id), changes))
        except ServiceError:
            for copy in copies:
                await records.delete(copy.record_id)
            raise
        for copy in copies:
            await enlist(records, copy.record_id)
        return [await self._describe(copy, copy.content.request.request_id) for copy in copies]

    async def _describe(self, record: StoredRecord, session_id: str) -> session_pb2.Session:
        (end,) = await self._records().lifetimes([record.record_id])
        if end is None:
            raise no_record(session_id, "session_id")
        content = record.content
        session = session_pb2.Session(
            session_id=session_id,
            model=content.request.model,
            adapter=content.request.adapter,
            revision=content.request.continuation.revision,
            prompt_tokens=len(content.prompt_token_ids) // 4,
            is_running=record.has_run and not record.is_finished,
            base_id=content.request.session_id,
            **end._asdict(),
        )
        for output, ended in zip(record.outputs, record.ends, strict=True):
            session.samples.add(num_tokens=len(output), is_finished=ended is not None)
        return session
