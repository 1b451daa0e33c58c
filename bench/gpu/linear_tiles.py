"""Other tiles of the engine's linear layers: their times beside cuBLAS, and whether they give the same bits.

Tiles with other bits than the engine's may serve best effort only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from unittest import mock

import torch

from bench.gpu.report import Report
from worker_svc.engine.gpu.kernels import linear
from worker_svc.engine.gpu.kernels.linear import LinearTile

SIZES = {"qkv": (4096, 1024), "o": (1024, 2048), "gate up": (6144, 1024), "down": (1024, 3072)}
COPIES = 28  # of a weight, so that the L2 cache does not serve it
SHOWN = 3  # of the fastest tiles


def _tiles(rows: Iterable[int], columns: Iterable[int], depths: Iterable[int], warps: Iterable[int],
           stages: Iterable[int]) -> list[LinearTile]:  # fmt: skip
    return [LinearTile(*sizes) for sizes in itertools.product(rows, columns, depths, warps, stages)]


FEW = [
    *_tiles((16,), (16, 32, 64), (64, 128), (4,), (4, 6)), *_tiles((16,), (16, 32), (256,), (4,), (3, 4)),
    *_tiles((16,), (16, 32), (128,), (2,), (4,)), *_tiles((64,), (32, 64), (64, 128), (4,), (4,)),
]  # fmt: skip
SOME = [
    *_tiles((16, 32), (32, 64), (64, 128), (4,), (4,)), *_tiles((64,), (32, 64, 128), (64, 128), (4,), (3, 4)),
]  # fmt: skip
MANY = [
    *_tiles((64,), (32, 64, 128), (64, 128), (4,), (4,)), *_tiles((128,), (64, 128), (64, 128), (4, 8), (3,)),
    *_tiles((128,), (64, 128), (64,), (8,), (4,)),
]  # fmt: skip
MOST = [
    *_tiles((128,), (128,), (64,), (4, 8), (3, 4)), *_tiles((128,), (256,), (64,), (8,), (3, 4)),
    *_tiles((64,), (128, 256), (64,), (4,), (3, 4)),
]  # fmt: skip
CASES = {1: FEW, 16: FEW, 32: SOME, 64: SOME, 128: MANY, 256: MANY, 512: [*MANY, *MOST], 4096: MOST}


def linear_tiles(report: Report) -> None:
    """For each size and number of rows: the engine's tile, cuBLAS, and the fastest tiles."""
    cases = {3: FEW[:1]} if report.is_smoke else CASES
    for (name, size), (rows, tiles) in itertools.product(SIZES.items(), cases.items()):
        out, inputs = (72, 256) if report.is_smoke else size
        _measure(report, f"{name} {rows} rows", out, inputs, rows, tiles)


def _measure(report: Report, name: str, out_size: int, inputs: int, rows: int, tiles: list[LinearTile]) -> None:
    x = torch.randn(rows, inputs, device=report.device).to(report.dtype)
    weight = torch.randn(out_size, inputs, device=report.device).to(report.dtype)
    weights = [weight.clone() for _ in range(1 if report.is_smoke else min(COPIES, 1 + COPIES * 512 // rows))]
    outs = [x.new_empty(rows, out_size) for _ in weights]
    expected, num_bytes, flop = reference(x, weight), out_size * inputs * 2, 2 * rows * out_size * inputs

    def add(label: str, ms: float, note: str = "") -> None:
        report.row("linear_tiles", f"{name}: {label}", ms=ms, num_bytes=num_bytes, flop=flop, note=note)

    def time_ms(tile: LinearTile) -> float:
        calls = [partial(linear.launch, x, w, None, out, tile) for w, out in zip(weights, outs, strict=True)]
        return report.time_ms(calls, 10)

    products = [partial(torch.mm, x, w.T, out=out) for w, out in zip(weights, outs, strict=True)]
    add("cuBLAS", report.time_ms(products, 10))
    own = linear.tile_for(rows, out_size)
    add(f"the engine's {_text(own)}", time_ms(own))
    found = []
    for tile in tiles:
        try:
            outs[0].fill_(float("nan"))
            linear.launch(x, weight, None, outs[0], tile)
            bits = "the same bits" if torch.equal(outs[0], expected) else "OTHER BITS"
            found.append((time_ms(tile), tile, bits))
        except Exception as error:  # a tile may need more memory than the GPU has
            report.row("linear_tiles", f"{name}: {tile}", note=f"{type(error).__name__}: {str(error)[:100]}")
    others = sum(bits != "the same bits" for _, _, bits in found)
    fastest = sorted(found, key=lambda item: item[0])[:SHOWN]
    for ms, tile, bits in fastest:
        add(_text(tile), ms, bits)
    if rows <= linear.FEW_ROWS and fastest:
        with mock.patch.object(linear, "early_bytes", return_value=0):
            add(f"{_text(fastest[0][1])} without early reads", time_ms(fastest[0][1]))
    times = " ".join(f"{_text(tile)}={ms * 1e3:.2f}" for ms, tile, _ in found)
    report.row(
        "linear_tiles", f"{name}: other bits", ok=not others, note=f"{others} of {len(found)} tiles; us: {times}"
    )


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By the tile that every number of rows may have."""
    out = x.new_empty(len(x), len(weight))
    linear.launch(x, weight, None, out, linear.TILE)
    return out


def _text(tile: LinearTile) -> str:
    return f"{tile.rows}x{tile.columns}x{tile.depth}w{tile.num_warps}s{tile.num_stages}"
