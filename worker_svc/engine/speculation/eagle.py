"""EAGLE-3 heads: a folder with one decoder layer, which is trained for a target and reads states of three layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from worker_svc.engine.backend import Backend, Embedded, ForwardBatch, KVLayout, Linear, LinearMaker
from worker_svc.engine.checkpoint.model_folder import CheckpointError, size_of
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.model import DecoderModel
from worker_svc.engine.decoder.operations import DecoderParts
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.decoder.stored import Stored, StoredLayers
from worker_svc.engine.decoder.weights import WeightLoader

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NUM_STATES = 3
LAYER_NAMES = ("midlayer.", "layers.0.")


class _BesideEmbedding:
    """A linear layer of [normed embedding | x]."""

    def __init__(self, linear: Linear) -> None:
        self._linear, self.embedded = linear, torch.empty(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(torch.cat((self.embedded, x), 1))


class _EagleLayers(StoredLayers):
    """Attention reads an embedding beside a state."""

    def layer(self, index: int) -> dict[str, Stored]:
        found = super().layer(index)
        return found | {"qkv": replace(found["qkv"], in_features=2 * self._config.hidden_size)}


class _EagleLoader(WeightLoader):
    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, backend: LinearMaker, dtype: torch.dtype) -> None:
        super().__init__(checkpoint, config, backend, dtype)
        self._stored = _EagleLayers(config)


class EagleFolder:
    """The files of a head, checked against its target. Raises CheckpointError."""

    def __init__(self, folder: Path, target: ModelConfig) -> None:
        self.checkpoint = Checkpoint(folder)
        config = self.checkpoint.config
        names = config.get("architectures") or []
        if not any(name in ARCHITECTURES for name in names):
            raise CheckpointError(
                f"architectures: {', '.join(map(str, names)) or 'not set'} is no EAGLE-3 head; use one of "
                f"{', '.join(ARCHITECTURES)}"
            )
        if size_of(config, "num_hidden_layers") != 1:
            raise CheckpointError(f"num_hidden_layers: {config['num_hidden_layers']} is not supported; only 1 is")
        if config.get("norm_before_residual"):
            raise CheckpointError("norm_before_residual: true is not supported; only false is computed")
        self.target_size = target.vocab_size
        if size_of(config, "vocab_size") > self.target_size:
            raise CheckpointError(
                f"vocab_size: {config['vocab_size']} of {folder} is above the {self.target_size} of the model, so the "
                "head belongs to another model"
            )
        self.layer_ids = _layer_ids(config, target.num_layers)
        parsed = parse_config({**config, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False})
        layer = next((name for name in LAYER_NAMES if self.checkpoint.has(f"{name}hidden_norm.weight")), LAYER_NAMES[0])
        own = replace(parsed.names, layer=layer, final_norm="norm", input_layernorm="hidden_norm")
        self.layer = replace(
            parsed,
            vocab_size=size_of(config, "draft_vocab_size", parsed.vocab_size),
            architecture=replace(parsed.architecture, names=own),
        )
        self.embedding_norm = f"{layer}input_layernorm"

    def kv_layout(self) -> KVLayout:
        """What the head keeps of a token."""
        return self.layer.layers[0].kv_layout()

    def token_ids(self) -> torch.Tensor:
        """The target's id of each id of the head."""
        own = torch.arange(self.layer.vocab_size)
        if not self.checkpoint.has("d2t") and len(own) == self.target_size:
            return own
        ids = own + self.checkpoint.tensor("d2t", (len(own),), torch.int64, (torch.int64, torch.int32))
        if len(torch.unique(ids)) < len(ids) or int(ids.min()) < 0 or int(ids.max()) >= self.target_size:
            raise CheckpointError(f"d2t: the ids must differ and be below the {self.target_size} ids of the model")
        return ids

    def embedding(self, target: DecoderModel, dtype: torch.dtype) -> torch.Tensor:
        """[vocab, hidden]: its own, or that of the target."""
        hidden, name = self.layer.hidden_size, "embed_tokens.weight"
        if self.checkpoint.has(name):
            return self.checkpoint.tensor(name, (size_of(self.checkpoint.config, "vocab_size"), hidden), None).to(dtype)
        if target.parts.config.hidden_size != hidden:
            raise CheckpointError(f"tensor {name} is missing, and the model's embedding has not {hidden} numbers")
        return target.parts.embedding


