"""The variants of kernels that multiply by quantized weights, weights of experts and adapters, for aot.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton

from bench.gpu.variant import Variant
from worker_svc.engine.gpu.kernels import norm_rows, route
from worker_svc.engine.gpu.kernels.linears import expert_linear, int4_linear, int8_linear, low_rank, scaled_linear

VALUES = "*fp8e4nv"
NUM_EXPERTS, TOP_K = 128, 8  # experts of Qwen3-30B-A3B


def weight_variants(t: str) -> Iterator[Variant]:
    """All variants for inputs of pointer type `t`."""
    yield from _row_variants(t)
    yield from _norm_variants(t)
    yield from _fp8_variants(t)
    yield from _int8_variants(t)
    yield from _int4_variants(t)
    yield from _route_variants(t)
    yield from _expert_variants(t)
    yield from _adapter_variants(t)


def _row_variants(t: str) -> Iterator[Variant]:
    for size, group in ((4096, 4096), (4096, 128), (28672, 28672)):
        block = min(triton.next_power_of_2(group), scaled_linear.WIDEST)
        at_once = max(scaled_linear.AT_ONCE // block, 1)
        constants = {"GROUP": group, "GROUPS_AT_ONCE": at_once, "BLOCK": block, "SMALLEST": scaled_linear.SMALLEST}
        yield Variant(
            f"fp8 rows {size} group {group}", scaled_linear.quantize_rows_kernel, f"{t} {VALUES} *fp32 i32 i32",
            constants, at_once * block // 512,
        )  # fmt: skip


def _norm_variants(t: str) -> Iterator[Variant]:
    for size, group in ((4096, 4096), (5120, 128)):
        block = triton.next_power_of_2(size)
        constants = {
            "N": size, "BLOCK": block, "GROUPS": 1 if group == size else block // group, "ADD": True, "KIND": 0,
            "NUM_GROUPS": triton.cdiv(size, group), "SMALLEST": scaled_linear.SMALLEST,
        }  # fmt: skip
        yield Variant(
            f"fp8 norm {size} group {group}", norm_rows.norm_rows_kernel, f"{t} {t} {t} {t} {VALUES} *fp32 fp32",
            constants, 8,
        )  # fmt: skip


def _fp8_variants(t: str) -> Iterator[Variant]:
    tiles = {"exact": scaled_linear.EXACT, "few rows": scaled_linear.FEW_ROWS, "many rows": scaled_linear.MANY_ROWS}
    for use, tile in tiles.items():
        for group in (0, 128):
            constants = {
                "GROUP": group, "BIAS": False, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns,
                "BLOCK_K": scaled_linear.WIDEST_K,
            }  # fmt: skip
            yield Variant(
                f"fp8 linear {use} group {group}", scaled_linear.scaled_linear_kernel,
                f"{VALUES} *fp32 {VALUES} *fp32 {t} {t} i32 i32 i32 i32 i32", constants,
                tile.num_warps, tile.num_stages, ("N", "K"),
            )  # fmt: skip


def _int8_variants(t: str) -> Iterator[Variant]:
    constants = {"BLOCK": 4096, "SMALLEST": int8_linear.INT8_SMALLEST}
    yield Variant("int8 rows", int8_linear.int8_rows_kernel, f"{t} *i8 *fp32 i32", constants, 8)
    for use, tile in {"few rows": scaled_linear.FEW_ROWS, "many rows": scaled_linear.MANY_ROWS}.items():
        constants = {
            "BIAS": False, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": scaled_linear.WIDEST_K
        }  # fmt: skip
        yield Variant(
            f"int8 linear {use}", int8_linear.int8_linear_kernel, f"*i8 *fp32 *i8 *fp32 {t} {t} i32 i32 i32 i32",
            constants, tile.num_warps, tile.num_stages, ("N", "K"),
        )  # fmt: skip


def _int4_variants(t: str) -> Iterator[Variant]:
    for use, tile in {"exact": int4_linear.EXACT, "few rows": int4_linear.FEW_ROWS}.items():
        for group in (int4_linear.DEPTH, int4_linear.PAIR):
            constants = {"GROUP": group, "BIAS": False, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns}
            yield Variant(
                f"int4 linear {use} group {group}", int4_linear.int4_linear_kernel,
                f"{t} *i32 {t} {t} {t} i32 i32 i32", constants, tile.num_warps, tile.num_stages, ("N", "K"),
            )  # fmt: skip
    constants = {"GROUP": int4_linear.DEPTH, "BLOCK_N": int4_linear.WIDENED_OUTPUTS}
    yield Variant("int4 widen", int4_linear.widen_kernel, f"*i32 {t} {t} i32 i32", constants, divisible=("N", "K"))


def _route_variants(t: str) -> Iterator[Variant]:
    i, f = "*i32", "*fp32"
    constants = {"TOP_K": TOP_K, "EXPERTS": NUM_EXPERTS, "RANKS": TOP_K, "NORMALIZED": True}
    whole = {"SIGMOID": False, "CORRECTED": False, "GROUP_SIZE": NUM_EXPERTS, "GROUPS": 1, "TOP_GROUPS": 1}
    parts = {"SIGMOID": True, "CORRECTED": True, "GROUP_SIZE": NUM_EXPERTS // 8, "GROUPS": 8, "TOP_GROUPS": 4}
    for name, choice in (("route", whole), ("route in groups", parts)):
        arguments = f"{t} {f} {i} {f} i32 i32 fp32"
        yield Variant(f"experts {name}", route.route_kernel, arguments, constants | choice | {"GROUP_BEST": 2}, 1)
    yield Variant("experts count", route.count_kernel, f"{i} {i} i32", {"BLOCK": route.BLOCK})
    for rows in (expert_linear.FEW_ROWS.rows, expert_linear.MANY_ROWS.rows):
        tile = {"ROWS": rows, "EXPERTS": NUM_EXPERTS, "BLOCK": route.BLOCK}
        yield Variant(f"experts group {rows}", route.group_kernel, f"{i} {i} {i} {i} {i} i32 i32", tile)
    added = {"TOP_K": TOP_K, "SHARED": True, "GATED": True, "BLOCK": expert_linear.COLUMNS}
    yield Variant("experts add", expert_linear.add_experts_kernel, f"{t} {f} {t} {t} {t} i32 i32", added)


def _expert_variants(t: str) -> Iterator[Variant]:
    shapes = {"exact": expert_linear.EXACT, "few": expert_linear.FEW_ROWS, "many": expert_linear.MANY_ROWS}
    for use, shape in shapes.items():
        for gated in (True, False):
            yield _expert_variant(f"experts {use} gated={gated}", t, t, shape, gated=gated)
            for group in (0, 128):
                name = f"experts fp8 {use} gated={gated} group {group}"
                yield _expert_variant(name, t, VALUES, shape, gated=gated, group=group)
    yield _expert_variant("experts float32 gated=True", "*fp32", "*fp32", expert_linear.WIDE_NUMBERS, gated=True)


def _expert_variant(
    name: str, out: str, values: str, shape: expert_linear.ExpertShape, *, gated: bool, group: int = 0
) -> Variant:
    is_scaled = values == VALUES
    constants: dict[str, Any] = {
        "PAIRS_PER_ROW": TOP_K if gated else 1, "GATED": gated, "KIND": 0, "SCALED": is_scaled, "GROUP": group,
        "BIASED": True,
        "BLOCK_M": shape.rows, "BLOCK_N": expert_linear.columns_of(shape, is_gated=gated),
        "BLOCK_K": scaled_linear.WIDEST_K if is_scaled else shape.depth,
    }  # fmt: skip
    types = f"{values} *fp32 {values} *fp32 {out} {out} *i32 *i32 *i32 i32 i32 i32 i32"
    kernel = expert_linear.expert_linear_kernel
    return Variant(name, kernel, types, constants, shape.num_warps, shape.num_stages, ("N", "K"))


def _adapter_variants(t: str) -> Iterator[Variant]:
    shapes = {"exact": low_rank.EXACT, "few rows": low_rank.FEW_ROWS}
    yield from _low_rank_variants("float32", "*fp32", low_rank.WIDE_NUMBERS)
    for use, shape in shapes.items():
        yield from _low_rank_variants(use, t, shape)


def _low_rank_variants(use: str, t: str, shape: low_rank.LowRankShape) -> Iterator[Variant]:
    table, i = "*i64", "*i32"
    constants: dict[str, Any] = {
        "LINE": low_rank.LINE, "ALIGNMENT": low_rank.ALIGNMENT, "BLOCK_M": shape.rows, "BLOCK_R": low_rank.BLOCK_R,
    }  # fmt: skip
    yield Variant(
        f"adapters shrink {use}", low_rank.shrink_kernel, f"{t} {t} {table} {i} {i} {i} *fp32 {'i32 ' * 7}",
        constants | {"BLOCK_K": shape.depth}, shape.num_warps, shape.num_stages,
        ("K", "max_rank", "capacity", "split_inputs"),
    )  # fmt: skip
    yield Variant(
        f"adapters expand {use}", low_rank.expand_kernel, f"*fp32 {t} {table} {i} {i} {i} {t} {'i32 ' * 9}",
        constants | {"BLOCK_N": low_rank.BLOCK_N, "RANKS": low_rank.RANKS}, shape.num_warps, shape.num_stages,
        ("N0", "N1", "N2", "max_rank", "capacity"),
    )  # fmt: skip
