"""Requests that continue from their record: the stored request, and the output of a run on another gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from quire.internal.v1 import record_pb2, scheduler_pb2
from quire.v1 import inference_pb2 as pb

from gateway_svc.records.recorder import OutputRecorder, Recording
from gateway_svc.records.store import RecordStore, StoredRecord, keeps_output
from gateway_svc.request.plan import GenerationPlan
from gateway_svc.request.validation import Replay
from gateway_svc.schedulers.submitter import Submission
from gateway_svc.schedulers.wire import continuation_from_outputs
from prefix_index.hashing import ids_from_bytes, token_bytes
from request_fields.fields import DRAFT_FIELDS
from svc_common.errors import NotFoundError, ServiceError
from svc_common.tasks import cancel

POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request that continues from its record. `sent`: per sample, the output tokens that the client has.

    `follows`: while another gateway runs the request, read its output from the record; otherwise end that run.
    """

    record: StoredRecord
    sent: tuple[int, ...]
    follows: bool = False

    @property
    def request(self) -> pb.GenerateRequest:
        """The stored request with all known output as its continuation.

        A resuming client always gets token ids, because it counts them for its next resume.
        """
        request = pb.GenerateRequest()
        request.CopyFrom(self.record.content.request)
        request.output.token_ids = not self.follows
        known = zip(self.record.outputs, self.record.ends, strict=True)
        request.continuation.MergeFrom(continuation_from_outputs(((output, False) for output, _ in known), 0))
        return request

    @property
    def prompt_ids(self) -> list[int]:
        return list(ids_from_bytes(self.record.content.prompt_token_ids))

    @property
    def replay(self) -> Replay:
        return Replay(self.sent, tuple(end and end.finish for end in self.record.ends))


def record_of(request: pb.GenerateRequest, plan: GenerationPlan, notes: bytes) -> record_pb2.RequestRecord:
    """The record of a request, with all defaults applied, because they may change before it is continued."""
    kept = pb.GenerateRequest()
    kept.CopyFrom(request)
    kept.request_id = plan.request_id
    kept.model, kept.adapter = plan.model.info.model, "" if plan.model.adapter is None else plan.model.name
    kept.sampling.CopyFrom(plan.sampling.params)
    kept.stop.CopyFrom(plan.sampling.stop)
    kept.continuation.Clear()
    for name in DRAFT_FIELDS:
        kept.ClearField(name)  # type: ignore[arg-type]
    kept.joins_events = False  # a property of the client, and another one may resume the request
    kept.continuation.revision = plan.model.revision
    ids = token_bytes(plan.prompt.ids)
    return record_pb2.RequestRecord(request=kept, prompt_token_ids=ids, notes=notes, alias=plan.model.alias)


@asynccontextmanager
async def recorded(
    recorder: OutputRecorder, content: record_pb2.RequestRecord, submission: Submission, resumed: Resumed | None
) -> AsyncIterator[Recording]:
    """Keep the record of a request while it is open. A request that follows a run is sent when that run ends."""
    request, record_id = submission.request, submission.request.request_id
    stored = [len(output) for output in resumed.record.outputs] if resumed else [0] * len(request.samples)
    recording = recorder.recording(record_id, request.samples, stored, keeps_output=keeps_output(content.request))
    follower = None
    if resumed is None:
        await recorder.records.create(record_id, content, recording.run)
        if content.request.session_id:
            await enlist(recorder.records, record_id, content.request.session_id)
        recorder.begin(recording)
    elif resumed.follows:
        follower = asyncio.create_task(Follower(recorder, recording, submission).run())
    else:
        await recorder.records.claim(record_id, recording.run, by_force=True)
        recorder.begin(recording)
    try:
        yield recording
    finally:
        if follower is not None:
            await cancel(follower)
        recording.close()


async def enlist(records: RecordStore, record_id: str, base_id: str = "") -> None:
    """Put a session into its owner's list, in place of the one that it continues."""
    owner = record_id.rpartition("/")[0]
    await records.enlist(owner, record_id, f"{owner}/{base_id}" if owner else base_id)


class Follower:
    """Delivers output that another gateway records to a request, which is sent if that gateway's run ends early."""

    def __init__(self, recorder: OutputRecorder, recording: Recording, submission: Submission) -> None:
        self._recorder = recorder
        self._recording = recording
        self._submission = submission
        self._request = submission.request

    async def run(self) -> None:
        """Run until the request has ended or was submitted. Errors end the request."""
        self._request.on_accepted()
        try:
            while not self._request.is_over and not await self._claim():
                await self._read()
                await asyncio.sleep(POLL_S)
            if self._request.is_over:
                return
            await self._read()  # the last output of the run that ended
            self._recorder.begin(self._recording)
            self._submission.send()
        except ServiceError as error:
            self._request.fail(error)

    async def _claim(self) -> bool:
        return await self._recorder.records.claim(self._recording.record_id, self._recording.run, by_force=False)

    async def _read(self) -> None:
        record = await self._recorder.records.load(self._recording.record_id)
        if record is None:
            raise no_record(self._recording.record_id)
        for index, output in enumerate(record.outputs):
            self._request.on_tokens(index, 0, output)
            end = record.ends[index]
            if end is not None:
                self._request.on_finished(_end_of(end, index))


def no_record(request_id: str, field: str = "request_id") -> NotFoundError:
    """The error for a request without a record, or with the record of another API key's owner."""
    return NotFoundError(
        f"there is no record of request {request_id!r}: it was not sent with resumable, or the record has expired "
        "(--record-ttl-s) or was deleted",
        field=field,
        subject=request_id,
    )


def _end_of(end: record_pb2.SampleEnd, index: int) -> scheduler_pb2.SampleFinished:
    finish = scheduler_pb2.SampleFinished()
    finish.CopyFrom(end.finish)
    finish.sample_index = index
    return finish
