"""The table of kernels that are checked before a worker serves. Attention is checked where it is chosen (choice.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from worker_svc.engine.gpu.start.checks.adapters import adapter_cases
from worker_svc.engine.gpu.start.checks.case import Case, Setup, verify
from worker_svc.engine.gpu.start.checks.experts import expert_cases
from worker_svc.engine.gpu.start.checks.layers import (
    activation_cases,
    linear_cases,
    norm_cases,
    rope_store_cases,
    soft_cap_cases,
)
from worker_svc.engine.gpu.start.checks.sampling import (
    banned_cases,
    filtered_cases,
    greedy_cases,
    noise_cases,
    processed_cases,
)
from worker_svc.engine.gpu.start.checks.steps import deltas_cases, prepare_cases
from worker_svc.engine.gpu.start.checks.weights import fp8_cases, int4_cases

OTHER_TRITON = "install another version of Triton, or use --backend cpu"
CHECKS: tuple[tuple[Callable[[Setup], Iterator[Case]], str], ...] = (
    (linear_cases, "install another version of Triton, or use --determinism best_effort (linear layers by cuBLAS)"),
    (fp8_cases, OTHER_TRITON),
    (int4_cases, OTHER_TRITON),
    (expert_cases, OTHER_TRITON),
    (adapter_cases, "install another version of Triton, or start the worker without adapters"),
    (norm_cases, OTHER_TRITON),
    (rope_store_cases, OTHER_TRITON),
    (activation_cases, OTHER_TRITON),
    (soft_cap_cases, OTHER_TRITON),
    (deltas_cases, OTHER_TRITON),
    (prepare_cases, OTHER_TRITON),
    (banned_cases, OTHER_TRITON),
    (processed_cases, OTHER_TRITON),
    (greedy_cases, OTHER_TRITON),
    (noise_cases, OTHER_TRITON),
    (filtered_cases, OTHER_TRITON),
)


def kernel_checks(setup: Setup) -> list[tuple[Case, str]]:
    """All cases, each with the advice for its failure."""
    return [(case, advice) for cases, advice in CHECKS for case in cases(setup)]


def check_kernels(checks: Sequence[tuple[Case, str]], setup: Setup) -> None:
    """Raises BackendUnavailableError for the first kernel that is wrong on this device. All ranks call it together."""
    for case, advice in checks:
        verify(case, advice, is_exact=setup.is_exact)
