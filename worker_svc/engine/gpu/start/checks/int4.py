"""Cases of the kernels that multiply by weights in int4, for workers that have such weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from worker_svc.engine.gpu.kernels import int4_linear
from worker_svc.engine.gpu.kernels.int4_linear import DEPTH, Int4Weight
from worker_svc.engine.gpu.start.checks.case import TOLERANCES, Case, Outputs, Setup

NUM_ROWS = int4_linear.EXACT.rows + 1  # two tiles; the second has one row
NUM_OUTPUTS = int4_linear.EXACT.columns + 16
INPUTS = 3 * DEPTH


def int4_cases(setup: Setup) -> Iterator[Case]:
    """The product with few and with more rows, and the copy in a float type, with two groups."""
    if "int4" not in setup.formats:
        return
    for group in (DEPTH, int4_linear.PAIR):
        weight = _weight(setup, group)
        for num_rows in (1, NUM_ROWS):
            yield _product_case(setup, weight, num_rows)
        yield _widen_case(setup, weight)


def _weight(setup: Setup, group: int) -> Int4Weight:
    steps = (torch.arange(NUM_OUTPUTS * INPUTS).view(NUM_OUTPUTS, INPUTS) * 7919 % 251 % 16).to(torch.uint8)
    scales = setup.random(NUM_OUTPUTS, INPUTS // group, seed=1).cpu().float().abs() + 0.1
    zeros = torch.arange(NUM_OUTPUTS)[:, None] % 16 + torch.zeros(INPUTS // group)
    numbers = int4_linear.scales_and_zeros(scales, zeros, setup.dtype)
    return Int4Weight(int4_linear.packed(steps).to(setup.device), numbers.to(setup.device), group)


def _product_case(setup: Setup, weight: Int4Weight, num_rows: int) -> Case:
    x, bias = setup.random(num_rows, INPUTS, seed=2), setup.random(NUM_OUTPUTS, seed=3)
    rounded = int4_linear.reference(weight).to(setup.dtype)

    def run(first: int, last: int) -> Outputs:
        return {"output": int4_linear.int4_linear(x[first:last].clone(), weight, bias, is_exact=setup.is_exact)}

    return Case(
        "int4_linear",
        f"[{num_rows}, {INPUTS}] x [{INPUTS}, {NUM_OUTPUTS}], groups of {weight.group}, {setup.dtype}",
        range(num_rows + 1),
        run,
        {"output": x.double() @ rounded.double().T + bias.double()},
        {"output": TOLERANCES[setup.dtype]},
    )


def _widen_case(setup: Setup, weight: Int4Weight) -> Case:
    return Case(
        "widen",
        f"[{NUM_OUTPUTS}, {INPUTS}], groups of {weight.group}, {setup.dtype}",
        (0, NUM_OUTPUTS),
        partial(_widen, weight),
        {"output": int4_linear.reference(weight)},
        {"output": TOLERANCES[setup.dtype]},
    )


def _widen(weight: Int4Weight, first: int, last: int) -> Outputs:
    return {"output": int4_linear.widened(weight)}
