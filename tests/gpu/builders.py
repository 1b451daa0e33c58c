"""Random batches over a KV pool with NaN in every slot that was not stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_svc.engine.backend import AttentionShape, HeadShape
from worker_svc.engine.gpu.kernels import fp8
from worker_svc.engine.gpu.kernels.attention import Parts, Queries, WorkList

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# The interpreter computes tl.dot of bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16] if DEVICE.type == "cpu" else [torch.float32, torch.float16, torch.bfloat16]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN counts as infinite."""
    found, expected = found.double().cpu(), expected.double().cpu()
    error = ((found - expected).norm() / expected.norm()).item()
    return error if error == error else float("inf")


@dataclass
class AttentionCase:
    """A batch of rows with their keys and values in shuffled blocks. Everything else in the pool is NaN."""

    q: torch.Tensor
    cache: tuple[torch.Tensor, torch.Tensor]
    queries: Queries
    num_rows: torch.Tensor
    shape: HeadShape
    scales: torch.Tensor | None = None  # scales of an fp8 pool
    layer: AttentionShape | None = None  # None: plain

    @property
    def attention(self) -> AttentionShape:
        return self.layer or AttentionShape.plain(self.shape)

    @classmethod
    def make(
        cls,
        shape: HeadShape,
        rows: list[tuple[int, int]],  # (context, queries)
        *,
        dtype: torch.dtype,
        block_size: int,
        padding: int = 0,
        seed: int = 0,
        scales: torch.Tensor | None = None,
        layer: AttentionShape | None = None,
    ) -> AttentionCase:
        """Keys that no query of their row sees, because of the window of `layer`, are NaN too."""
        generator = torch.Generator().manual_seed(seed)
        lengths = [context + count for context, count in rows]
        blocks = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(blocks) + 2, generator=generator).tolist()
        tables = torch.full((len(rows) + 3, max(blocks) + 1), -1, dtype=torch.int32)
        lines = torch.randperm(len(tables), generator=generator)[: len(rows)].int()
        size = (len(order), block_size, shape.num_kv_heads, shape.head_dim)
        cache = (torch.full(size, torch.nan), torch.full(size, torch.nan))
        for line, length, count, (context, _) in zip(lines.tolist(), lengths, blocks, rows, strict=True):
            tables[line, :count] = torch.tensor([order.pop() for _ in range(count)])
            lowest = 0 if layer is None or layer.window is None else max(context + 1 - layer.window, 0)
            tables[line, : lowest // block_size] = order[0]  # blocks that are freed have no keys of the row
            keys = torch.arange(lowest, length)
            for pool in cache:
                values = torch.randn(len(keys), *size[2:], generator=generator)
                pool[tables[line].long()[keys // block_size], keys % block_size] = values
        starts = torch.tensor([0] + [count for _, count in rows]).cumsum(0)
        q = torch.randn(int(starts[-1]) + padding, shape.num_q_heads, shape.head_dim, generator=generator)
        # Padding rows hold values of an earlier step.
        stale = torch.randint(0, 9, (padding,), generator=generator)
        queries = Queries(
            rows=torch.cat((lines, stale)).int().to(DEVICE),
            starts=torch.cat((starts, stale)).int().to(DEVICE),
            contexts=torch.cat((torch.tensor([context for context, _ in rows]), stale)).int().to(DEVICE),
            tables=tables.to(DEVICE),
        )
        placed = tuple(pool.to(dtype).to(DEVICE) for pool in cache)
        if scales is not None:
            parts = zip(cache, scales, strict=True)
            placed = tuple(fp8.reference(pool, scale[:, None]).to(DEVICE) for pool, scale in parts)
        return cls(q.to(dtype).to(DEVICE), placed, queries, ints(len(rows)), shape, scales, layer)

    def empty_work(self, num_items: int = 4096, num_launches: int = 1) -> WorkList:
        work = WorkList.empty(num_items, self.q.device, num_launches)
        work.items.fill_(-1)
        work.sizes.fill_(-1)
        return work

    def empty_parts(self, num_parts: int = 4096) -> Parts:
        parts = Parts.empty(num_parts, len(self.queries.rows), self.shape, self.q.device)
        parts.out.fill_(torch.nan)
        parts.log_sum.fill_(torch.nan)
        return parts
