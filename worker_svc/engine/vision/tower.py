"""The vision tower: the patches of one image become embeddings for the decoder.

It computes one image at a time with the operations of the backend, so its result depends on nothing but the image. Keys
and values of a layer are in blocks of scratch memory, where the attention kernel reads them; a window of the image
is a row of such a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.engine.backend import AttentionShape, Cache, ForwardBatch, LayerBackend, Linear, Norm, RotaryTable
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.kernels.exact_ops import cos_sin
from worker_svc.engine.layers import AttentionInput, LayerReader, LayerRunner, StackLayer
from worker_svc.engine.vision.config import VisionConfig

NORM_EPS = 1e-6
ROPE_THETA = 10000.0
BLOCK_SIZE = 64  # keys and values; the patches of a window of the usual size


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image as the image processor prepared it, before its values were normalized."""

    patches: npt.NDArray[np.uint8]  # [height * width, channels * patch_size^2]: squares of merge_size^2 patches in turn
    values: npt.NDArray[np.float32]  # [channels, 256]: the normalized value of each value of a channel
    height: int  # in patches
    width: int


@dataclass(frozen=True, slots=True)
class Merger:
    """Joins squares of patches into tokens. The norm is that of a patch, or of a token."""

    norm: Norm
    linears: tuple[Linear, Linear]


