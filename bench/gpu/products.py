"""Linear layers with stored weights as workers serve them: the products of torch beside the engine's kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from bench.gpu.report import Report, relative_error
from worker_svc.engine.gpu.kernels import int4_linear, scaled_linear
from worker_svc.engine.gpu.kernels.int4_linear import Int4Weight
from worker_svc.engine.gpu.layers.linears import Fp8Linear, Int4Linear, library_int4_product, library_product

Layer = Callable[[torch.Tensor], torch.Tensor]

SIZES = [
    (4096, 1024),
    (1024, 3072),
]  # outputs and inputs: the projections of Qwen3-0.6B before and after a layer's work
NUM_LAYERS = 28  # with weights of their own, so that the L2 cache does not serve them
GROUP = 128


def products(report: Report) -> None:
    """Few and many rows, with fp8 and int4 weights. An int4 weight is multiplied as it is stored for few rows only."""
    for outputs, inputs in [(72, 256)] if report.is_smoke else SIZES:
        for num_rows in (3,) if report.is_smoke else (16, 256):
            _fp8(report, outputs, inputs, num_rows)
        _int4(report, outputs, inputs, 3 if report.is_smoke else 16)


def _fp8(report: Report, outputs: int, inputs: int, num_rows: int) -> None:
    x = torch.randn(num_rows, inputs, device=report.device).to(report.dtype)
    weight = scaled_linear.quantized(torch.randn(outputs, inputs, device=report.device))
    weights = [replace(weight, steps=weight.steps.clone()) for _ in range(1 if report.is_smoke else NUM_LAYERS)]
    ours = partial(scaled_linear.scaled_linear, is_exact=False)
    layers: dict[str, list[Layer]] = {
        "ours": [Fp8Linear(weight, None, ours) for weight in weights],
        "torch._scaled_mm": [Fp8Linear(weight, None, library_product) for weight in weights],
    }
    expected = scaled_linear.reference(scaled_linear.quantize_rows(x, inputs), weight, None)
    _measure(report, f"fp8 {outputs} x {inputs}, {num_rows} rows", layers, x, expected, outputs * inputs)


def _int4(report: Report, outputs: int, inputs: int, num_rows: int) -> None:
    x = torch.randn(num_rows, inputs, device=report.device).to(report.dtype)
    scales, zeros = torch.rand(outputs, inputs // GROUP) + 0.1, 15 * torch.rand(outputs, inputs // GROUP)
    words = int4_linear.packed(torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)).to(report.device)
    numbers = int4_linear.scales_and_zeros(scales, zeros, report.dtype).to(report.device)
    weights = [Int4Weight(words.clone(), numbers, GROUP) for _ in range(1 if report.is_smoke else NUM_LAYERS)]
    ours = partial(int4_linear.int4_linear, is_exact=False)
    layers: dict[str, list[Layer]] = {
        "ours": [Int4Linear(weight, None, ours) for weight in weights],
        "torch._weight_int4pack_mm": [Int4Linear(weight, None, library_int4_product) for weight in weights],
    }
    expected = x.double() @ int4_linear.reference(weights[0]).double().T
    _measure(report, f"int4 {outputs} x {inputs}, {num_rows} rows", layers, x, expected, outputs * inputs / 2)


def _measure(
    report: Report,
    name: str,
    layers: dict[str, list[Layer]],
    x: torch.Tensor,
    expected: torch.Tensor,
    num_bytes: float,
) -> None:
    """A row for each implementation, with its error and the time of a layer."""
    for label, calls in layers.items():
        try:
            error = relative_error(calls[0](x), expected)
        except Exception as problem:  # torch serves other dtypes, GPUs or sizes
            report.row("products", f"{name}: {label}", note=f"{type(problem).__name__}: {str(problem)[:120]}")
            continue
        ms = report.time_ms([partial(call, x) for call in calls])
        ok = error < report.tolerance
        report.row("products", f"{name}: {label}", ok=ok, ms=ms, num_bytes=num_bytes, note=f"error {error:.1e}")
