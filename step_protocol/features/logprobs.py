"""Log probabilities of sampled tokens and of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from step_protocol.columns import (
    EMPTY,
    F32,
    NO_FLOATS,
    U32,
    U64,
    AnswerPart,
    Bools,
    WireError,
    f32_from_bytes,
    f32_to_bytes,
    u32_column,
    u32_from_bytes,
    u32_to_bytes,
)


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log probabilities of N tokens. A token has 0 or 1 + k entries: itself, then the k most likely tokens."""

    lens: U32  # [N] entries per token
    logprobs: F32  # [sum(lens)]
    token_ids: U32  # [sum(lens)]
    ranks: U32  # [tokens with entries] 1 + number of tokens with a greater value
    # [tokens with entries] of rows that ask for them, 0 for others; None if no row asks:
    raw_logprobs: F32 | None = None  # raw log probabilities of the tokens, if `logprobs` are processed
    num_kept: U32 | None = None  # token ids that the filters keep
    logits_digests: U64 | None = None

    def write(self, message: Any) -> None:
        """Fills a LogprobColumns."""
        message.lens, message.logprobs = u32_to_bytes(self.lens), f32_to_bytes(self.logprobs)
        message.token_ids, message.ranks = u32_to_bytes(self.token_ids), u32_to_bytes(self.ranks)
        for name, column in self.extras().items():
            setattr(message, name, column.astype(LOGPROB_EXTRAS[name].newbyteorder("<")).tobytes())

    @classmethod
    def read(cls, message: Any, num_tokens: int) -> Self:
        """The columns of so many tokens. Raises WireError."""
        columns = cls(
            lens=u32_from_bytes(message.lens, "lens"),
            logprobs=f32_from_bytes(message.logprobs, "logprobs"),
            token_ids=u32_from_bytes(message.token_ids, "logprobs.token_ids"),
            ranks=u32_from_bytes(message.ranks, "ranks"),
            **_extras(message),
        )
        expected = num_tokens, int(columns.lens.sum(dtype=np.uint64)), int(np.count_nonzero(columns.lens))
        found = len(columns.lens), len(columns.logprobs), len(columns.ranks)
        if found != expected or len(columns.token_ids) != expected[1]:
            raise WireError(
                f"log probabilities have {found[0]} lens, {found[1]} logprobs, {len(columns.token_ids)} token_ids and "
                f"{found[2]} ranks; expected {expected[0]}, {expected[1]}, {expected[1]} and {expected[2]}"
            )
        for name, column in columns.extras().items():
            if len(column) != expected[2]:
                raise WireError(f"log probabilities have {len(column)} {name}; expected {expected[2]}")
        return columns

    def select(self, mask: Bools) -> LogprobColumns:
        """The tokens where `mask` [N] is true."""
        if mask.all():
            return self
        entries, has_entries = np.repeat(mask, self.lens), mask[self.lens > 0]
        extras = {name: column[has_entries] for name, column in self.extras().items()}
        return LogprobColumns(
            self.lens[mask], self.logprobs[entries], self.token_ids[entries], self.ranks[has_entries], **extras
        )

    def extras(self) -> dict[str, Any]:
        """The columns that some row asks for, by name."""
        found = {name: getattr(self, name) for name in LOGPROB_EXTRAS}
        return {name: column for name, column in found.items() if column is not None}


LOGPROB_EXTRAS: dict[str, np.dtype[Any]] = {  # the optional columns and their numbers
    "raw_logprobs": np.dtype(np.float32),
    "num_kept": np.dtype(np.uint32),
    "logits_digests": np.dtype(np.uint64),
}


def concat_columns(parts: Sequence[LogprobColumns]) -> LogprobColumns:
    """The tokens of all parts in order."""
    names = dict.fromkeys(name for part in parts for name in part.extras())
    extras = {name: np.concatenate([_extra(part, name) for part in parts]) for name in names}
    return LogprobColumns(
        np.concatenate([part.lens for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        **extras,
    )


def _extra(part: LogprobColumns, name: str) -> Any:
    found = getattr(part, name)
    return np.zeros(len(part.ranks), LOGPROB_EXTRAS[name]) if found is None else found


def no_logprobs(num_tokens: int) -> LogprobColumns:
    """Columns of tokens without entries."""
    return LogprobColumns(np.zeros(num_tokens, dtype=np.uint32), NO_FLOATS, EMPTY, EMPTY)


def _extras(message: Any) -> dict[str, Any]:
    """The optional columns of a message. Raises WireError."""
    found: dict[str, Any] = {}
    for name, dtype in LOGPROB_EXTRAS.items():
        data = getattr(message, name)
        if len(data) % dtype.itemsize:
            raise WireError(f"{name} has {len(data)} bytes; the length must be a multiple of {dtype.itemsize}", name)
        if data:
            found[name] = np.frombuffer(data, dtype.newbyteorder("<"))
    return found


@dataclass(frozen=True, slots=True)
class PromptLogprobs(AnswerPart):
    """Log probabilities of prompt tokens. The positions of a row ascend."""

    FIELDS = ("prompt_rows", "prompt_positions", "prompt_logprobs")
    WHAT = "prompt_logprobs"

    rows: U32  # [N]
    positions: U32  # [N] in the prompt, from 1
    columns: LogprobColumns

    def write(self, message: Any) -> None:
        message.prompt_rows, message.prompt_positions = u32_to_bytes(self.rows), u32_to_bytes(self.positions)
        self.columns.write(message.prompt_logprobs)

    @classmethod
    def read(cls, message: Any) -> Self:
        rows = u32_from_bytes(message.prompt_rows, "prompt_rows")
        positions = u32_column("prompt_positions", message.prompt_positions, len(rows), "one per item of prompt_rows")
        return cls(rows, positions, LogprobColumns.read(message.prompt_logprobs, len(rows)))
