"""Cases of the kernels that multiply by quantized weights, for workers that have such weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.gpu.checks.case import TOLERANCES, Case, Outputs, Setup
from worker_svc.engine.backend import Norm
from worker_svc.engine.gpu.kernels import norm
from worker_svc.engine.gpu.kernels.linears import int4_linear, int8_linear, scaled_linear
from worker_svc.engine.gpu.kernels.linears.int4_linear import DEPTH, Int4Weight
from worker_svc.engine.gpu.kernels.linears.scaled_linear import FP8, Fp8Weight, ScaledRows
from worker_svc.engine.kernels.torch_linear import Int8Rows

NUM_ROWS = scaled_linear.EXACT.rows + 1  # two tiles; the second has one row
NUM_OUTPUTS = scaled_linear.EXACT.columns + 16
GROUP = 128
INT4_ROWS = int4_linear.EXACT.rows + 1
INT4_OUTPUTS = int4_linear.EXACT.columns + 16
INT4_INPUTS = 3 * DEPTH
FP8_SUM = 4e-3  # Hopper adds the products of a tile in less than float32


def fp8_cases(setup: Setup) -> Iterator[Case]:
    """The rounding of rows and the product, with one scale for all inputs and one for each GROUP inputs."""
    if "fp8" not in setup.formats:
        return
    for group in (setup.model.hidden_size, GROUP):
        yield _quantize_case(setup, group)
        for num_rows in (1, NUM_ROWS):  # the tiles for few and for many rows
            yield _product_case(setup, group, num_rows)
        if norm.can_round(setup.model.hidden_size, group):
            yield _norm_case(setup, group)


def _quantize_case(setup: Setup, group: int) -> Case:
    x = setup.random(NUM_ROWS, setup.model.hidden_size)
    expected = scaled_linear.reference_rows(x, group)

    def run(first: int, last: int) -> Outputs:
        found = scaled_linear.quantize_rows(x[first:last].clone(), group)
        return {"steps": found.steps, "scales": found.scales}

    return Case(
        "quantize_rows",
        f"[{NUM_ROWS}, {setup.model.hidden_size}], groups of {group}, {setup.dtype}",
        range(NUM_ROWS + 1),
        run,
        {"steps": expected.steps, "scales": expected.scales},
        {"steps": TOLERANCES[FP8], "scales": 1e-6},
    )


def _norm_case(setup: Setup, group: int) -> Case:
    """A norm with a residual, rounded."""
    dim = setup.model.hidden_size
    x, residual = setup.random(NUM_ROWS, dim), setup.random(NUM_ROWS, dim, seed=1)
    weight = Norm(setup.random(dim, seed=2), None, setup.model.norm_eps, "rms")
    total, normed = norm.reference(x, residual, weight)
    expected = scaled_linear.reference_rows(normed, group)

    def run(first: int, last: int) -> Outputs:
        part = x[first:last].clone()
        found = norm.add_norm_rows(part, residual[first:last].clone(), weight, group)
        return {"residual": part, "steps": found.steps, "scales": found.scales}

    return Case(
        "norm_rows",
        f"[{NUM_ROWS}, {dim}], groups of {group}, {setup.dtype}",
        range(NUM_ROWS + 1),
        run,
        {"residual": total, "steps": expected.steps, "scales": expected.scales},
        # the norm may be rounded to the other neighbour, in the dtype of the model and then in fp8
        {"steps": 2 * TOLERANCES[FP8], "scales": TOLERANCES[setup.dtype]},
    )


def _product_case(setup: Setup, group: int, num_rows: int) -> Case:
    in_size = setup.model.hidden_size
    rows = scaled_linear.reference_rows(setup.random(num_rows, in_size), group)
    weight = scaled_linear.reference_rows(setup.random(NUM_OUTPUTS, in_size, seed=1), group)
    stored = Fp8Weight(weight.steps, weight.scales.T.contiguous(), group)
    bias = setup.random(NUM_OUTPUTS, seed=2)

    def run(first: int, last: int) -> Outputs:
        part = ScaledRows(rows.steps[first:last].clone(), rows.scales[first:last].clone())
        return {"output": scaled_linear.scaled_linear(part, stored, bias, setup.dtype, is_exact=setup.is_exact)}

    return Case(
        "scaled_linear",
        f"[{num_rows}, {in_size}] x [{in_size}, {NUM_OUTPUTS}], groups of {group}, {setup.dtype}",
        range(num_rows + 1),
        run,
        {"output": scaled_linear.reference(rows, stored, bias)},
        {"output": max(TOLERANCES[setup.dtype], FP8_SUM)},
    )


def int8_cases(setup: Setup) -> Iterator[Case]:
    """The rounding of rows, and the product for few and for many rows."""
    if "int8" not in setup.formats:
        return
    in_size = setup.model.hidden_size
    x, weight = setup.random(NUM_ROWS, in_size), int8_linear.torch_int8_rows(setup.random(NUM_OUTPUTS, in_size, seed=1))
    rounded, bias = int8_linear.torch_int8_rows(x), setup.random(NUM_OUTPUTS, seed=2)

    def rows(first: int, last: int) -> Outputs:
        found = int8_linear.int8_rows(x[first:last].clone())
        return {"steps": found.steps, "scales": found.scales}

    def product(first: int, last: int) -> Outputs:
        part = Int8Rows(rounded.steps[first:last].clone(), rounded.scales[first:last].clone())
        return {"output": int8_linear.int8_linear(part, weight, bias, setup.dtype)}

    sizes, all_rows = f"[{NUM_ROWS}, {in_size}], {setup.dtype}", range(NUM_ROWS + 1)
    yield Case("int8_rows", sizes, all_rows, rows, {"steps": rounded.steps, "scales": rounded.scales})
    for num_rows in (1, NUM_ROWS):
        part = Int8Rows(rounded.steps[:num_rows], rounded.scales[:num_rows])
        expected = {"output": int8_linear.torch_int8_linear(part, weight, bias, setup.dtype)}
        yield Case("int8_linear", f"{num_rows} of {sizes}", range(num_rows + 1), product, expected)


def int4_cases(setup: Setup) -> Iterator[Case]:
    """The product with few and with more rows, and the copy in a float type, with two groups."""
    if "int4" not in setup.formats:
        return
    for group in (DEPTH, int4_linear.PAIR):
        weight = _int4_weight(setup, group)
        for num_rows in (1, INT4_ROWS):
            yield _int4_product_case(setup, weight, num_rows)
        yield _widen_case(setup, weight)


def _int4_weight(setup: Setup, group: int) -> Int4Weight:
    steps = (torch.arange(INT4_OUTPUTS * INT4_INPUTS).view(INT4_OUTPUTS, INT4_INPUTS) * 7919 % 251 % 16).to(torch.uint8)
    scales = setup.random(INT4_OUTPUTS, INT4_INPUTS // group, seed=1).cpu().float().abs() + 0.1
    zeros = torch.arange(INT4_OUTPUTS)[:, None] % 16 + torch.zeros(INT4_INPUTS // group)
    numbers = int4_linear.scales_and_zeros(scales, zeros, setup.dtype)
    return Int4Weight(int4_linear.packed(steps).to(setup.device), numbers.to(setup.device), group)


def _int4_product_case(setup: Setup, weight: Int4Weight, num_rows: int) -> Case:
    x, bias = setup.random(num_rows, INT4_INPUTS, seed=2), setup.random(INT4_OUTPUTS, seed=3)
    rounded = int4_linear.reference(weight).to(setup.dtype)

    def run(first: int, last: int) -> Outputs:
        return {"output": int4_linear.int4_linear(x[first:last].clone(), weight, bias, is_exact=setup.is_exact)}

    return Case(
        "int4_linear",
        f"[{num_rows}, {INT4_INPUTS}] x [{INT4_INPUTS}, {INT4_OUTPUTS}], groups of {weight.group}, {setup.dtype}",
        range(num_rows + 1),
        run,
        {"output": x.double() @ rounded.double().T + bias.double()},
        {"output": TOLERANCES[setup.dtype]},
    )


def _widen_case(setup: Setup, weight: Int4Weight) -> Case:
    return Case(
        "widen",
        f"[{INT4_OUTPUTS}, {INT4_INPUTS}], groups of {weight.group}, {setup.dtype}",
        (0, INT4_OUTPUTS),
        partial(_widen, weight),
        {"output": int4_linear.reference(weight)},
        {"output": TOLERANCES[setup.dtype]},
    )


def _widen(weight: Int4Weight, first: int, last: int) -> Outputs:
    return {"output": int4_linear.widened(weight)}
