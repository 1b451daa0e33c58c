"""Carried inputs for tests: random embeddings, their content ids, and their messages."""

from __future__ import annotations

import numpy as np
import torch
from quire.internal.v1 import inputs_pb2 as pb

from prefix_index.hashing import content_ids, input_digest
from step_protocol.types import CarriedInput


def embeddings(rows: torch.Tensor, start: int = 0) -> CarriedInput:
    """An input with these embeddings [length, hidden] at the positions from `start` on."""
    dtype, data = str(rows.dtype).removeprefix("torch."), bytes(rows.contiguous().view(torch.uint8).numpy())
    shape = tuple(rows.shape)
    return CarriedInput(
        "embeddings", input_digest("embeddings", dtype, shape, data), start, len(rows), dtype, shape, data
    )


def random_embeddings(length: int, hidden: int, *, seed: int = 0, start: int = 0) -> CarriedInput:
    """An input with random embeddings in float32."""
    return embeddings(torch.randn(length, hidden, generator=torch.Generator().manual_seed(seed)), start)


def rows_of(item: CarriedInput) -> torch.Tensor:
    """The embeddings [length, hidden] of an input in float32."""
    dtype: torch.dtype = getattr(torch, item.dtype)
    return torch.frombuffer(bytearray(item.data), dtype=dtype).view(item.shape).float()


def with_content_ids(prompt: list[int], *inputs: CarriedInput) -> list[int]:
    """The prompt with content ids in place of the tokens at the positions of the inputs."""
    found = np.array(prompt, dtype="<u4")
    for item in inputs:
        found[item.start : item.start + item.length] = np.frombuffer(content_ids(item.digest, item.length), "<u4")
    return found.tolist()


def to_proto(item: CarriedInput) -> pb.CarriedInput:
    """The message of an input."""
    return pb.CarriedInput(
        kind=pb.InputKind.Value(f"INPUT_KIND_{item.kind.upper()}"),
        digest=item.digest,
        start=item.start,
        length=item.length,
        dtype=pb.InputDtype.Value(f"INPUT_DTYPE_{item.dtype.upper()}"),
        shape=item.shape,
        data=item.data,
    )
