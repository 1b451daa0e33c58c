"""Other libraries on the same inputs in the same run, if they can be imported: attention through the classes that serve
with it (`--attention`), and vLLM for the workload."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

from bench.gpu.kernels import Case, nano_contexts, prefill_flop
from bench.gpu.model import make_checkpoint
from bench.gpu.report import Report
from bench.gpu.serving import NANO, workload_of
from worker_svc.engine.gpu.attention.flash import FlashAttention, flash_package
from worker_svc.engine.gpu.attention.flash3 import Flash3Attention, flash3_package
from worker_svc.engine.gpu.attention.flashinfer import FlashInferAttention, flashinfer_package
from worker_svc.engine.gpu.attention.paged import Attention


def libraries(report: Report) -> None:
    """Decode with nano-vllm's lengths, and prompts, for each library beside the engine's kernel."""
    decode = [5, 40, 17] if report.is_smoke else nano_contexts()
    for name, contexts, count in (("decode", decode, 1), ("prefill", [0] * (2 if report.is_smoke else 8), 1024)):
        num_queries = min(count, 20) if report.is_smoke else count
        case = Case.make(report, contexts, num_queries)
        flop = prefill_flop(case, num_queries) if num_queries > 1 else 0.0
        run, out = case.run(case.triton())
        ours = report.time_ms([run])
        report.row("libraries", f"{name}: ours", ms=ours, num_bytes=0 if flop else case.key_bytes, flop=flop)
        for library, make in LIBRARIES.items():
            _measure(report, f"{name}: {library}", case, make, flop, ours)
        del case, run, out
        report.release()


def _measure(
    report: Report, name: str, case: Case, make: Callable[[Case], Attention], flop: float, ours: float
) -> None:
    try:
        run, out = case.run(make(case))
        error = case.error(out)
    except Exception as problem:  # it is missing, or serves other versions, GPUs or sizes
        report.row("libraries", name, note=f"{type(problem).__name__}: {str(problem)[:120]}")
        return
    ms = report.time_ms([run])
    num_bytes = 0 if flop else case.key_bytes
    note = f"error {error:.1e}; our time / theirs {ours / ms:.2f}"
    report.row("libraries", name, ok=error < report.tolerance, ms=ms, num_bytes=num_bytes, flop=flop, note=note)
    report.figures[f"ours_to_{name.replace(': ', '_')}"] = round(ours / ms, 3)


def _flash_2(case: Case) -> Attention:
    return FlashAttention(flash_package())


def _flash_3(case: Case) -> Attention:
    return Flash3Attention(flash3_package(), [case.layer], case.block_size, case.cache.keys.dtype)


def _flashinfer(case: Case) -> Attention:
    return FlashInferAttention(
        flashinfer_package(), [case.layer], block_size=case.block_size, max_rows=case.num_rows,
        max_tokens=len(case.q), max_model_len=case.longest, dtype=case.q.dtype, kv_dtype=case.cache.keys.dtype,
        device=case.q.device,
    )  # fmt: skip


LIBRARIES: dict[str, Callable[[Case], Attention]] = {
    "flash-attn 2": _flash_2,
    "flash-attn 3": _flash_3,
    "FlashInfer": _flashinfer,
}


def vllm_workload(report: Report) -> None:
    """nano-vllm's workload through vLLM's offline interface, with the same checkpoint: the best of two runs."""
    try:
        vllm = importlib.import_module("vllm")
    except Exception as error:  # a library for another version of torch may raise anything
        report.row("vllm", "vLLM", note=f"missing: {str(error)[:120]}")
        return
    engine: Any = vllm.LLM(
        model=str(make_checkpoint(report)), skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=256,
        max_num_batched_tokens=16_384, gpu_memory_utilization=0.85, enable_prefix_caching=False,
    )  # fmt: skip
    workload = workload_of(report)
    prompts = [{"prompt_token_ids": request.prompt} for request in workload.requests]
    sampling = [
        vllm.SamplingParams(
            temperature=NANO.temperature, max_tokens=request.num_output, ignore_eos=True, detokenize=False
        )
        for request in workload.requests
    ]
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    tok_s = workload.num_output / min(seconds[1:])
    report.row("vllm", f"vLLM {vllm.__version__}", ms=min(seconds[1:]) * 1e3, note=f"{tok_s:.0f} tok/s")
    report.figures["vllm_tok_s"] = round(tok_s, 1)
    if ours := report.figures.get("in_process_tok_s"):
        report.row("vllm", "ours in-process / vLLM", note=f"{ours / tok_s:.2f}")
