"""Tensors of KServe V2: a request's inputs as values, and values as outputs. Pure."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quire.foreign import kserve_pb2 as pb

from gateway_svc.http.json_text import invalid, shown

# By datatype: the code of `array`, and the field of InferTensorContents.
NUMBERS: Mapping[str, tuple[str, str]] = {
    "BOOL": ("B", "bool_contents"), "INT8": ("b", "int_contents"), "INT16": ("h", "int_contents"),
    "INT32": ("i", "int_contents"), "INT64": ("q", "int64_contents"), "UINT8": ("B", "uint_contents"),
    "UINT16": ("H", "uint_contents"), "UINT32": ("I", "uint_contents"), "UINT64": ("Q", "uint64_contents"),
    "FP32": ("f", "fp32_contents"), "FP64": ("d", "fp64_contents"),
}  # fmt: skip
LENGTH_BYTES = 4  # before each element of BYTES
MAX_ELEMENTS = 4096  # elements of BYTES or BOOL in one tensor
MAX_DIMENSIONS = 8


def inputs_of(request: pb.ModelInferRequest) -> Iterator[tuple[str, Sequence[Any]]]:
    """Name and values of each input. Raises InvalidRequestError."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise invalid(
            "raw_input_contents", f"has {len(raw)} items; must have one for each of {len(request.inputs)} inputs"
        )
    for i, tensor in enumerate(request.inputs):
        if len(tensor.shape) > MAX_DIMENSIONS:
            raise invalid(tensor.name[:80], f"has {len(tensor.shape)} dimensions; at most {MAX_DIMENSIONS} are allowed")
        values = _values(tensor, raw[i] if raw else None)
        if len(values) != math.prod(tensor.shape):
            words = f"has {len(values)} values, but its shape {list(tensor.shape)} is another number"
            raise invalid(tensor.name[:80], words)
        yield tensor.name, values


def _values(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Sequence[Any]:
    if tensor.datatype == "BYTES":
        return _texts(
            tensor.name[:80], tensor.contents.bytes_contents if raw is None else _split(tensor.name[:80], raw)
        )
    if tensor.datatype not in NUMBERS:
        words = f"has datatype {shown(tensor.datatype)}; must be BYTES, {', '.join(NUMBERS)}"
        raise invalid(tensor.name[:80], words)
    code, field = NUMBERS[tensor.datatype]
    if raw is None:
        return getattr(tensor.contents, field)  # type: ignore[no-any-return]
    values = array(code)
    if len(raw) % values.itemsize:
        raise invalid(tensor.name[:80], f"has {len(raw)} bytes, which is no multiple of {values.itemsize}")
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    if tensor.datatype != "BOOL":
        return values
    if len(values) > MAX_ELEMENTS:
        raise invalid(tensor.name[:80], f"has more than {MAX_ELEMENTS} elements")
    return list(map(bool, values))


def _split(name: str, raw: bytes) -> Iterator[bytes]:
    """The elements of a BYTES tensor: each has its length before it."""
    at = 0
    while at < len(raw):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(raw[at:start], "little")
        if at > len(raw):
            raise invalid(name, "ends within an element: each has its length in 4 little-endian bytes before it")
        yield raw[start:at]


def _texts(name: str, elements: Iterable[bytes]) -> list[str]:
    found: list[str] = []
    for element in elements:
        if len(found) == MAX_ELEMENTS:
            raise invalid(name, f"has more than {MAX_ELEMENTS} elements")
        try:
            found.append(element.decode())
        except UnicodeDecodeError:
            raise invalid(name, "has an element that is not UTF-8") from None
    return found


def add_output(response: pb.ModelInferResponse, name: str, datatype: str, rows: Sequence[Any]) -> None:
    """Append a tensor with one row per sample. Rows of numbers are filled with zeros to the longest one."""
    tensor = response.outputs.add(name=name, datatype=datatype, shape=[len(rows)])
    if datatype == "BYTES":
        elements = [row.encode() for row in rows]
        raw = b"".join(len(one).to_bytes(LENGTH_BYTES, "little") + one for one in elements)
    else:
        values = array(NUMBERS[datatype][0])
        if rows and isinstance(rows[0], Sequence):
            width = max(map(len, rows))
            tensor.shape.append(width)
            for row in rows:
                values.extend(row)
                values.extend([0] * (width - len(row)))
        else:
            values.extend(rows)
        if sys.byteorder == "big":
            values.byteswap()
        raw = values.tobytes()
    response.raw_output_contents.append(raw)
