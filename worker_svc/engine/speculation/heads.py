"""Heads: small models that predict the token after the next one from a state of the target and the next token.

The entry of position p in the keys and values of a head is made from the state of the token before p and from the token
at p; the state before the first token is 0. So it is a function of the tokens up to p, like the target's own keys and
values, and lies in a layer of the same pool: blocks that are shared, copied, moved or kept in a tier have it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from worker_svc.engine.backend import Backend, Embedded, ForwardBatch, KVLayout
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.model import DecoderModel
from worker_svc.engine.decoder.operations import DecoderParts
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.decoder.weights import WeightLoader
from worker_svc.engine.speculation.eagle import EagleFolder, EagleHead


class Head(Protocol):
    """A loaded head."""

    state_width: int
    reads_hidden: bool  # it reads the states of all tokens after the final norm of the target

    def fuse(self, pool: KVCachePool) -> None:
        """Use the last layer of this pool."""

    def states_of(self, target: DecoderModel) -> torch.Tensor:
        """The states [T, state_width] of all tokens of the target's last step."""

    def forward(self, batch: ForwardBatch, before: torch.Tensor) -> torch.Tensor:
        """Stores keys and values of T tokens with the states [T, state_width] before them; logits [S, vocab] of the
        head tokens, which the next call overwrites."""

    @property
    def states(self) -> torch.Tensor:
        """The states [S, state_width] that this head gives its head tokens, for the token after them."""


class MtpHead:
    """The layer of DeepSeek V3, GLM-4.5 and others that is trained with the model (multi-token prediction):

        x = projection([norm(embedding of the token) | norm(state before it)]);  a decoder layer;  norm;  head

    Embedding and head are the target's. A state is the output of the last norm, of the target or of this layer.
    """

    reads_hidden = True

    def __init__(self, loader: WeightLoader, layer: ModelConfig, target: DecoderModel, backend: Backend) -> None:
        """`layer`: see `ModelConfig.predicting_layer`."""
        names, before = layer.architecture.mtp, target.parts.config.num_layers
        if names is None:
            raise TypeError("the architecture names no predicting layer: a bug in loading.py")
        self.state_width = layer.hidden_size
        self._backend, self._embedding = backend, target.parts.embedding
        self._norms = [loader.norm(name.format(before)) for name in (names.embedding_norm, names.state_norm)]
        self._projection = loader.projection(names.projection.format(before), 2 * layer.hidden_size)
        parts = DecoderParts(
            layer,
            target.parts.embedding,
            None,
            [loader.layer(0)],
            loader.final_norm(),
            target.parts.head,
            target.parts.rotaries,
        )
        self._decoder = DecoderModel(parts, backend)

    def fuse(self, pool: KVCachePool) -> None:
        self._pool = pool.layers_from(len(pool.group_of) - 1)
        self._decoder.fuse(self._pool)

    def states_of(self, target: DecoderModel) -> torch.Tensor:
        return target.hidden.to(self._embedding.dtype)

    def forward(self, batch: ForwardBatch, before: torch.Tensor) -> torch.Tensor:
        joined = [self._embedding[torch.from_numpy(batch.token_ids)], before]
        for part, norm in zip(joined, self._norms, strict=True):
            self._backend.add_norm(part, None, norm, part)
        rows = self._projection(torch.cat(joined, 1))
        embedded = Embedded(np.arange(len(rows)), rows)
        return self._decoder.forward(replace(batch, embedded=embedded, hidden_tokens=batch.head_tokens), self._pool)

    @property
    def states(self) -> torch.Tensor:
        return self._decoder.hidden.to(self._embedding.dtype)


def predicting_layer(checkpoint: Checkpoint, model: ModelConfig) -> ModelConfig:
    """The layer of a checkpoint that predicts a further token. Raises CheckpointError."""
    layer = model.predicting_layer()
    if layer is None or layer.architecture.mtp is None:
        raise CheckpointError(
            f"speculate=mtp: {model.architecture.models} is not supported; use suffix, draft:DIR or eagle:DIR"
        )
    name = f"{layer.architecture.mtp.embedding_norm.format(model.num_layers)}.weight"
    if not checkpoint.has(name):
        raise CheckpointError(
            f"speculate=mtp: {checkpoint.folder} has no layer that predicts a further token (tensor {name} is "
            "missing); download the whole model, or use suffix or draft:DIR"
        )
    return layer


def mtp_layout(checkpoint: Checkpoint, model: ModelConfig) -> KVLayout:
    """What the head keeps of a token."""
    return predicting_layer(checkpoint, model).layers[0].kv_layout()


def head_layouts(checkpoint: Checkpoint, config: EngineConfig, model: ModelConfig) -> list[KVLayout]:
    """The layer of the pool for the head of the settings, after those of the model."""
    if config.proposer == "eagle" and config.draft_dir is not None:
        return [EagleFolder(config.draft_dir, model).kv_layout()]
    return [mtp_layout(checkpoint, model)] if config.proposer == "mtp" else []


def load_head(
    checkpoint: Checkpoint, config: EngineConfig, target: DecoderModel, backend: Backend, max_len: int
) -> Head | None:
    """The head of the settings; None if they name none."""
    if config.proposer == "eagle" and config.draft_dir is not None:
        return EagleHead(EagleFolder(config.draft_dir, target.parts.config), target, backend, max_len)
    if config.proposer != "mtp":
        return None
    layer = predicting_layer(checkpoint, target.parts.config)
    loader = WeightLoader(checkpoint, layer, backend, target.parts.embedding.dtype)
    return MtpHead(loader, layer, target, backend)
