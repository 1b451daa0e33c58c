"""Pooled rows: they return numbers when their prompt is complete, instead of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from step_protocol.columns import (
    F32,
    U32,
    AnswerPart,
    WireError,
    f32_from_bytes,
    f32_to_bytes,
    u32_column,
    u32_from_bytes,
    u32_to_bytes,
)

MAX_NUMBERS = 1 << 16  # numbers of one row


@dataclass(frozen=True, slots=True)
class PooledRows(AnswerPart):
    """The numbers of the pooled rows that a step completes."""

    FIELDS = ("pooled_rows", "pooled_lens", "pooled_values")
    WHAT = "numbers"
    ENDS_PROMPT = True

    rows: U32  # [P]
    lens: U32  # [P]
    values: F32  # [sum(lens)]

    def of_row(self) -> dict[int, F32]:
        """The numbers by row."""
        parts = np.split(self.values, np.cumsum(self.lens)[:-1]) if len(self.lens) else []
        return dict(zip(self.rows.tolist(), parts, strict=True))

    def checked(self, vocab_size: int) -> Self:
        if len(np.unique(self.rows)) < len(self.rows):
            raise WireError(f"pooled_rows has a row twice: {self.rows.tolist()}")
        if int(self.lens.max()) > MAX_NUMBERS or not self.lens.all():
            raise WireError(f"a pooled row has {int(self.lens.max())} numbers; expected 1 to {MAX_NUMBERS}")
        if not np.isfinite(self.values).all():
            raise WireError("pooled_values has NaN or infinity")
        return self

    def write(self, message: Any) -> None:
        message.pooled_rows, message.pooled_lens = u32_to_bytes(self.rows), u32_to_bytes(self.lens)
        message.pooled_values = f32_to_bytes(self.values)

    @classmethod
    def read(cls, message: Any) -> Self:
        rows = u32_from_bytes(message.pooled_rows, "pooled_rows")
        lens = u32_column("pooled_lens", message.pooled_lens, len(rows), "one per item of pooled_rows")
        values = f32_from_bytes(message.pooled_values, "pooled_values")
        if len(values) != (expected := int(lens.sum(dtype=np.uint64))):
            problem = f"has {len(values)} items, expected {expected} (the sum of pooled_lens)"
            raise WireError(f"pooled_values {problem}", "pooled_values")
        return cls(rows, lens, values)
