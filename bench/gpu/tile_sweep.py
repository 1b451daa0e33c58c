"""Other tile sizes of attention. Later sections, and the workers that they start, use the best ones."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from unittest import mock

import torch

from bench.gpu.kernels import Case, measure, nano_contexts, prefill_flop, using
from bench.gpu.report import Report
from worker_svc.engine.gpu.attention import paged as engine_attention
from worker_svc.engine.gpu.attention import tiles
from worker_svc.engine.gpu.kernels.attention import AttentionTiles

GAIN = 1.02  # other tiles are used only if the engine's own take so much longer
DECODE_VARIANTS = [
    {"num_stages": 5}, {"num_stages": 6}, {"num_warps": 1}, {"num_warps": 4}, {"block_n": 64, "num_stages": 5},
    {"block_n": 64, "num_stages": 5, "num_warps": 4}, {"block_n": 128, "min_split": 128, "num_stages": 3},
    {"min_split": 128}, {"min_split": 256},
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
    report.figures["tiles"] = {use: fields for use, fields in chosen.items() if fields}
    report.row("tile_sweep", "chosen", note=f"QUIRE_ATTENTION_TILES='{json.dumps(report.figures['tiles'])}'")


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


# With SPLIT_KEYS and LEAST_OF_ROW.
SPLITS: list[tuple[dict[str, int], int, int]] = [
    ({}, tiles.SPLIT_KEYS, tiles.LEAST_OF_ROW), ({}, 144, 32), ({}, 576, 32), ({}, 288, 64),
    ({"num_stages": 5}, 288, 32), ({"num_warps": 4}, 288, 32), ({"block_n": 64, "num_stages": 5}, 288, 32),
    ({"block_n": 64, "num_stages": 5, "min_split": 256}, 288, 32), ({"min_split": 32}, 288, 32),
]  # fmt: skip
EXACT_VARIANTS: list[dict[str, int]] = [
    {}, {"block_m": 16, "num_warps": 1}, {"block_m": 16, "num_warps": 4}, {"block_m": 32, "num_warps": 2},
]  # fmt: skip
SPLIT_SIZES = {
    "B 1 ctx 512": [511], "B 1 ctx 4k": [4095], "B 1 ctx 32k": [32_767], "B 1 ctx 131k": [131_071],
    "B 8 ctx 4k": [4095] * 8, "B 32 ctx 512": [511] * 32, "B 32 ctx 4k": [4095] * 32, "B 256 ctx 512": [511] * 256,
    "nano": [],
}  # fmt: skip


def splits(report: Report) -> None:
    """Lengths of splits and their most in a row, with other tiles, for few long rows and many short ones; then tiles of
    exact mode, and whether they give the same bits.
    """
    for name, contexts in ({"B 3": [39] * 3} if report.is_smoke else SPLIT_SIZES).items():
        case = Case.make(report, contexts or nano_contexts())
        for fields, keys, most in SPLITS[:1] if report.is_smoke else SPLITS:
            table = replace(engine_attention.DECODE_TILES, **fields)
            with (
                mock.patch.object(tiles, "SPLIT_KEYS", keys),
                mock.patch.object(tiles, "LEAST_OF_ROW", most),
                using("decode", table),
            ):
                measure(report, "splits", f"{name}: {keys} {most} {_text(fields)}", case, case.triton(), repeats=10)
        _exact_variants(report, case, name)
        del case
        report.release()


def _exact_variants(report: Report, case: Case, name: str) -> None:
    expected = None
    for fields in EXACT_VARIANTS[:1] if report.is_smoke else EXACT_VARIANTS:
        with using("exact", replace(engine_attention.EXACT_TILES, **fields)):
            attention = case.triton("exact")
        label = f"exact {name}: {_text(fields)}"
        try:
            run, out = case.run(attention)
            expected = out.clone() if expected is None else expected
            note = "the same bits" if torch.equal(out, expected) else "other bits"
            report.row("splits", label, ms=report.time_ms([run], 10), note=note)
        except Exception as error:  # a variant may need more memory than the GPU has, or fail to compile
            report.row("splits", label, note=f"{type(error).__name__}: {str(error)[:120]}")
