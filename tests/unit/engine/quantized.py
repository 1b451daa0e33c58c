"""Quantized checkpoints of random weights, packed word by word as the formats define it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ: bits 4 i to 4 i + 3 of a word have this column

Tensors = dict[str, torch.Tensor]
Pack = Callable[[np.random.Generator, int, int], tuple[Tensors, np.ndarray]]


@dataclass(frozen=True)
class Format:
    """A quantization_config, and a function that makes the tensors and the weight [out, in] of a layer."""

    fields: dict[str, Any]
    pack: Pack


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers [n, k] packed along k, the first in the lowest bits."""
    per_word = 32 // bits
    packed = np.zeros((len(numbers), -(-numbers.shape[1] // per_word)), np.uint32)
    for k in range(numbers.shape[1]):
        packed[:, k // per_word] |= numbers[:, k].astype(np.uint32) << np.uint32(bits * (k % per_word))
    return packed.view(np.int32)


def awq_words(numbers: np.ndarray) -> np.ndarray:
    return words(np.stack([numbers[:, 8 * (k // 8) + AWQ_COLUMNS[k % 8]] for k in range(numbers.shape[1])], 1), 4)


def scales_of(
    rng: np.random.Generator, shape: tuple[int, ...], inputs: int, top: float, dtype=np.float16
) -> np.ndarray:
    """Scales such that the outputs of a layer are about as large as its inputs."""
    return (rng.uniform(1.0, 3.0, shape) * inputs**-0.5 / top).astype(dtype)


def to_torch(tensors: dict[str, np.ndarray]) -> Tensors:
    return {name: torch.from_numpy(np.ascontiguousarray(tensor)) for name, tensor in tensors.items()}


def gptq(bits: int, group: int, *, order: bool = False, symmetric: bool = False, version: int = 1) -> Format:
    def pack(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        size = inputs if group == -1 else group
        groups, top = -(-inputs // size), 1 << bits
        g_idx = np.arange(inputs) // size
        if order:
            rng.shuffle(g_idx)
        q = rng.integers(0, top, (inputs, outputs))
        zeros = np.full((groups, outputs), top // 2) if symmetric else rng.integers(0, top, (groups, outputs))
        scales = scales_of(rng, zeros.shape, inputs, top)
        weight = np.empty((outputs, inputs), np.float32)
        for i in range(inputs):
            weight[:, i] = (q[i] - zeros[g_idx[i]]).astype(np.float32) * scales[g_idx[i]].astype(np.float32)
        stored = zeros if version == 2 else (zeros - 1) % top
        tensors = {"qweight": words(q.T, bits).T, "qzeros": words(stored, bits), "scales": scales}
        return to_torch(tensors | {"g_idx": g_idx.astype(np.int32)}), weight

    fields = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order, "sym": symmetric}
    return Format(fields | {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, pack)


def awq(group: int) -> Format:
    def pack(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        groups = -(-inputs // group)
        q, zeros = rng.integers(0, 16, (inputs, outputs)), rng.integers(0, 16, (groups, outputs))
        scales = scales_of(rng, zeros.shape, inputs, 16)
        weight = np.empty((outputs, inputs), np.float32)
        for i in range(inputs):
            weight[:, i] = (q[i] - zeros[i // group]).astype(np.float32) * scales[i // group].astype(np.float32)
        return to_torch({"qweight": awq_words(q), "qzeros": awq_words(zeros), "scales": scales}), weight

    fields = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(fields | {"modules_to_not_convert": ["lm_head"]}, pack)


def scaled_pack(dtype: torch.dtype, scale: str, block: tuple[int | None, int | None]) -> Pack:
    """int8 or fp8 with one scale for each block of outputs and inputs; None: all."""

    def pack(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        rows, columns = block[0] or outputs, block[1] or inputs
        top = 128 if dtype is torch.int8 else 448
        if dtype is torch.int8:
            q = torch.from_numpy(rng.integers(-128, 128, (outputs, inputs))).to(dtype)
        else:
            q = torch.from_numpy(rng.uniform(-top, top, (outputs, inputs))).to(dtype)
        scales = scales_of(rng, (-(-outputs // rows), -(-inputs // columns)), inputs, top, np.float32)
        weight = q.double().numpy()
        for o in range(outputs):
            for i in range(inputs):
                weight[o, i] *= scales[o // rows, i // columns]
        stored = scales.reshape(1) if block == (None, None) else scales
        return {"weight": q, scale: torch.from_numpy(stored)}, weight.astype(np.float32)

    return pack


def static(target: Format) -> Format:
    """The same weights with a scale of inputs."""

    def pack(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        tensors, weight = target.pack(rng, outputs, inputs)
        return tensors | {"input_scale": torch.tensor(0.01)}, weight

    fields = copy.deepcopy(target.fields)
    if fields["quant_method"] == "fp8":
        fields["activation_scheme"] = "static"
    else:
        fields["config_groups"]["group_0"]["input_activations"] |= {"dynamic": False, "strategy": "tensor"}
    return Format(fields, pack)


def fp8(block: int | None) -> Format:
    fields: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    fields["modules_to_not_convert"] = ["lm_head"]
    if block is None:
        return Format(fields, scaled_pack(torch.float8_e4m3fn, "weight_scale", (None, None)))
    size = (block, block + 8)
    pack = scaled_pack(torch.float8_e4m3fn, "weight_scale_inv", size)
    return Format(fields | {"weight_block_size": list(size)}, pack)


TOKEN_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(format_name: str, weights: dict[str, Any], pack: Pack, inputs: dict[str, Any] | None = None) -> Format:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | weights}
    group |= {"input_activations": inputs, "output_activations": None}
    return Format(
        {
            "quant_method": "compressed-tensors",
            "format": format_name,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
        },
        pack,
    )


def compressed_int8(strategy: str, inputs: dict[str, Any] | None = None, group: int | None = None) -> Format:
    block = {"channel": (1, None), "tensor": (None, None), "group": (1, group)}[strategy]
    weights = {"num_bits": 8, "type": "int", "strategy": strategy, "group_size": group}
    return compressed("int-quantized", weights, scaled_pack(torch.int8, "weight_scale", block), inputs)


def compressed_fp8(strategy: str) -> Format:
    block = {"channel": (1, None), "tensor": (None, None), "block": (16, 24)}[strategy]
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": [16, 24]}
    inputs = TOKEN_INPUTS | {"type": "float"}
    return compressed("float-quantized", weights, scaled_pack(torch.float8_e4m3fn, "weight_scale", block), inputs)


def compressed_packed(bits: int, group: int, *, order: bool = False) -> Format:
    def pack(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        top, groups = 1 << bits, -(-inputs // group)
        q, g_idx = rng.integers(0, top, (outputs, inputs)), np.arange(inputs) // group
        if order:
            rng.shuffle(g_idx)
        scales = scales_of(rng, (outputs, groups), inputs, top)
        weight = np.empty((outputs, inputs), np.float32)
        for i in range(inputs):
            weight[:, i] = (q[:, i] - top // 2).astype(np.float32) * scales[:, g_idx[i]].astype(np.float32)
        tensors = {"weight_packed": words(q, bits), "weight_scale": scales, "weight_shape": np.array([outputs, inputs])}
        return to_torch(tensors | ({"weight_g_idx": g_idx.astype(np.int32)} if order else {})), weight

    fields = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group}
    return compressed("pack-quantized", fields | {"actorder": "group" if order else None}, pack)


FORMATS = {
    "gptq-int4": gptq(4, 48), "gptq-int4-act-order": gptq(4, 48, order=True),
    "gptq-int4-symmetric-v2": gptq(4, -1, symmetric=True, version=2), "gptq-int8": gptq(8, 32), "awq": awq(40),
    "fp8-tensor": fp8(None), "fp8-block": fp8(40), "fp8-static": static(fp8(None)),
    "compressed-int8-channel": compressed_int8("channel"), "compressed-int8-tensor": compressed_int8("tensor"),
    "compressed-int8-group": compressed_int8("group", group=24), "compressed-fp8-channel": compressed_fp8("channel"),
    "compressed-fp8-tensor": compressed_fp8("tensor"), "compressed-fp8-static": static(compressed_fp8("tensor")),
    "compressed-fp8-block": compressed_fp8("block"), "compressed-int4": compressed_packed(4, 40),
    "compressed-int4-act-order": compressed_packed(4, 40, order=True),
    "compressed-int8-packed": compressed_packed(8, 48),
}  # fmt: skip


def is_linear(name: str) -> bool:
    return name.endswith("proj.weight") or ".experts." in name


def quantize_model(folder: Path, target: Format, is_quantized: Callable[[str], bool] = is_linear) -> Path:
    """Replaces the linear layers of a checkpoint. Returns a folder of the same model with float weights."""
    plain = folder.with_name(f"{folder.name}-plain")
    shutil.copytree(folder, plain)
    stored, weights, rng = {}, {}, np.random.default_rng(0)
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = weights[name] = tensor
        if is_quantized(name):
            del stored[name]
            tensors, weight = target.pack(rng, *tensor.shape)
            stored |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in tensors.items()}
            weights[name] = torch.from_numpy(weight)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": target.fields}))
    return plain
