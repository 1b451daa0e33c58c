"""Beam search parameters of one request, and the checks that depend on several fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from request_fields.fields import FIELDS, FieldError


class EarlyStopping(Enum):
    """When a beam search ends, with the names and meanings of `early_stopping` in transformers.

    FALSE: when the best running beam, at its current length, can no longer beat the worst kept sequence. TRUE: as soon
    as `width` sequences are complete. NEVER: like FALSE, but a positive length_penalty assumes the largest length.
    """

    FALSE = 1
    TRUE = 2
    NEVER = 3


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of one beam search: the typed form of the `sampling` fields about beams."""

    width: int  # beams that run at once
    num_returned: int  # best sequences that the client gets
    length_penalty: float = 1.0  # a sequence's score is its log probability / length ** length_penalty
    early_stopping: EarlyStopping = EarlyStopping.FALSE


NOT_WITH_BEAMS = [field.path for field in FIELDS if not field.works_with_beams]
ONLY_WITH_BEAMS = [field.path for field in FIELDS if field.needs_beams]


def check_beam_fields(fields_set: Mapping[str, Any]) -> None:
    """Check the fields that a request sets, by path, against its beam_width. Raises FieldError."""
    width = fields_set.get("sampling.beam_width") or 0
    if width < 2:
        for path in ONLY_WITH_BEAMS:
            if path in fields_set:
                raise FieldError(path, "is set; it needs sampling.beam_width of at least 2")
        return
    for path in NOT_WITH_BEAMS:
        if path in fields_set:
            value = fields_set[path]
            shown = f"is {value:g}" if isinstance(value, int | float) else "is set"
            raise FieldError(
                path,
                f"{shown}, and sampling.beam_width is {width}; beam search does not support it: unset one",
            )


def beam_params(sampling: Mapping[str, Any], max_tokens: int) -> BeamParams | None:
    """Beam search parameters from `sampling` values by field name; None without beam search. Raises FieldError."""
    width, n = sampling.get("beam_width") or 0, sampling.get("n") or 1
    if width < 2:
        return None
    if n > width:
        raise FieldError("sampling.n", f"is {n}; must be at most sampling.beam_width, {width}")
    if not max_tokens:
        raise FieldError("stop.max_tokens", "is 0; must be at least 1 with sampling.beam_width")
    early = sampling.get("early_stopping") or EarlyStopping.FALSE.value
    return BeamParams(width, n, float(sampling.get("length_penalty", 1.0)), EarlyStopping(early))
