"""Reads quantized linear layers: weights in float32, or the int8 values and scales as they are stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.checkpoint.quantization_config import (
    FLOATS,
    MXFP4_GROUP,
    WORD_BITS,
    Mxfp4,
    Packed,
    Scaled,
    Scheme,
)
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.kernels.four_bits import FourBitRows
from worker_svc.engine.kernels.torch_linear import Int8Rows

E8M0_BIAS = 127  # of the exponent of a scale
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of eight, that each 4 bits of a word belong to


def read_weight(checkpoint: Checkpoint, name: str, scheme: Scheme, shape: tuple[int, int]) -> torch.Tensor:
    """The weight [out, in] of a layer in float32. Raises CheckpointError if a tensor does not fit to config.json."""
    if isinstance(scheme, Scaled):
        parts = _read(checkpoint, name, scheme, shape)
        weight, scales = parts["weight"].float(), parts[scheme.scale].float()
        return weight.mul_(_spread(scales, shape, scheme.block))
    if isinstance(scheme, Mxfp4):
        raise CheckpointError(f"{name}: only stacked experts are read as mxfp4; the checkpoint lacks {name}.weight")
    scheme.check_size(name, *shape)
    parts = _read(checkpoint, name, scheme, shape)
    if scheme.layout == "compressed":
        return _compressed(name, scheme, parts, shape)
    return _with_zeros(name, scheme, parts, shape[1])


def read_mxfp4(
    checkpoint: Checkpoint, name: str, scheme: Mxfp4, shape: tuple[int, int, int], expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks [out, groups, 16] and scales [out, groups] of one of `shape[0]` experts."""
    count, outputs, inputs = shape
    if inputs % MXFP4_GROUP:
        raise CheckpointError(f"{name}: {inputs} inputs do not fill groups of {MXFP4_GROUP}, which mxfp4 requires")
    blocks, scales = (
        checkpoint.tensor(f"{name}_{part}", (count, *stored.shape), None, (torch.uint8,))[expert]
        for part, stored in scheme.parts(outputs, inputs).items()
    )
    return blocks, scales


def read_int8_rows(checkpoint: Checkpoint, name: str, scheme: Scaled, shape: tuple[int, int]) -> Int8Rows:
    """The stored values of a layer with `has_int8_rows`."""
    parts = _read(checkpoint, name, scheme, shape)
    return Int8Rows(parts["weight"], parts[scheme.scale].float().reshape(-1).expand(shape[0]))


