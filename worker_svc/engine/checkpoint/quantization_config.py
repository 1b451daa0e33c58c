"""How a quantized checkpoint stores its linear layers, from `quantization_config` of config.json. Without torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from worker_svc.engine.checkpoint.architecture import Architecture
from worker_svc.engine.checkpoint.model_folder import CheckpointError

FLOATS = ("float32", "bfloat16", "float16")
MXFP4_GROUP = 32  # inputs that have a scale in common
WORD_BITS = 32  # of a packed tensor
INPUT_SCALE = "input_scale"
LINEAR = "Linear"  # the target that stands for all linear layers
UNLIMITED = -1  # group_size of one group for all inputs

IN_DTYPE = "weights are converted to `--dtype` at load"
INT8_STORED = "int8 kernel with the stored values and scales"
FP8_STORED = "fp8 kernels with the stored values and scales"
INT4_STORED = "int4 kernels with the stored values and scales; 8 bits are converted at load"
INT4_ON_CPU = "`cpu`: int4 kernels with the stored values and scales; `reference`, and 8 bits: converted at load"
FP4_ON_CPU = "`cpu`: fp4 kernels with the stored bits; `reference`: converted at load, which rounds nothing"
# Formats for docs/models.md: quant_method, what is read, how it is computed on CPUs, how on GPUs
FORMATS = (
    (
        "compressed-tensors",
        "`int-quantized`: int8 per output or tensor, inputs in int8 with dynamic scales per token", INT8_STORED,
        f"{INT8_STORED}; experts are converted",
    ),
    ("compressed-tensors", "`int-quantized`: int8 per output, tensor or group, other inputs", IN_DTYPE, IN_DTYPE),
    ("compressed-tensors", "`float-quantized`: fp8 (e4m3) per output, tensor or block", IN_DTYPE, FP8_STORED),
    (
        "compressed-tensors", "`pack-quantized`: int4 and int8 per output or group, with or without `weight_g_idx`",
        INT4_ON_CPU, INT4_STORED,
    ),
    ("fp8", "fp8 (e4m3) per tensor, or per block (`weight_block_size`)", IN_DTYPE, FP8_STORED),
    (
        "mxfp4", "experts of GPT-OSS: fp4 (e2m1), a power of two per 32 inputs", FP4_ON_CPU,
        "converted at load, which rounds nothing",
    ),
    ("gptq", "int4 and int8, any `group_size`, `desc_act`, `sym`; `gptq` and `gptq_v2`", INT4_ON_CPU, INT4_STORED),
    ("awq", "int4, any `group_size`, layout `gemm` of AutoAWQ", INT4_ON_CPU, INT4_STORED),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a quantized layer."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scaled:
    """8 bits per weight, and a scale for each block of weights."""

    dtype: Literal["int8", "float8_e4m3fn"]
    scale: str  # the name of its tensor
    block: tuple[int | None, int | None]  # outputs and inputs that have a scale in common; None: all
    rounds_inputs: bool = False  # the model was quantized for inputs in int8, with one scale per token
    has_input_scale: bool = False  # a scale of inputs is stored. It is not used: each token has its own scale or none

    def parts(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        """The tensors by name, without the name of the layer."""
        rows, columns = self.block
        scales = _ceil(outputs, rows or outputs), _ceil(inputs, columns or inputs)
        parts = {
            "weight": StoredTensor((outputs, inputs), (self.dtype,)),
            self.scale: StoredTensor((1,) if self.block == (None, None) else scales, FLOATS),
        }
        return parts | ({INPUT_SCALE: StoredTensor((1,), FLOATS)} if self.has_input_scale else {})

    @property
    def has_int8_rows(self) -> bool:
        """Whether the int8 kernel computes what the model was quantized for: one scale per output and input row."""
        return self.rounds_inputs and self.block in ((1, None), (None, None))


@dataclass(frozen=True, slots=True)
class Packed:
    """Several weights in each int32, and a scale for each output and group of inputs."""

    layout: Literal["gptq", "awq", "compressed"]
    bits: int
    group: int | None  # inputs that have a scale in common; None: all
    has_order: bool = False  # layout compressed: `weight_g_idx` has the group of each input
    zero_offset: int = 0  # added to stored zero points

    def parts(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        """The tensors by name, without the name of the layer."""
        per_word, groups = WORD_BITS // self.bits, self.groups(inputs)
        words, floats, order = ("int32",), FLOATS, StoredTensor((inputs,), ("int32", "int64"))
        if self.layout == "compressed":
            parts = {
                "weight_packed": StoredTensor((outputs, _ceil(inputs, per_word)), words),
                "weight_scale": StoredTensor((outputs, groups), floats),
                "weight_shape": StoredTensor((2,), ("int32", "int64")),
            }
            return parts | ({"weight_g_idx": order} if self.has_order else {})
        packed = {"gptq": (inputs // per_word, outputs), "awq": (inputs, outputs // per_word)}[self.layout]
        parts = {
            "qweight": StoredTensor(packed, words),
            "qzeros": StoredTensor((groups, outputs // per_word), words),
            "scales": StoredTensor((groups, outputs), floats),
        }
        return parts | ({"g_idx": order} if self.layout == "gptq" else {})

    def groups(self, inputs: int) -> int:
        """The number of groups of a layer."""
        return _ceil(inputs, self.group or inputs)

    def check_size(self, name: str, outputs: int, inputs: int) -> None:
        """Raises CheckpointError for a layer that does not fill whole words."""
        per_word = WORD_BITS // self.bits
        packed = {"gptq": (inputs, outputs), "awq": (outputs,), "compressed": ()}[self.layout]
        if any(size % per_word for size in packed):
            raise CheckpointError(
                f"{name}: {outputs} outputs and {inputs} inputs do not fill whole words of {per_word} weights, which "
                f"{self.layout} requires; the weights and config.json belong to different models"
            )


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """4 bits per weight (E2M1), two in a byte, and a power of two for 32 inputs. The tensors hold all experts of a
    layer."""

    def parts(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        """The tensors of one expert by name, without the name of the layer."""
        groups = inputs // MXFP4_GROUP
        return {
            "blocks": StoredTensor((outputs, groups, MXFP4_GROUP // 2), ("uint8",)),
            "scales": StoredTensor((outputs, groups), ("uint8",)),
        }


Scheme = Scaled | Packed | Mxfp4


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Which layers of a checkpoint are quantized, and how."""

    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]  # with the layers that each applies to
    ignored: tuple[str, ...] = ()

    def scheme_of(self, name: str) -> Scheme | None:
        """How a layer is stored. None: in a float type. Targets that name the layer precede `Linear`."""
        if any(_matches(entry, name) for entry in self.ignored):
            return None
        named = [scheme for targets, scheme in self.schemes if any(_matches(target, name) for target in targets)]
        others = [scheme for targets, scheme in self.schemes if LINEAR in targets]
        return next(iter(named + others), None)


