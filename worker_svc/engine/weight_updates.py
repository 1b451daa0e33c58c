"""Weights of a runner that change while it serves: updates, and sleep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from step_protocol.types import TensorChecksum
from worker_svc.engine.backend import Backend, LayerBackend
from worker_svc.engine.checkpoint.model_folder import tensor_sums
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig, EngineInfo, StagedWeights
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.engine_info import revision_of
from worker_svc.engine.kernels.memory import release, resident_bytes
from worker_svc.engine.loaders.decoders import load_decoder_weights
from worker_svc.engine.loading import ModelSource
from worker_svc.engine.step import StepPart


class UpdatableWeights:
    """A half of the runner: the weights in its model and its parts."""

    has_new_weights = True
    info: EngineInfo
    _config: EngineConfig
    _threads: int
    _backend: Backend
    _layers: LayerBackend
    _model: Any
    _pool: KVCachePool
    _parts: list[StepPart]
    _is_asleep: bool
    images: Any  # an ImageEncoder, or None

    def check_update(self, files: Sequence[Path]) -> list[TensorChecksum]:
        """The tensors of the last file. Raises CheckpointError unless they fit. Any thread may call it."""
        checkpoint = Checkpoint(self._config.model_dir, files)
        return tensor_sums(files[-1], len(checkpoint.tensor_names))

    def stage(self, version: int, updates: Sequence[Path]) -> StagedWeights:
        """The weights of the folder with these updates, beside those in use. Another thread than that of steps may call
        it, while steps run. Raises CheckpointError for an update that does not fit, ValueError for a model whose
        weights cannot change.
        """
        config, info = self._config, self.info
        if info.is_encoder or info.encoder is not None:
            raise ValueError("the weights of encoders cannot be updated; restart the workers with another model")
        checkpoint = Checkpoint(config.model_dir, updates)
        backend = make_backend(config.backend, self._threads, config.determinism, config.quantize)
        source = ModelSource(checkpoint, config, backend, backend, getattr(torch, info.dtype), self._threads)
        weights = load_decoder_weights(source, info.max_model_len)
        digest = checkpoint.weights_digest()
        revision = revision_of(config, checkpoint, info.dtype, info.numerics, digest, info.max_model_len)
        staged = replace(info, weight_version=version, weights_digest=digest, weights_revision=revision)
        return StagedWeights(staged, frozenset(checkpoint.used_updates()), (backend, weights))

    def activate(self, staged: StagedWeights) -> None:
        """Compute with these weights from the next step on. Open rows keep their keys and values, and no block stays
        committed: it was computed by other weights."""
        backend, weights = staged.weights
        self._backend = self._layers = backend
        self._model, self.images = weights.model, weights.images
        self._model.fuse(self._pool)
        for part in self._parts:
            part.use(weights)
        self.forget_prefixes()
        self.info, self._is_asleep = staged.info, False
        self._backend.end_load()

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of host memory of the weights and of the pool's blocks that were used. Any thread may read it."""
        pool = sum(resident_bytes(tensor) for tensor in self._pool.tensors if tensor.is_cpu)
        return {"weights": 0 if self._model is None else self._backend.num_weight_bytes, "KV pool": pool}

    def forget_prefixes(self) -> None:
        self._pool.uncommit(np.arange(self._pool.num_blocks))

    def sleep(self, tags: Sequence[str]) -> None:
        """Free the memory of the weights, until the next `activate`, or that of the KV pool, whose rows are closed."""
        if "weights" in tags:
            self._is_asleep = True
            self._model, self.images = None, None
            for part in self._parts:
                part.use(None)
        if "kv_cache" in tags:
            self.forget_prefixes()
            for tensor in self._pool.tensors:
                if tensor.is_cpu:
                    release(tensor)
