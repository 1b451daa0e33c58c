"""Attention of the CPU engine alone: microseconds per call of one layer, one thread, bfloat16 or float32.

    python bench/attention.py                      # about a minute
    python bench/attention.py --cases w3
    python bench/attention.py --numbers float32
    QUIRE_CPU_PATH=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 \
        python bench/attention.py

torch's scaled dot product attention gets contiguous keys and values of rows that all have the same lengths, so it does
less work than paged attention. A figure is the least processor time of the thread over all rounds, because other
processes disturb that least. `read` is the time to read all keys and values once from memory, and `products` the time
of all multiply-adds at the speed of one large product; each is a lower limit where it applies. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from bench.worker import Limits, measure_limits
from worker_svc.engine.backend import AttentionShape, ForwardBatch, HeadShape, KVLayout
from worker_svc.engine.cpu.backend import CpuBackend
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool

BLOCK = 16
SMALL, LARGE = HeadShape(8, 4, 32), HeadShape(16, 8, 128)
ROUND_S = 0.02  # least duration of a round


@dataclass(frozen=True)
class Case:
    """Rows that each compute `queries` tokens after `context` tokens, of which the first `shared` are common."""

    name: str
    shape: HeadShape
    rows: int
    queries: int
    context: int
    shared: int = 0

    @property
    def num_pairs(self) -> int:
        """Pairs of a query vector and a key that it sees."""
        return self.rows * self.shape.num_q_heads * sum(self.context + i + 1 for i in range(self.queries))

    @property
    def num_keys(self) -> int:
        """Different keys of all rows, per KV head."""
        return self.shared + self.rows * (self.context + self.queries - self.shared)


CASES = [
    Case("w1 decode, 64 rows", SMALL, 64, 1, 64), Case("w1 decode, 36 rows", SMALL, 36, 1, 280),
    Case("decode, 64 rows of 1,056", SMALL, 64, 1, 1056),
    Case("w3 decode, 64 rows share 1,024", SMALL, 64, 1, 1056, 1024), Case("w3 decode, one row", SMALL, 1, 1, 1056),
    Case("decode, 8 rows of 4,096", SMALL, 8, 1, 4096), Case("w3 prefill of 1,024", SMALL, 1, 1024, 0),
    Case("w3 prefill, 32 rows of 32 after 1,024", SMALL, 32, 32, 1024, 1024),
    Case("prefill of 1,024 after 3,072", SMALL, 1, 1024, 3072), Case("w2 decode, 16 rows", LARGE, 16, 1, 110),
    Case("d128 decode, 16 rows of 1,024", LARGE, 16, 1, 1024), Case("d128 prefill of 64", LARGE, 1, 64, 0),
    Case("d128 prefill of 1,024", LARGE, 1, 1024, 0), Case("d128 prefill of 256 after 3,840", LARGE, 1, 256, 3840),
]  # fmt: skip


def make_batch(case: Case) -> tuple[ForwardBatch, int]:
    """A batch over scattered blocks, and the number of blocks."""
    per_row, shared = -(-(case.context + case.queries) // BLOCK), case.shared // BLOCK
    num_blocks = shared + case.rows * (per_row - shared)
    order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    tables = np.empty((case.rows, per_row), np.int32)
    tables[:, :shared] = order[:shared]
    tables[:, shared:] = order[shared:].reshape(case.rows, -1)
    tokens = case.rows * case.queries
    starts = np.arange(0, tokens + 1, case.queries, dtype=np.int32)
    unused = np.zeros(tokens, np.int64)
    context = np.full(case.rows, case.context, np.int32)
    rows = np.arange(case.rows, dtype=np.int32)
    return ForwardBatch(unused, unused.astype(np.int32), unused, rows, starts, context, tables, unused), num_blocks


def thread_seconds(call: Callable[[], object]) -> float:
    """Seconds per call in one round of at least ROUND_S."""
    count, started = 0, time.thread_time()
    while (spent := time.thread_time() - started) < ROUND_S:
        call()
        count += 1
    return spent / count


def paged_call(backend: CpuBackend, case: Case, dtype: torch.dtype) -> Callable[[], None]:
    batch, num_blocks = make_batch(case)
    pool = KVCachePool([KVLayout.of(case.shape)], num_blocks, BLOCK, dtype)
    keys, values = pool.layer(0)
    keys.normal_()
    values.normal_()
    q = torch.randn(case.rows * case.queries, case.shape.num_q_heads, case.shape.head_dim).to(dtype)
    out = torch.empty_like(q)
    shape = AttentionShape(case.shape, case.shape.head_dim**-0.5)
    return lambda: backend.paged_attention(q, (keys, values), batch, out, shape)


def torch_call(case: Case, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Rows of the same lengths as one batch."""
    s, num_keys = case.shape, case.context + case.queries
    q = torch.randn(case.rows, s.num_q_heads, case.queries, s.head_dim).to(dtype)
    k, v = (torch.randn(case.rows, s.num_kv_heads, num_keys, s.head_dim).to(dtype) for _ in range(2))
    visible = torch.ones(case.queries, num_keys, dtype=torch.bool).tril(case.context)
    mask = None if case.queries == 1 or not case.context else visible
    attend = torch.nn.functional.scaled_dot_product_attention
    is_causal = case.queries > 1 and mask is None
    return lambda: attend(q, k, v, mask, is_causal=is_causal, enable_gqa=True)


def measure(case: Case, backend: CpuBackend, number: str, limits: Limits, args: argparse.Namespace) -> dict[str, float]:
    dtype = getattr(torch, number)
    calls: dict[str, Callable[[], object]] = {"ours": paged_call(backend, case, dtype)}
    if args.torch:
        calls["torch"] = torch_call(case, dtype)
    least = dict.fromkeys(calls, math.inf)
    for _ in range(args.rounds):
        for name, call in calls.items():
            least[name] = min(least[name], thread_seconds(call))
    kv_bytes = 2 * case.num_keys * case.shape.num_kv_heads * case.shape.head_dim * dtype.itemsize
    least["read"] = kv_bytes / limits.read
    least["products"] = 2 * case.num_pairs * case.shape.head_dim / limits.macs[number]
    return {name: round(1e6 * seconds, 1) for name, seconds in least.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave out torch")
    args = parser.parse_args()
    limits = measure_limits([args.numbers], 1)
    torch.manual_seed(0)
    backend, figures = CpuBackend(1), {}
    for case in CASES:
        if args.cases in case.name:
            found = figures[case.name] = measure(case, backend, args.numbers, limits, args)
            ratio = f"torch/ours {found['torch'] / found['ours']:5.2f}" if args.torch else ""
            print(f"{case.name:40s} {ratio}  {found}", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
