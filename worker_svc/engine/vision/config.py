"""A vision tower as data, from `vision_config` of config.json."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from worker_svc.engine.backend import HeadShape
from worker_svc.engine.checkpoint.architecture import NormKind, TowerKind
from worker_svc.engine.checkpoint.model_folder import CheckpointError, choice_of, size_of

ACTIVATIONS = {"quick_gelu": "quick_gelu", "silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_size = partial(size_of, within="vision_config.")


@dataclass(frozen=True, slots=True)
class TowerNames:
    """Names of tensors, without `.weight` and `.bias`. Those of a layer follow `layer`."""

    patch: str = "visual.patch_embed.proj"
    positions: str = ""  # a square table of learned positions; empty: none
    layer: str = "visual.blocks.{}."
    input_norm: str = "norm1"
    qkv: str = "attn.qkv"
    o: str = "attn.proj"
    post_norm: str = "norm2"
    gate_up: tuple[str, ...] = ("mlp.fc1",)  # [gate, up], or `up` alone if there is no gate
    down: str = "mlp.fc2"
    merger_norm: str = "visual.merger.ln_q"
    merger_linears: tuple[str, str] = ("visual.merger.mlp.0", "visual.merger.mlp.2")
    deep_norm: str = ""
    deep_linears: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class TowerFamily:
    """The differences of one family from the common tower, and the fields of its `vision_config`."""

    norm: NormKind = "layer"
    is_gated: bool = False
    has_patch_bias: bool = False
    default_activation: str = "quick_gelu"
    hidden: str = "hidden_size"
    out: str = "out_hidden_size"
    names: TowerNames = TowerNames()


FAMILIES: dict[TowerKind, TowerFamily] = {
    "qwen2_vl": TowerFamily(hidden="embed_dim", out="hidden_size"),
    "qwen2_5_vl": TowerFamily(
        norm="rms", is_gated=True, default_activation="silu",
        names=TowerNames(gate_up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj"),
    ),
    "qwen3_vl": TowerFamily(
        has_patch_bias=True, default_activation="gelu_pytorch_tanh",
        names=TowerNames(
            positions="visual.pos_embed", gate_up=("mlp.linear_fc1",), down="mlp.linear_fc2",
            merger_norm="visual.merger.norm", merger_linears=("visual.merger.linear_fc1", "visual.merger.linear_fc2"),
            deep_norm="visual.deepstack_merger_list.{}.norm",
            deep_linears=("visual.deepstack_merger_list.{}.linear_fc1", "visual.deepstack_merger_list.{}.linear_fc2"),
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A vision tower, checked. It turns the patches of one image into embeddings of the decoder's width."""

    family: TowerFamily
    patch_size: int
    frames: int  # an image is repeated this many times, as a still video
    channels: int
    merge_size: int  # a square of this many patches a side becomes one token of the decoder
    hidden: int
    inner: int
    out: int
    heads: HeadShape
    num_layers: int
    activation: str
    window: int | None  # side of a window in tokens of the decoder; None: every layer attends to the whole image
    full_layers: frozenset[int]  # layers that attend to the whole image although there is a window
    num_positions_per_side: int  # of the learned positions; 0: none
    deep_layers: tuple[int, ...]  # DeepStack: outputs of these layers are added after the first layers of the decoder

    @property
    def names(self) -> TowerNames:
        return self.family.names

    @property
    def num_outputs(self) -> int:
        """Embeddings per token: one that replaces the token's, and one per layer of DeepStack."""
        return 1 + len(self.deep_layers)

    def num_pair_products(self) -> int:
        """Products for the attention of one patch to another one, in all layers that attend to the whole image."""
        num_full = self.num_layers if self.window is None else len(self.full_layers)
        return 2 * num_full * self.hidden

    def num_parameters(self) -> int:
        """Weights of the linear layers, without those of the mergers."""
        parts = 2 + self.family.is_gated
        return self.num_layers * self.hidden * (4 * self.hidden + parts * self.inner)


