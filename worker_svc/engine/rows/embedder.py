"""Embeddings of the tokens of a step whose positions belong to inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from step_protocol.columns import I64
from step_protocol.types import CarriedInput
from worker_svc.engine.backend import DeepRows, Embedded
from worker_svc.engine.rows.images import ImageEncoder
from worker_svc.engine.rows.inputs import InputSpan, InputTable
from worker_svc.engine.step import Step, StepPart

# bfloat16 is not a type of numpy: its bits are read as integers.
STORED: dict[str, npt.DTypeLike] = {"float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}


class InputEmbedder(StepPart):
    """Computes embeddings of the inputs of rows of a decoder."""

    def __init__(
        self,
        table: InputTable,
        hidden_size: int,
        dtype: torch.dtype,
        images: ImageEncoder | None = None,
        *,
        scale: float = 1.0,
    ) -> None:
        """Without `images`, rows have no images. `scale`: of the embeddings that requests carry."""
        self._table, self.in_use = table, table.in_use
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._scale = scale
        self._images = images
        self._device = torch.device("cpu") if images is None else images.device

    def use(self, weights: Any) -> None:
        if weights is None:
            self._images = None
        else:
            self._images, self._scale = weights.images, weights.model.parts.config.given_embedding_scale

    def before(self, step: Step) -> None:
        plan, forward = step.plan, step.forward
        forward.embedded, forward.deep = self.embed(
            self._table.spans(plan.rows, plan.context_lens, plan.ends, plan.starts)
        )
        if forward.embedded is not None:
            forward.token_ids[forward.embedded.tokens] = 0  # content ids are not in the vocabulary

    def embed(self, spans: list[InputSpan]) -> tuple[Embedded | None, DeepRows | None]:
        """The embeddings of all spans, and what is added to those of images; None if there are none."""
        if not spans:
            return None, None
        outputs = [self._outputs(span) for span in spans]
        tokens, order = _ascending(spans)
        embedded = Embedded(tokens, torch.cat([rows[0] for rows in outputs])[order])
        deep = [(span, rows[1:]) for span, rows in zip(spans, outputs, strict=True) if len(rows) > 1]
        if not deep:
            return embedded, None
        tokens, order = _ascending([span for span, _ in deep])
        return embedded, DeepRows(tokens, torch.cat([rows for _, rows in deep], dim=1)[:, order].contiguous())

    def _outputs(self, span: InputSpan) -> torch.Tensor:
        """[num_outputs, count, hidden] The embeddings of a span, then what is added to it after layers."""
        if span.item.kind != "image" or self._images is None:
            return self._rows(span.item, span.first, span.count)[None].to(self._device)
        outputs = self._images.outputs(span.item, is_begin=span.first == 0)
        return outputs[:, span.first : span.first + span.count]

    def _rows(self, item: CarriedInput, first: int, count: int) -> torch.Tensor:
        """[count, hidden] The embeddings of an input from its position `first` on, in the number type of the model."""
        width = self._hidden_size
        column = np.frombuffer(item.data, STORED[item.dtype], count * width, first * width * _item_bytes(item))
        native = column.astype(column.dtype.newbyteorder("="), copy=True)  # torch wants writable memory
        rows = torch.from_numpy(native)
        given = (rows.view(torch.bfloat16) if item.dtype == "bfloat16" else rows).to(self._dtype).view(count, width)
        return given if self._scale == 1.0 else given * self._scale


def _ascending(spans: list[InputSpan]) -> tuple[I64, torch.Tensor]:
    """The tokens of the spans in ascending order, and the indices that sort them."""
    tokens = np.concatenate([np.arange(span.token, span.token + span.count) for span in spans])
    order = np.argsort(tokens, kind="stable")
    return tokens[order], torch.from_numpy(order)


def _item_bytes(item: CarriedInput) -> int:
    return np.dtype(STORED[item.dtype]).itemsize
