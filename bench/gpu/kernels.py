"""Attention alone: error against float32, and speed relative to a copy and a large matrix product of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

from bench.gpu.report import Report, relative_error
from worker_svc.engine.backend import AttentionShape, HeadShape, Norm
from worker_svc.engine.config import Determinism
from worker_svc.engine.gpu.attention import paged as engine_attention
from worker_svc.engine.gpu.attention.paged import Attention, LayerCache, TritonAttention
from worker_svc.engine.gpu.kernels import norm
from worker_svc.engine.gpu.kernels.attention import AttentionTiles, Queries
from worker_svc.engine.gpu.step.step_buffer import Bucket, HostStep, StepColumns

QWEN3_HEADS = HeadShape(16, 8, 128)
SMOKE_HEADS = HeadShape(4, 2, 16)
LINE = 16  # words; a kernel is compiled for tables whose rows are whole lines, and for others
DECODE_SIZES = [(1, 512), (1, 4096), (32, 512), (32, 4096), (256, 512), (256, 4096)]
TARGET_OF_COPY = 0.8
NANO = "lengths of nano-vllm"


def nano_contexts(num_rows: int = 256) -> list[int]:
    """Tokens of the rows of nano-vllm's benchmark halfway: a prompt of 100 to 1,024, and a part of as many outputs."""
    rng = np.random.default_rng(0)
    outputs = rng.integers(100, 1025, num_rows)
    return (rng.integers(100, 1025, num_rows) + (outputs * rng.random(num_rows)).astype(int)).tolist()


