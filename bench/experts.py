"""Decode speed of a model of experts, as a ratio to a dense model with the same number of active parameters.

    python bench/experts.py              # about two minutes
    python bench/experts.py --rows 1 64 --numbers bfloat16

Both models run on the engine alone, greedy, in exact mode, with 32 prompt tokens and 64 output tokens per row. A token
uses EXPERTS["num_experts_per_tok"] experts, whose inner sizes add up to the dense model's. The rows of a step choose
different experts, so it reads more weights than a step of the dense model: `read_ratio` is the ratio of the bytes of
weights that a step reads if all rows choose at random. `ratio` is tokens per second of experts / dense, by processor
time. The runs alternate; each figure is the best of the repeats. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # quire-worker sets it too; OpenMP reads it when torch is imported

from bench.machine import describe, quiet
from bench.worker import NUMBERS, Loop, timed
from bench.workloads import Model, Request, Workload, make_model, weight_shapes
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.kernels.machine import available_cores
from worker_svc.engine.model_runner import ModelRunner

PROMPT_LEN, NUM_OUTPUT = 32, 64
DENSE: Model = {
    "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 2048, "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS: Model = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def main() -> None:
    args = _arguments()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number in args.numbers:
            runners = {
                name: _runner(make_model(Path(folder) / f"{name}-{number}", model, NUMBERS[number][0]), number, args)
                for name, model in (("dense", DENSE), ("experts", EXPERTS))
            }
            for rows in args.rows:
                results.append({"numbers": number, "rows": rows} | _compare(runners, rows, args.repeats))
                print(json.dumps(results[-1]), flush=True)
    print(json.dumps(describe() | {"bench": "experts", "threads": args.threads, "results": results}))


def _runner(folder: Path, number: str, args: argparse.Namespace) -> ModelRunner:
    dtype, quantize = NUMBERS[number]
    settings = {"threads": args.threads, "quantize": quantize, "max_model_len": 256}
    return ModelRunner(EngineConfig(folder, dtype, kv_cache_memory=1 << 29, **settings))


def _compare(runners: dict[str, ModelRunner], rows: int, repeats: int) -> dict[str, float]:
    runs: dict[str, list[dict]] = {name: [] for name in runners}
    for _ in range(repeats):
        for name, runner in runners.items():
            runs[name].append(quiet(partial(timed, Loop(runner, _workload(rows)))))
    tokens = rows * NUM_OUTPUT
    dense, experts = ({key: min(run[key] for run in runs[name]) for key in ("seconds", "cpu_s")} for name in runs)
    return {
        "ratio": round(dense["cpu_s"] / experts["cpu_s"], 3),
        "ratio_by_time": round(dense["seconds"] / experts["seconds"], 3),
        "read_ratio": round(_bytes_read(DENSE, rows) / _bytes_read(EXPERTS, rows), 3),
        "dense_tok_s": round(tokens / dense["seconds"], 1),
        "experts_tok_s": round(tokens / experts["seconds"], 1),
        "steal_pct": max(run["steal_pct"] or 0.0 for each in runs.values() for run in each),
    }


def _workload(rows: int) -> Workload:
    prompts = [[3 + (7919 * row + 31 * place) % 4000 for place in range(PROMPT_LEN)] for row in range(rows)]
    return Workload([Request(prompt, NUM_OUTPUT) for prompt in prompts], DENSE, 0)


def _bytes_read(model: Model, rows: int) -> float:
    """Weights that a step of `rows` rows reads, in elements: of each expert, as probable as it is chosen."""
    shapes = weight_shapes(model)
    share = 1.0
    if "num_experts" in model:
        share -= (1 - model["num_experts_per_tok"] / model["num_experts"]) ** rows
    total = 0.0
    for name, shape in shapes.items():
        elements = shape[0] * shape[1] if len(shape) == 2 else shape[0]
        total += elements * (share if ".experts." in name else 1.0)
    return total


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 32, 64], help="rows of a step (default: %(default)s)"
    )
    parser.add_argument("--numbers", nargs="+", choices=list(NUMBERS), default=["float32", "bfloat16", "int8"])
    parser.add_argument(
        "--threads", type=int, default=available_cores(), help="threads of the engine (default: all cores)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each model (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
