"""Recurrent layers as data: gated delta nets, Mamba 2 and short convolutions, and the states that their rows keep.

    [q | k | v | z | b | a] = W x;   q, k, v = silu(conv(q, k, v))                  the projections of a token
    gated delta net    g = exp(-e^A softplus(a + bias)), d = sigmoid(b) (v - (g S)^T k);   q, k have length 1
    Mamba 2            s = softplus(a + bias), g = exp(-e^A s), d = s v;   q, k are its C and B
    both               S = g S + k d^T;   o = S^T q (+ skip v);   out = W_o(norm and gate of o)
    short convolution  [b | c | x] = W x;   out = W_o(c conv(b x))

A state has a matrix S of each head, and the last inputs of the convolution, all in float32 and never in another type.
There is one arithmetic: token by token, in the order of positions, with sums over keys in order. So a state depends on
the tokens of its row alone, and not on chunks, other rows or the path by which it came to be. A *snapshot* is a copy of
it after some tokens, in a slot of the same pool (rows/states.py decides when).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import xxhash

from worker_svc.engine.checkpoint.model_folder import CheckpointError, size_of
from worker_svc.engine.kernels.memory import lazy_zeros

if TYPE_CHECKING:
    from worker_svc.engine.config import EngineConfig

RecurrenceKind = Literal["gated_delta", "mamba2", "short_conv"]

ROWS_WITH_DRAFTS = 2  # whose states within drafts are kept in a step, if all drafts are computed
LANES = 16  # columns of a state are padded to whole vectors


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One recurrent layer, checked. A key head serves `num_heads / num_key_heads` heads."""

    kind: RecurrenceKind
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # positions that the convolution spans
    norm_width: int = 0  # outputs that one norm spans; 0: none
    norms_first: bool = True  # outputs are multiplied by their gate after the norm
    has_norm: bool = True
    has_conv_bias: bool = False
    has_projection_bias: bool = False
    step_limits: tuple[float, float] = (0.0, float("inf"))
    eps: float = 1e-6

    @property
    def num_values(self) -> int:
        """Width of the outputs."""
        return self.num_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of the convolution."""
        return 2 * self.num_key_heads * self.key_dim + self.num_values

    @property
    def width(self) -> int:
        """Width of the projections of a token."""
        if self.kind == "short_conv":
            return 3 * self.channels
        num_gates = 2 if self.kind == "gated_delta" else 1
        return self.channels + self.num_values + num_gates * self.num_heads

    @property
    def columns(self) -> int:
        """Columns of a head's matrix, in memory."""
        return -(-self.value_dim // LANES) * LANES

    @property
    def num_matrix_floats(self) -> int:
        return self.num_heads * self.key_dim * self.columns

    @property
    def num_floats(self) -> int:
        """Size of a row's state."""
        return self.num_matrix_floats + (self.kernel - 1) * self.channels


def gated_delta(config: Mapping[str, Any]) -> Recurrence:
    """The gated delta net of Qwen3-Next and Qwen3.5. Raises CheckpointError naming the field."""
    num_key_heads, num_heads = size_of(config, "linear_num_key_heads"), size_of(config, "linear_num_value_heads")
    if num_heads % num_key_heads:
        raise CheckpointError(
            f"linear_num_key_heads: {num_key_heads} does not divide the {num_heads} heads of linear_num_value_heads"
        )
    value_dim = size_of(config, "linear_value_head_dim")
    return Recurrence(
        "gated_delta",
        num_key_heads,
        num_heads,
        size_of(config, "linear_key_head_dim"),
        value_dim,
        size_of(config, "linear_conv_kernel_dim"),
        norm_width=value_dim,
        eps=norm_eps(config),
    )


def short_conv(config: Mapping[str, Any]) -> Recurrence:
    """The short convolution of LFM2. Raises CheckpointError naming the field."""
    has_bias = bool(config.get("conv_bias", False))
    hidden, kernel = size_of(config, "hidden_size"), size_of(config, "conv_L_cache")
    return Recurrence("short_conv", 1, 1, 0, hidden, kernel, has_conv_bias=has_bias, has_projection_bias=has_bias)


def mamba2(config: Mapping[str, Any]) -> Recurrence:
    """Mamba 2. Raises CheckpointError naming the field."""
    num_groups, num_heads = size_of(config, "mamba_n_groups"), size_of(config, "mamba_n_heads")
    if num_heads % num_groups:
        raise CheckpointError(f"mamba_n_groups: {num_groups} does not divide the {num_heads} heads of mamba_n_heads")
    width = config.get("mamba_d_head")
    if width in (None, "auto"):
        inner = config.get("mamba_d_ssm") or int(config.get("mamba_expand", 2) * size_of(config, "hidden_size"))
        width = inner // num_heads
    value_dim = size_of({"mamba_d_head": width}, "mamba_d_head")
    return Recurrence(
        "mamba2",
        num_groups,
        num_heads,
        size_of(config, "mamba_d_state"),
        value_dim,
        size_of(config, "mamba_d_conv"),
        norm_width=num_heads * value_dim // num_groups,
        norms_first=bool(config.get("mamba_norm_before_gate", False)),
        has_norm=bool(config.get("mamba_rms_norm", True)),
        has_conv_bias=bool(config.get("mamba_conv_bias", True)),
        has_projection_bias=bool(config.get("mamba_proj_bias", False)),
        step_limits=_step_limits(config.get("time_step_limit")),
        eps=norm_eps(config),
    )


def norm_eps(config: Mapping[str, Any]) -> float:
    """What norms add to the mean of squares. Raises CheckpointError naming the field."""
    field = "norm_eps" if "norm_eps" in config else "rms_norm_eps"
    if config.get(field, 1e-6) is None:
        raise CheckpointError(f"{field}: config.json must hold a number of 0 or more, found None")
    return float(config.get(field, 1e-6))


def _step_limits(limits: Any) -> tuple[float, float]:
    """`time_step_limit` of config.json, where infinity may be an object."""
    if limits is None:
        return 0.0, float("inf")
    try:
        low, high = (float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits)
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"time_step_limit: config.json must hold two numbers, found {limits!r}") from None
    return low, high


