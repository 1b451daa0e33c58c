"""What the readers of prompts share: their interface, and the threads and sandbox processes they use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.v1 import inference_pb2 as pb

from gateway_svc.request.models import ServedModel
from gateway_svc.request.prompts.inputs import PromptInput
from gateway_svc.request.sandbox.image_preparer import ImagePreparer
from gateway_svc.request.sandbox.template_renderer import TemplateRenderer
from gateway_svc.request.threads import Lane


@dataclass(frozen=True, slots=True)
class ReadContext:
    """Where prompts are read: the threads for generations or for Tokenize calls, and the sandbox processes."""

    lane: Lane
    templates: TemplateRenderer
    images: ImagePreparer


class PromptReader(Protocol):
    """Reads the prompts of one kind. All methods raise InvalidRequestError."""

    def check(self, prompt: pb.Prompt, field: str) -> None:
        """Check the form, which needs no model. `field` is the path of the prompt."""

    def check_size(self, request: pb.GenerateRequest, model: ServedModel) -> None:
        """Refuse a prompt that the model does not take or that is certainly too long, before it is read."""

    async def read(
        self, request: pb.GenerateRequest, model: ServedModel, known_ids: Sequence[int] | None, context: ReadContext
    ) -> PromptInput:
        """The prompt of a generation. `known_ids`: its ids, if a record has them."""
        ...