def parse_vision(config: dict[str, Any], kind: TowerKind, decoder_hidden: int) -> VisionConfig:
    """Reads `vision_config`. Raises CheckpointError naming the field for anything that is not supported."""
    fields = config.get("vision_config")
    if not isinstance(fields, dict):
        raise CheckpointError("vision_config: config.json must hold an object; download the model again")
    family = FAMILIES[kind]
    hidden, num_heads = _size(fields, family.hidden), _size(fields, "num_heads")
    head_dim = hidden // num_heads
    if hidden % num_heads or head_dim % 4:
        raise CheckpointError(
            f"vision_config.num_heads: {family.hidden} {hidden} over {num_heads} heads is not a multiple of 4 for each"
        )
    out, depth = _size(fields, family.out), _size(fields, "depth")
    if out != decoder_hidden:
        raise CheckpointError(
            f"vision_config.{family.out}: {out} is not the hidden_size of the decoder, {decoder_hidden}"
        )
    return VisionConfig(
        family=family,
        patch_size=_size(fields, "patch_size"),
        frames=_size(fields, "temporal_patch_size", 2),
        channels=_size(fields, "in_channels", fields.get("in_chans", 3)),
        merge_size=_size(fields, "spatial_merge_size", 2),
        hidden=hidden,
        inner=_inner(fields, kind, hidden),
        out=out,
        heads=HeadShape(num_heads, num_heads, head_dim),
        num_layers=depth,
        activation=choice_of(
            fields.get("hidden_act") or family.default_activation, ACTIVATIONS, "vision_config.hidden_act"
        ),
        window=_window(fields) if kind == "qwen2_5_vl" else None,
        full_layers=frozenset(fields.get("fullatt_block_indexes", ())),
        num_positions_per_side=_positions(fields) if family.names.positions else 0,
        deep_layers=_deep_layers(fields, depth) if family.names.deep_norm else (),
    )


def _inner(fields: dict[str, Any], kind: TowerKind, hidden: int) -> int:
    return int(hidden * fields.get("mlp_ratio", 4)) if kind == "qwen2_vl" else _size(fields, "intermediate_size")


def _window(fields: dict[str, Any]) -> int:
    unit = _size(fields, "spatial_merge_size", 2) * _size(fields, "patch_size")
    size = _size(fields, "window_size", 112)
    if size < unit:
        raise CheckpointError(f"vision_config.window_size: {size} pixels are below one token of {unit} pixels")
    return size // unit


def _positions(fields: dict[str, Any]) -> int:
    count = _size(fields, "num_position_embeddings")
    side = int(count**0.5)
    if side * side != count:
        raise CheckpointError(f"vision_config.num_position_embeddings: {count} is not a square")
    return side


def _deep_layers(fields: dict[str, Any], depth: int) -> tuple[int, ...]:
    layers = fields.get("deepstack_visual_indexes") or []
    if any(not isinstance(layer, int) or not 0 <= layer < depth for layer in layers) or len(set(layers)) < len(layers):
        raise CheckpointError(
            f"vision_config.deepstack_visual_indexes: {layers} must name different layers below depth {depth}"
        )
    return tuple(layers)


def tower_tensors(config: VisionConfig) -> list[str]:
    """The names of the tensors of a tower."""
    names, family = config.names, config.family
    linears = [*names.merger_linears]
    norms = [names.merger_norm]
    for index in range(config.num_layers):
        prefix = names.layer.format(index)
        linears += [prefix + name for name in (names.qkv, names.o, *names.gate_up, names.down)]
        norms += [prefix + names.input_norm, prefix + names.post_norm]
    for index in range(len(config.deep_layers)):
        linears += [name.format(index) for name in names.deep_linears]
        norms.append(names.deep_norm.format(index))
    tables = [names.patch, *([names.positions] if names.positions else [])]
    return [
        *(f"{name}.weight" for name in (*tables, *linears, *norms)),
        *(f"{name}.bias" for name in _with_bias(names.patch, linears, norms, family)),
    ]


def _with_bias(patch: str, linears: list[str], norms: list[str], family: TowerFamily) -> list[str]:
    return [*linears, *(norms if family.norm == "layer" else []), *([patch] if family.has_patch_bias else [])]
