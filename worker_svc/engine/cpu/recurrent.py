"""Recurrent layers: the structs of kernels/recurrent.cpp, and the same layers in plain torch on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from step_protocol.columns import I32, I64
from worker_svc.engine.backend import ForwardBatch, RecurrentWeights, SnapshotColumns
from worker_svc.engine.cpu import torch_ops
from worker_svc.engine.kernels import exact_ops
from worker_svc.engine.kernels.binding import Struct, struct
from worker_svc.engine.recurrent import Recurrence, StatePool

RECURRENCE_STRUCT, STATE_ROWS_STRUCT = struct("Recurrence"), struct("StateRows")
MOST_FLOATS = 1 << 24  # numbers of states that are copied at once
KINDS = {"gated_delta": 0, "mamba2": 1, "short_conv": 2}


def recurrence_struct(weights: RecurrentWeights, pool: StatePool, index: int) -> Struct:
    """A layer over its states."""
    spec = pool.spec(index)
    return RECURRENCE_STRUCT.of(
        spec,
        weights,
        kind=KINDS[spec.kind],
        key_heads=spec.num_key_heads,
        heads=spec.num_heads,
        norm_width=spec.norm_width or spec.num_values,
        norm_is_shared=weights.norm is not None and len(weights.norm) == spec.norm_width,
        slot_stride=pool.slots.shape[1],
        states=pool.layer(index),
        min_step=spec.step_limits[0],
        max_step=spec.step_limits[1],
    )


def state_rows_struct(batch: ForwardBatch) -> Struct:
    """The rows of a batch."""
    snapshots = taken(batch)
    return STATE_ROWS_STRUCT.of(
        batch,
        slots=batch.rows,
        snapshot_starts=snapshots.starts,
        snapshot_ends=snapshots.ends,
        snapshot_slots=snapshots.slots,
        count=len(batch.rows),
    )


def taken(batch: ForwardBatch) -> SnapshotColumns:
    if batch.snapshots is None:
        raise RuntimeError("a step of recurrent layers does not say which snapshots it takes: a bug in the engine")
    return batch.snapshots


def advance(
    spec: Recurrence,
    weights: RecurrentWeights,
    states: torch.Tensor,
    rows: tuple[Sequence[int], I32 | I64, I32 | I64],
    taken: SnapshotColumns,
    projected: torch.Tensor,
) -> torch.Tensor:
    """The outputs [T, num_values] of a layer with `states` [slots, floats], which it advances: row by row, token by
    token. `rows`: their slots, starts of their tokens, and numbers of tokens before."""
    out = projected.new_zeros(len(projected), spec.num_values)
    slots, starts, contexts = rows
    are_single = (np.diff(starts) == 1) & (np.diff(taken.starts[: len(starts)]) == 0)
    if are_single.any():
        places = (np.array(slots)[are_single], contexts[are_single] == 0, starts[:-1][are_single])
        at, is_new, tokens = (torch.from_numpy(column).to(projected.device) for column in places)
        out[tokens] = advance_each(spec, weights, states, at, is_new, projected[tokens])
    for index in np.flatnonzero(~are_single).tolist():
        row = slots[index]
        first, end = starts[index : index + 2].tolist()
        state = states[row : row + 1].clone() if contexts[index] else torch.zeros_like(states[:1])
        for snapshot in range(*taken.starts[index : index + 2].tolist()):
            stop = int(starts[index]) + int(taken.ends[snapshot])
            if first < stop:  # else another one was taken there
                out[first:stop] = _advance(spec, weights, state, projected[None, first:stop])[0]
            states[int(taken.slots[snapshot])] = state[0]
            first = stop
        if first < end:
            out[first:end] = _advance(spec, weights, state, projected[None, first:end])[0]
        states[row] = state[0]
    return out


def advance_each(
    spec: Recurrence,
    weights: RecurrentWeights,
    states: torch.Tensor,
    rows: torch.Tensor,
    is_new: torch.Tensor,
    projected: torch.Tensor,
) -> torch.Tensor:
    """The same for one token of each row [B], without a read of the host. New rows begin with zeros."""
    most = max(1, MOST_FLOATS // spec.num_floats)
    out = []
    for own, begins, x in zip(*(torch.split(part, most) for part in (rows, is_new, projected[:, None])), strict=True):
        state = states[own].masked_fill(begins[:, None], 0.0)
        out.append(_advance(spec, weights, state, x)[:, 0])
        states[own] = state
    return torch.cat(out)


def _advance(spec: Recurrence, weights: RecurrentWeights, state: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
    """The outputs of some tokens [B, n, width] of each row, whose states [B, floats] are changed in place."""
    x, count = projected.float(), projected.shape[1]
    tail = state[:, spec.num_matrix_floats :].view(-1, spec.kernel - 1, spec.channels)
    conv_inputs = x[..., : spec.channels]
    if spec.kind == "short_conv":
        conv_inputs = conv_inputs * x[..., 2 * spec.channels :]
    inputs = torch.cat((tail, conv_inputs), 1)
    mixed = torch.zeros_like(conv_inputs) if weights.conv_bias is None else weights.conv_bias.expand_as(conv_inputs)
    for tap in range(spec.kernel):
        mixed = mixed + weights.conv[tap] * inputs[:, tap : tap + count]
    tail.copy_(inputs[:, count:])
    if spec.kind == "short_conv":
        return (x[..., spec.channels : 2 * spec.channels] * mixed).to(projected.dtype)
    outputs = _recur(spec, weights, state, torch_ops.activate(mixed, "silu"), x[..., spec.channels + spec.num_values :])
    gate = torch_ops.activate(x[..., spec.channels : spec.channels + spec.num_values], "silu")
    return _gated(spec, weights, outputs, gate).to(projected.dtype)


def _recur(
    spec: Recurrence, weights: RecurrentWeights, state: torch.Tensor, mixed: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """The outputs [B, n, heads, value_dim] before gate and norm."""
    keys, group = spec.num_key_heads * spec.key_dim, spec.num_heads // spec.num_key_heads
    lead = mixed.shape[:2]
    matrix = state[:, : spec.num_matrix_floats].view(-1, spec.num_heads, spec.key_dim, spec.columns)
    matrix = matrix[..., : spec.value_dim]  # a view: changes are in `state`
    q, k = mixed[..., : 2 * keys].view(*lead, 2, spec.num_key_heads, spec.key_dim).unbind(2)
    v = mixed[..., 2 * keys :].view(*lead, spec.num_heads, spec.value_dim)
    is_delta = spec.kind == "gated_delta"
    if is_delta:
        q, k = _unit(q) * spec.key_dim**-0.5, _unit(k)
    q, k = q.repeat_interleave(group, 2)[..., None], k.repeat_interleave(group, 2)[..., None]
    if weights.decay is None or weights.step_bias is None:
        raise RuntimeError(f"a layer of kind {spec.kind} has no decay or step: a bug in the engine")
    step = torch_ops.softplus(gates[..., -spec.num_heads :] + weights.step_bias).clamp(*spec.step_limits)
    decays = exact_ops.exp(step * weights.decay)[..., None, None]
    shares = (torch_ops.sigmoid(gates[..., : spec.num_heads]) if is_delta else step)[..., None]
    outputs = torch.empty_like(v)
    for i in range(v.shape[1]):
        matrix *= decays[:, i]
        known = exact_ops.ordered_sum((matrix * k[:, i]).mT)[..., 0] if is_delta else 0.0
        matrix += k[:, i] * ((v[:, i] - known) * shares[:, i])[..., None, :]
        outputs[:, i] = exact_ops.ordered_sum((matrix * q[:, i]).mT)[..., 0]
    return outputs if weights.skip is None else outputs + v * weights.skip[:, None]


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(exact_ops.ordered_sum(x * x) + 1e-6)


def _gated(spec: Recurrence, weights: RecurrentWeights, outputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    outputs = outputs.reshape(gate.shape)
    if not spec.norms_first:
        outputs = outputs * gate
    if weights.norm is not None:
        grouped = outputs.view(*gate.shape[:2], -1, spec.norm_width)
        grouped = grouped / torch.sqrt(exact_ops.ordered_sum(grouped * grouped) / spec.norm_width + spec.eps)
        outputs = (grouped * weights.norm.view(-1, spec.norm_width)).view(gate.shape)
    return outputs * gate if spec.norms_first else outputs