def _layer_ids(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs are the states; `eagle_config` names the layers before them."""
    nested = (config.get("eagle_config") or {}).get(LAYER_IDS)
    ids = config.get(LAYER_IDS) or (nested and [id_ + 1 for id_ in nested])
    ids = ids or [2, num_layers // 2, num_layers - 3]
    if len(ids) != NUM_STATES or not all(isinstance(id_, int) and 1 <= id_ < num_layers for id_ in ids):
        raise CheckpointError(
            f"{LAYER_IDS}: {ids} must be {NUM_STATES} layers of the model after its first one, which has {num_layers}"
        )
    return tuple(ids)


class EagleHead:
    """x = state before; attention of [norm(embedding of the token) | norm(x)]; feed-forward part; norm; head.

    A state is fc([states of the target]), or the output of this layer before its norm. The head has its own, smaller
    vocabulary. Attention reads twice the width, so the layer runs operation by operation.
    """

    reads_hidden = False

    def __init__(self, folder: EagleFolder, target: DecoderModel, backend: Backend, max_len: int) -> None:
        dtype = target.parts.embedding.dtype
        layer, loader = folder.layer, _EagleLoader(folder.checkpoint, folder.layer, backend, dtype)
        self.state_width, self._backend, self._target_size = layer.hidden_size, backend, folder.target_size
        target.capture(tuple(id_ - 1 for id_ in folder.layer_ids))
        self._fuse_states = loader.projection("fc", NUM_STATES * target.parts.config.hidden_size)
        self._embedding = folder.embedding(target, dtype)
        self._embedding_norm, self._final_norm = loader.norm(folder.embedding_norm), loader.final_norm()
        self._token_ids = folder.token_ids()
        head = loader.head()
        if head is None:
            raise TypeError("a head without logits: a bug in eagle.py")
        self._head, loaded = head, loader.layer(0)
        if loaded.qkv is None:
            raise TypeError("a layer without attention: a bug in eagle.py")
        self._qkv = _BesideEmbedding(loaded.qkv)
        rotaries = [rotary.table(max_len) for rotary in layer.rotaries]
        parts = DecoderParts(layer, self._embedding, None, [replace(loaded, qkv=self._qkv)], None, None, rotaries)
        self._decoder = DecoderModel(parts, backend)

    def fuse(self, pool: KVCachePool) -> None:
        self._pool = pool.layers_from(len(pool.group_of) - 1)

    def states_of(self, target: DecoderModel) -> torch.Tensor:
        return self._fuse_states(torch.cat(list(target.captured), 1))

    def forward(self, batch: ForwardBatch, before: torch.Tensor) -> torch.Tensor:
        known = np.where(batch.token_ids < len(self._embedding), batch.token_ids, 0)
        embedded = self._embedding[torch.from_numpy(known)]
        self._backend.add_norm(embedded, None, self._embedding_norm, embedded)
        self._qkv.embedded = embedded
        given = Embedded(np.arange(len(before)), before)
        batch = replace(
            batch, token_ids=known, embedded=given, hidden_tokens=batch.head_tokens, head_tokens=batch.head_tokens[:0]
        )
        self._decoder.forward(batch, self._pool)
        self.states = self._decoder.hidden.to(self._embedding.dtype)
        normed = torch.empty_like(self.states)
        self._backend.add_norm(self.states.clone(), None, self._final_norm, normed)
        logits = normed.new_full((len(normed), self._target_size), -torch.inf)
        if len(normed):
            logits[:, self._token_ids] = self._head(normed)
        return logits