def ceilings(report: Report) -> None:
    size = 1 << 20 if report.is_smoke else 1 << 31
    source = torch.zeros(size // 4, dtype=torch.float32, device=report.device)
    target = torch.empty_like(source)
    # A kernel: in a graph, copy_ is a copy engine, which is slower.
    ms = report.time_ms([lambda: torch.mul(source, 1.0, out=target)])
    report.bandwidth = 2 * size / ms * 1e3
    report.row("ceilings", "copy", ms=ms, num_bytes=2 * size)
    n = 128 if report.is_smoke else 8192
    a, b = (torch.randn(n, n, device=report.device).to(report.dtype) for _ in range(2))
    ms = report.time_ms([lambda: a @ b])
    report.tflops = 2 * n**3 / ms * 1e3
    report.row("ceilings", f"matmul {n}", ms=ms, flop=2 * n**3)
    report.figures["copy_gb_s"], report.figures["matmul_tflops"] = report.bandwidth / 1e9, report.tflops / 1e12
    _launches(report)


def _launches(report: Report) -> None:
    """Time per short kernel when many follow each other in a graph, with and without an early start."""
    x = torch.randn(1, 64 if report.is_smoke else 1024, device=report.device).to(report.dtype)
    out, rms = torch.empty_like(x), Norm(torch.ones_like(x[0]), None, 1e-6)
    run = lambda: norm.add_norm(x, None, rms, out)  # noqa: E731
    kinds = {"pdl_launch_us": norm.dependent, "launch_us": lambda: {"PDL": False}}
    for key, arguments in kinds.items():
        with mock.patch.object(norm, "dependent", arguments):
            ms = report.time_ms([run] * (2 if report.is_smoke else 200))
        name = "a short kernel that starts early" if key.startswith("pdl") else "a short kernel"
        report.row("ceilings", name, ms=ms, note=f"{ms * 1e3:.2f} us")
        report.figures[key] = ms * 1e3


@dataclass
class Case:
    """Rows with random keys and values in one layer's pool, and queries for them."""

    q: torch.Tensor
    cache: LayerCache
    columns: StepColumns
    layer: AttentionShape

    @classmethod
    def make(
        cls,
        report: Report,
        contexts: Sequence[int],
        num_queries: int = 1,
        block_size: int = 256,
        head_dim: int = 128,
        *,
        is_fp8: bool = False,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Case:
        """`contexts`: for each row the tokens in the pool before its `num_queries` new ones."""
        shape = HeadShape(4, 2, head_dim // 8) if report.is_smoke else HeadShape(16, 8, head_dim)
        block_size = 16 if report.is_smoke else block_size
        counts = [-(-(context + num_queries) // block_size) for context in contexts]
        pool = (sum(counts), block_size, shape.num_kv_heads, shape.head_dim)
        keys, values = (torch.randn(pool, device=report.device, dtype=report.dtype) for _ in range(2))
        scales = None
        if is_fp8:
            scales = torch.full((3, shape.num_kv_heads), 0.25, device=report.device)
            keys, values = ((x / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn) for x in (keys, values))
        q = torch.randn(len(contexts) * num_queries, shape.num_q_heads, shape.head_dim, device=report.device)
        columns = _columns(_tables(counts), contexts, num_queries, report.device)
        layer = replace(AttentionShape.plain(shape), window=window, soft_cap=soft_cap)
        return cls(q.to(report.dtype), LayerCache(keys, values, scales), columns, layer)

    @property
    def shape(self) -> HeadShape:
        return self.layer.heads

    def row(self, index: int) -> Case:
        """One of the rows alone, over the same pool. Cases with one query per row only."""
        tables = self.columns.queries.tables[index : index + 1].clone()
        columns = _columns(tables, self.contexts[index : index + 1], 1, self.q.device)
        return Case(self.q[index : index + 1].clone(), self.cache, columns, self.layer)

    def last(self, count: int) -> Case:
        """The last queries of the only row, over the same pool."""
        context = self.contexts[0] + len(self.q) - count
        columns = _columns(self.columns.queries.tables.clone(), [context], count, self.q.device)
        return Case(self.q[-count:].clone(), self.cache, columns, self.layer)

    @property
    def num_rows(self) -> int:
        return len(self.contexts)

    @property
    def contexts(self) -> list[int]:
        return [int(context) for context in self._host.contexts]

    @property
    def longest(self) -> int:
        """A limit of the tokens of a row."""
        return max(self.contexts) + len(self.q)

    @property
    def block_size(self) -> int:
        return self.cache.keys.shape[1]

    @property
    def _host(self) -> HostStep:
        if self.columns.host is None:
            raise RuntimeError("a case has its lengths on the host")
        return self.columns.host

    def triton(self, determinism: Determinism = "best_effort") -> TritonAttention:
        """The engine's own attention."""
        return TritonAttention(
            self.shape, determinism, windows=[self.layer.window], max_rows=self.num_rows, max_tokens=len(self.q),
            num_layers=1, dtype=self.q.dtype, device=self.q.device,
        )  # fmt: skip

    def run(self, attention: Attention) -> tuple[Callable[[], None], torch.Tensor]:
        """A function that computes a step of one layer, after its first run, and its output."""
        out = torch.full_like(self.q, float("nan"))

        def run() -> None:
            attention.begin(self.columns)
            attention.attend(self.q, self.cache, self.columns, self.layer, out)

        run()
        return run, out

    def expected(self, row: int) -> torch.Tensor:
        """Attention of one row in float32."""
        first, last = (int(start) for start in self._host.starts[row : row + 2])
        num_keys = self.contexts[row] + last - first
        k, v = (self._gathered(pool, row)[:num_keys] for pool in self.cache.pools)
        if self.cache.scales is not None:
            k, v = k * self.cache.scales[0, :, None], v * self.cache.scales[1, :, None]
        keys = torch.arange(num_keys, device=k.device)
        place = num_keys - last + first + torch.arange(last - first, device=k.device)[:, None]
        is_visible = keys[None] <= place
        if self.layer.window is not None:
            is_visible &= keys[None] > place - self.layer.window
        q, k, v = (x.transpose(0, 1)[None] for x in (self.q[first:last].float(), k, v))
        if self.layer.soft_cap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=is_visible, enable_gqa=True)[0].transpose(0, 1)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * self.layer.scale / self.layer.soft_cap
        weights = (self.layer.soft_cap * scores.tanh()).masked_fill(~is_visible, -torch.inf).softmax(-1)
        return (weights @ v)[0].transpose(0, 1)

    def _gathered(self, pool: torch.Tensor, row: int) -> torch.Tensor:
        blocks = self.columns.queries.tables[row].long()
        found = pool[blocks] if pool.itemsize > 1 else pool.view(torch.uint8)[blocks].view(pool.dtype)
        return found.flatten(0, 1).float()

    def error(self, out: torch.Tensor) -> float:
        """The largest error of the first, the middle and the last row."""
        worst = 0.0
        for row in {0, self.num_rows // 2, self.num_rows - 1}:
            first, last = (int(start) for start in self._host.starts[row : row + 2])
            worst = max(worst, relative_error(out[first:last], self.expected(row)))
        return worst

    @property
    def key_bytes(self) -> int:
        """Bytes of keys and values that a layer of a decode step reads."""
        most = self.layer.window or max(self.contexts) + 1
        num_keys = sum(min(context + 1, most) for context in self.contexts)
        return 2 * num_keys * self.shape.num_kv_heads * self.shape.head_dim * self.cache.keys.itemsize


def _tables(counts: list[int]) -> torch.Tensor:
    """Block tables of rows with these numbers of blocks, in random order. Their stride is no multiple of a line."""
    tables = torch.zeros(len(counts), -(-max(counts) // LINE) * LINE + 1, dtype=torch.int32)
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    for row, found in enumerate(blocks.split(counts)):
        tables[row, : len(found)] = found
    return tables


def _columns(tables: torch.Tensor, contexts: Sequence[int], num_queries: int, device: torch.device) -> StepColumns:
    num_rows = len(contexts)
    host = HostStep(np.arange(num_rows + 1) * num_queries, np.array(contexts, np.int64))
    ints = {"dtype": torch.int32, "device": device}
    queries = Queries(
        rows=torch.arange(num_rows, **ints),
        starts=torch.tensor(host.starts, **ints),
        contexts=torch.tensor(host.contexts, **ints),
        tables=tables.to(device),
    )
    size = num_rows * num_queries
    bucket = Bucket(size, num_rows, num_rows, is_decode=num_queries == 1, is_filtered=False)
    unused = torch.zeros(1, **ints)
    return StepColumns(
        bucket=bucket, num_rows=torch.tensor([num_rows], **ints), queries=queries, sample_rows=unused,
        sample_tokens=unused, nth=unused, output_positions=unused, known=unused, token_ids=unused, positions=unused,
        slots=unused, host=host,
    )  # fmt: skip


@contextmanager
def using(use: str, tiles: AttentionTiles) -> Iterator[None]:
    """Attention that is made here uses these tiles for decode or prefill."""
    with mock.patch.object(engine_attention, f"{use.upper()}_TILES", tiles):
        yield


def measure(
    report: Report, section: str, name: str, case: Case, attention: Attention, *, flop: float = 0, repeats: int = 20
) -> float:
    """A row with the error and the time of a layer; returns milliseconds, infinite if it is wrong."""
    run, out = case.run(attention)
    error = case.error(out)
    ms = report.time_ms([run], repeats)
    num_bytes = 0 if flop else case.key_bytes
    ok = error < report.tolerance
    report.row(section, name, ok=ok, ms=ms, num_bytes=num_bytes, flop=flop, note=f"error {error:.1e}")
    return ms if ok else float("inf")


def decode_attention(report: Report) -> None:
    """Equal rows, and the lengths of nano-vllm's benchmark."""
    sizes = [(f"B {rows} ctx {context}", [context - 1] * rows) for rows, context in DECODE_SIZES]
    sizes.append((NANO, nano_contexts()))
    if report.is_smoke:
        sizes = [("B 3 ctx 40", [39] * 3), (NANO, [5, 40, 17])]
    for name, contexts in sizes:
        for block_size in (256,) if len(contexts) < 256 else (16, 64, 256):
            case = Case.make(report, contexts, block_size=block_size)
            label = f"{name} block {case.block_size}"
            ms = measure(report, "decode_attention", label, case, case.triton())
            measure(report, "decode_attention", f"exact {label}", case, case.triton("exact"))
            if name == NANO and block_size == 256:
                found = report.figures["decode_of_copy"] = case.key_bytes / ms * 1e3 / report.bandwidth
                ok = None if report.is_smoke else found >= TARGET_OF_COPY
                report.row("decode_attention", "of copy bandwidth", ok=ok, note=f"{found:.1%}, {NANO}, goal 80 %")
            del case
            report.release()


def prefill_flop(case: Case, num_queries: int) -> float:
    """FLOP of causal attention."""
    keys = sum(num_queries * context + num_queries**2 / 2 for context in case.contexts)
    return 4 * case.shape.num_q_heads * case.shape.head_dim * keys


def prefill_attention(report: Report) -> None:
    sizes = [(2, 0, 20)] if report.is_smoke else [(32, 0, 256), (8, 0, 1024), (1, 0, 8192), (4, 3072, 1024)]
    for num_rows, context, count in sizes:
        case = Case.make(report, [context] * num_rows, count)
        for name, determinism in (("", "best_effort"), ("exact ", "exact")):
            measure(
                report, "prefill_attention", f"{name}{num_rows} x {count} after {context}", case,
                case.triton(determinism), flop=prefill_flop(case, count), repeats=10,
            )  # fmt: skip


def other_caches(report: Report) -> None:
    """fp8 keys and values, windows, soft caps, head sizes that are not powers of two: prompts and single queries."""
    num_rows, context = (3, 40) if report.is_smoke else (256, 2048)
    kinds: dict[str, dict[str, Any]] = {
        "fp8": {"is_fp8": True}, "window": {"window": 30 if report.is_smoke else 1024}, "soft cap": {"soft_cap": 50.0},
        "dim 80": {"head_dim": 80}, "dim 96": {"head_dim": 96}, "dim 112": {"head_dim": 112},
    }  # fmt: skip
    if not report.is_smoke:
        kinds["dim 256"] = {"head_dim": 256}
    for name, fields in kinds.items():
        for use, contexts, count in (
            ("decode", [context] * num_rows, 1),
            ("prefill", [context] * 2, 20 if report.is_smoke else 1024),
        ):
            case = Case.make(report, contexts, count, **fields)
            label = f"{name} {use} {len(contexts)} x {count} after {context}"
            flop = 0.0 if use == "decode" else prefill_flop(case, count)
            ms = measure(report, "other_caches", label, case, case.triton(), flop=flop, repeats=10)
            report.figures[f"attention_ms_{use}_{name.replace(' ', '_')}"] = ms
            if name == "fp8" and use == "decode":
                report.figures["fp8_decode_of_copy"] = case.key_bytes / ms * 1e3 / report.bandwidth
            del case
            report.release()
