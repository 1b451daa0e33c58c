"""Kernels besides attention, and what exact mode relies on."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.gpu.checks.references import token_of
from bench.gpu.kernels import Case
from bench.gpu.report import Report, relative_error
from worker_svc.engine.backend import HeadShape, Norm, RotaryTable
from worker_svc.engine.gpu.kernels import activation, linear, norm, rope_store
from worker_svc.engine.gpu.kernels.sampler import sample
from worker_svc.engine.gpu.kernels.sampler.thresholds import Thresholds

EPS = 1e-6
VOCAB = 151_936


def small_kernels(report: Report) -> None:
    num_rows, hidden, inner = (3, 64, 96) if report.is_smoke else (256, 1024, 3072)
    vocab = 5000 if report.is_smoke else VOCAB
    make = lambda *size: torch.randn(*size, device=report.device).to(report.dtype)  # noqa: E731
    x, residual, weight = make(num_rows, hidden), make(num_rows, hidden), make(hidden)
    rms = Norm(weight, None, EPS)
    total, expected = norm.reference(x, residual, rms)
    out = torch.empty_like(x)
    added = x.clone()
    norm.add_norm(added, residual, rms, out)
    error = max(relative_error(out, expected), relative_error(added, total))
    scratch = x.clone()
    ms = report.time_ms([lambda: norm.add_norm(scratch, residual, rms, out)])
    report.row("small_kernels", "rms_norm", ok=error < report.tolerance, ms=ms, note=f"error {error:.1e}")

    gate_up = make(num_rows, 2 * inner)
    gated = torch.empty(num_rows, inner, device=report.device, dtype=report.dtype)
    ms = report.time_ms([lambda: activation.gated_activation(gate_up, gated, "silu")])
    error = relative_error(gated, activation.reference(gate_up, "silu"))
    report.row("small_kernels", "silu_mul", ok=error < report.tolerance, ms=ms, note=f"error {error:.1e}")
    _rope(report, num_rows)
    _sampler(report, num_rows, vocab)


def _rope(report: Report, num_rows: int) -> None:
    shape = HeadShape(4, 2, 16) if report.is_smoke else HeadShape(16, 8, 128)
    dim, heads = shape.head_dim, shape.num_q_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(num_rows, heads * dim, device=report.device).to(report.dtype)
    norms = tuple(Norm(torch.rand(dim, device=report.device).add(0.5).to(report.dtype), None, EPS) for _ in range(2))
    angles = torch.arange(4096, device=report.device).float()[:, None] * 1e6 ** -(
        torch.arange(0, dim, 2, device=report.device) / dim
    )
    rotary = RotaryTable(angles.cos(), angles.sin())
    positions = torch.randint(0, 4096, (num_rows,), device=report.device).int()
    slots = torch.randperm(num_rows, device=report.device).int()
    cache = tuple(
        torch.zeros(num_rows, 1, shape.num_kv_heads, dim, device=report.device, dtype=report.dtype) for _ in "kv"
    )
    q = torch.empty(num_rows, shape.num_q_heads, dim, device=report.device, dtype=report.dtype)
    run = lambda: rope_store.rope_store(qkv, norms, rotary, positions, slots, cache, q, shape)  # noqa: E731
    run()
    expected = rope_store.reference(qkv, norms, rotary, positions, shape)
    stored = [pool[slots.long(), 0] for pool in cache]
    error = max(map(relative_error, [q, *stored], expected))
    report.row(
        "small_kernels", "rope_store", ok=error < report.tolerance, ms=report.time_ms([run]), note=f"error {error:.1e}"
    )


def _sampler(report: Report, num_rows: int, vocab: int) -> None:
    """Tokens of a few rows against the specification in numpy; times for all rows."""
    from request_fields.fields import SamplingParams
    from worker_svc.engine.gpu.step.device_rows import HEAD_WORDS, sampling_words

    logits = (3 * torch.randn(num_rows, vocab, device=report.device)).to(report.dtype)
    rows = torch.arange(num_rows, dtype=torch.int32, device=report.device)
    out = tuple(torch.zeros(num_rows, dtype=torch.int32, device=report.device) for _ in range(2))
    positions = rows * 3
    for name, fields in (
        ("greedy", (0.0, 0, 1.0, 0.0)),
        ("plain", (0.6, 0, 1.0, 0.0)),
        ("filtered", (0.6, 20, 0.95, 0.0)),
    ):
        params = [SamplingParams(*fields, seed=2**40 + i) for i in range(num_rows)]
        state = torch.zeros(num_rows, HEAD_WORDS, dtype=torch.int32)
        for i, row in enumerate(params):
            state[i] = torch.from_numpy(sampling_words(row, 1))
        state = state.to(report.device)
        thresholds = Thresholds(num_rows, vocab, report.device)
        scratch = sample.scratch_for(num_rows, vocab, report.device)

        def run(state=state, thresholds=thresholds, scratch=scratch, is_filtered=name == "filtered"):
            lowest = thresholds.find(logits, state, rows) if is_filtered else None
            sample.sample(logits, state, rows, positions, lowest, scratch, out)

        run()
        found = out[0].tolist()
        checked = range(0, num_rows, max(1, num_rows // 8))
        wrong = [i for i in checked if found[i] != token_of(logits[i].cpu(), params[i], 1, 3 * i)]
        ms = report.time_ms([run])
        report.row("small_kernels", f"sample {name}", ok=not wrong, ms=ms, note=f"rows that differ from numpy: {wrong}")


def invariance(report: Report) -> None:
    """Checks what exact mode relies on: a row has the same bits alone and in a batch."""
    shapes = [(130, 64)] if report.is_smoke else [(4096, 1024), (1024, 3072), (VOCAB, 1024)]
    for out_size, in_size in shapes:
        x = torch.randn(256, in_size, device=report.device).to(report.dtype)
        weight = torch.randn(out_size, in_size, device=report.device).to(report.dtype)
        for name, product, is_ours in (("ours", linear.linear, True), ("library", F.linear, False)):
            whole = product(x, weight, None)
            counts = (1, 3, 17, 64, 100) if not report.is_smoke else (1, 70)
            wrong = [n for n in counts if not torch.equal(product(x[:n].contiguous(), weight, None), whole[:n])]
            note = f"row counts that differ: {wrong}"
            report.row("invariance", f"{name} {out_size} x {in_size}", ok=not wrong if is_ours else None, note=note)
        ms = report.time_ms([lambda x=x, weight=weight: linear.linear(x, weight, None)], 5)
        report.row(
            "invariance", f"speed of ours {out_size} x {in_size}, 256 rows", ms=ms, flop=2 * 256 * out_size * in_size
        )
    contexts = [39] * 3 if report.is_smoke else [1500] * 64
    case = Case.make(report, contexts)
    _, whole = case.run(case.triton("exact"))
    single = case.row(1)
    _, alone = single.run(single.triton("exact"))
    ok = torch.equal(alone[0], whole[1])
    report.row("invariance", f"attention exact: alone = among {len(contexts)}", ok=ok)
