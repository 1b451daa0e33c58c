"""Gemma 3n and 4: layers with heads of their own shapes that may share keys and values, and embeddings per token and
layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from worker_svc.engine.backend import HeadShape, Linear, Norm
from worker_svc.engine.checkpoint.model_folder import CheckpointError, size_of
from worker_svc.engine.decoder.plain_part import PlainPart

OVERRIDES = {"head_dim", "num_key_value_heads"}  # fields of `per_layer_config` that are computed


@dataclass(frozen=True, slots=True)
class PerLayerTable:
    """What makes the inputs [tokens, layers, width] of all layers from token ids and input embeddings."""

    embedding: torch.Tensor  # [vocab, layers * width]; tokens above have row 0
    projection: Linear
    norm: Norm  # of `width` numbers

    @classmethod
    def part(cls, vocab: int, num_layers: int, width: int, hidden: int) -> PlainPart[PerLayerTable]:
        return PlainPart(
            cls,
            linears={"projection": ("model.per_layer_model_projection", num_layers * width, hidden)},
            norms={"norm": ("model.per_layer_projection_norm", width)},
            tensors={"embedding": ("model.embed_tokens_per_layer.weight", (vocab, num_layers * width), None)},
        )

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The rows of the tokens, [tokens, layers * width]."""
        rows: torch.Tensor = self.embedding[token_ids.where(token_ids < len(self.embedding), 0)]
        return rows


@dataclass(frozen=True, slots=True)
class PerLayerWeights:
    """What a layer adds to its output: norm(projection(activation(gate(x)) * input))."""

    gate: Linear
    projection: Linear
    norm: Norm

    @classmethod
    def part(cls, prefix: str, width: int, hidden: int) -> PlainPart[PerLayerWeights]:
        return PlainPart(
            cls,
            linears={
                "gate": (f"{prefix}per_layer_input_gate", width, hidden),
                "projection": (f"{prefix}per_layer_projection", hidden, width),
            },
            norms={"norm": (f"{prefix}post_per_layer_input_norm", hidden)},
        )


def layer_heads(config: Mapping[str, Any], heads: HeadShape, is_full: Sequence[bool]) -> list[HeadShape]:
    """The heads of each layer. Raises CheckpointError naming the field."""
    given = config.get("per_layer_config")
    if given is None:
        fields = {"head_dim": config.get("global_head_dim") or 512}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            fields["num_key_value_heads"] = config["num_global_key_value_heads"]
        given = {index: fields for index, is_one in enumerate(is_full) if is_one}
    for index, fields in given.items():
        if not str(index).isdecimal() or not isinstance(fields, dict):
            raise CheckpointError(
                f"per_layer_config.{index}: config.json must hold fields of a layer, found {fields!r}"
            )
    by_index = {int(index): fields for index, fields in given.items()}
    return [_with_fields(heads, by_index.get(index, {})) for index in range(len(is_full))]


def _with_fields(heads: HeadShape, fields: Mapping[str, Any]) -> HeadShape:
    if unknown := sorted(fields.keys() - OVERRIDES):
        raise CheckpointError(f"per_layer_config: {unknown[0]!r} is not supported; only head_dim and KV heads differ")
    given = {"head_dim": heads.head_dim, "num_key_value_heads": heads.num_kv_heads} | dict(fields)
    found = replace(heads, head_dim=size_of(given, "head_dim"), num_kv_heads=size_of(given, "num_key_value_heads"))
    if found.num_q_heads % found.num_kv_heads:
        raise CheckpointError(
            f"num_key_value_heads: {found.num_kv_heads} does not divide the {found.num_q_heads} attention heads"
        )
    return found


def kv_owners(config: Mapping[str, Any], is_full: Sequence[bool]) -> list[int | None]:
    """The layer whose keys and values each layer reads; None: it has its own."""
    count = len(is_full)
    first = count - int(config.get("num_kv_shared_layers") or 0)
    last = {kind: index for index, kind in enumerate(is_full[:first])}
    if first < 0 or any(kind not in last for kind in is_full[first:]):
        raise CheckpointError(
            f"num_kv_shared_layers: {count - first} of {count} layers leave none whose keys and values they can read"
        )
    return [None if index < first else last[kind] for index, kind in enumerate(is_full)]
