"""What a model folder says about embeddings and scores: the modules of sentence-transformers, and classification heads.

Read without torch. A module that would change the numbers and is not known is refused by name, never skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from step_protocol.types import PoolingKind
from worker_svc.engine.checkpoint.model_folder import CheckpointError, read_object, read_objects

MODES = {"mean": PoolingKind.MEAN, "cls": PoolingKind.CLS, "lasttoken": PoolingKind.LAST}
OLD_MODES = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}  # fmt: skip
DENSE_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "Sigmoid": "sigmoid"}
PLAIN_MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore", "Dropout")
MAX_SANE_LENGTH = 1 << 25  # tokenizers without a limit have 1e30


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer after the pooling, in a file of its own."""

    folder: str
    in_features: int
    out_features: int
    has_bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """The embeddings and scores of a model."""

    kind: PoolingKind
    normalize: bool
    dense: tuple[DenseLayer, ...] = ()
    max_length: int | None = None  # of a text in tokens; None: that of the model
    answer_token_ids: tuple[int, ...] = ()  # of a reranker without head: yes, then no
    num_classes: int = 0  # outputs of the classification head; 0: none
    has_sigmoid: bool = True  # scores are probabilities
    is_configured: bool = False  # the folder has modules.json


def read_pooling(folder: Path, config: Mapping[str, Any], default: PoolingKind) -> PoolingConfig:
    """Reads modules.json and the files that it names. `default`: the pooling of a folder without modules.json.

    Raises CheckpointError naming the file and the setting for anything that is not supported.
    """
    found = PoolingConfig(default, normalize=True)
    if (folder / "modules.json").is_file():
        found = _read_modules(folder, default)
    architecture = str((config.get("architectures") or [""])[0])
    classes = _num_classes(config) if architecture.endswith("ForSequenceClassification") else 0
    return replace(
        found,
        num_classes=classes,
        has_sigmoid=_has_sigmoid(config, folder),
        max_length=_max_length(folder),
    )


def _num_classes(config: Mapping[str, Any]) -> int:
    labels = config.get("id2label")
    return len(labels) if labels is not None else int(config.get("num_labels", 2))


def _read_modules(folder: Path, default: PoolingKind) -> PoolingConfig:
    kind, normalize, dense = default, False, []
    answers: tuple[int, ...] = ()
    for module in read_objects(folder / "modules.json"):
        name, path = str(module.get("type", "")).rsplit(".", 1)[-1], str(module.get("path", ""))
        if name not in PLAIN_MODULES:
            raise CheckpointError(
                f"modules.json: module {module.get('type')} is not supported; use one of {', '.join(PLAIN_MODULES)}"
            )
        _check_path(path)
        if name == "Pooling":
            kind = _kind(folder / path / "config.json")
        elif name == "Dense":
            if normalize:
                raise CheckpointError(
                    "modules.json: a Dense module follows Normalize; only the other order is supported"
                )
            dense.append(_dense(folder, path))
        elif name == "LogitScore":
            answers = _answers(folder / path / "config.json")
        normalize = normalize or name == "Normalize"
    return PoolingConfig(kind, normalize, tuple(dense), answer_token_ids=answers, is_configured=True)


def _check_path(path: str) -> None:
    if path.startswith("/") or ".." in path.split("/"):
        raise CheckpointError(f"modules.json: path {path!r} leaves the model folder")


def _kind(path: Path) -> PoolingKind:
    config = read_object(path)
    modes = config.get("pooling_mode", [mode for field, mode in OLD_MODES.items() if config.get(field)])
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in MODES:
        raise CheckpointError(
            f"{path}: pooling {' + '.join(map(str, modes)) or 'not set'} is not supported; "
            f"use one of {', '.join(MODES)}"
        )
    if config.get("include_prompt", True) is False:
        raise CheckpointError(f"{path}: include_prompt false is not supported; prompts are part of the pooled text")
    return MODES[modes[0]]


def _dense(folder: Path, path: str) -> DenseLayer:
    config = read_object(folder / path / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in DENSE_ACTIVATIONS:
        raise CheckpointError(
            f"{path}/config.json: activation_function {activation} is not supported; use one of "
            f"{', '.join(DENSE_ACTIVATIONS)}"
        )
    if config.get("use_residual"):
        raise CheckpointError(f"{path}/config.json: use_residual is not supported")
    if not (folder / path / "model.safetensors").is_file():
        raise CheckpointError(f"{path} has no model.safetensors; convert the model with SentenceTransformer.save")
    sizes = [int(config.get(name, 0)) for name in ("in_features", "out_features")]
    return DenseLayer(path, sizes[0], sizes[1], bool(config.get("bias", True)), DENSE_ACTIVATIONS[activation])


def _answers(path: Path) -> tuple[int, ...]:
    config = read_object(path)
    found = (config.get("true_token_id"), config.get("false_token_id"))
    return tuple(int(token_id) for token_id in found if token_id is not None)


def _has_sigmoid(config: Mapping[str, Any], folder: Path) -> bool:
    """As CrossEncoder: config.json may name another activation of the score."""
    named = config.get("sentence_transformers")
    activation = named.get("activation_fn") if isinstance(named, dict) else None
    own = folder / "config_sentence_transformers.json"
    if activation is None and own.is_file():
        activation = read_object(own).get("activation_fn")
    activation = activation or config.get("sbert_ce_default_activation_function")
    return not (isinstance(activation, str) and activation.endswith(".Identity"))


def _max_length(folder: Path) -> int | None:
    limits = []
    for name, field in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        if (folder / name).is_file():
            value = read_object(folder / name).get(field)
            if isinstance(value, int | float) and 0 < value < MAX_SANE_LENGTH:
                limits.append(int(value))
    return min(limits, default=None)
