"""Other libraries on the same inputs in the same run, if they can be imported: attention through the classes that serve
with it (`--attention`)."""

from __future__ import annotations

from collections.abc import Callable

from bench.gpu.kernels import Case, nano_contexts, prefill_flop
from bench.gpu.report import Report
from bench.gpu.toolchain import use_peers
from worker_svc.engine.gpu.attention.flash import FlashAttention, flash_package
from worker_svc.engine.gpu.attention.flash3 import Flash3Attention, flash3_package
from worker_svc.engine.gpu.attention.paged import Attention


def libraries(report: Report) -> None:
    """Decode with nano-vllm's lengths, and prompts, for each library beside the engine's kernel."""
    use_peers(report.scratch)
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


LIBRARIES: dict[str, Callable[[Case], Attention]] = {
    "flash-attn 2": _flash_2,
    "flash-attn 3": _flash_3,
}
