"""Writes the answers of a client to a replay log."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from os import PathLike
from typing import Any

from google.protobuf import json_format
from quire.v1 import inference_pb2 as pb

from quire_client.aio.transport import in_thread
from quire_client.assembly import StreamAssembler
from quire_client.plain import plain
from quire_client.types import FinishReason
from request_fields.replay_log import sample_entry, turn_entry


class AsyncTurnLog:
    """The replay log of one run (docs/replay.md): a line per complete answer. Raises OSError if it cannot be written.

    `unary`: that of the client.
    """

    def __init__(self, unary: Callable[..., Awaitable[Any]], path: str | PathLike[str]) -> None:
        self._unary = unary
        self._path = path
        self._models: dict[str, Any] = {}  # ModelInfo by revision

    async def add(self, assembler: StreamAssembler) -> None:
        """Write the line of an answer, unless it was aborted."""
        if all(sample.finish_reason is not FinishReason.ABORTED for sample in assembler.finished_samples):
            line = json.dumps(await self.entry_of(assembler), ensure_ascii=False)
            await in_thread(lambda: _append(self._path, line))

    async def entry_of(self, assembler: StreamAssembler) -> dict[str, Any]:
        """The entry of a complete answer."""
        accepted = assembler.accepted or pb.Accepted()
        if accepted.revision not in self._models:
            named = pb.GetModelRequest(model=accepted.target or accepted.model)
            response = await self._unary(lambda gateway: gateway.stub.GetModel, named)
            self._models[accepted.revision] = response.model.info
        request = json_format.MessageToDict(assembler.request, preserving_proto_field_name=True)
        samples = [
            sample_entry(
                one.text, one.reasoning, plain(one.tool_calls), one.finish_reason.value, assembler.ends[one.index]
            )
            for one in assembler.finished_samples
        ]
        return turn_entry(request, self._models[accepted.revision], accepted, samples)


def _append(path: str | PathLike[str], line: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{line}\n")
