"""Linear layers in torch: over weights packed for oneDNN once, and in int8.

A matrix product may add in another order when it has fewer rows: oneDNN does for one row. In exact mode every weight
shape is probed at load, and its calls are shaped so that a row's result never depends on the other rows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

INT8_MAX = 127.0
MAX_INT8_INPUTS = 65_536  # more products of 255 * 127 could overflow 32 bits
PROBE_ROWS = (4, 5, 6, 7, 8, 13, 16, 17, 31, 32, 33, 48, 64, 65, 96, 127, 128, 130)
LARGE_WEIGHT = 1 << 24  # elements; a few row counts must do for these
LARGE_PROBE_ROWS = (4, 5, 8, 17, 33, 64)


@dataclass(frozen=True, slots=True)
class RowRule:
    """How calls are shaped: fewer rows than `at_least` are padded; with `tile`, calls have exactly that many rows."""

    at_least: int = 1
    tile: int | None = None


BEST_EFFORT_RULE = RowRule()
# Cheapest first. The last always holds: one row never has a neighbour.
EXACT_RULES = (RowRule(at_least=4), RowRule(tile=32), RowRule(tile=1))


class PackedLinear:
    """A weight [out, in] with its bias, called on [n, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.in_features = weight.shape[1]
        self.rule = BEST_EFFORT_RULE
        self._bias = bias
        self._packed = _pack(weight)
        self._product: Any = torch.ops.mkldnn._linear_pointwise.default if self._packed is not None else None
        self._weight = weight if self._packed is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rule = self.rule
        if rule.tile is not None:
            return self._tiled(x, rule.tile)
        if x.shape[0] < rule.at_least:
            return self._multiply(F.pad(x, (0, 0, 0, rule.at_least - x.shape[0])))[: x.shape[0]]
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return F.linear(x, self._weight, self._bias)  # type: ignore[arg-type]
        result: torch.Tensor = self._product(x, self._packed, self._bias, "none", [], "")
        return result

    def _tiled(self, x: torch.Tensor, tile: int) -> torch.Tensor:
        missing = -x.shape[0] % tile
        padded = F.pad(x, (0, 0, 0, missing)) if missing else x
        return torch.cat([self._multiply(part.contiguous()) for part in torch.split(padded, tile)])[: x.shape[0]]


class RowRules:
    """Finds each weight shape's rule once. One per backend."""

    def __init__(self) -> None:
        self._rules: dict[tuple[int, int, torch.dtype, bool], RowRule] = {}

    def apply(self, linear: PackedLinear, weight: torch.Tensor, has_bias: bool) -> None:
        key = (weight.shape[0], weight.shape[1], weight.dtype, has_bias)
        if key not in self._rules:
            self._rules[key] = find_exact_rule(linear, weight)
        linear.rule = self._rules[key]


class Int8Linear:
    """A weight [out, in] as int8 with one scale per output, called on [n, in] of any float type: what linear.cpp
    computes, bit for bit. Each row of x gets its own scale, or it would depend on its neighbours.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        check_int8_width(weight.shape[1])
        steps, self._scales = _quantize_rows(weight)
        self._weight = steps.to(torch.int8)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        q, scales = _quantize_rows(x)
        sums = (q.double() @ self._weight.double().T).float()  # exact: integers below 2^53
        y = sums * (scales[:, None] * self._scales)
        return (y if self._bias is None else y + self._bias).to(x.dtype)


def check_int8_width(in_features: int) -> None:
    """Raises ValueError for a layer that is too wide to be summed in 32 bits."""
    if in_features > MAX_INT8_INPUTS:
        raise ValueError(
            f"quantize=int8 sums at most {MAX_INT8_INPUTS} inputs, a layer has {in_features}; leave it unset"
        )


def _quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of [n, dim] in steps of its own scale: steps [n, dim] from -127 to 127, scales [n]."""
    wide = x.float()
    top = wide.abs().amax(dim=1)
    inverse = torch.where(top > 0, torch.div(torch.tensor(INT8_MAX), top), 0.0)
    return (wide * inverse[:, None]).round(), top / INT8_MAX


def find_exact_rule(linear: PackedLinear, weight: torch.Tensor) -> RowRule:
    """The cheapest rule under which rows come out bitwise equal for every probed number of rows."""
    rows = LARGE_PROBE_ROWS if weight.numel() > LARGE_WEIGHT else PROBE_ROWS
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(rows) + 1, weight.shape[1], generator=generator).to(weight.dtype)
    for rule in EXACT_RULES:
        linear.rule = rule
        expected = linear(x)
        if all(torch.equal(linear(x[1 : n + 1].contiguous()), expected[1 : n + 1]) for n in (1, 2, 3, *rows)):
            if rule is not EXACT_RULES[0]:
                logger.warning("weights of shape %s need %s to be exact here: slower", tuple(weight.shape), rule)
            return rule
    return EXACT_RULES[-1]


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight in oneDNN's own layout, or None where this build of torch cannot."""
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(4, weight.shape[1]), packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return None
    return packed
