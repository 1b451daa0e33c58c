"""One check: compares a kernel on a few rows with its reference, and in exact mode with a run on fewer rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from worker_svc.engine.backend import AttentionShape
from worker_svc.engine.config import Determinism
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.gpu.check import TOLERANCES, difference
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.layers.linears import WeightFormat
from worker_svc.engine.gpu.step.device_rows import make_state

__all__ = ["TOLERANCES", "Case", "Outputs", "Setup", "find_fault", "launch", "verify"]

Outputs = dict[str, torch.Tensor]


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
    formats: frozenset[WeightFormat] = frozenset()  # formats of quantized weights
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


class CheckError(Exception):
    """A kernel fails to run or is wrong."""


def verify(case: Case, *, is_exact: bool) -> None:
    """Raises CheckError.

    `is_exact`: rows must also have the same bits when they are computed alone.
    """
    try:
        whole, parts = launch(case, is_exact=is_exact)
    except Exception as error:
        raise CheckError(f"{case.kernel} does not run ({case.inputs}): {error}") from error
    fault = find_fault(case, whole, parts)
    if fault is not None:
        raise CheckError(f"{case.kernel} is wrong ({case.inputs}): {fault}")


def launch(case: Case, *, is_exact: bool) -> tuple[Outputs, dict[tuple[int, int], Outputs]]:
    """The outputs of all rows and, in exact mode, of parts of them."""
    whole = _on_host(case.run(0, case.num_rows))
    return whole, {rows: _on_host(case.run(*rows)) for rows in (_parts(case.num_rows) if is_exact else [])}


def find_fault(case: Case, whole: Outputs, parts: dict[tuple[int, int], Outputs]) -> str | None:
    """Describes a fault in the outputs of all rows or of a part of them. None if there is none."""
    for name, expected in _on_host(case.expected).items():
        fault = difference(whole[name], expected, case.tolerances.get(name, 0.0))
        if fault is not None:
            return f"{name}: {fault}"
    for (first, last), part in parts.items():
        begin, end = case.starts[first], case.starts[last]
        for name, found in part.items():
            fault = difference(found[: end - begin], whole[name][begin:end], 0.0)
            if fault is not None:
                return f"rows {first} to {last - 1} depend on the number of rows: {name}: {fault}"
    return None


def _parts(num_rows: int) -> list[tuple[int, int]]:
    """Row ranges (first, end): the first row alone, then all other rows."""
    return [(0, 1), (1, num_rows)] if num_rows > 1 else []


def _on_host(outputs: Outputs) -> Outputs:
    return {name: output.cpu().double() for name, output in outputs.items()}
