"""Prompts that are input embeddings: a tensor in the safetensors format, checked and converted to a carried input.

Only safetensors is read. Formats that may contain code, such as those of `torch.save` and pickle, are refused.
"""

from __future__ import annotations

from typing import Any

from quire.internal.v1 import inputs_pb2
from safetensors import SafetensorError, deserialize

from gateway_svc.columns import u32_from_bytes
from gateway_svc.request.finite import is_finite
from gateway_svc.request.models import ServedModel
from gateway_svc.request.parameters import FieldErrors, invalid
from gateway_svc.request.prompt_input import FIELD, PromptInput
from prefix_index.content_ids import content_ids, input_digest

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def read_embeddings(data: bytes, model: ServedModel) -> PromptInput:
    """The prompt of a file in the safetensors format with one tensor [positions, hidden_size].

    `check_embeddings` has accepted it. Raises InvalidRequestError with shape, dtype and limits.
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
    return _whole_prompt(DTYPES[dtype], (length, width), values)


def _whole_prompt(dtype: str, shape: tuple[int, int], values: bytes) -> PromptInput:
    digest = input_digest("embeddings", dtype, shape, values)
    carried = inputs_pb2.CarriedInput(
        kind=inputs_pb2.INPUT_KIND_EMBEDDINGS,
        digest=digest,
        start=0,
        length=shape[0],
        dtype=inputs_pb2.InputDtype.Value(f"INPUT_DTYPE_{dtype.upper()}"),
        shape=shape,
        data=values,
    )
    return PromptInput(u32_from_bytes(content_ids(digest, shape[0])), (carried,))


def _only_tensor(data: bytes) -> dict[str, Any]:
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
