"""A prompt as schedulers get it, and the checks of prompt embeddings that need not read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.internal.v1 import inputs_pb2

from gateway_svc.request.models import ServedModel
from gateway_svc.request.parameters import invalid
from svc_common.errors import ContextLengthError

FIELD = "prompt.embeddings"
HEADER_BYTES = 64 << 10  # more than the header of one tensor needs


@dataclass(frozen=True, slots=True)
class PromptInput:
    """Token ids, with content ids at the positions of inputs, and these inputs in the order of their positions."""

    ids: Sequence[int]
    inputs: tuple[inputs_pb2.CarriedInput, ...] = ()


def check_embeddings(num_bytes: int, model: ServedModel) -> None:
    """Refuse embeddings that the model does not take, or that are certainly too many."""
    hidden_size, most = model.info.hidden_size, model.limits.max_tokens
    if not hidden_size:
        raise invalid(
            FIELD, f"is set, but the workers of model {model.name!r} take tokens only; send text or token ids"
        )
    if num_bytes > (limit := HEADER_BYTES + 4 * hidden_size * most):
        raise ContextLengthError(
            f"{FIELD} has {num_bytes} bytes, more than the {limit} bytes of {most} positions of {hidden_size} float32 "
            "values: shorten the prompt",
            field=FIELD,
            limit=most,
        )