def read_fp8_rows(
    checkpoint: Checkpoint, name: str, scheme: Scaled, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored values [out, in] of a layer in fp8, and the scales of each output [out, groups of inputs]."""
    parts = _read(checkpoint, name, scheme, shape)
    rows, scales = scheme.block[0], parts[scheme.scale].float()
    if rows is None:
        return parts["weight"], scales.reshape(1, 1).expand(shape[0], 1)
    if rows > 1:
        scales = scales.repeat_interleave(rows, 0)[: shape[0]]
    return parts["weight"], scales.reshape(shape[0], -1)


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """A weight in int4: (step - zero) * scale. `groups` [in] has the group of each input."""

    steps: torch.Tensor  # uint8 [out, in]
    scales: torch.Tensor  # float32 [out, groups]
    zeros: torch.Tensor  # float32 [out, groups]
    groups: torch.Tensor


def read_int4_rows(checkpoint: Checkpoint, name: str, scheme: Packed, shape: tuple[int, int]) -> Int4Rows:
    """The stored values of a layer whose scheme has 4 bits."""
    scheme.check_size(name, *shape)
    parts = _read(checkpoint, name, scheme, shape)
    if scheme.layout == "compressed":
        _check_shape(name, parts, shape)
        steps = _unpack(parts["weight_packed"], scheme.bits, 1)[:, : shape[1]]
        scales = parts["weight_scale"].float()
        zeros = torch.full_like(scales, 1 << (scheme.bits - 1))
        groups = _groups(name, "weight_g_idx", scheme, parts, shape[1])
        return Int4Rows(steps.to(torch.uint8), scales, zeros, groups)
    steps, zeros = _steps_and_zeros(scheme, parts)
    groups = _groups(name, "g_idx", scheme, parts, shape[1])
    return Int4Rows(steps.T.to(torch.uint8), parts["scales"].float().T, zeros.T.float(), groups)


def order_of(groups: list[torch.Tensor], group: int) -> torch.Tensor | None:
    """The inputs sorted by their group, empty if they are. None: layers that are multiplied together differ, or groups
    have other sizes than `group`."""
    inputs = torch.arange(len(groups[0]))
    order = groups[0].argsort(stable=True)
    if not torch.equal(groups[0][order], inputs // group) or any(not torch.equal(each, groups[0]) for each in groups):
        return None
    return order[:0] if torch.equal(order, inputs) else order


def four_bit_rows(parts: list[Int4Rows], group: int) -> FourBitRows | None:
    """The outputs of several weights together. None: their groups differ."""
    order = order_of([part.groups for part in parts], group)
    if order is None:
        return None
    codes, scales = torch.cat([part.steps for part in parts]), torch.cat([part.scales for part in parts])
    zeros = torch.cat([part.zeros for part in parts]).to(torch.uint8)
    return FourBitRows(codes[:, order] if len(order) else codes, scales, zeros, group, order if len(order) else None)


def fp4_rows(blocks: torch.Tensor, scales: torch.Tensor) -> FourBitRows:
    """A weight in MXFP4: blocks [out, groups, 16] of uint8, two E2M1 values in each, the first in the lower bits, and
    scales [out, groups] of uint8, which stand for 2^(scale - 127)."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    return FourBitRows(codes, torch.exp2(scales.float() - E8M0_BIAS), None, 2 * blocks.shape[2])


def _read(checkpoint: Checkpoint, name: str, scheme: Scheme, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The tensors of a layer, checked."""
    found = {}
    for suffix, part in scheme.parts(*shape).items():
        tensor_name, dtypes = f"{name}.{suffix}", tuple(getattr(torch, dtype) for dtype in part.dtypes)
        # The scale of a whole tensor is stored with one dimension or none
        is_scalar = part.shape == (1,) and checkpoint.shape(tensor_name) == ()
        tensor = checkpoint.tensor(tensor_name, () if is_scalar else part.shape, None, dtypes)
        if part.dtypes == FLOATS and not tensor.isfinite().all():
            raise CheckpointError(f"tensor {tensor_name} has scales that are not finite; download the model again")
        found[suffix] = tensor
    return found


def _spread(scales: torch.Tensor, shape: tuple[int, int], block: tuple[int | None, int | None]) -> torch.Tensor:
    """The scale of each weight, or of each row where it is the same for all inputs."""
    rows, columns = block
    if rows is None:
        return scales.reshape(1, 1)
    if rows > 1:
        scales = scales.repeat_interleave(rows, 0)[: shape[0]]
    return scales if columns is None else scales.repeat_interleave(columns, 1)[:, : shape[1]]


def _compressed(name: str, scheme: Packed, parts: dict[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """Weights that are packed along the inputs, with 2^(bits - 1) added."""
    _check_shape(name, parts, shape)
    steps = _unpack(parts["weight_packed"], scheme.bits, 1)[:, : shape[1]].float()
    groups = _groups(name, "weight_g_idx", scheme, parts, shape[1])
    return steps.sub_(1 << (scheme.bits - 1)).mul_(parts["weight_scale"].float()[:, groups])


def _with_zeros(name: str, scheme: Packed, parts: dict[str, torch.Tensor], inputs: int) -> torch.Tensor:
    """Weights of GPTQ and AWQ: [in, out], with a zero point for each output and group."""
    steps, zeros = _steps_and_zeros(scheme, parts)
    groups = _groups(name, "g_idx", scheme, parts, inputs)
    weight = steps.float().sub_(zeros.float()[groups]).mul_(parts["scales"].float()[groups])
    return weight.T.contiguous()


def _steps_and_zeros(scheme: Packed, parts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps [in, out] and zero points [groups, out] of GPTQ and AWQ."""
    is_awq = scheme.layout == "awq"
    steps = _unpack(parts["qweight"], scheme.bits, 1 if is_awq else 0)
    zeros = _unpack(parts["qzeros"], scheme.bits, 1)
    if is_awq:
        steps, zeros = _in_order(steps), _in_order(zeros)
    # Version 1 of GPTQ stores zero points less 1, and therefore 0 as the highest value
    return steps, (zeros + scheme.zero_offset) & ((1 << scheme.bits) - 1)


def _check_shape(name: str, parts: dict[str, torch.Tensor], shape: tuple[int, int]) -> None:
    if parts["weight_shape"].tolist() != list(shape):
        raise CheckpointError(
            f"tensor {name}.weight_shape is {parts['weight_shape'].tolist()}, but config.json requires {list(shape)}"
        )


def _groups(name: str, suffix: str, scheme: Packed, parts: dict[str, torch.Tensor], inputs: int) -> torch.Tensor:
    """The group of each input."""
    count = scheme.groups(inputs)
    if suffix not in parts:
        return torch.arange(inputs) // (scheme.group or inputs)
    groups = parts[suffix].long()
    if int(groups.min()) < 0 or int(groups.max()) >= count:
        raise CheckpointError(
            f"tensor {name}.{suffix} has groups from {int(groups.min())} to {int(groups.max())}, but the layer has "
            f"{count} groups, from 0; download the model again"
        )
    return groups


def _unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The numbers in int32 words [a, b], the lowest bits first, side by side along a dimension."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts)) & ((1 << bits) - 1)
    return numbers.flatten(dim, dim + 1)


def _in_order(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of AWQ's words [n, out] in the order of the outputs."""
    places = torch.tensor(AWQ_ORDER).argsort()
    grouped: torch.Tensor = numbers.reshape(len(numbers), -1, len(AWQ_ORDER))[..., places]
    return grouped.flatten(1)
