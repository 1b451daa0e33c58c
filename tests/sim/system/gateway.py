"""The gateway's servicer, with the dispatcher behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from quire.v1 import inference_pb2 as pb

from gateway_svc import validation
from gateway_svc.directory import ModelDirectory
from gateway_svc.dispatcher import Dispatcher, Hints
from gateway_svc.prompts import PromptReader
from gateway_svc.servicer import InferenceServicer
from svc_common.errors import UnavailableError


class SimGateway(InferenceServicer):
    """Generate by way of the dispatcher."""

    def __init__(self, directory: ModelDirectory, prompts: PromptReader, dispatcher: Dispatcher) -> None:
        super().__init__(directory, prompts, max_streams=1000)
        self._dispatcher = dispatcher

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        validation.check_generate(request)
        model = next((client.model for client in self._directory.clients if client.model is not None), None)
        if model is None:
            raise UnavailableError("no model is ready yet; try again", retry_after_s=1.0)
        with self._open_stream(request.request_id) as (request_id, stream):
            generation, scheduler_request = await self._prepare(request, model, request_id)
            scheduler_request.is_resumed = request.HasField("continuation")
            context.add_done_callback(lambda _: scheduler_request.release())
            try:
                stream.set_request(scheduler_request)
                if not scheduler_request.is_over:
                    self._dispatcher.submit(
                        scheduler_request, model.info, Hints(request.prompt.tokens.SerializeToString())
                    )
                async for event in generation.events(scheduler_request):
                    yield event
            finally:
                scheduler_request.release()
