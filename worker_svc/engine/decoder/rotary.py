"""Rotary positions: frequencies from config.json, and the table of their cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from step_protocol.columns import I64
from worker_svc.engine.backend import RotaryTable
from worker_svc.engine.checkpoint.architecture import MropeKind
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.kernels.exact_ops import cos_sin

ORIGINAL_LENGTH = "original_max_position_embeddings"
LONG_ROPES = ("longrope", "su")  # `su`: its name in the first checkpoints of Phi-3


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Factors of queries that grow with the position p: 1 + strength * ln(1 + floor((p + shift) / length))."""

    strength: float
    length: int
    shift: int = 0

    def table(self, length: int) -> torch.Tensor:
        """The factors of positions below `length`."""
        steps = (torch.arange(length) + self.shift) // self.length
        factors = [1.0 + self.strength * math.log1p(step) for step in range(int(steps[-1]) + 1)]
        return torch.tensor(factors)[steps]


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotation of queries and keys: the first 2 * len(inv_freq) dimensions of each head, in two halves."""

    inv_freq: torch.Tensor  # float32, scaling included
    factor: float = 1.0  # of cos and sin
    long_inv_freq: torch.Tensor | None = None  # replaces inv_freq if the maximum length is above `original_length`
    original_length: int = 0
    axes: I64 | None = None  # see RotaryTable
    is_interleaved: bool = False  # these three too
    is_first: bool = False
    q_scaling: QueryScaling | None = None

    def table(self, length: int) -> RotaryTable:
        """cos and sin of positions below `length`, as in transformers; the same on every machine."""
        is_long = self.long_inv_freq is not None and length > self.original_length
        inv_freq = self.long_inv_freq if self.long_inv_freq is not None and is_long else self.inv_freq
        cos, sin = cos_sin(torch.arange(length).float()[:, None] * inv_freq[None])
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        q_scales = None if self.q_scaling is None else self.q_scaling.table(length)
        return RotaryTable(cos, sin, self.axes, q_scales, self.is_interleaved, self.is_first)


def length_choice(config: dict[str, Any], max_model_len: int) -> str:
    """What the maximum length decides about a rotation: the factors of LongRoPE. Empty for other rotations."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) not in LONG_ROPES:
        return ""
    original = config.get(ORIGINAL_LENGTH) or rope.get(ORIGINAL_LENGTH) or 0
    return "long" if max_model_len > original else "short"


def rotary_at(table: RotaryTable, positions: I64) -> RotaryTable:
    """A table with a row for each of the positions [3, n] on three axes. Every number of it is one of `table`."""
    rows = torch.from_numpy(positions[table.axes].T.copy()).to(table.cos.device)
    return RotaryTable(table.cos.gather(0, rows), table.sin.gather(0, rows))


