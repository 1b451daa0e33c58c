"""Embeddings of the tokens of a step whose positions belong to inputs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.engine.backend import Embedded
from worker_svc.engine.batch import CarriedInput
from worker_svc.engine.inputs import InputSpan

# bfloat16 is not a type of numpy: its bits are read as integers.
STORED: dict[str, npt.DTypeLike] = {"float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}


class InputEmbedder:
    """Computes embeddings of inputs for one model."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        self._hidden_size = hidden_size
        self._dtype = dtype

    def embed(self, spans: list[InputSpan]) -> Embedded | None:
        """The embeddings of all spans; None if there are none."""
        if not spans:
            return None
        tokens = np.concatenate([np.arange(span.token, span.token + span.count) for span in spans])
        rows = torch.cat([self._rows(span.item, span.first, span.count) for span in spans])
        order = np.argsort(tokens, kind="stable")
        return Embedded(tokens[order], rows[torch.from_numpy(order)])

    def _rows(self, item: CarriedInput, first: int, count: int) -> torch.Tensor:
        """[count, hidden] The embeddings of an input from its position `first` on, in the number type of the model."""
        width = self._hidden_size
        column = np.frombuffer(item.data, STORED[item.dtype], count * width, first * width * _item_bytes(item))
        native = column.astype(column.dtype.newbyteorder("="), copy=True)  # torch wants writable memory
        rows = torch.from_numpy(native)
        return (rows.view(torch.bfloat16) if item.dtype == "bfloat16" else rows).to(self._dtype).view(count, width)


def _item_bytes(item: CarriedInput) -> int:
    return np.dtype(STORED[item.dtype]).itemsize
