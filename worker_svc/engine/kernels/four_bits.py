"""Weights in 4 bits: as checkpoints store them, and in the units of linear_4bit.h."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

INT4, FP4 = 3, 4  # `Kind` of products.h
MAX_UNIT, WORD = 128, 8  # inputs of a unit, and of a word
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP4_CODES = (7, 8, 9, 10, 11, 12, 13, 14, 7, 6, 5, 4, 3, 2, 1, 0)  # E2M1's codes in ascending order of their values
FP4_ZERO = 7  # the code of 0 in this order
# Scales in 16 bits: (1 + m / 1024) * 2^(e - 48), with 6 bits e and 10 bits m.
SCALE_BIAS, SCALE_EXPONENTS, SCALE_BITS = 48, 64, 10
FLOAT_BIAS, FLOAT_BITS = 127, 23


@dataclass(frozen=True, slots=True)
class FourBitRows:
    """A weight [out, in] in 4 bits: (code - zero) * scale, or without zeros E2M1 times a scale. Columns belong to the
    inputs in `order`, and `group` of them share a scale. The last group may be shorter."""

    codes: torch.Tensor  # uint8 [out, in]
    scales: torch.Tensor  # float32 [out, groups]
    zeros: torch.Tensor | None  # uint8 [out, groups]
    group: int
    order: torch.Tensor | None = None  # int64 [in]; None: columns are the inputs

    def of_outputs(self, order: torch.Tensor) -> FourBitRows:
        """The outputs in another order."""
        zeros = None if self.zeros is None else self.zeros[order]
        return replace(self, codes=self.codes[order], scales=self.scales[order], zeros=zeros)

    def widened(self) -> torch.Tensor:
        """The weight in float32: each product is rounded once."""
        columns = torch.arange(self.codes.shape[1]) // self.group
        if self.zeros is None:
            values = torch.tensor(E2M1)[self.codes.int()]
        else:
            values = self.codes.float() - self.zeros.float()[:, columns]
        weight = values * self.scales[:, columns]
        return weight if self.order is None else weight[:, self.order.argsort()]


@dataclass(frozen=True, slots=True)
class FourBitUnits:
    """`FourBitRows` as linear_4bit.h packs them: each unit of inputs has a scale, and a zero if it is INT4."""

    kind: int
    codes: torch.Tensor  # uint8 [out, in]
    scales: torch.Tensor  # int16 [out, units]: the bits of scales in 16 bits, or the exponents of FP4's
    zeros: torch.Tensor | None  # uint8 [out, units]
    unit: int
    order: torch.Tensor | None  # int32 [in]


def units_of(rows: FourBitRows) -> FourBitUnits | None:
    """None: the kernels do not compute these weights, because groups do not consist of units, or scales need more
    bits."""
    inputs = rows.codes.shape[1]
    unit = unit_of(rows.group, inputs)
    if unit is None:
        return None
    if rows.zeros is None:
        kind, empty = FP4, torch.full_like(rows.scales, FP4_ZERO, dtype=torch.uint8)
        codes = torch.tensor(FP4_CODES, dtype=torch.uint8)[rows.codes.int()]
        codes, scales = _with_scales_of_zeros(codes, rows.scales / 2, empty, rows.group)
        bits = exponents_of(scales)
    else:
        kind = INT4
        codes, scales = _with_scales_of_zeros(rows.codes, rows.scales, rows.zeros, rows.group)
        bits = scale_bits(scales)
    if bits is None:
        return None
    count = -(-inputs // unit)
    times = count if rows.group >= inputs else rows.group // unit

    def of_units(part: torch.Tensor) -> torch.Tensor:
        return part.repeat_interleave(times, 1)[:, :count].contiguous()

    zeros = None if rows.zeros is None else of_units(rows.zeros)
    order = None if rows.order is None else rows.order.int().contiguous()
    return FourBitUnits(kind, codes.contiguous(), of_units(bits), zeros, unit, order)


def unit_of(group: int, inputs: int) -> int | None:
    """The inputs of a unit: as many as possible, of one group. None: no whole words fit."""
    if group >= inputs:
        return min(MAX_UNIT, -(-inputs // WORD) * WORD)
    return next((unit for unit in range(MAX_UNIT, 0, -WORD) if group % unit == 0), None)


def scale_bits(scales: torch.Tensor) -> torch.Tensor | None:
    """Scales in 16 bits, as int16. None: some are not among these numbers."""
    bits = scales.float().contiguous().view(torch.int32)
    exponents = (bits >> FLOAT_BITS) - (FLOAT_BIAS - SCALE_BIAS)
    rest = bits & ((1 << (FLOAT_BITS - SCALE_BITS)) - 1)
    if ((exponents < 0) | (exponents >= SCALE_EXPONENTS) | (rest != 0)).any():
        return None
    first = (FLOAT_BIAS - SCALE_BIAS) << FLOAT_BITS
    return ((bits - first) >> (FLOAT_BITS - SCALE_BITS)).to(torch.int16)


def exponents_of(scales: torch.Tensor) -> torch.Tensor | None:
    """The biased exponents of powers of two, as int16. None: some are not among the normal ones."""
    bits = scales.float().contiguous().view(torch.int32)
    exponents = bits >> FLOAT_BITS
    is_power = (bits & ((1 << FLOAT_BITS) - 1)) == 0
    if not (is_power & (exponents > 0) & (exponents < 2 * FLOAT_BIAS + 1)).all():
        return None
    return exponents.to(torch.int16)


def _with_scales_of_zeros(
    codes: torch.Tensor, scales: torch.Tensor, empty: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same weights, where groups of zeros have the scale 1. `empty` [out, groups] is the code of 0."""
    outputs, inputs = codes.shape
    columns = torch.arange(inputs) // group
    of_zero = empty[:, columns]
    is_used = (codes != of_zero) & (scales != 0)[:, columns]
    padded = torch.zeros(outputs, scales.shape[1] * group, dtype=torch.bool)
    padded[:, :inputs] = is_used
    has_used = padded.view(outputs, -1, group).any(2)
    return torch.where(is_used, codes, of_zero), torch.where(has_used, scales, 1.0)
