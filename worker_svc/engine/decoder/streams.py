"""Gemma 3n: several residual streams (AltUp), a part of low rank beside attention (Laurel), and sparse activations.

Every token has several streams of hidden states. A layer computes on one of them, the active one. Before the layer each
stream is predicted from all of them; after it each is corrected by what the layer has changed in the active one. The
coefficients depend on the token. All operations are element-wise, linear layers, or sums of exact_ops.py, so the result
of a token depends on no other token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker_svc.engine.backend import DecoderRowOperations, Linear, Norm
from worker_svc.engine.decoder.plain_part import PlainPart
from worker_svc.engine.kernels.exact_ops import ordered_sum

SMALLEST_SQUARE = 1e-5  # of the mean of a stream's squares


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """The streams of a model."""

    count: int
    active: int  # the stream that layers compute on
    scales_output: bool  # what the inputs per layer are gated with
    laurel_rank: int


@dataclass(frozen=True, slots=True)
class StreamTable:
    """What makes streams after the first one of input embeddings, and one state of all streams."""

    spec: StreamSpec
    into: Sequence[Linear]
    out: Sequence[Linear]

    @classmethod
    def part(cls, spec: StreamSpec, hidden: int) -> PlainPart[StreamTable]:
        others = range(spec.count - 1)

        def make(**linears: Linear) -> StreamTable:
            into, out = ([linears[f"{side}{index}"] for index in others] for side in ("into", "out"))
            return cls(spec, into, out)

        names = {f"into{index}": f"model.altup_projections.{index}" for index in others}
        names |= {f"out{index}": f"model.altup_unembed_projections.{index}" for index in others}
        return PlainPart(make, linears={key: (name, hidden, hidden) for key, name in names.items()})


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """How a layer predicts and corrects its streams."""

    norm: Norm
    router: Linear
    prediction: torch.Tensor  # float32 [count * count, count]: from each stream to each
    correction: torch.Tensor  # float32 [count, count]
    output_scale: torch.Tensor  # [hidden]

    @classmethod
    def part(cls, spec: StreamSpec, prefix: str, hidden: int) -> PlainPart[StreamWeights]:
        prefix, count, wide = prefix + "altup.", spec.count, torch.float32
        return PlainPart(
            cls,
            linears={"router": (f"{prefix}modality_router", count, hidden)},
            norms={"norm": (f"{prefix}router_norm", hidden)},
            tensors={
                "prediction": (f"{prefix}prediction_coefs.weight", (count * count, count), wide),
                "correction": (f"{prefix}correction_coefs.weight", (count, count), wide),
                "output_scale": (f"{prefix}correct_output_scale", (hidden,), None),
            },
        )


@dataclass(frozen=True, slots=True)
class Laurel:
    """What is added to the output of attention: the normed input, and norm(right(left(of it)))."""

    left: Linear
    right: Linear
    norm: Norm

    @classmethod
    def part(cls, spec: StreamSpec, prefix: str, hidden: int) -> PlainPart[Laurel]:
        prefix, rank = prefix + "laurel.", spec.laurel_rank
        linears = {"left": (f"{prefix}linear_left", rank, hidden), "right": (f"{prefix}linear_right", hidden, rank)}
        return PlainPart(cls, linears=linears, norms={"norm": (f"{prefix}post_laurel_norm", hidden)})

    def add(self, backend: DecoderRowOperations, x: torch.Tensor, output: torch.Tensor, norm: Norm | None) -> None:
        """x + output becomes their sum with this part, over the square root of 2. `norm` is that of attention."""
        normed, added = torch.empty_like(x), torch.empty_like(x)
        backend.add_norm(x, None, norm, normed)
        backend.add_norm(self.right(self.left(normed)), None, self.norm, added)
        x.copy_((x.float() + output.float() + (normed + added).float()) * 2.0**-0.5)
        output.zero_()


class ResidualStreams:
    """The streams of the tokens of one step."""

    def __init__(self, backend: DecoderRowOperations, table: StreamTable, embedded: torch.Tensor) -> None:
        self._backend = backend
        self._table = table
        self._states = torch.stack([embedded, *(self._as_large(linear(embedded), embedded) for linear in table.into)])

    def keep(self, tokens: torch.Tensor) -> None:
        """Drops all other tokens."""
        self._states = self._states[:, tokens]

    def predict(self, part: StreamWeights) -> torch.Tensor:
        """Predicts the streams of a layer; its input [n, hidden], in own memory."""
        count, states = self._table.spec.count, self._states.float()
        coefficients = self._coefficients(part, self._states[self._table.spec.active], part.prediction)
        predicted = states.clone()
        for target in range(count):
            for source in range(count):
                predicted[target] += states[source] * coefficients[:, target * count + source, None]
        self._states = predicted.to(self._states.dtype)
        return self._states[self._table.spec.active].clone()

    def correct(self, part: StreamWeights, x: torch.Tensor) -> torch.Tensor:
        """Corrects the streams by the output x of a layer; what the inputs per layer are gated with [n, hidden]."""
        spec, states = self._table.spec, self._states.float()
        change = x.float() - states[spec.active]
        for stream, coefficient in zip(states, self._coefficients(part, x, part.correction).T, strict=True):
            stream += change * (coefficient[:, None] + 1.0)
        self._states = states.to(x.dtype)
        active = self._states[spec.active]
        return active * part.output_scale if spec.scales_output else active

    def add(self, x: torch.Tensor) -> None:
        """Adds x [n, hidden] to all streams but the first."""
        self._states[1:] += x

    def merged(self) -> torch.Tensor:
        """One state of all streams, [n, hidden]."""
        first, *others = self._states
        total: torch.Tensor = first.float()
        for linear, state in zip(self._table.out, others, strict=True):
            total = total + self._as_large(linear(state), first).float()
        return (total / self._table.spec.count).to(first.dtype)

    def _coefficients(self, part: StreamWeights, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The outputs [n, k] of weights [k, count] for the shares of the streams in tokens x."""
        normed = torch.empty_like(x)
        self._backend.add_norm(x.clone(), None, part.norm, normed)
        routed = part.router(normed * x.shape[1] ** -1.0)
        self._backend.soft_cap(routed, 1.0)
        found: torch.Tensor = ordered_sum(routed.float()[:, None] * weights)[..., 0]
        return found

    def _as_large(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """x with the mean square of `other`, row by row."""
        size, wanted = _mean_square(x).clamp_min(SMALLEST_SQUARE), _mean_square(other)
        return (x.float() * wanted.sqrt() / size.sqrt()).to(x.dtype)


def _mean_square(x: torch.Tensor) -> torch.Tensor:
    return ordered_sum(x.float() ** 2) / x.shape[-1]


def sparse_gates(gate_up: torch.Tensor, cutoff: float) -> torch.Tensor:
    """[gate | up], in which a gate is what it exceeds the mean of its row by `cutoff` deviations."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    mean = ordered_sum(gate) / gate.shape[1]
    deviation = (ordered_sum((gate - mean) ** 2) / gate.shape[1]).sqrt()
    return torch.cat((gate.sub(mean + deviation * cutoff).clamp_min(0.0), up), 1).to(gate_up.dtype)