def parse_quantization(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """Reads `quantization_config`. None: the checkpoint is not quantized. Raises CheckpointError for anything that is
    not supported, with the field, its value and what is supported."""
    fields = config.get("quantization_config") or config.get("compression_config")
    if not fields:
        return None
    if not isinstance(fields, dict):
        raise CheckpointError(f"quantization_config: must be a JSON object, found {fields!r}")
    return METHODS[_choice(fields, "quant_method", tuple(METHODS))](fields)


def quantization_of(config: Mapping[str, Any], architecture: Architecture) -> QuantizationConfig | None:
    """As `parse_quantization`, for a model of an architecture."""
    found = parse_quantization(config)
    if found is not None and architecture.names.is_transposed:
        raise CheckpointError(
            f"quantization_config: quantized checkpoints of {architecture.models} are not supported; use the original "
            "weights"
        )
    return found


def _gptq(fields: dict[str, Any]) -> QuantizationConfig:
    version = _choice(fields, "checkpoint_format", ("gptq", "gptq_v2"), fields.get("format", "gptq"))
    _choice(fields, "is_marlin_format", (False,), False)
    _choice(fields, "pack_dtype", ("int32",), "int32")
    _choice(fields, "desc_act", (False, True), False)  # `g_idx` has the order in both cases
    _refuse(fields, "dynamic")
    scheme = Packed(
        "gptq",
        _choice(fields, "bits", (4, 8)),
        _group_size(fields),
        zero_offset=1 if version == "gptq" else 0,
    )
    return QuantizationConfig((((LINEAR,), scheme),), _entries(fields, "modules_to_not_convert"))


def _awq(fields: dict[str, Any]) -> QuantizationConfig:
    _choice({"version": str(fields.get("version", fields.get("format", "gemm"))).lower()}, "version", ("gemm",))
    _choice(fields, "backend", ("autoawq",), "autoawq")
    _choice(fields, "zero_point", (True,), True)
    scheme = Packed("awq", _choice(fields, "bits", (4,)), _group_size(fields))
    return QuantizationConfig((((LINEAR,), scheme),), _entries(fields, "modules_to_not_convert"))


def _fp8(fields: dict[str, Any]) -> QuantizationConfig:
    is_static = _choice(fields, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    _choice(fields, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    ignored = _entries(fields, "modules_to_not_convert") + _entries(fields, "ignored_layers")
    block = fields.get("weight_block_size")
    if block is None:
        scheme = Scaled("float8_e4m3fn", "weight_scale", (None, None), has_input_scale=is_static)
    else:
        block_size = _block(fields, "weight_block_size")
        scheme = Scaled("float8_e4m3fn", "weight_scale_inv", block_size, has_input_scale=is_static)
    return QuantizationConfig((((LINEAR,), scheme),), ignored)


COMPRESSED_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")


def _compressed_tensors(fields: dict[str, Any]) -> QuantizationConfig:
    whole = _choice(fields, "format", COMPRESSED_FORMATS)
    _refuse(fields, "kv_cache_scheme")
    _refuse(fields, "transform_config")
    _choice(_object(fields, "sparsity_config") or {}, "format", ("dense",), "dense", within="sparsity_config.")
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()) or not groups:
        raise CheckpointError(f"quantization_config.config_groups: must be an object of objects, found {groups!r}")
    schemes = []
    for name, group in groups.items():
        path = f"config_groups.{name}."
        format_name = _choice(group, "format", COMPRESSED_FORMATS, whole, within=path)
        schemes.append((_entries(group, "targets", path) or (LINEAR,), _group_scheme(group, format_name, path)))
    return QuantizationConfig(tuple(schemes), _entries(fields, "ignore"))


def _group_scheme(group: dict[str, Any], format_name: str, path: str) -> Scheme:
    _refuse(group, "output_activations", path)
    weights, inputs = group.get("weights"), _object(group, "input_activations", path)
    if not isinstance(weights, dict):
        raise CheckpointError(f"quantization_config.{path}weights: must be an object, found {weights!r}")
    _choice(weights, "symmetric", (True,), True, within=path + "weights.")
    _choice(weights, "dynamic", (False,), False, within=path + "weights.")
    is_float = weights.get("type") == "float"
    is_static = inputs is not None and not _choice(
        inputs, "dynamic", (True, False) if is_float else (True,), False, within=path + "input_activations."
    )
    if format_name == "pack-quantized":
        return _packed_scheme(weights, path + "weights.")
    kind = _choice(weights, "type", ("int", "float"), "int", within=path + "weights.")
    _choice(weights, "num_bits", (8,), within=path + "weights.")
    _choice(weights, "actorder", (None, "weight", "static"), None, within=path + "weights.")
    block = _block_of(weights, path + "weights.")
    rounds_inputs = kind == "int" and inputs is not None and _is_int8_per_token(inputs)
    dtype: Literal["int8", "float8_e4m3fn"] = "int8" if kind == "int" else "float8_e4m3fn"
    return Scaled(dtype, "weight_scale", block, rounds_inputs, has_input_scale=is_static)


def _packed_scheme(weights: dict[str, Any], path: str) -> Packed:
    _choice(weights, "type", ("int",), "int", within=path)
    bits = _choice(weights, "num_bits", (4, 8), within=path)
    order = _choice(weights, "actorder", (None, "weight", "static", "group", "dynamic"), None, within=path)
    strategy = _choice(weights, "strategy", ("channel", "group"), within=path)
    group = _group_size(weights, path) if strategy == "group" else None
    return Packed("compressed", bits, group, has_order=order in ("group", "dynamic"))


def _block_of(weights: dict[str, Any], path: str) -> tuple[int | None, int | None]:
    strategy = _choice(weights, "strategy", ("tensor", "channel", "group", "block"), within=path)
    if strategy == "block":
        return _block(weights, "block_structure", path)
    if strategy == "group":
        return 1, _group_size(weights, path)
    return (1, None) if strategy == "channel" else (None, None)


def _is_int8_per_token(inputs: dict[str, Any]) -> bool:
    defaults = {"type": "int", "symmetric": True, "strategy": None, "num_bits": None}
    found = {field: inputs.get(field, default) for field, default in defaults.items()}
    return found == {"type": "int", "symmetric": True, "strategy": "token", "num_bits": 8}


def _mxfp4(fields: dict[str, Any]) -> QuantizationConfig:
    return QuantizationConfig((((r"re:.*\.experts\.",), Mxfp4()),), _entries(fields, "modules_to_not_convert"))


METHODS: dict[str, Callable[[dict[str, Any]], QuantizationConfig]] = {
    "compressed-tensors": _compressed_tensors, "fp8": _fp8, "gptq": _gptq, "awq": _awq, "mxfp4": _mxfp4,
}  # fmt: skip


def _choice(
    fields: Mapping[str, Any], field: str, supported: tuple[Any, ...], default: Any = None, within: str = ""
) -> Any:
    """The value of a field, which must be one of `supported`. `default`: the value if it is missing or null."""
    value = default if fields.get(field) is None else fields[field]
    if isinstance(value, list | dict) or (value, type(value)) not in {(one, type(one)) for one in supported}:
        raise CheckpointError(
            f"quantization_config.{within}{field}: {value!r} is not supported; "
            f"supported: {', '.join(map(str, supported))}"
        )
    return value


def _refuse(fields: Mapping[str, Any], field: str, within: str = "") -> None:
    """Raises CheckpointError if a field is set."""
    if fields.get(field):
        raise CheckpointError(
            f"quantization_config.{within}{field}: {fields[field]!r} is not supported; use a checkpoint without it"
        )


def _object(fields: Mapping[str, Any], field: str, within: str = "") -> dict[str, Any] | None:
    """The value of a field; None if it is missing or null."""
    value = fields.get(field)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"quantization_config.{within}{field}: must be an object, found {value!r}")
    return value


def _group_size(fields: Mapping[str, Any], within: str = "") -> int | None:
    value = fields.get("group_size")
    if value == UNLIMITED:
        return None
    return _positive(value, f"{within}group_size", f", or {UNLIMITED} for one group")


def _block(fields: Mapping[str, Any], field: str, within: str = "") -> tuple[int, int]:
    value = fields.get(field)
    if not isinstance(value, list) or len(value) != 2:
        raise CheckpointError(f"quantization_config.{within}{field}: must hold two positive integers, found {value!r}")
    rows, columns = (_positive(size, within + field) for size in value)
    return rows, columns


def _positive(value: Any, field: str, also: str = "") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"quantization_config.{field}: must be a positive integer{also}, found {value!r}")
    return value


def _entries(fields: Mapping[str, Any], field: str, within: str = "") -> tuple[str, ...]:
    """A list of names of layers and of patterns, which start with `re:`."""
    entries = fields.get(field) or []
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise CheckpointError(f"quantization_config.{within}{field}: must be a list of names, found {entries!r}")
    for entry in entries:
        _check_pattern(entry, f"quantization_config.{within}{field}")
    return tuple(entries)


def _check_pattern(entry: str, field: str) -> None:
    try:
        re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
    except re.error as error:
        raise CheckpointError(f"{field}: {entry!r} is not a valid regular expression: {error}") from error


def _matches(entry: str, name: str) -> bool:
    """Whether an entry is a pattern of a layer, its name, or a part of its name between dots."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return f".{entry}." in f".{name}."


def _ceil(size: int, step: int) -> int:
    return -(-size // step)
