"""Single kernels: error against float32, and speed relative to a copy and a large matrix product of the same run."""

from __future__ import annotations

import importlib
import platform
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton

from bench.gpu.report import Report, relative_error
from worker_svc.engine.backend import AttentionShape, HeadShape, RotaryTable
from worker_svc.engine.gpu.kernels import activation, linear, rms_norm, rope_store, sample
from worker_svc.engine.gpu.kernels.attention import Parts, Queries, Tiles, WorkList, paged_attention
from worker_svc.engine.gpu.kernels.filters import Filters
from worker_svc.engine.gpu.kernels.work_list import make_work_list
from worker_svc.engine.gpu.tiles import DECODE_TILES, EXACT_TILES, PREFILL_TILES, Processors, for_heads, splits_for

EPS = 1e-6
VOCAB = 151_936


def environment(report: Report) -> None:
    names = ["torch", "triton", "transformers", "grpc", "google.protobuf", "xxhash", "flash_attn"]
    for name in names:
        try:
            module = importlib.import_module(name)
            report.row("environment", name, note=str(getattr(module, "__version__", "there")))
        except ImportError as error:
            report.row("environment", name, note=f"missing: {error}")
    report.figures["python"] = platform.python_version()
    report.figures["torch"], report.figures["triton"] = torch.__version__, triton.__version__
    if report.is_smoke:
        report.figures["device"] = "cpu (smoke)"
        return
    device = torch.cuda.get_device_properties(0)  # raises an error with the cause if there is no GPU
    report.figures |= {"device": device.name, "memory_gib": round(device.total_memory / 2**30, 1)}
    report.row("environment", device.name, note=f"{report.figures['memory_gib']} GiB, CUDA {torch.version.cuda}")


