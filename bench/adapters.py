"""Decode speed of a batch whose rows use 8 LoRA adapters, as a ratio to the same batch without adapters.

    python bench/adapters.py             # about a minute
    python bench/adapters.py --rows 8 64 --ranks 16 --numbers bfloat16

The engine alone, greedy, in exact mode, with 32 prompt tokens and 64 output tokens per row. Each adapter changes all
linear layers; row r uses adapter r % 8, so 8 rows use one adapter each. `ratio` is tokens per second with adapters /
without, by processor time. The runs alternate; each figure is the best of the repeats. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # quire-worker sets it too; OpenMP reads it when torch is imported

from bench.lora import make_adapter
from bench.machine import describe, quiet
from bench.worker import NUMBERS, Loop, timed
from bench.workloads import Model, Request, Workload, make_model
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.kernels.machine import available_cores
from worker_svc.engine.model_runner import ModelRunner

PROMPT_LEN, NUM_OUTPUT, NUM_ADAPTERS = 32, 64, 8
MODEL: Model = {
    "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 32768, "max_position_embeddings": 4096,
}  # fmt: skip


class AdaptedRunner:
    """A runner whose opened rows use adapters in turn."""

    def __init__(self, runner: ModelRunner, digests: list[bytes]) -> None:
        self._runner = runner
        self._digests = digests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, batch: Any) -> Any:
        opens = [replace(o, adapter=self._digests[o.row % len(self._digests)]) for o in batch.opens]
        return self._runner.execute(replace(batch, opens=opens))


def main() -> None:
    args = _arguments()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number in args.numbers:
            dtype, quantize = NUMBERS[number]
            model = make_model(Path(folder) / number, MODEL, dtype)
            settings: dict[str, Any] = {"threads": args.threads, "quantize": quantize, "max_model_len": 256}
            settings |= {"max_adapters": NUM_ADAPTERS, "max_adapter_rank": 256}
            runner = ModelRunner(EngineConfig(model, dtype, kv_cache_memory=1 << 29, **settings))
            for rank in args.ranks:
                adapted = AdaptedRunner(runner, _load_adapters(runner, Path(folder), rank))
                for rows in args.rows:
                    compared = _compare({"base": runner, "adapters": adapted}, rows, args.repeats)
                    results.append({"numbers": number, "rank": rank, "rows": rows} | compared)
                    print(json.dumps(results[-1]), flush=True)
    print(json.dumps(describe() | {"bench": "adapters", "threads": args.threads, "results": results}))


def _load_adapters(runner: ModelRunner, folder: Path, rank: int) -> list[bytes]:
    """Adapters of this rank instead of another."""
    for entry in runner.adapters.entries():
        runner.adapters.unload(entry.name)
    digests: list[bytes] = []
    for number in range(NUM_ADAPTERS):
        path = make_adapter(folder / f"rank{rank}-{number}", MODEL, rank, number)
        digests.append(runner.adapters.load(str(number), path).digest)
        runner.adapters.swap(digests[-1], kept=digests)
    return digests


def _compare(runners: dict[str, Any], rows: int, repeats: int) -> dict[str, float]:
    runs: dict[str, list[dict]] = {name: [] for name in runners}
    for _ in range(repeats):
        for name, runner in runners.items():
            runs[name].append(quiet(partial(timed, Loop(runner, _workload(rows)))))
    tokens = rows * NUM_OUTPUT
    base, adapters = ({key: min(run[key] for run in runs[name]) for key in ("seconds", "cpu_s")} for name in runs)
    return {
        "ratio": round(base["cpu_s"] / adapters["cpu_s"], 3),
        "ratio_by_time": round(base["seconds"] / adapters["seconds"], 3),
        "base_tok_s": round(tokens / base["seconds"], 1),
        "adapters_tok_s": round(tokens / adapters["seconds"], 1),
        "steal_pct": max(run["steal_pct"] or 0.0 for each in runs.values() for run in each),
    }


def _workload(rows: int) -> Workload:
    prompts = [[3 + (7919 * row + 31 * place) % 4000 for place in range(PROMPT_LEN)] for row in range(rows)]
    return Workload([Request(prompt, NUM_OUTPUT) for prompt in prompts], MODEL, 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64], help="rows of a step (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64], help="(default: %(default)s)")
    parser.add_argument("--numbers", nargs="+", choices=list(NUMBERS), default=["bfloat16"])
    parser.add_argument(
        "--threads", type=int, default=available_cores(), help="threads of the engine (default: all cores)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