class VisionTower:
    """A loaded tower."""

    def __init__(self, checkpoint: Checkpoint, config: VisionConfig, backend: LayerBackend, dtype: torch.dtype) -> None:
        self.config = config
        self.device = backend.device
        self.dtype = dtype
        self._backend = backend
        self._runner = LayerRunner(backend, config.activation, config.family.is_gated, is_pre_norm=True)
        reader = _Reader(checkpoint, config, backend, dtype)
        self._patch = reader.patch()
        self._positions = reader.positions()
        self._layers = [reader.layer(index) for index in range(config.num_layers)]
        self._merger = reader.merger()
        self._deep_mergers = [reader.deep_merger(index) for index in range(len(config.deep_layers))]

    def start(self, pixels: Pixels) -> TowerRun:
        """Begins to compute an image."""
        patches = torch.from_numpy(self._normalized(pixels)).to(self.device, self.dtype)
        x = self._patch(patches)
        if self._positions is not None:
            x += _interpolated(self._positions, pixels, self.config).to(self.dtype)
        return TowerRun(self, x, _Layout(pixels, self.config, self.device))

    def _normalized(self, pixels: Pixels) -> npt.NDArray[np.float32]:
        """Inputs of the first layer [num_patches, channels * frames * patch_size^2]."""
        config = self.config
        values = pixels.patches.reshape(len(pixels.patches), config.channels, 1, -1)
        channels = np.arange(config.channels)[:, None, None]
        found: npt.NDArray[np.float32] = np.repeat(pixels.values[channels, values], config.frames, axis=2)
        return found.reshape(len(found), -1)

    def run_layer(
        self, index: int, x: torch.Tensor, residual: torch.Tensor | None, layout: _Layout
    ) -> torch.Tensor | None:
        """Adds the residual to x; returns the residual of the layer."""
        config, cache = self.config, layout.cache(x.dtype)
        batch = layout.whole if config.window is None or index in config.full_layers else layout.windows
        shape = AttentionShape(config.heads, config.heads.head_dim**-0.5, is_causal=False)
        return self._runner.run(self._layers[index], x, residual, AttentionInput(batch, cache, shape, layout.rotary))

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """The embeddings [num_tokens, out] of a whole tower."""
        normed = torch.empty_like(x)
        self._backend.add_norm(x, None, self._merger.norm, normed)
        return self._joined(normed.view(-1, self.config.merge_size**2 * x.shape[1]), self._merger)

    def merge_deep(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The embeddings that DeepStack takes after one of its layers."""
        squares = x.view(-1, self.config.merge_size**2 * x.shape[1])
        normed = torch.empty_like(squares)
        self._backend.add_norm(squares, None, self._deep_mergers[index].norm, normed)
        return self._joined(normed, self._deep_mergers[index])

    def _joined(self, squares: torch.Tensor, merger: Merger) -> torch.Tensor:
        hidden = merger.linears[0](squares)
        self._backend.activation(hidden, "gelu")
        return merger.linears[1](hidden)


class TowerRun:
    """One image on its way through the tower. Its layers may run in several calls; the result is the same."""

    def __init__(self, tower: VisionTower, x: torch.Tensor, layout: _Layout) -> None:
        self._tower = tower
        self._layout = layout
        self._x = x if layout.order is None else x[layout.order]
        self._residual: torch.Tensor | None = None
        self._deep: list[torch.Tensor] = []
        self._next_layer = 0

    @property
    def is_done(self) -> bool:
        """Whether all layers have run."""
        return self._next_layer == self._tower.config.num_layers

    def advance_to(self, num_layers: int) -> None:
        """Runs layers until this number of them has run."""
        config = self._tower.config
        for index in range(self._next_layer, min(num_layers, config.num_layers)):
            self._residual = self._tower.run_layer(index, self._x, self._residual, self._layout)
            if index in config.deep_layers:
                self._finish_layer()
                self._deep.append(self._tower.merge_deep(config.deep_layers.index(index), self._x))
            self._next_layer = index + 1

    def result(self) -> torch.Tensor:
        """[num_outputs, num_tokens, out]: the embeddings, then those of DeepStack. Valid when all layers have run."""
        self._finish_layer()
        outputs = torch.stack([self._tower.merge(self._x), *self._deep])
        if self._layout.order is None:
            return outputs
        tokens = self._layout.order[:: self._tower.config.merge_size**2] // self._tower.config.merge_size**2
        restored = torch.empty_like(outputs)
        restored[:, tokens] = outputs
        return restored

    def _finish_layer(self) -> None:
        if self._residual is not None:
            self._x += self._residual
            self._residual = None


class _Layout:
    """Where the patches of one image are: their order, positions and slots."""

    def __init__(self, pixels: Pixels, config: VisionConfig, device: torch.device) -> None:
        self._config = config
        merge, height, width = config.merge_size, pixels.height, pixels.width
        rows, columns = _squares(height, width, merge)
        self.order: torch.Tensor | None = None
        lengths = np.array([height * width], np.int64)
        self.whole = _batch(lengths)
        self.windows = self.whole
        if config.window is not None:
            tokens, lengths = _windows(height // merge, width // merge, config.window)
            order = (tokens[:, None] * merge**2 + np.arange(merge**2)).reshape(-1)
            self.order = torch.from_numpy(order)
            rows, columns = rows[order], columns[order]
            self.windows = _batch(lengths * merge**2)
        self.rotary = _rotary(rows, columns, config.heads.head_dim).to(device)
        self._num_blocks = 1 + max(int(batch.tables.max()) for batch in (self.whole, self.windows))
        self._cache: Cache | None = None

    def cache(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks for the keys and values of one layer."""
        if self._cache is None:
            heads = self._config.heads
            shape = self._num_blocks, heads.num_kv_heads, heads.head_dim, BLOCK_SIZE
            zeros = self.rotary.cos.new_zeros
            self._cache = zeros(shape, dtype=dtype), zeros(*shape[:2], *shape[:1:-1], dtype=dtype)
        return self._cache


def _squares(height: int, width: int, merge: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows and columns of the patches in the order of the processor: the patches of a square follow each other."""
    grid = np.mgrid[:height, :width].reshape(2, height // merge, merge, width // merge, merge)
    rows, columns = grid.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return rows, columns


def _windows(height: int, width: int, size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The tokens of an image in the order of its windows, and the number of tokens of each window."""
    rows, columns = np.mgrid[:height, :width].reshape(2, -1)
    window = rows // size * (width // size + 1) + columns // size
    return np.argsort(window, kind="stable"), np.unique(window, return_counts=True)[1].astype(np.int64)


def _batch(lengths: npt.NDArray[np.int64]) -> ForwardBatch:
    """A batch of rows of these lengths, each with blocks of its own. `positions` are indices of patches."""
    num_blocks = -(-lengths // BLOCK_SIZE)
    first_blocks = np.cumsum(num_blocks) - num_blocks
    tables = first_blocks[:, None] + np.minimum(np.arange(num_blocks.max()), num_blocks[:, None] - 1)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    in_row = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    return ForwardBatch(
        token_ids=np.zeros(0, np.int64),
        positions=np.arange(starts[-1], dtype=np.int32),
        slots=np.repeat(first_blocks * BLOCK_SIZE, lengths) + in_row,
        rows=np.arange(len(lengths), dtype=np.int32),
        query_starts=starts.astype(np.int32),
        context_lens=np.zeros(len(lengths), np.int32),
        tables=np.ascontiguousarray(tables, np.int32),
        head_tokens=np.zeros(0, np.int64),
    )


def _rotary(rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], head_dim: int) -> RotaryTable:
    """The rotation of each patch: a quarter of a head by its row, a quarter by its column."""
    inv_freq = 1.0 / (ROPE_THETA ** (torch.arange(0, head_dim // 2, 2, dtype=torch.float) / (head_dim // 2)))
    places = torch.from_numpy(np.stack((rows, columns), axis=1)).float()
    return RotaryTable(*cos_sin((places[:, :, None] * inv_freq).reshape(len(places), -1)))


def _interpolated(table: torch.Tensor, pixels: Pixels, config: VisionConfig) -> torch.Tensor:
    """The learned positions [side^2, hidden] at the places of the patches, interpolated linearly, in float32."""
    side = config.num_positions_per_side
    rows, columns = _squares(pixels.height, pixels.width, config.merge_size)
    row_taps, column_taps = _taps(rows, pixels.height, side), _taps(columns, pixels.width, side)
    x = torch.zeros(len(rows), table.shape[1], device=table.device)
    for row, row_weight in row_taps:
        for column, column_weight in column_taps:
            weight = torch.from_numpy(row_weight * column_weight).to(table.device)
            x = x + table[torch.from_numpy(row * side + column)].float() * weight[:, None]
    return x


def _taps(
    indices: npt.NDArray[np.int64], size: int, side: int
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    """The two entries of `side` entries that surround each index of an axis of `size`, with their weights."""
    place = indices.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(place)
    taps = []
    for offset in (0, 1):
        weight = np.maximum(np.float32(1) - np.abs(place - low - np.float32(offset)), np.float32(0))
        taps.append((np.clip(low.astype(np.int64) + offset, 0, side - 1), weight))
    return taps


class _Reader(LayerReader):
    """Reads the tensors of a tower."""

    def __init__(self, checkpoint: Checkpoint, config: VisionConfig, backend: LayerBackend, dtype: torch.dtype) -> None:
        super().__init__(checkpoint, backend, dtype, config.family.norm, NORM_EPS)
        self._config = config

    def patch(self) -> Linear:
        config, name = self._config, self._config.names.patch
        kernel = (config.channels, config.frames, config.patch_size, config.patch_size)
        weight = self.tensor(f"{name}.weight", (config.hidden, *kernel)).view(config.hidden, -1)
        bias = self.tensor(f"{name}.bias", (config.hidden,)) if config.family.has_patch_bias else None
        return self._maker.make_linear(weight, bias)

    def positions(self) -> torch.Tensor | None:
        config = self._config
        if not config.names.positions:
            return None
        return self.tensor(f"{config.names.positions}.weight", (config.num_positions_per_side**2, config.hidden))

    def layer(self, index: int) -> StackLayer:
        config, names = self._config, self._config.names
        prefix, hidden, inner = names.layer.format(index), config.hidden, config.inner
        return StackLayer(
            attention_norm=self.norm(prefix + names.input_norm, hidden),
            qkv=self.linear([prefix + names.qkv], 3 * hidden, hidden, has_bias=True),
            o=self.linear([prefix + names.o], hidden, hidden, has_bias=True),
            feed_norm=self.norm(prefix + names.post_norm, hidden),
            up=self.linear([prefix + name for name in names.gate_up], inner, hidden, has_bias=True),
            down=self.linear([prefix + names.down], hidden, inner, has_bias=True),
        )

    def merger(self) -> Merger:
        names = self._config.names
        return self._merger(self.norm(names.merger_norm, self._config.hidden), names.merger_linears)

    def deep_merger(self, index: int) -> Merger:
        config, names = self._config, self._config.names
        norm = self.norm(names.deep_norm.format(index), config.hidden * config.merge_size**2)
        first, second = (name.format(index) for name in names.deep_linears)
        return self._merger(norm, (first, second))

    def _merger(self, norm: Norm, names: tuple[str, str]) -> Merger:
        width = self._config.hidden * self._config.merge_size**2
        first = self.linear(names[:1], width, width, has_bias=True)
        return Merger(norm, (first, self.linear(names[1:], self._config.out, width, has_bias=True)))
