"""Prompts that are input embeddings: a tensor in the safetensors format.

Only safetensors is read. Formats that may contain code, such as those of `torch.save` and pickle, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.internal.v1 import inputs_pb2
from quire.v1 import inference_pb2 as pb

from gateway_svc.request.field_errors import FieldErrors, invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.prompts.reader import PromptInput, ReadContext, carried_input, is_finite, whole_prompt
from svc_common.errors import ContextLengthError

FIELD = "prompt.embeddings"
HEADER_BYTES = 64 << 10  # more than the header of one tensor needs
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class EmbeddingsReader:
    """Reads large tensors in a thread."""

    def check(self, prompt: pb.Prompt, field: str) -> None:
        if not prompt.embeddings:
            raise invalid(f"{field}.embeddings", "is empty; send a file in the safetensors format")

    def check_size(self, request: pb.GenerateRequest, model: ServedModel) -> None:
        """Refuse embeddings that the model does not take, or that are certainly too many."""
        num_bytes, hidden_size = len(request.prompt.embeddings), model.info.hidden_size
        max_tokens = model.limits.max_tokens
        if not hidden_size:
            raise invalid(
                FIELD, f"is set, but the workers of model {model.name!r} take tokens only; send text or token ids"
            )
        if num_bytes > (limit := HEADER_BYTES + 4 * hidden_size * max_tokens):
            raise ContextLengthError(
                f"{FIELD} has {num_bytes} bytes, more than the {limit} bytes of {max_tokens} positions of "
                f"{hidden_size} float32 values: shorten the prompt",
                field=FIELD,
                limit=max_tokens,
            )

    async def read(
        self, request: pb.GenerateRequest, model: ServedModel, known_ids: Sequence[int] | None, context: ReadContext
    ) -> PromptInput:
        data = request.prompt.embeddings
        return await context.lane.run(len(data), read_embeddings, data, model)


def read_embeddings(data: bytes, model: ServedModel) -> PromptInput:
    """The prompt of a file in the safetensors format with one tensor [positions, hidden_size].

    Its size is checked. Raises InvalidRequestError with shape, dtype and limits.
    """
    tensor = _only_tensor(data)
    dtype, (length, width), values = tensor["dtype"], _shape_of(tensor), bytes(tensor["data"])
    if dtype not in DTYPES:
        raise invalid(FIELD, f"has dtype {dtype}; must be one of {', '.join(DTYPES)}")
    if width != model.info.hidden_size:
        words = f"has rows of {width} values; must be {model.info.hidden_size}, the hidden_size of model {model.name!r}"
        raise invalid(FIELD, words)
    if not length:
        raise invalid(FIELD, "has no rows; a prompt needs at least 1 position")
    with FieldErrors():
        model.limits.resolve(length, None)
    if not is_finite(values, DTYPES[dtype]):
        raise invalid(FIELD, "contains NaN or infinity; all values must be finite")
    kind, shape = inputs_pb2.INPUT_KIND_EMBEDDINGS, (length, width)
    return whole_prompt(carried_input(kind, DTYPES[dtype], shape, values, start=0, length=length))


def _only_tensor(data: bytes) -> dict[str, Any]:
    from safetensors import SafetensorError, deserialize  # loaded for the first such prompt only

    try:
        tensors = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise invalid(FIELD, f"is not in the safetensors format: {error}; save one tensor with safetensors") from None
    if len(tensors) != 1:
        raise invalid(FIELD, f"has {len(tensors)} tensors; must have one, of shape [positions, hidden_size]")
    found: dict[str, Any] = tensors[0][1]
    return found


def _shape_of(tensor: dict[str, Any]) -> tuple[int, int]:
    shape = tensor["shape"]
    if len(shape) != 2:
        raise invalid(FIELD, f"has shape {shape}; must have two dimensions, [positions, hidden_size]")
    return shape[0], shape[1]
