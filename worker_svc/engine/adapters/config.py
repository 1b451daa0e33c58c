"""adapter_config.json of a PEFT folder. Importing this does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from worker_svc.engine.checkpoint.model_folder import CheckpointError, read_object

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 1024
ALL_LINEAR = "all-linear"

# Fields that change the result and are not computed, with what they request. Each must be unset, false or empty.
REFUSED_FIELDS = {
    "use_dora": "DoRA", "modules_to_save": "replaced modules",
    "trainable_token_indices": "trained rows of the embedding",
    "target_parameters": "adapters of parameters, such as those of experts", "layer_replication": "replicated layers",
    "lora_bias": "biases of lora_B", "use_qalora": "QA-LoRA", "use_bdlora": "block-diagonal adapters",
    "alora_invocation_tokens": "activated LoRA", "arrow_config": "Arrow routing", "kasa_config": "KaSA",
    "velora_config": "VeLoRA", "monteclora_config": "MonteCLoRA",
}  # fmt: skip
# With these values of init_lora_weights, training starts from changed weights of the base model.
CHANGED_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
# Fields without an effect on a loaded adapter, and fields that are read.
IGNORED_FIELDS = frozenset((
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "lora_dropout", "fan_in_fan_out", "init_lora_weights", "megatron_config", "megatron_core",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
    "ensure_weight_tying", "layers_pattern",
))  # fmt: skip
READ_FIELDS = frozenset((
    "bias", "r", "target_modules", "exclude_modules", "lora_alpha", "use_rslora", "layers_to_transform",
    "rank_pattern", "alpha_pattern",
))  # fmt: skip


class AdapterError(CheckpointError):
    """An adapter that cannot be served. The message names the folder, field or tensor and says what to do."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of adapter_config.json that determine the result. Patterns are regular expressions, as in PEFT."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: frozenset[int] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, path: str) -> int:
        """The rank of the adapter of one module."""
        return _matching(self.rank_pattern, path, self.rank)

    def scale_of(self, path: str) -> float:
        """The factor of the product of its matrices."""
        alpha, rank = _matching(self.alpha_pattern, path, self.alpha), self.rank_of(path)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def targets(self, path: str, layer: int) -> bool:
        """Whether the adapter must change a linear layer of the decoder's layers."""
        if self.exclude_modules and _selects(self.exclude_modules, path):
            return False
        if self.layers_to_transform is not None and layer not in self.layers_to_transform:
            return False
        return self.target_modules == ALL_LINEAR or _selects(self.target_modules, path)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Raises AdapterError for a folder that is no LoRA adapter, or needs something that is not computed."""
    if not (folder / CONFIG_FILE).is_file():
        raise AdapterError(f"{folder} has no {CONFIG_FILE}; give a folder that save_pretrained of PEFT wrote")
    try:
        fields = read_object(folder / CONFIG_FILE)
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    _check_supported(folder, fields)
    return AdapterConfig(
        rank=_rank("r", fields.get("r", 8)),
        alpha=_number("lora_alpha", fields.get("lora_alpha", 8)),
        is_rank_stabilized=bool(fields.get("use_rslora", False)),
        target_modules=_modules("target_modules", fields.get("target_modules")),
        exclude_modules=_modules("exclude_modules", fields.get("exclude_modules") or []),
        layers_to_transform=_layers(fields.get("layers_to_transform")),
        rank_pattern={key: _rank(f"rank_pattern[{key!r}]", rank) for key, rank in _pattern(fields, "rank_pattern")},
        alpha_pattern={
            key: _number(f"alpha_pattern[{key!r}]", alpha) for key, alpha in _pattern(fields, "alpha_pattern")
        },
    )


def _check_supported(folder: Path, fields: dict[str, Any]) -> None:
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"peft_type: {folder} is an adapter of kind {kind!r}; only LORA is computed")
    for name, value in fields.items():
        if value and name in REFUSED_FIELDS:
            raise AdapterError(f"{name}: {folder} uses {REFUSED_FIELDS[name]}, which is not computed; found {value!r}")
        if value and name not in IGNORED_FIELDS | READ_FIELDS | REFUSED_FIELDS.keys():
            raise AdapterError(
                f"{name}: {folder} sets an unknown field to {value!r}; without it the output may be wrong"
            )
    if fields.get("bias", "none") != "none":
        raise AdapterError(f"bias: {folder} trained biases ({fields['bias']!r}), which is not computed; use bias none")
    start = str(fields.get("init_lora_weights", "")).lower()
    if start.startswith(CHANGED_BASE):
        raise AdapterError(
            f"init_lora_weights: {folder} was trained from weights changed by {start!r}; convert it with "
            "path_initial_model_for_weight_conversion of save_pretrained"
        )


def _pattern(fields: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    found = fields.get(name) or {}
    if not isinstance(found, dict):
        raise AdapterError(f"{name}: must be an object of module names and numbers, found {found!r}")
    for key in found:
        _compiled(key, name)
    return list(found.items())


def _rank(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise AdapterError(f"{name}: must be an integer from 1 to {MAX_RANK}, found {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise AdapterError(f"{name}: must be a number, found {value!r}")
    return float(value)


def _modules(name: str, value: Any) -> tuple[str, ...] | str:
    if isinstance(value, str) and value:
        if value != ALL_LINEAR:
            _compiled(value, name)
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise AdapterError(
        f"{name}: must be a list of module names, a regular expression or {ALL_LINEAR!r}, found {value!r}"
    )


def _layers(value: Any) -> frozenset[int] | None:
    if value is None:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) for layer in layers):
        raise AdapterError(f"layers_to_transform: must be a list of layer numbers, found {value!r}")
    return frozenset(layers)


def _compiled(pattern: str, name: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise AdapterError(f"{name}: {pattern!r} is not a valid regular expression: {error}") from None


def _selects(modules: tuple[str, ...] | str, path: str) -> bool:
    """A string is a regular expression for the whole path; a list has ends of paths."""
    if isinstance(modules, str):
        return re.fullmatch(modules, path) is not None
    return any(path == module or path.endswith(f".{module}") for module in modules)


def _matching(patterns: Mapping[str, T], path: str, default: T) -> T:
    """The value of the first pattern that matches the end of a path."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", path)), default)
