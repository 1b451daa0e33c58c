"""Checkpoints that the other sections do not use: experts, int4 weights, several GPUs for one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.gpu.model import (
    EXPERTS,
    FEW_EXPERTS,
    TINY,
    load,
    make_checkpoint,
    model_of,
    time_beside_default,
    time_decode,
    write_checkpoint,
)
from bench.gpu.report import Report
from bench.workloads import COMMON, QWEN3_06B, Model, weight_shapes
from worker_svc.engine.gpu.ranks.parallel_runner import ParallelRunner

# Two layers of Qwen3-30B-A3B, with a small vocabulary.
LARGE: Model = QWEN3_06B | EXPERTS | {
    "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4,
    "vocab_size": 32_768, "intermediate_size": 6144,
}  # fmt: skip
INT4_SPREAD = 4.6  # standard deviation of the integers -8 to 7


def experts(report: Report) -> None:
    """Decode steps of a model of experts, relative to the bytes of the experts that random rows choose."""
    model = TINY | FEW_EXPERTS if report.is_smoke else LARGE
    folder = write_checkpoint(report, report.scratch / "experts", model)
    kinds: dict[str, dict[str, Any]] = {"": {}, "fp8 weights ": {"quantize": "fp8"}}
    for name, settings in kinds.items():
        runner = load(folder, report, cuda_graphs="lazy", **settings)
        for num_rows in [3] if report.is_smoke else [1, 32, 256]:
            ms = time_decode(runner, report, num_rows, 30 if report.is_smoke else 512)
            if ms is not None:
                num_bytes = expert_bytes(model, num_rows) / (2 if settings else 1)
                report.row("experts", f"{name}B {num_rows}", ms=ms, num_bytes=num_bytes, note="bytes of experts alone")
                report.figures[f"experts_{name.replace(' ', '_')}ms_b{num_rows}"] = ms
        del runner
        report.release()


def expert_bytes(model: Model, num_rows: int) -> float:
    """Bytes of the experts that a step reads on average, if each row chooses at random."""
    count, top_k = model["num_experts"], model["num_experts_per_tok"]
    used = count * (1 - (1 - top_k / count) ** num_rows)
    return float(model["num_hidden_layers"] * used * 3 * model["moe_intermediate_size"] * model["hidden_size"] * 2)


def int4_weights(report: Report) -> None:
    """Decode steps of the model of the other sections with int4 weights."""
    folder = write_int4(report, report.scratch / "int4", model_of(report))
    for determinism in ("best_effort", "exact"):
        runner = load(folder, report, cuda_graphs="lazy", determinism=determinism)
        time_beside_default(report, runner, "int4_weights", f"int4 weights {determinism}")
        del runner
        report.release()


def write_int4(report: Report, folder: Path, model: Model) -> Path:
    """A checkpoint in the format of GPTQ, with random integers, unless it exists."""
    if (folder / "config.json").exists():  # written last
        return folder
    generator = torch.Generator().manual_seed(0)
    group = 32 if report.is_smoke else 128
    tensors: dict[str, torch.Tensor] = {}
    for name, size in weight_shapes(model).items():
        if name.endswith("_proj"):
            tensors |= {f"model.{name}.{part}": x for part, x in _gptq(*size, group, generator).items()}
        else:
            weight = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * size[-1] ** -0.5
            tensors[f"model.{name}.weight"] = weight.to(report.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    method = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True,
              "checkpoint_format": "gptq"}  # fmt: skip
    dtype = str(report.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(COMMON | model | {"dtype": dtype, "quantization_config": method}))
    return folder


def _gptq(outputs: int, inputs: int, group: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Eight numbers in each word; zeros are stored minus one."""
    low, high, groups = -(2**31), 2**31, inputs // group
    words = torch.randint(low, high, (inputs // 8, outputs), generator=generator, dtype=torch.int64).int()
    return {
        "qweight": words,
        "qzeros": torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((groups, outputs), inputs**-0.5 / INT4_SPREAD, dtype=torch.float16),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // group,
    }


def ranks(report: Report) -> None:
    """Decode steps on several GPUs, with and without sums in shared memory."""
    available = 2 if report.is_smoke else torch.cuda.device_count()
    sizes = [size for size in (2, 4, 8) if size <= available]
    if not sizes:
        report.row("ranks", "several GPUs", note=f"this machine has {available}")
    for size in sizes:
        for method in ("auto", "nccl"):
            runner = load(
                make_checkpoint(report), report, ParallelRunner, cuda_graphs="lazy", tensor_parallel_size=size,
                all_reduce=method,
            )  # fmt: skip
            time_beside_default(report, runner, "ranks", f"{size} ranks {method}")
            runner.close()
            report.release()