class StatePool:
    """The states of all rows, snapshots of them, and states within the drafts of a step: `num_rows` + `num_snapshots` +
    `num_drafts` slots, in this order.

    A slot is contiguous over all layers, so that a copy or a snapshot is one piece of memory.
    """

    def __init__(
        self,
        layers: Sequence[Recurrence | None],
        num_rows: int,
        num_snapshots: int,
        num_drafts: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """`device` None: the pool is in host memory."""
        self.num_rows, self.num_snapshots, self.num_drafts = num_rows, num_snapshots, num_drafts
        self.layers = list(layers)
        self._starts: list[int] = []
        size = 0
        for layer in layers:
            self._starts.append(size)
            size += 0 if layer is None else layer.num_floats
        self.padding = num_rows + num_snapshots + num_drafts  # a slot of rows that are none
        if device is None or device.type == "cpu":
            self.slots = _lazy_floats(self.padding + 1, size)  # [slots, floats]
        else:
            self.slots = torch.zeros(self.padding + 1, size, device=device)

    @classmethod
    def of_model(
        cls, layers: Sequence[Recurrence | None], config: EngineConfig, device: torch.device | None = None
    ) -> StatePool | None:
        """The pool of a worker; None: no layer is recurrent. Raises ValueError if there is too little memory."""
        size = cls.bytes_per_slot(layers)
        if not size:
            return None
        num_drafts = 0 if config.speculate is None else ROWS_WITH_DRAFTS * config.max_drafts
        return cls(layers, config.max_num_seqs, config.snapshot_memory // size, num_drafts, device)

    @staticmethod
    def bytes_per_slot(layers: Sequence[Recurrence | None]) -> int:
        return sum(4 * layer.num_floats for layer in layers if layer is not None)

    def spec(self, index: int) -> Recurrence:
        """A recurrent layer."""
        layer = self.layers[index]
        if layer is None:
            raise RuntimeError(f"layer {index} is not recurrent: a bug in the engine")
        return layer

    def layer(self, index: int) -> torch.Tensor:
        """The states of one layer in all slots, [slots, floats], as a view."""
        return self.slots[:, self._starts[index] : self._starts[index] + self.spec(index).num_floats]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots, all at once: a slot may be a source and a target."""
        kept = {slot: self.slots[slot].clone() for slot in set(sources) & set(targets)}
        for source, target in zip(sources, targets, strict=True):
            if source != target:
                self.slots[target] = kept[source] if source in kept else self.slots[source]

    @property
    def layout(self) -> str:
        """Identifies the order of the numbers in a slot."""
        return xxhash.xxh3_64_hexdigest(repr([repr(layer) for layer in self.layers]).encode())


def _lazy_floats(num_slots: int, size: int) -> torch.Tensor:
    """Zeros that take memory when they are first written. Raises ValueError."""
    try:
        return lazy_zeros(4 * num_slots * size).view(torch.float32).view(num_slots, size)
    except OSError as error:
        raise ValueError(
            f"the states of {num_slots} rows and snapshots need {4 * num_slots * size} bytes: {error.strerror}; lower "
            "max_num_seqs or snapshot_memory"
        ) from None
