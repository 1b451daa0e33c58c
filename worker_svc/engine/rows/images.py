"""Embeddings of images: computed by the vision tower once per digest, as long as they are in the cache."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from request_fields.sizes import LEVELS
from step_protocol.features import ImageSteps
from step_protocol.messages import StepBatch
from step_protocol.types import CarriedInput, ImageInfo
from worker_svc.engine.backend import LayerBackend
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.rows.inputs import InputTable
from worker_svc.engine.vision.config import VisionConfig
from worker_svc.engine.vision.tower import Pixels, TowerRun, VisionTower

ATTENTION_FACTOR = 4  # a product of attention takes about this many times as long as one of a linear layer (AMX)
MAX_STARTED = 4  # images whose computation was begun and not finished; the oldest one begins again


@dataclass(slots=True)
class _Entry:
    outputs: torch.Tensor
    is_used: bool = False


class ImageEncoder:
    """Owns the cache. The images used last stay, up to `max_bytes` of embeddings, and always the newest one."""

    def __init__(self, tower: VisionTower, max_bytes: int) -> None:
        self._tower = tower
        self.device = tower.device
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.num_bytes = 0  # of the entries
        self._started: OrderedDict[bytes, TowerRun] = OrderedDict()
        self.num_encoded = 0  # images that the tower computed
        self.num_hits = 0  # images of rows that were in the cache when their first position was computed

    def work(self, batch: StepBatch, inputs: InputTable) -> None:
        """Does the work on images that a step has. A row that is closed, or that failed, has none."""
        asked = batch.part(ImageSteps)
        for one in () if asked is None else asked.work:
            item = inputs.find(one.row, one.start)
            if item is not None and item.kind == "image":
                self.advance(item, one.done / one.total)

    def advance(self, item: CarriedInput, fraction: float) -> None:
        """Computes an image up to this fraction of its layers, unless it is in the cache."""
        if item.digest in self._entries:
            self._entries.move_to_end(item.digest)
            return
        run = self._started.pop(item.digest, None) or self._tower.start(_pixels_of(item, self._tower.config))
        run.advance_to(round(fraction * self._tower.config.num_layers))
        if run.is_done:
            self._keep(item.digest, run.result())
            return
        self._started[item.digest] = run
        if len(self._started) > MAX_STARTED:
            self._started.popitem(last=False)

    def outputs(self, item: CarriedInput, *, is_begin: bool) -> torch.Tensor:
        """The outputs of the tower [num_outputs, length, hidden]. `is_begin`: a row needs them from its first position
        on, so that each row counts once.
        """
        self.advance(item, 1.0)
        entry = self._entries[item.digest]
        if is_begin:
            self.num_hits += entry.is_used
            entry.is_used = True
        return entry.outputs

    def _keep(self, digest: bytes, outputs: torch.Tensor) -> None:
        self.num_encoded += 1
        self._entries[digest] = _Entry(outputs)
        self.num_bytes += outputs.nbytes
        while self.num_bytes > self._max_bytes and len(self._entries) > 1:
            self.num_bytes -= self._entries.popitem(last=False)[1].outputs.nbytes


def load_images(
    checkpoint: Checkpoint, config: EngineConfig, vision: VisionConfig, backend: LayerBackend, dtype: torch.dtype
) -> ImageEncoder:
    """The tower of a model. It is never quantized."""
    return ImageEncoder(VisionTower(checkpoint, vision, backend, dtype), config.image_cache_memory)


def image_shape(model: ModelConfig) -> ImageInfo | None:
    """How images become positions of a prompt; None: the model takes none."""
    if model.vision is None or model.image_token_id is None:
        return None
    vision = model.vision
    patch_values = vision.channels * vision.patch_size**2
    share = vision.merge_size**2 / model.num_linear_parameters()
    token_cost, attention_cost = share * vision.num_parameters(), share * ATTENTION_FACTOR * vision.num_pair_products()
    return ImageInfo(model.image_token_id, vision.merge_size, patch_values, vision.channels, token_cost, attention_cost)


def _pixels_of(item: CarriedInput, vision: VisionConfig) -> Pixels:
    height, width, patch_values = item.shape
    size = height * width * patch_values
    patches = np.frombuffer(item.data, np.uint8, size).reshape(height * width, patch_values)
    values = np.frombuffer(item.data, "<f4", offset=size).reshape(vision.channels, LEVELS)
    return Pixels(patches, values.astype(np.float32), height, width)
