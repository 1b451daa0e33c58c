"""All linear layers of a step on one core: our kernels on the paths of this processor, and oneDNN, by number of rows.

    python bench/linear.py                                 # both models; a few minutes
    python bench/linear.py --models small --rows 1,36,256  # half a minute
    python bench/linear.py --layers                        # every layer by itself
    python bench/linear.py --paths avx2 --rows 1,8,64 --layers  # 4 bits beside bfloat16 without AVX512
    ONEDNN_MAX_CPU_ISA=AVX2 python bench/linear.py --paths avx2,avx512 --numbers float32

`int4` has float16 scales and zeros for each 128 inputs, `fp4` is MXFP4 (blocks of 32). In parentheses: the time
of `--numbers` on the same path divided by theirs.

Milliseconds of thread CPU time, the least of several rounds in which all implementations take turns. Each layer has
several copies of its weights, which take turns too, so that weights come from where they would in a model. The
vocabulary head is counted for at most 64 rows. Paths that this processor lacks are left out. oneDNN is called as torch
calls it, which takes some microseconds a call.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench.machine import processor
from bench.workloads import QWEN3_06B, SMALL, Model
from worker_svc.engine.kernels.build import load_kernels_of
from worker_svc.engine.kernels.four_bits import FourBitRows, units_of
from worker_svc.engine.kernels.linear import BFLOAT16, FLOAT32, INT8, KernelLinear
from worker_svc.engine.kernels.memory import WeightMemory, collapse
from worker_svc.engine.kernels.paths import available_paths
from worker_svc.engine.kernels.torch_linear import PackedLinear

MODELS: dict[str, tuple[Model, int]] = {"small": (SMALL, 8 << 20), "qwen3-0.6b": (QWEN3_06B, 128 << 20)}
ROWS = (1, 4, 16, 36, 64, 256, 1024)
MAX_HEAD_ROWS = 64
ROUND_S = 2e-3

Call = Callable[[torch.Tensor], torch.Tensor]
Maker = Callable[[torch.Tensor], Call]


@dataclass(frozen=True)
class Layer:
    name: str
    out_features: int
    in_features: int
    count: int  # in the model


def layers_of(model: Model) -> list[Layer]:
    hidden, inner, count = model["hidden_size"], model["intermediate_size"], model["num_hidden_layers"]
    q_size = model["num_attention_heads"] * model["head_dim"]
    kv_size = model["num_key_value_heads"] * model["head_dim"]
    return [
        Layer("qkv", q_size + 2 * kv_size, hidden, count),
        Layer("o", hidden, q_size, count),
        Layer("gate_up", 2 * inner, hidden, count),
        Layer("down", hidden, inner, count),
        Layer("head", model["vocab_size"], hidden, 1),
    ]


def implementations(names: list[str], number: str, weights: WeightMemory) -> dict[str, Maker]:
    """Constructors by name: of the given paths, and oneDNN. int8 beside bfloat16 only."""
    builds = {path.name: load_kernels_of(path) for path in available_paths() if path.name in names}
    makers: dict[str, Maker] = {}
    for name, build in builds.items():
        makers[name] = partial(_kernel_linear, build, weights, BFLOAT16 if number == "bfloat16" else FLOAT32)
        if number == "bfloat16":
            makers[f"{name} int8"] = partial(_kernel_linear, build, weights, INT8)
        for group, form in ((128, "int4"), (32, "fp4")):
            makers[f"{name} {form}"] = partial(_four_bit_linear, build, weights, group)
    makers["oneDNN"] = partial(PackedLinear, bias=None)
    return makers


def _kernel_linear(kernels: ctypes.CDLL, weights: WeightMemory, kind: int, weight: torch.Tensor) -> Call:
    return KernelLinear(kernels, kind, weight, None, 1, weights.zeros)


def _four_bit_linear(kernels: ctypes.CDLL, weights: WeightMemory, group: int, weight: torch.Tensor) -> Call:
    """Random codes: int4 in groups of 128, E2M1 in blocks of 32."""
    groups = -(-weight.shape[1] // group)
    codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8)
    is_int4 = group > 32
    scales = torch.full((len(weight), groups), 2.0**-6)
    zeros = torch.randint(0, 16, (len(weight), groups), dtype=torch.uint8) if is_int4 else None
    units = units_of(FourBitRows(codes, scales, zeros, group))
    if units is None:
        raise ValueError(f"group {group} does not consist of whole units")
    return KernelLinear(kernels, units.kind, units, None, 1, weights.zeros)


def thread_seconds(copies: list[Call], x: torch.Tensor) -> float:
    """Seconds of one call, the mean of a round of calls."""
    calls = 0
    started = time.thread_time()
    while True:
        for copy in copies:
            copy(x)
        calls += len(copies)
        spent = time.thread_time() - started
        if spent > ROUND_S:
            return spent / calls


def measure(layer: Layer, working_set: int, args: argparse.Namespace) -> Iterator[tuple[int, dict[str, float]]]:
    """The least milliseconds of one call by implementation, for each number of rows."""
    dtype = getattr(torch, args.numbers)
    weight = (torch.randn(layer.out_features, layer.in_features) / layer.in_features**0.5).to(dtype)
    num_copies = max(1, working_set // (weight.numel() * weight.element_size()))
    weights = WeightMemory()
    makers = implementations(args.paths.split(","), args.numbers, weights)
    copies = {
        name: [make(weight) for _ in range(num_copies * (4 if name.endswith(("int4", "fp4")) else 1))]
        for name, make in makers.items()
    }
    collapse(weights.take())  # a load ends with this call too
    for n in map(int, args.rows.split(",")):
        if layer.name == "head" and n > MAX_HEAD_ROWS:
            continue
        x = torch.randn(n, layer.in_features).to(dtype)
        best = dict.fromkeys(copies, float("inf"))
        for _ in range(args.rounds):
            for name, calls in copies.items():
                best[name] = min(best[name], 1e3 * thread_seconds(calls, x))
        yield n, best


def print_rows(title: str, times: dict[int, dict[str, float]]) -> None:
    names = list(next(iter(times.values())))
    print(f"\n| {title} | " + " | ".join(names) + " |\n|" + " --- |" * (1 + len(names)))
    for n, best in times.items():
        print(f"| {n} | " + " | ".join(_cell(name, best) for name in names) + " |", flush=True)


def _cell(name: str, best: dict[str, float]) -> str:
    """Milliseconds; for 4 bits also the ratio to the float type on the same path."""
    path, _, form = name.partition(" ")
    ratio = f" ({best[path] / best[name]:.2f}x)" if form in ("int4", "fp4") else ""
    return f"{best[name]:.3g}{ratio}"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated: " + ", ".join(MODELS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="comma-separated numbers of rows")
    parser.add_argument("--paths", default="amx,avx512_bf16", help="comma-separated paths (docs/configuration.md)")
    parser.add_argument("--numbers", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=12, help="the least of this many rounds counts (default 12)")
    parser.add_argument("--layers", action="store_true", help="print every layer too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{processor()}; milliseconds of one thread, {args.numbers} except where noted")
    for name in args.models.split(","):
        model, working_set = MODELS[name]
        total: dict[int, dict[str, float]] = {}
        for layer in layers_of(model):
            times = dict(measure(layer, working_set, args))
            gc.collect()
            if args.layers:
                print_rows(f"{name} {layer.name} {layer.out_features} x {layer.in_features}: rows", times)
            for n, best in times.items():
                sums = total.setdefault(n, dict.fromkeys(best, 0.0))
                for key, value in best.items():
                    sums[key] += layer.count * value
        print_rows(f"{name}: rows", total)


if __name__ == "__main__":
    main()
