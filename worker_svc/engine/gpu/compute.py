"""One step on the device: prepare, forward, sample; as a CUDA graph where there is one for its bucket."""

from __future__ import annotations

import bisect
import logging
from typing import Any

import torch

from worker_svc.engine.gpu.attention import Attention
from worker_svc.engine.gpu.kernels import sample
from worker_svc.engine.gpu.kernels.prepare import prepare
from worker_svc.engine.gpu.kernels.threshold import Scratch, find_thresholds
from worker_svc.engine.gpu.model import DeviceDecoder
from worker_svc.engine.gpu.parallel import Group
from worker_svc.engine.gpu.step_buffer import Bucket, HostStep, StepBuffer
from worker_svc.engine.plan import StepPlan

logger = logging.getLogger(__name__)

WARM_UP_RUNS = 2  # the first compiles, the second finds nothing left to compile


def decode_sizes(max_rows: int) -> list[int]:
    """Rows of the buckets: close together where a step is short."""
    sizes = [1, 2, 4, *range(8, min(max_rows, 256) + 1, 8), *range(288, max_rows + 1, 32)]
    return [*(size for size in sizes if size < max_rows), max_rows]


class StepCompute:
    """Runs what a step buffer holds. Results lie in `tokens` and `statuses`, int32 [max_rows], in sampling order."""

    def __init__(
        self,
        model: DeviceDecoder,
        attention: Attention,
        buffer: StepBuffer,
        state: torch.Tensor,
        block_size: int,
        vocab: range,
        group: Group,
    ) -> None:
        max_rows, device = len(state), state.device
        self._model = model
        self._attention = attention
        self._buffer = buffer
        self._state = state
        self._block_size = block_size
        self._max_rows = max_rows
        self._sizes = decode_sizes(max_rows)
        self._vocab = vocab
        self._group = group
        self._thresholds = Scratch.make(max_rows, len(vocab), device)
        self._scores, self._faults = sample.scratch_for(max_rows, len(vocab), device)
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self._cache = torch.empty(0)
        self.results = torch.zeros(2, max_rows, dtype=torch.int32, device=device)

    def use_cache(self, cache: torch.Tensor) -> None:
        """The pool that steps from now on read and write; graphs of another are void."""
        self._graphs.clear()
        self._cache = cache

    def bucket_of(self, plan: StepPlan, *, is_filtered: bool) -> Bucket:
        """What a step is padded to: single queries to a size that may be captured, others to nothing."""
        num_rows, num_tokens, num_samples = len(plan.rows), int(plan.starts[-1]), len(plan.sampling_rows)
        if num_tokens > num_rows:
            return Bucket(num_tokens, self._max_rows, num_samples, is_decode=False, is_filtered=is_filtered)
        return self._decode_bucket(max(num_rows, num_samples), is_filtered=is_filtered)

    def _decode_bucket(self, num_rows: int, *, is_filtered: bool) -> Bucket:
        size = self._sizes[bisect.bisect_left(self._sizes, num_rows)]
        return Bucket(size, size, size, is_decode=True, is_filtered=is_filtered)

    def run(self, bucket: Bucket, host: HostStep) -> None:
        """Starts the uploaded step."""
        graph = self._graphs.get(bucket)
        if graph is not None:
            graph.replay()
        else:
            self._run_eagerly(bucket, host)

    def _run_eagerly(self, bucket: Bucket, host: HostStep | None) -> None:
        columns = self._buffer.columns(bucket, host)
        queries = columns.queries
        made = (columns.token_ids, columns.positions, columns.slots)
        prepare(
            self._state, columns.num_rows, queries.rows, queries.starts, queries.contexts, columns.known, made,
            self._block_size,
        )  # fmt: skip
        logits = self._model.forward(columns, self._attention, self._cache)
        if logits is None:
            return
        lowest = None
        if bucket.is_filtered:
            lowest = find_thresholds(logits, self._state, columns.sample_rows, self._thresholds, self._group)
        sample.sample(
            logits, self._state, columns.sample_rows, columns.output_positions, lowest,
            (self._scores, self._faults), (self.results[0], self.results[1]), self._vocab.start, self._group,
        )  # fmt: skip

    def capture(self) -> int:
        """Captures all decode buckets, largest first so that they share memory. Returns how many."""
        if self._state.device.type != "cuda" or not self._attention.can_capture(is_decode=True):
            return 0
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            for is_filtered in (False, True):
                self._capture_one(self._decode_bucket(size, is_filtered=is_filtered), pool)
        return len(self._graphs)

    def _capture_one(self, bucket: Bucket, pool: Any) -> None:
        """The buffer holds a step without rows, so neither warm-up nor capture changes a row or the pool."""
        for _ in range(WARM_UP_RUNS):
            self._run_eagerly(bucket, None)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._run_eagerly(bucket, None)
        self._graphs[bucket] = graph

    def warm_up(self, max_tokens: int) -> None:
        """The largest step there is, without rows: compiles, and shows what memory a step takes."""
        bucket = Bucket(max_tokens, self._max_rows, self._max_rows, is_decode=False, is_filtered=True)
        none = torch.zeros(1, dtype=torch.int64).numpy()
        self._run_eagerly(bucket, HostStep(none, none[:0]))
