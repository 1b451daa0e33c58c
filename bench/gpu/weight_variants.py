"""Kernels with the types and constants of one launch, for aot.py: those that multiply by quantized weights, weights of
experts and adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from worker_svc.engine.gpu.kernels import norm, route
from worker_svc.engine.gpu.kernels.linears import expert_linear, int4_linear, linear, low_rank, scaled_linear
from worker_svc.engine.gpu.kernels.linears.linear import Tile

VALUES = "*fp8e4nv"
MULTIPLIED = "N", "K"
NUM_EXPERTS, TOP_K = 128, 8  # experts of Qwen3-30B-A3B


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with the argument types and constants of a launch."""

    name: str
    kernel: Any
    types: str  # types of the non-constant arguments, in order
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()  # arguments that are multiples of 16 in every model


def linear_variant(name: str, numbers: tuple[str, str], t: str, tile: Tile, **constants: Any) -> Variant:
    """The linear layer of numbers and scales of these pointer types, with outputs of type `t`."""
    constants = {
        "SCALED": False, "GROUP": 0, "BIAS": False, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth, **constants,
    }  # fmt: skip
    types = f"{' '.join(numbers * 2)} {t} {t} i32 i32 i32 i32 i32"
    return Variant(name, linear.linear_kernel, types, constants, tile.num_warps, tile.num_stages, MULTIPLIED)


def weight_variants(t: str) -> Iterator[Variant]:
    """The variants for inputs of pointer type `t`."""
    constants: dict[str, Any] = {
        "N": 5120, "BLOCK": 8192, "GROUPS": 64, "ADD": True, "KIND": 0, "NUM_GROUPS": 40,
        "SMALLEST": scaled_linear.SMALLEST,
    }  # fmt: skip
    types = f"{t} {t} {t} {t} {VALUES} *fp32 fp32"
    yield Variant("fp8 norm 5120 group 128", norm.norm_kernel, types, constants, 8)
    eight = (VALUES, "*fp32"), ("*i8", "*fp32")
    yield linear_variant("fp8 linear exact group 128", eight[0], t, scaled_linear.EXACT, SCALED=True, GROUP=128)
    yield linear_variant("int8 linear few rows", eight[1], t, scaled_linear.FEW_ROWS, SCALED=True)
    four = int4_linear.EXACT
    constants = {"GROUP": int4_linear.DEPTH, "BIAS": False, "BLOCK_M": four.rows, "BLOCK_N": four.columns}
    yield Variant(
        f"int4 linear exact group {int4_linear.DEPTH}", int4_linear.int4_linear_kernel,
        f"{t} *i32 {t} {t} {t} i32 i32 i32", constants, four.num_warps, four.num_stages, MULTIPLIED,
    )  # fmt: skip
    constants = {"GROUP": int4_linear.DEPTH, "BLOCK_N": int4_linear.WIDENED_OUTPUTS}
    types = f"*i32 {t} {t} i32 i32"
    yield Variant("int4 widen", int4_linear.widen_kernel, types, constants, divisible=MULTIPLIED)
    yield from _expert_variants(t)
    yield from _adapter_variants(t)


def _expert_variants(t: str) -> Iterator[Variant]:
    constants = {"TOP_K": TOP_K, "EXPERTS": NUM_EXPERTS, "RANKS": TOP_K, "NORMALIZED": True, "GROUP_BEST": 2}
    whole = {"SIGMOID": False, "CORRECTED": False, "GROUP_SIZE": NUM_EXPERTS, "GROUPS": 1, "TOP_GROUPS": 1}
    parts = {"SIGMOID": True, "CORRECTED": True, "GROUP_SIZE": NUM_EXPERTS // 8, "GROUPS": 8, "TOP_GROUPS": 4}
    for name, choice in (("route", whole), ("route in groups", parts)):
        types = f"{t} *fp32 *i32 *fp32 i32 i32 fp32"
        yield Variant(f"experts {name}", route.route_kernel, types, constants | choice, 1)
    for name, values, shape, group in (
        ("exact gated=True", t, expert_linear.EXACT, 0),
        ("few gated=True", t, expert_linear.FEW_ROWS, 0),
        ("fp8 many gated=True group 128", VALUES, expert_linear.MANY_ROWS, 128),
    ):
        constants = {
            "PAIRS_PER_ROW": TOP_K, "GATED": True, "KIND": 0, "SCALED": group > 0, "GROUP": group, "BIASED": True,
            "BLOCK_M": shape.rows, "BLOCK_N": expert_linear.columns_of(shape, is_gated=True),
            "BLOCK_K": scaled_linear.WIDEST_K if group else shape.depth,
        }  # fmt: skip
        types = f"{values} *fp32 {values} *fp32 {t} {t} *i32 *i32 *i32 i32 i32 i32 i32"
        kernel = expert_linear.expert_linear_kernel
        yield Variant(f"experts {name}", kernel, types, constants, shape.num_warps, shape.num_stages, ("N", "K"))


def _adapter_variants(t: str) -> Iterator[Variant]:
    for use, shape in (("exact", low_rank.EXACT), ("few rows", low_rank.FEW_ROWS)):
        constants: dict[str, Any] = {
            "LINE": low_rank.LINE, "ALIGNMENT": low_rank.ALIGNMENT, "BLOCK_M": shape.rows, "BLOCK_R": low_rank.BLOCK_R,
        }  # fmt: skip
        yield Variant(
            f"adapters shrink {use}", low_rank.shrink_kernel, f"{t} {t} *i64 *i32 *i32 *i32 *fp32 {'i32 ' * 7}",
            constants | {"BLOCK_K": shape.depth}, shape.num_warps, shape.num_stages,
            ("K", "max_rank", "capacity", "split_inputs"),
        )  # fmt: skip
        if use == "exact":
            yield Variant(
                "adapters expand exact", low_rank.expand_kernel, f"*fp32 {t} *i64 *i32 *i32 *i32 {t} {'i32 ' * 9}",
                constants | {"BLOCK_N": low_rank.BLOCK_N, "RANKS": low_rank.RANKS}, shape.num_warps, shape.num_stages,
                ("N0", "N1", "N2", "max_rank", "capacity"),
            )  # fmt: skip