def ceilings(report: Report) -> None:
    size = 1 << 20 if report.is_smoke else 1 << 31
    source = torch.zeros(size // 4, dtype=torch.float32, device=report.device)
    target = torch.empty_like(source)
    ms = report.time_ms([lambda: target.copy_(source)])
    report.bandwidth = 2 * size / ms * 1e3
    report.row("ceilings", "copy", ms=ms, num_bytes=2 * size)
    n = 128 if report.is_smoke else 8192
    a, b = (torch.randn(n, n, device=report.device).to(report.dtype) for _ in range(2))
    ms = report.time_ms([lambda: a @ b])
    report.tflops = 2 * n**3 / ms * 1e3
    report.row("ceilings", f"matmul {n}", ms=ms, flop=2 * n**3)
    report.figures["copy_gb_s"], report.figures["matmul_tflops"] = report.bandwidth / 1e9, report.tflops / 1e12


@dataclass
class Case:
    """Rows over a pool of random keys, for attention."""

    q: torch.Tensor
    cache: tuple[torch.Tensor, torch.Tensor]
    queries: Queries
    num_rows: torch.Tensor
    shape: HeadShape
    scales: torch.Tensor | None = None

    @classmethod
    def make(
        cls,
        report: Report,
        num_rows: int,
        context: int,
        num_queries: int,
        block_size: int = 256,
        head_dim: int = 128,
        *,
        is_fp8: bool = False,
    ) -> Case:
        shape = HeadShape(4, 2, head_dim // 8) if report.is_smoke else HeadShape(16, 8, head_dim)
        block_size = 16 if report.is_smoke else block_size
        blocks = -(-(context + num_queries) // block_size)
        size = (num_rows * blocks, block_size, shape.num_kv_heads, shape.head_dim)
        cache = tuple(torch.randn(size, device=report.device, dtype=report.dtype) for _ in range(2))
        tables = torch.randperm(num_rows * blocks, device=report.device).int().view(num_rows, blocks)
        ints = {"dtype": torch.int32, "device": report.device}
        queries = Queries(
            rows=torch.arange(num_rows, **ints),
            starts=torch.arange(num_rows + 1, **ints) * num_queries,
            contexts=torch.full((num_rows,), context, **ints),
            tables=tables,
        )
        tokens = num_rows * num_queries
        q = torch.randn(tokens, shape.num_q_heads, shape.head_dim, device=report.device).to(report.dtype)
        count = torch.tensor([num_rows], **ints)
        if not is_fp8:
            return cls(q, cache, queries, count, shape)
        scales = torch.full((2, shape.num_kv_heads), 0.25, device=report.device)
        cache = tuple((pool / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn) for pool in cache)
        return cls(q, cache, queries, count, shape, scales)

    def attention(self, tiles: Tiles, per_processor: int | None = None):
        """A function that runs the kernel, and its output. The work list is made once. Without `per_processor`, as many
        programs run on a processor as fit."""
        num_rows, device = len(self.queries.rows), self.q.device
        processors = Processors.of(device)
        splits = splits_for(self.shape, processors)
        most = splits.most + num_rows if tiles.min_split else num_rows * (len(self.q) // num_rows + 1)
        work, parts = WorkList.empty(most, device), Parts.empty(most, num_rows, self.shape, device)
        out = torch.full_like(self.q, float("nan"))
        make_work_list(
            self.queries, self.num_rows, work, tiles, queries_per_tile=tiles.queries(self.shape), splits=splits
        )
        num_programs = processors.count * (per_processor or 1)

        def run():
            return paged_attention(
                self.q,
                self.cache,
                self.queries,
                work,
                parts,
                out,
                AttentionShape.plain(self.shape),
                tiles,
                num_programs,
                self.scales,
            )

        if per_processor is None:
            num_programs = processors.num_programs(run(), tiles.num_warps)
        return run, out

    def expected(self, row: int) -> torch.Tensor:
        """Attention of one row in float32."""
        first, last = int(self.queries.starts[row]), int(self.queries.starts[row + 1])
        num_keys = int(self.queries.contexts[row]) + last - first
        k, v = (self._gathered(pool, row)[:num_keys] for pool in self.cache)
        if self.scales is not None:
            k, v = k * self.scales[0, :, None], v * self.scales[1, :, None]
        keys = torch.arange(num_keys, device=k.device)
        is_visible = keys[None] <= num_keys - last + first + torch.arange(last - first, device=k.device)[:, None]
        q, k, v = (x.transpose(0, 1)[None] for x in (self.q[first:last].float(), k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=is_visible, enable_gqa=True)[0].transpose(0, 1)

    def _gathered(self, pool: torch.Tensor, row: int) -> torch.Tensor:
        blocks = self.queries.tables[row].long()
        found = pool[blocks] if self.scales is None else pool.view(torch.uint8)[blocks].view(pool.dtype)
        return found.flatten(0, 1).float()

    def error(self, out: torch.Tensor) -> float:
        """The largest error of the first, the middle and the last row."""
        num_rows = len(self.queries.rows)
        worst = 0.0
        for row in {0, num_rows // 2, num_rows - 1}:
            first, last = int(self.queries.starts[row]), int(self.queries.starts[row + 1])
            worst = max(worst, relative_error(out[first:last], self.expected(row)))
        return worst

    @property
    def key_bytes(self) -> int:
        """Bytes of keys and values that a decode step reads."""
        keys = int(self.queries.contexts.sum()) + len(self.q)
        return 2 * keys * self.shape.num_kv_heads * self.shape.head_dim * self.cache[0].element_size()


def decode_attention(report: Report) -> None:
    sizes = [(3, 40)] if report.is_smoke else [(1, 512), (1, 4096), (32, 512), (32, 4096), (256, 512), (256, 4096)]
    for num_rows, context in sizes:
        for block_size in (256,) if num_rows < 256 else (16, 64, 256):
            case = Case.make(report, num_rows, context - 1, 1, block_size)
            for name, tiles in (("", DECODE_TILES), ("exact ", EXACT_TILES)):
                run, out = case.attention(tiles)
                run()
                error = case.error(out)
                ms = report.time_ms([run])
                label = f"{name}B {num_rows} ctx {context} block {case.cache[0].shape[1]}"
                report.row(
                    "decode_attention", label, ok=error < report.tolerance, ms=ms,
                    num_bytes=case.key_bytes, note=f"error {error:.1e}",
                )  # fmt: skip
                if (num_rows, context, block_size, name) == (256, 4096, 256, ""):
                    report.figures["decode_of_copy"] = case.key_bytes / ms * 1e3 / report.bandwidth
            del case
            report.release()


def other_caches(report: Report) -> None:
    """fp8 keys and values, and head sizes that are not powers of two: prompts and single queries."""
    rows = (3, 40) if report.is_smoke else (256, 2048)
    kinds = [("fp8", 128, True), ("dim 80", 80, False), ("dim 96", 96, False), ("dim 112", 112, False)]
    if not report.is_smoke:
        kinds.append(("dim 256", 256, False))
    for name, dim, is_fp8 in kinds:
        for use, tiles, num_rows, context, count in (
            ("decode", DECODE_TILES, *rows, 1),
            ("prefill", PREFILL_TILES, 2, rows[1], 20 if report.is_smoke else 1024),
        ):
            case = Case.make(report, num_rows, context, count, head_dim=dim, is_fp8=is_fp8)
            run, out = case.attention(for_heads(tiles, case.shape))
            run()
            error = case.error(out)
            ms = report.time_ms([run], 10)
            num_bytes = case.key_bytes if use == "decode" else 0
            label = f"{name} {use} {num_rows} x {count} after {context}"
            report.row(
                "other_caches", label, ok=error < report.tolerance, ms=ms, num_bytes=num_bytes,
                note=f"error {error:.1e}",
            )  # fmt: skip
            if name == "fp8" and use == "decode":
                report.figures["fp8_decode_of_copy"] = num_bytes / ms * 1e3 / report.bandwidth
            del case
            report.release()


def prefill_attention(report: Report) -> None:
    sizes = [(2, 0, 20)] if report.is_smoke else [(32, 0, 256), (8, 0, 1024), (1, 0, 8192), (4, 3072, 1024)]
    for num_rows, context, count in sizes:
        case = Case.make(report, num_rows, context, count)
        heads, dim = case.shape.num_q_heads, case.shape.head_dim
        flop = 4 * heads * dim * num_rows * (count * context + count * count / 2)
        for name, tiles in (("", PREFILL_TILES), ("exact ", EXACT_TILES)):
            run, out = case.attention(tiles)
            run()
            error = case.error(out)
            report.row(
                "prefill_attention", f"{name}{num_rows} x {count} after {context}", ok=error < report.tolerance,
                ms=report.time_ms([run], 10), flop=flop, note=f"error {error:.1e}",
            )  # fmt: skip


def tile_sweep(report: Report) -> None:
    """Other tiles and grids, for the table in tiles.py."""
    case = Case.make(report, 2, 0, 20) if report.is_smoke else Case.make(report, 8, 0, 1024)
    for stages, warps, per_sm in [(3, 8, 1), (3, 8, 2), (5, 8, 1), (5, 8, 3)]:
        tiles = replace(PREFILL_TILES, num_stages=stages, num_warps=warps)
        _sweep(report, case, tiles, per_sm, f"prefill stages {stages} warps {warps} per SM {per_sm}")
    for num_rows, context in [(3, 40)] if report.is_smoke else [(256, 1024), (32, 4096)]:
        case = Case.make(report, num_rows, context - 1, 1)
        for split, stages, warps, per_sm, keys in [
            (64, 3, 4, 3, 64), (64, 5, 4, 3, 64), (64, 5, 4, 2, 64), (64, 7, 4, 2, 64), (64, 5, 4, 4, 32),
            (128, 5, 4, 3, 128), (64, 5, 4, 4, 64), (256, 5, 4, 3, 64), (64, 5, 8, 2, 64),
        ]:  # fmt: skip
            tiles = replace(DECODE_TILES, min_split=split, num_stages=stages, num_warps=warps, block_n=keys)
            shape = f"least split {split} stages {stages} warps {warps} per SM {per_sm} keys {keys}"
            label = f"B {num_rows} ctx {context} {shape}"
            _sweep(report, case, tiles, per_sm, label, num_bytes=case.key_bytes)


def _sweep(report: Report, case: Case, tiles: Tiles, per_sm: int, label: str, num_bytes: int = 0) -> None:
    """Measures a variant and its error, to find a correct variant if the compiler miscompiles the one in the table."""
    run, out = case.attention(tiles, per_sm)
    run()
    error = case.error(out)
    report.row(
        "tile_sweep", label, ok=error < report.tolerance, ms=report.time_ms([run], 10), num_bytes=num_bytes,
        note=f"error {error:.1e}",
    )  # fmt: skip


def small_kernels(report: Report) -> None:
    num_rows, hidden, inner = (3, 64, 96) if report.is_smoke else (256, 1024, 3072)
    vocab = 5000 if report.is_smoke else VOCAB
    make = lambda *size: torch.randn(*size, device=report.device).to(report.dtype)  # noqa: E731
    x, residual, weight = make(num_rows, hidden), make(num_rows, hidden), make(hidden)
    total, expected = rms_norm.reference(x, residual, weight, EPS)
    out = torch.empty_like(x)
    added = x.clone()
    rms_norm.add_rms_norm(added, residual, weight, out, EPS)
    error = max(relative_error(out, expected), relative_error(added, total))
    scratch = x.clone()
    ms = report.time_ms([lambda: rms_norm.add_rms_norm(scratch, residual, weight, out, EPS)])
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
    norms = tuple(torch.rand(dim, device=report.device).add(0.5).to(report.dtype) for _ in range(2))
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
    run = lambda: rope_store.rope_store(qkv, norms, rotary, positions, slots, cache, q, shape, EPS)  # noqa: E731
    run()
    expected = rope_store.reference(qkv, norms, rotary, positions, shape, EPS)
    stored = [pool[slots.long(), 0] for pool in cache]
    error = max(map(relative_error, [q, *stored], expected))
    report.row(
        "small_kernels", "rope_store", ok=error < report.tolerance, ms=report.time_ms([run]), note=f"error {error:.1e}"
    )


def _sampler(report: Report, num_rows: int, vocab: int) -> None:
    """Tokens of a few rows against the specification in numpy; times for all rows."""
    from request_fields.fields import SamplingParams
    from worker_svc.engine.gpu.device_rows import HEAD_WORDS, sampling_words

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
        filters = Filters(num_rows, vocab, report.device)
        scratch = sample.scratch_for(num_rows, vocab, report.device)

        def run(state=state, filters=filters, scratch=scratch, is_filtered=name == "filtered"):
            lowest = filters.thresholds(logits, state, rows) if is_filtered else None
            sample.sample(logits, state, rows, positions, lowest, scratch, out)

        run()
        found = out[0].tolist()
        checked = range(0, num_rows, max(1, num_rows // 8))
        wrong = [i for i in checked if found[i] != sample.reference(logits[i].cpu(), params[i], 1, 3 * i)]
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
    num_rows, context = (3, 40) if report.is_smoke else (64, 1500)
    case = Case.make(report, num_rows, context, 1)
    one = replace(
        case.queries, rows=case.queries.rows[1:2], starts=case.queries.starts[:2], contexts=case.queries.contexts[1:2]
    )
    single = Case(case.q[1:2].contiguous(), case.cache, one, case.num_rows.clone().fill_(1), case.shape)
    results = []
    for part in (case, single):
        run, out = part.attention(EXACT_TILES)
        run()
        results.append(out)
    report.row("invariance", f"attention exact: alone = among {num_rows}", ok=torch.equal(results[1][0], results[0][1]))
