"""Other libraries on the same inputs in the same run, if they can be imported: attention, and vLLM for the workload."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu.kernels import Case, nano_contexts, prefill_flop
from bench.gpu.model import make_checkpoint
from bench.gpu.report import Report
from bench.gpu.serving import NANO, workload_of

Run = Callable[[], torch.Tensor]  # attention of a layer, [tokens, heads, dim]


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


def _measure(report: Report, name: str, case: Case, make: Callable[[Case], Run], flop: float, ours: float) -> None:
    try:
        run = make(case)
        error = case.error(run())
    except Exception as problem:  # it is missing, or serves other versions, GPUs or sizes
        report.row("libraries", name, note=f"{type(problem).__name__}: {str(problem)[:120]}")
        return
    ms = report.time_ms([run])
    num_bytes = 0 if flop else case.key_bytes
    note = f"error {error:.1e}; our time / theirs {ours / ms:.2f}"
    report.row("libraries", name, ok=error < report.tolerance, ms=ms, num_bytes=num_bytes, flop=flop, note=note)
    report.figures[f"ours_to_{name.replace(': ', '_')}"] = round(ours / ms, 3)


def _lengths(case: Case) -> tuple[torch.Tensor, int, int]:
    """Keys of each row, queries of each row, and the most keys."""
    count = len(case.q) // case.num_rows
    lengths = case.columns.queries.contexts + count
    return lengths, count, int(lengths.max())


def _flash_2(case: Case) -> Run:
    flash = importlib.import_module("flash_attn")
    lengths, count, _ = _lengths(case)
    q = case.q.view(case.num_rows, count, *case.q.shape[1:])
    tables = case.columns.queries.tables.contiguous()

    def run() -> torch.Tensor:
        out = flash.flash_attn_with_kvcache(
            q, case.cache.keys, case.cache.values, cache_seqlens=lengths, block_table=tables, causal=True
        )
        return torch.as_tensor(out).flatten(0, 1)

    return run


def _flash_3(case: Case) -> Run:
    flash = importlib.import_module("flash_attn_interface")
    lengths, count, _ = _lengths(case)
    q = case.q.view(case.num_rows, count, *case.q.shape[1:])
    tables = case.columns.queries.tables.contiguous()

    def run() -> torch.Tensor:
        out = flash.flash_attn_with_kvcache(
            q, case.cache.keys, case.cache.values, cache_seqlens=lengths, page_table=tables, causal=True
        )
        return torch.as_tensor(out[0] if isinstance(out, tuple) else out).flatten(0, 1)

    return run


def _flashinfer(case: Case) -> Run:
    flashinfer = importlib.import_module("flashinfer")
    lengths, count, _ = _lengths(case)
    size = case.cache.keys.shape[1]
    counts = (lengths + size - 1) // size
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    indices = torch.cat(list(_used_blocks(case, counts.tolist()))).int()
    last = (lengths - 1) % size + 1
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=case.q.device)
    heads, pools = case.shape, (case.cache.keys, case.cache.values)
    if count == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(
            starts, indices, last.int(), heads.num_q_heads, heads.num_kv_heads, heads.head_dim, size,
            q_data_type=case.q.dtype, kv_data_type=case.cache.keys.dtype,
        )  # fmt: skip
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            case.columns.queries.starts, starts, indices, last.int(), heads.num_q_heads, heads.num_kv_heads,
            heads.head_dim, size, causal=True, q_data_type=case.q.dtype,
        )  # fmt: skip
    return lambda: torch.as_tensor(wrapper.run(case.q, pools))


def _used_blocks(case: Case, counts: list[int]) -> Iterator[torch.Tensor]:
    for row, count in enumerate(counts):
        yield case.columns.queries.tables[row, :count]


LIBRARIES: dict[str, Callable[[Case], Run]] = {
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