def parse_rotary(config: dict[str, Any], rope: dict[str, Any], head_dim: int) -> Rotary:
    """The rotation that `rope` describes: `rope_parameters`, or `rope_theta` with `rope_scaling`. Raises
    CheckpointError naming the field."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_SCALINGS:
        raise CheckpointError(f"rope_type: {kind!r} is not supported; use one of {', '.join(ROPE_SCALINGS)}")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if "rotary_dim" in config and "partial_rotary_factor" not in rope:  # of the first checkpoints of MiniMax-M2
        partial = positive(config, "rotary_dim") / head_dim
    dim = int(head_dim * positive({"partial_rotary_factor": partial}, "partial_rotary_factor"))
    if kind == "proportional":
        rope, dim = {**rope, "num_rotated": dim // 2}, head_dim
    if dim < 2 or dim % 2 or dim > head_dim:
        raise CheckpointError(
            f"partial_rotary_factor: {partial!r} of head_dim {head_dim} is {dim} dimensions; rotary positions need an "
            f"even number from 2 to {head_dim}"
        )
    theta = positive(rope if "rope_theta" in rope else {"rope_theta": 10000.0, **config}, "rope_theta")
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return ROPE_SCALINGS[kind](theta**exponents, {"max_position_embeddings": 0, **config, **rope, "rope_theta": theta})


def mrope_axes(sections: object, kind: MropeKind, count: int) -> I64:
    """The axis (time, height, width) of each of `count` frequencies. Raises CheckpointError."""
    if not isinstance(sections, list) or len(sections) != 3 or not all(isinstance(size, int) for size in sections):
        raise CheckpointError(f"mrope_section: config.json must hold three integers, found {sections!r}")
    if sum(sections) != count or min(sections) < 0:
        raise CheckpointError(f"mrope_section: {sections} must add up to the {count} frequencies of a head")
    if kind == "sections":
        return np.repeat(np.arange(3), sections)
    axes = np.zeros(count, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def positive(rope: dict[str, Any], field: str) -> float:
    """A positive number. Raises CheckpointError naming the field."""
    value = rope.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"{field}: config.json must hold a positive number, found {value!r}")
    return float(value)


def _default(wave: torch.Tensor, rope: dict[str, Any]) -> Rotary:
    return Rotary(1.0 / wave)


def _dynamic(wave: torch.Tensor, rope: dict[str, Any]) -> Rotary:
    """A fixed stretch of the base by `alpha` (Hunyuan). Without it, sequences stretch the base if they are longer than
    max_position_embeddings, which no sequence is here."""
    if rope.get("alpha") is None:
        return _default(wave, rope)
    dim = 2 * len(wave)
    theta = rope["rope_theta"] * positive(rope, "alpha") ** (dim / (dim - 2))
    return Rotary(1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _linear(wave: torch.Tensor, rope: dict[str, Any]) -> Rotary:
    return Rotary(1.0 / wave / positive(rope, "factor"))


def _proportional(wave: torch.Tensor, rope: dict[str, Any]) -> Rotary:
    """All numbers of a head are in pairs, of which the first ones rotate."""
    inv_freq = 1.0 / wave / positive({"factor": 1.0, **rope}, "factor")
    inv_freq[rope["num_rotated"] :] = 0
    return Rotary(inv_freq)


def _llama3(wave: torch.Tensor, rope: dict[str, Any]) -> Rotary:
    """Divides the frequencies of long wavelengths by `factor`, keeps those of short ones, and interpolates the rest."""
    inv_freq = 1.0 / wave
    factor = positive(rope, "factor")
    low = positive(rope, "low_freq_factor")
    high = positive(rope, "high_freq_factor")
    original_len = positive(rope, ORIGINAL_LENGTH)
    wave_len = 2 * math.pi / inv_freq
    smooth = (original_len / wave_len - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    is_long, is_short = wave_len > original_len / low, wave_len < original_len / high
    return Rotary(torch.where(is_long, inv_freq / factor, torch.where(is_short, inv_freq, blended)))


def _yarn(wave: torch.Tensor, rope: dict[str, Any]) -> Rotary:
    """Divides low frequencies by `factor`, keeps high ones, and interpolates between them (Peng et al., YaRN, 2023)."""
    original_len = rope["max_position_embeddings"]
    if rope.get(ORIGINAL_LENGTH):
        original_len = positive(rope, ORIGINAL_LENGTH)
    factor, theta, dim = positive(rope, "factor"), rope["rope_theta"], 2 * len(wave)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(rope.get("beta_fast") or 32), dimension_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(len(wave)).float() - low) / (max(high - low, 0.001))).clamp(0, 1)
    inv_freq = 1.0 / (factor * wave) * ramp + 1.0 / wave * (1 - ramp)
    return Rotary(inv_freq, _yarn_factor(rope, factor))


def yarn_mscale(rope: dict[str, Any]) -> float:
    """What YaRN multiplies queries and keys with, if `mscale_all_dim` is set."""
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return _mscale(positive(rope, "factor"), positive(rope, "mscale_all_dim"))


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_factor(rope: dict[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return positive(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _mscale(factor, rope["mscale"]) / _mscale(factor, rope["mscale_all_dim"])
    return _mscale(factor, 1.0)


def _longrope(wave: torch.Tensor, rope: dict[str, Any]) -> Rotary:
    """Divides each frequency by a factor of its own (Ding et al., LongRoPE, 2024). transformers changes to the long
    factors in the middle of a sequence, which would invalidate its keys; here the maximum length chooses."""
    factors = {}
    for name in ("short_factor", "long_factor"):
        values = rope.get(name)
        if not isinstance(values, list) or len(values) != len(wave):
            raise CheckpointError(f"{name}: config.json must hold a list of {len(wave)} numbers")
        factors[name] = torch.tensor(values, dtype=torch.float32)
    original_len = positive(rope, ORIGINAL_LENGTH)
    ratio = rope.get("factor") or rope["max_position_embeddings"] / original_len
    scale = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original_len))
    if rope.get("attention_factor") is not None:
        scale = positive(rope, "attention_factor")
    short, long = (1.0 / (factors[name] * wave) for name in ("short_factor", "long_factor"))
    return Rotary(short, scale, long, int(original_len))


ROPE_SCALINGS: dict[str, Callable[[torch.Tensor, dict[str, Any]], Rotary]] = {
    "default": _default,
    "mrope": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
} | dict.fromkeys(LONG_ROPES, _longrope)
