"""One check: compares a kernel on a few rows with its reference, and in exact mode with a run on fewer rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from worker_svc.engine.backend import AttentionShape, BackendUnavailableError
from worker_svc.engine.config import Determinism
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.layers.linears import WeightFormat
from worker_svc.engine.gpu.step.device_rows import make_state

Outputs = dict[str, torch.Tensor]

# Allowed difference per element, as a fraction of the sum of its magnitude and the root mean square of its last
# dimension. A value in the wrong place differs by about 1, roundings of 16-bit numbers by less than 2 of their steps
# (eps). float32 sums of thousands of products differ by 1e-5, products rounded to TF32 by 1e-3.
TOLERANCES = {
    torch.float32: 1e-4,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).eps,
}


@dataclass(frozen=True, slots=True)
class Setup:
    """The shapes and settings with which this rank launches its kernels."""

    model: ModelConfig  # this rank's shard: its heads and its part of the intermediate size
    vocab_size: int  # whole vocabulary
    dtype: torch.dtype
    block_size: int
    max_model_len: int
    device: torch.device
    group: Group
    determinism: Determinism
    has_scaled_cache: bool  # KV cache in fp8
    formats: frozenset[WeightFormat] = frozenset()  # of quantized weights
    max_adapter_rank: int = 0  # 0: the worker serves no adapters

    @property
    def is_exact(self) -> bool:
        return self.determinism == "exact"

    @property
    def is_compiled(self) -> bool:
        """Whether kernels are compiled. Elsewhere they are interpreted, which tests cover."""
        return self.device.type == "cuda"

    @property
    def cache_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.has_scaled_cache else self.dtype

    @property
    def attention_shapes(self) -> list[AttentionShape]:
        """The different attentions of the layers."""
        return list(dict.fromkeys(self.model.attention(index) for index in range(self.model.num_layers)))

    def random(self, *size: int, seed: int = 0) -> torch.Tensor:
        """Numbers of variance 1 without outliers, in the model's dtype; the same on every machine."""
        uniform = torch.rand(*size, generator=torch.Generator().manual_seed(seed))
        return ((2 * uniform - 1) * 3**0.5).to(self.dtype).to(self.device)

    def records(self, count: int, num_blocks: int = 0) -> torch.Tensor:
        """Empty records of `count` rows, as long as the worker's, because kernels are compiled for that stride."""
        return make_state(count, max(-(-self.max_model_len // self.block_size), num_blocks), self.device)

    def ints(self, *values: int) -> torch.Tensor:
        """int32 on the device."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with its inputs.

    `run(first, last)` launches it for rows [first, last) of the case and returns outputs whose dimension 0 holds the
    lines of these rows in order. `starts` [rows + 1] are the first lines of all rows.
    """

    kernel: str
    inputs: str  # shapes, for the error message
    starts: Sequence[int]
    run: Callable[[int, int], Outputs]
    expected: Outputs
    tolerances: dict[str, float] = field(default_factory=dict)  # by output; 0 for outputs that are not listed

    @property
    def num_rows(self) -> int:
        return len(self.starts) - 1


def verify(case: Case, advice: str, *, is_exact: bool) -> None:
    """Raises BackendUnavailableError, ending with `advice`, if the kernel fails to run or is wrong.

    `is_exact`: rows must also have the same bits when they are computed alone.
    """
    try:
        whole, parts = launch(case, is_exact=is_exact)
    except Exception as error:
        raise BackendUnavailableError(
            f"{case.kernel} failed in the start-up check ({case.inputs}): {error}; {advice}"
        ) from error
    fault = find_fault(case, whole, parts)
    if fault is not None:
        raise BackendUnavailableError(f"{case.kernel} failed the start-up check ({case.inputs}): {fault}; {advice}")


def launch(case: Case, *, is_exact: bool) -> tuple[Outputs, dict[tuple[int, int], Outputs]]:
    """The outputs of all rows and, in exact mode, of parts of them."""
    whole = _on_host(case.run(0, case.num_rows))
    return whole, {rows: _on_host(case.run(*rows)) for rows in (_parts(case.num_rows) if is_exact else [])}


def find_fault(case: Case, whole: Outputs, parts: dict[tuple[int, int], Outputs]) -> str | None:
    """Describes a fault in the outputs of all rows or of a part of them. None if there is none."""
    for name, expected in _on_host(case.expected).items():
        fault = _difference(name, whole[name], expected, case.tolerances.get(name, 0.0))
        if fault is not None:
            return fault
    for (first, last), part in parts.items():
        begin, end = case.starts[first], case.starts[last]
        for name, found in part.items():
            fault = _difference(name, found[: end - begin], whole[name][begin:end], 0.0)
            if fault is not None:
                return f"rows {first} to {last - 1} depend on the number of rows: {fault}"
    return None


def _parts(num_rows: int) -> list[tuple[int, int]]:
    """Row ranges (first, end): the first row alone, then all other rows."""
    return [(0, 1), (1, num_rows)] if num_rows > 1 else []


def _on_host(outputs: Outputs) -> Outputs:
    return {name: output.cpu().double() for name, output in outputs.items()}


def _difference(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    """Describes the element that is furthest beyond the tolerance. NaN counts as infinitely far."""
    distance = torch.where(found == expected, 0.0, (found - expected).abs()).nan_to_num(torch.inf)
    allowed = torch.zeros_like(distance)
    if tolerance:
        allowed = tolerance * (expected.abs() + expected.square().mean(-1, keepdim=True).sqrt())
    excess = distance - allowed
    if not (excess > 0).any():
        return None
    place = torch.unravel_index(excess.argmax(), excess.shape)
    return (
        f"the largest difference of {name} is {float(distance[place]):.3g} at {[int(index) for index in place]} "
        f"(got {float(found[place]):.6g}, expected {float(expected[place]):.6g}, tolerance {float(allowed[place]):.3g})"
    )
