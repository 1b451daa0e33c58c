"""Other tile sizes of attention. Later sections, and the workers that they start, use the best ones."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from unittest import mock

from bench.gpu.kernels import Case, measure, nano_contexts, prefill_flop, using
from bench.gpu.report import Report
from worker_svc.engine.gpu.attention import paged as engine_attention
from worker_svc.engine.gpu.attention import tiles
from worker_svc.engine.gpu.kernels import work_list
from worker_svc.engine.gpu.kernels.attention import AttentionTiles
from worker_svc.engine.gpu.kernels.work_list import MOST_OF_ROW

SPLITS = [(36, MOST_OF_ROW), (144, MOST_OF_ROW), (tiles.SPLIT_KEYS, 32), (tiles.SPLIT_KEYS, 64)]
GAIN = 1.02  # other tiles are used only if the engine's own take so much longer
DECODE_VARIANTS = [
    {"num_stages": 3}, {"num_stages": 4}, {"num_stages": 7}, {"num_stages": 4, "block_n": 128},
    {"num_stages": 3, "block_n": 128, "num_warps": 8}, {"block_n": 32, "num_stages": 7}, {"num_warps": 2},
    {"num_warps": 8}, {"min_split": 128}, {"min_split": 256},
]  # fmt: skip
PREFILL_VARIANTS = [
    {"num_stages": 3}, {"num_stages": 4}, {"block_n": 128, "num_stages": 3}, {"block_n": 128, "num_stages": 4},
    {"block_m": 64, "num_warps": 4}, {"num_warps": 4},
]  # fmt: skip


def tile_sweep(report: Report) -> None:
    """Sets the figure `tiles` to the differences from the engine's table."""
    contexts = [5, 40, 17] if report.is_smoke else nano_contexts()
    case = Case.make(report, contexts)
    chosen = {"decode": _best(report, case, "decode", DECODE_VARIANTS)}
    del case
    report.release()
    case = Case.make(report, [0, 0], 20) if report.is_smoke else Case.make(report, [0] * 8, 1024)
    chosen["prefill"] = _best(report, case, "prefill", PREFILL_VARIANTS)
    _splits(report)
    report.figures["tiles"] = {use: fields for use, fields in chosen.items() if fields}
    report.row("tile_sweep", "chosen", note=f"QUIRE_ATTENTION_TILES='{json.dumps(report.figures['tiles'])}'")


def _splits(report: Report) -> None:
    """Other lengths of splits, and other limits of the splits of a row, for few long rows and many short ones."""
    sizes = {"B 1 ctx 32k": [32_767], "B 8 ctx 4k": [4095] * 8, "nano": nano_contexts()}
    if report.is_smoke:
        sizes = {"B 3 ctx 40": [39] * 3}
    for name, contexts in sizes.items():
        case = Case.make(report, contexts)
        for keys, most in [(tiles.SPLIT_KEYS, MOST_OF_ROW), *(SPLITS[:1] if report.is_smoke else SPLITS)]:
            with (
                mock.patch.object(tiles, "SPLIT_KEYS", keys),
                mock.patch.object(work_list, "MOST_OF_ROW", most),
            ):
                label = f"{name}: SPLIT_KEYS {keys}, at most {most} splits of a row"
                measure(report, "tile_sweep", label, case, case.triton(), repeats=10)
        del case
        report.release()


def _best(report: Report, case: Case, use: str, variants: list[dict[str, int]]) -> dict[str, int]:
    """The variant that is clearly faster than the engine's tiles; empty if there is none. One that does not compile, or
    is wrong, is reported."""
    table: AttentionTiles = getattr(engine_attention, f"{use.upper()}_TILES")
    own = best = _measure(report, case, use, table, f"{use}: the engine's {_text(asdict(table))}")
    found: dict[str, int] = {}
    for fields in variants[:1] if report.is_smoke else variants:
        ms = _measure(report, case, use, replace(table, **fields), f"{use}: {_text(fields)}")
        if ms < best:
            best, found = ms, fields
    return found if own > GAIN * best else {}


def _measure(report: Report, case: Case, use: str, chosen: AttentionTiles, name: str) -> float:
    flop = 0 if use == "decode" else prefill_flop(case, len(case.q) // case.num_rows)
    with using(use, chosen):
        attention = case.triton()
    try:
        return measure(report, "tile_sweep", name, case, attention, flop=flop, repeats=10)
    except Exception as error:  # a variant may need more memory than the GPU has, or fail to compile
        report.row("tile_sweep", name, note=f"{type(error).__name__}: {str(error)[:120]}")
        return float("inf")


def _text(fields: dict[str, object]) -> str:
    return " ".join(f"{name} {value}" for name, value in fields.items())
