"""Writes the output of all open requests with a record, every WRITE_INTERVAL_S or after WRITE_TOKENS tokens.

A failed write is repeated with the next one, also after the end of its request: the next turn of a session needs the
whole output. Other output that is not stored is recomputed when it is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from array import array
from collections.abc import Sequence
from typing import Protocol

from quire.internal.v1 import record_pb2 as pb
from quire.internal.v1 import scheduler_pb2
from quire.v1 import types_pb2 as types

from gateway_svc.records.fields import Update
from gateway_svc.records.store import RecordStore
from prefix_index.hashing import token_bytes
from svc_common.errors import UnavailableError
from svc_common.tasks import cancel

log = logging.getLogger(__name__)

WRITE_INTERVAL_S = 0.5
WRITE_TOKENS = 64


class Journal(Protocol):
    """The output of one sample, and how it ended."""

    outputs: array[int]
    finish: scheduler_pb2.SampleFinished | None
    is_closed: bool  # a stop string has ended the output


class Recording:
    """The record of one open request. The handler reports progress; the recorder reads the journals.

    `stored`: output tokens per sample that the record has. `keeps_output` is False for a request with logprobs, because
    its stream is not a function of the tokens: all its output is recomputed.
    """

    def __init__(
        self,
        record_id: str,
        journals: Sequence[Journal],
        stored: Sequence[int],
        wake: asyncio.Event,
        *,
        keeps_output: bool,
    ) -> None:
        self.record_id = record_id
        self.run = secrets.token_hex(8)
        self.is_closed = False
        self.is_tried = False  # its end was written, or could not be written
        self._journals = journals
        self._stored = list(stored)  # per sample, number of tokens that are in Redis
        self._sent = list(stored)  # per sample, number of tokens that belong to the output
        self._ended: dict[int, bool] = {}  # samples that have ended -> whether the end is stored
        self._wake = wake
        self._keeps_output = keeps_output

    def advance(self, sample: int, num_output: int, *, is_done: bool) -> None:
        """Report that a sample now has `num_output` tokens."""
        if not self._keeps_output:
            return
        self._sent[sample] = num_output
        finish = self._journals[sample].finish
        if is_done and finish is not None and finish.reason != types.FINISH_REASON_ERROR:
            self._ended.setdefault(sample, False)
        if num_output - self._stored[sample] >= WRITE_TOKENS:
            self._wake.set()

    def close(self) -> None:
        """End the recording: the next write stores the remaining output and ends the lease."""
        self.is_closed = True
        self._wake.set()

    def update(self) -> Update:
        """The output that is not stored yet."""
        columns = {
            (sample, start): token_bytes(self._journals[sample].outputs[start:end])
            for sample, (start, end) in enumerate(zip(self._stored, self._sent, strict=True))
            if start < end
        }
        ends = {sample: self._end(sample) for sample, is_stored in self._ended.items() if not is_stored}
        return Update(self.record_id, self.run, columns, ends, self.is_closed)

    def on_written(self, update: Update) -> None:
        """Mark the output of an update as stored."""
        for (sample, start), column in update.columns.items():
            self._stored[sample] = start + len(column) // 4
        self._ended |= dict.fromkeys(update.ends, True)

    def _end(self, sample: int) -> bytes:
        journal = self._journals[sample]
        end = pb.SampleEnd(finish=journal.finish, num_output=self._sent[sample])
        if journal.is_closed:  # a later token may have ended the sample
            end.finish.reason = types.FINISH_REASON_STOP
            end.finish.ClearField("stop_token_id")
        return end.SerializeToString()


class OutputRecorder:
    """Owns the task that writes. `records` is the store for all other access."""

    def __init__(self, records: RecordStore) -> None:
        self.records = records
        self._open: list[Recording] = []
        self._wake = asyncio.Event()
        self._written = asyncio.Event()  # replaced after each pass
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task. Call it once, on the event loop."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Write the remaining output, once."""
        if self._task is not None:
            await cancel(self._task)
        for recording in self._open:
            recording.is_closed = True
        await self._write_all()
        await self.records.close()

    def recording(
        self, record_id: str, journals: Sequence[Journal], stored: Sequence[int], *, keeps_output: bool
    ) -> Recording:
        """A recording that is not written before `begin`."""
        return Recording(record_id, journals, stored, self._wake, keeps_output=keeps_output)

    def begin(self, recording: Recording) -> None:
        """Write the output of a request from now on."""
        self._open.append(recording)
        self._wake.set()

    async def finish(self, recording: Recording) -> None:
        """End a recording, and wait until its end was written, or could not be written."""
        recording.close()
        while recording in self._open and not recording.is_tried:
            await self._written.wait()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WRITE_INTERVAL_S if self._open else None):
                    await self._wake.wait()
            self._wake.clear()
            await self._write_all()

    async def _write_all(self) -> None:
        recordings = list(self._open)
        if not recordings:
            return
        updates = [recording.update() for recording in recordings]
        try:
            answers = await self.records.write(updates)
        except UnavailableError:
            gone = set[Recording]()
        else:
            for recording, update in zip(recordings, updates, strict=True):
                recording.on_written(update)
            gone = {
                recording
                for recording, update, has_record in zip(recordings, updates, answers, strict=True)
                if update.releases or not has_record
            }
        for recording, update in zip(recordings, updates, strict=True):
            recording.is_tried = update.releases
        self._open = [recording for recording in self._open if recording not in gone]
        self._written.set()
        self._written = asyncio.Event()
