"""Models that the other sections do not use."""

from __future__ import annotations

from bench.gpu.model import EXPERTS, FEW_EXPERTS, TINY, load, time_decode, write_checkpoint
from bench.gpu.report import Report
from bench.workloads import QWEN3_06B, Model

# Two layers of Qwen3-30B-A3B, with a small vocabulary.
LARGE: Model = QWEN3_06B | EXPERTS | {
    "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4,
    "vocab_size": 32_768, "intermediate_size": 6144,
}  # fmt: skip


def experts(report: Report) -> None:
    """Decode steps of a model of experts, relative to the bytes of the experts that random rows choose."""
    model = TINY | FEW_EXPERTS if report.is_smoke else LARGE
    folder = write_checkpoint(report, report.scratch / "experts", model)
    for name, settings in (("", {}), ("fp8 weights ", {"quantize": "fp8"})):
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
