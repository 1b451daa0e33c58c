"""Every start-up check of a worker, as a table: the kernels in the settings in which workers use them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import torch

from bench.gpu.checks import case as checks
from bench.gpu.checks.adapters import adapter_cases
from bench.gpu.checks.attention import MAX_ROWS, MAX_TOKENS, attention_cases
from bench.gpu.checks.experts import expert_cases
from bench.gpu.checks.layers import activation_cases, linear_cases, norm_cases, rope_store_cases, soft_cap_cases
from bench.gpu.checks.sampling import banned_cases, filtered_cases, greedy_cases, noise_cases, processed_cases
from bench.gpu.checks.steps import deltas_cases, prepare_cases
from bench.gpu.checks.weights import fp8_cases, int4_cases, int8_cases
from bench.gpu.model import EXPERTS, FEW_EXPERTS, model_of
from bench.gpu.report import OutOfTimeError, Report
from bench.workloads import COMMON
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.gpu.attention.paged import TritonAttention
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.kernels import launch
from worker_svc.engine.gpu.layers.linears import WeightFormat

CHECKS = (
    linear_cases, fp8_cases, int8_cases, int4_cases, expert_cases, adapter_cases, norm_cases, rope_store_cases,
    activation_cases, soft_cap_cases, deltas_cases, prepare_cases, banned_cases, processed_cases, greedy_cases,
    noise_cases, filtered_cases,
)  # fmt: skip
SERVING = ("attention", "linear")  # without which no speed is worth measuring
FORMATS = frozenset(get_args(WeightFormat))  # every kind of quantized weights
SETTINGS: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16, "determinism": "best_effort", "formats": FORMATS},
    {"dtype": torch.bfloat16, "determinism": "exact", "formats": FORMATS},
    {"dtype": torch.float16, "determinism": "best_effort", "has_scaled_cache": True},
    {"dtype": torch.bfloat16, "determinism": "best_effort", "block_size": 16},
    {"dtype": torch.bfloat16, "determinism": "best_effort", "model": EXPERTS, "formats": FORMATS},
    {"dtype": torch.bfloat16, "determinism": "exact", "model": EXPERTS, "formats": FORMATS},
    {"dtype": torch.float32, "determinism": "exact"},
]

SMOKE_SETTINGS: list[dict[str, Any]] = [
    {"dtype": torch.float32, "determinism": "exact", "formats": FORMATS},
    {"dtype": torch.float32, "determinism": "best_effort", "model": FEW_EXPERTS},
]


def self_checks(report: Report) -> None:
    """A check that cannot run counts as failed; the others still run. Sets the figure `wrong_kernels`."""
    wrong = _check(report, "self_checks")
    report.figures["wrong_kernels"] = sorted(wrong.intersection(SERVING))


def without_early_starts(report: Report) -> None:
    """The same, with kernels that start after their predecessor has ended."""
    os.environ[launch.DISABLE] = "1"  # it is read at the first launch of a process, which runs only this section
    _check(report, "checks_without_early_starts")


def _check(report: Report, section: str) -> set[str]:
    """The kernels that failed."""
    wrong = set()
    for fields in SMOKE_SETTINGS if report.is_smoke else SETTINGS:
        setup = make_setup(report, fields)
        name = f"{setup.dtype} {setup.determinism} block {setup.block_size}".removeprefix("torch.")
        name += " experts" if "model" in fields else ""
        name += " fp8 cache" if setup.has_scaled_cache else ""
        for kernel, cases in checks_of(setup):
            started = time.perf_counter()
            fault, count = None, 0
            try:
                for case in cases:
                    count += 1
                    # The interpreter multiplies with numpy, whose rows depend on their number.
                    checks.verify(case, is_exact=setup.is_exact and not report.is_smoke)
            except OutOfTimeError:
                raise
            except Exception as error:  # the table should be complete
                fault = str(error)
            if not count and fault is None:
                continue  # the settings do not use this kernel
            ms = (time.perf_counter() - started) * 1e3
            note = f"{count} cases" if fault is None else fault[:300]
            if fault is not None:
                wrong.add(kernel)
            report.row(section, f"{kernel}, {name}", ok=fault is None, ms=ms, note=note)
    return wrong


def launches(setup: checks.Setup) -> list[Callable[[], object]]:
    """Functions that launch the kernels of all checks."""
    return [partial(checks.launch, case, is_exact=setup.is_exact) for _, cases in checks_of(setup) for case in cases]


def make_setup(report: Report, fields: dict[str, Any]) -> checks.Setup:
    fields = dict(fields)
    model = parse_config(COMMON | model_of(report) | fields.pop("model", {}))
    defaults: dict[str, Any] = {
        "model": model, "vocab_size": model.vocab_size, "block_size": 16 if report.is_smoke else 256,
        "max_model_len": 4096, "device": report.device, "group": Group(), "has_scaled_cache": False,
        "max_adapter_rank": 16,
    }  # fmt: skip
    return checks.Setup(**(defaults | fields))


def checks_of(setup: checks.Setup) -> Iterator[tuple[str, Iterator[checks.Case]]]:
    """The name of each check and its cases."""
    yield "attention", _attention_cases(setup)
    for cases in CHECKS:
        yield cases.__name__.removesuffix("_cases"), cases(setup)


def _attention_cases(setup: checks.Setup) -> Iterator[checks.Case]:
    attention = TritonAttention(
        setup.model.heads, setup.determinism, windows=[shape.window for shape in setup.attention_shapes],
        max_rows=MAX_ROWS, max_tokens=MAX_TOKENS,
        num_layers=1, dtype=setup.dtype, device=setup.device,
    )  # fmt: skip
    yield from attention_cases(attention, "attention", setup)
