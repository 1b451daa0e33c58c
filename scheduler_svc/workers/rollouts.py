"""The calls of RolloutService, as they reach a scheduler: pauses, and the conversion of all others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict

from quire.internal.v1 import scheduler_pb2
from quire.v1 import rollouts_pb2 as pb

from scheduler_svc.core.admission.barrier import Hold, HoldMode
from scheduler_svc.step_loop import StepLoop
from scheduler_svc.workers.weights import Weights, check_name
from svc_common.calls import first_of, read_rest
from svc_common.errors import AbortedError, InvalidRequestError, ServiceError

Request = scheduler_pb2.ControlRolloutsRequest
Response = scheduler_pb2.ControlRolloutsResponse

MODES = {
    pb.PAUSE_MODE_UNSPECIFIED: HoldMode.KEEP, pb.PAUSE_MODE_KEEP: HoldMode.KEEP,
    pb.PAUSE_MODE_RETRACT: HoldMode.RETRACT, pb.PAUSE_MODE_ABORT: HoldMode.ABORT, pb.PAUSE_MODE_FINISH: HoldMode.FINISH,
}  # fmt: skip
MAX_PAUSES = 64


class Rollouts:
    """Owns the pauses. `weights` does everything else."""

    def __init__(self, step_loop: StepLoop, weights: Weights) -> None:
        self.weights = weights
        self._step_loop = step_loop
        self._pauses: dict[str, asyncio.Future[Hold]] = {}

    async def control(self, request: Request) -> Response:
        """Serve one call. Raises ServiceError."""
        weights = self.weights
        match request.WhichOneof("call"):
            case "begin":
                version = weights.begin(request.begin.update_id, request.begin.version)
                return Response(begin=pb.BeginUpdateResponse(version=version))
            case "prepare":
                await weights.prepare(request.prepare.update_id, request.prepare.digest)
            case "commit":
                asked = request.commit
                return Response(commit=await weights.commit(asked.update_id, asked.digest, asked.running_rows))
            case "abort":
                await weights.abort(request.abort.update_id)
            case "pause":
                return Response(pause=await self._pause(request.pause))
            case "unpause":
                return Response(unpause=self._unpause(request.unpause.pause_id))
            case "sleep":
                await weights.sleep(request.sleep.tags)
            case "wake":
                await weights.wake(request.wake.tags)
            case "reset":
                await weights.reset_prefix_cache()
            case None:
                raise InvalidRequestError("call is not set", field="call")
        return Response(weights=self._describe())

    async def add_tensors(self, requests: AsyncIterator[pb.PutTensorsRequest]) -> pb.PutTensorsResponse:
        """Add a file of tensors to an update: one that the workers have, or one that arrives."""
        stream = aiter(requests)
        first = await first_of(stream, "update_id")
        if first.path:
            return pb.PutTensorsResponse(tensors=await self.weights.put(first.update_id, first.path))

        async def pieces() -> AsyncIterator[bytes]:
            yield first.data
            async for request in stream:
                yield request.data

        try:
            return pb.PutTensorsResponse(tensors=await self.weights.write(first.update_id, pieces()))
        except ServiceError:
            await read_rest(stream)
            raise

    async def _pause(self, request: pb.PauseRequest) -> pb.PauseResponse:
        check_name(request.pause_id, "pause_id")
        mode = MODES.get(request.mode)
        if mode is None:
            raise InvalidRequestError(f"mode is {request.mode}, which is not a value", field="mode")
        if request.pause_id not in self._pauses and len(self._pauses) >= MAX_PAUSES:
            raise InvalidRequestError(f"{MAX_PAUSES} pauses have begun; end one first", field="pause_id")
        if request.pause_id not in self._pauses:
            self._pauses[request.pause_id] = self._step_loop.hold(Hold(f"pause:{request.pause_id}", mode))
        samples = (await asyncio.shield(self._pauses[request.pause_id])).samples
        if samples is None:
            raise AbortedError(f"pause {request.pause_id!r} was ended before all workers had stopped; begin it again")
        return pb.PauseResponse(samples=[pb.PausedSample(**asdict(one)) for one in samples])

    def _unpause(self, pause_id: str) -> pb.UnpauseResponse:
        for name in [pause_id] if pause_id else list(self._pauses):
            if self._pauses.pop(name, None) is not None:
                self._step_loop.release(f"pause:{name}")
        return pb.UnpauseResponse(pause_ids=sorted(self._pauses))

    def _describe(self) -> pb.GetWeightsResponse:
        response = self.weights.describe()
        response.pause_ids.extend(sorted(self._pauses))
        return response
