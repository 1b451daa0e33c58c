"""The columns of features: one `Part` each, written and read by itself alone; and the budgets of reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from request_fields.fields import MAX_UINT32
from step_protocol.columns import (
    EMPTY,
    F32,
    I64,
    NO_FLOATS,
    U32,
    U64,
    AnswerPart,
    Bools,
    Columns,
    Part,
    WireError,
    f32_from_bytes,
    f32_to_bytes,
    u32_column,
    u32_from_bytes,
    u32_to_bytes,
)

START_WITHIN = 4  # tokens, such as white space, in front of the start marker of reasoning
MAX_DELAY = 8  # tokens after which a grammar allows the end of reasoning: the rest of a character
MAX_NUMBERS = 1 << 16  # numbers of one row


@dataclass(frozen=True, slots=True)
class BeamMoves(Columns):
    """Beams that get new tokens, all at once. A beam continues the computed tokens of its parent, or of itself."""

    FIELDS = ("beam_rows", "beam_parents", "beam_tokens")

    rows: U32  # [M]
    parents: U32  # [M] rows of the same request
    tokens: U32  # [M] to append


@dataclass(frozen=True, slots=True)
class BeamCandidates(Columns, AnswerPart):
    """Candidates of several rows. Those of one row are adjacent, in descending order; ties by lowest id."""

    FIELDS = ("candidate_rows", "candidate_ids", "candidate_logprobs")
    FLOATS = frozenset({"candidate_logprobs"})

    rows: U32  # [C]
    token_ids: U32  # [C]
    logprobs: F32  # [C]

    def checked(self, vocab_size: int) -> BeamCandidates:
        """The candidates of all rows but those with an invalid candidate, which fail for lack of candidates."""
        is_valid = (self.token_ids < vocab_size) & (self.logprobs < np.inf)  # false for NaN
        return self if is_valid.all() else self.without(self.rows[~is_valid].astype(np.int64))

    def without(self, rows: I64) -> BeamCandidates:
        """The candidates of all other rows."""
        kept = ~np.isin(self.rows, rows)
        return BeamCandidates(self.rows[kept], self.token_ids[kept], self.logprobs[kept])


NO_CANDIDATES = BeamCandidates(EMPTY, EMPTY, NO_FLOATS)


class ImageWork(NamedTuple):
    """A part of the work on one image of a row."""

    row: int
    start: int  # first position of the image
    done: int  # after this step
    total: int


@dataclass(frozen=True, slots=True)
class ImageSteps(Part):
    """The work on images that a step does."""

    FIELDS = ("images",)

    work: tuple[ImageWork, ...]

    def write(self, message: Any) -> None:
        message.images = u32_to_bytes(np.array(self.work, np.uint32))

    @classmethod
    def read(cls, message: Any) -> Self:
        values = u32_from_bytes(message.images, "images")
        if len(values) % 4:
            raise WireError(f"images has {len(values)} numbers, expected four per image", "images")
        work = tuple(ImageWork(*item) for item in values.reshape(-1, 4).tolist())
        if any(not 0 < item.done <= item.total for item in work):
            raise WireError("images has work that is 0, or beyond all work of its image", "images")
        return cls(work)


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


@dataclass(frozen=True, slots=True)
class TakenSnapshots(Columns):
    """Snapshots that a step takes."""

    FIELDS = ("snapshot_rows", "snapshot_positions", "snapshot_slots")

    rows: U32  # [N] rows whose states are kept
    positions: U32  # [N] tokens of the row that the state includes, the last one in this step
    slots: U32  # [N] where the state is kept


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Ends the reasoning of a row after `num_tokens` tokens. A function of the output alone."""

    num_tokens: int
    start_ids: U32  # reasoning begins behind these ids in a row; empty: with the output
    end_ids: U32  # each ends reasoning
    last_ids: U32  # forced before the first of `end_ids`
    repeats: bool  # reasoning begins anywhere, and again; else behind at most START_WITHIN tokens, once

    @property
    def positions(self) -> range:
        """Output positions of which one may be forced."""
        last = self.num_tokens + START_WITHIN + len(self.start_ids) + len(self.last_ids) + MAX_DELAY
        return range(self.num_tokens, MAX_UINT32 if self.repeats else last + 1)

    def forced_id(self, output: U32) -> int | None:
        """The token that must follow the output; None: any. The time is bounded by the length of the output, whatever a
        client's ids are: reasoning is at most once between two end ids, behind the first start marker there.
        """
        if len(output) not in self.positions:
            return None
        ends = np.flatnonzero(np.isin(output, self.end_ids))
        first, until = np.append(0, ends + 1), np.append(ends, len(output))
        markers = self._markers(output)
        begins = np.append(markers + len(self.start_ids), len(output) + 1)[np.searchsorted(markers, first)]
        num_left = self.num_tokens - int((until - begins)[:-1][begins[:-1] <= ends].sum())
        border = int(begins[-1]) + num_left
        if max(begins[-1], border) > len(output):
            return None
        return self._closing_id(output[max(border, 0) :], num_left)

    def _closing_id(self, over: U32, num_left: int) -> int:
        """The token behind the tokens `over` the budget: those of a grammar that allowed no end in the middle of a
        character, and some of `last_ids`. Reasoning that begins again behind the budget has no `last_ids`."""
        size, last = len(self.last_ids), self.last_ids.tobytes()
        ends = (over[len(over) - k :].tobytes() for k in range(min(size, len(over)), -1, -1))
        known = next(len(end) // 4 for end in ends if last.startswith(end))  # 4 bytes an id
        return int(self.end_ids[0] if known == size or num_left < 0 else self.last_ids[known])

    def _markers(self, output: U32) -> I64:
        """Where the start markers begin."""
        if not len(self.start_ids):
            return np.zeros(1, np.int64)
        found = np.ones(max(0, len(output) - len(self.start_ids) + 1), np.bool_)
        for i, id_ in enumerate(self.start_ids):
            found &= output[i : i + len(found)] == id_
        return np.flatnonzero(found) if self.repeats else np.flatnonzero(found[: START_WITHIN + 1])[:1]


STEP_PARTS: tuple[type[Part], ...] = (BeamMoves, ImageSteps, TakenSnapshots)
ANSWER_PARTS: tuple[type[Part], ...] = (PromptLogprobs, BeamCandidates, PooledRows)
