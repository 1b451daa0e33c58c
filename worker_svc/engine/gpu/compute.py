"""One step on the device: prepare, forward, sample. It runs as a CUDA graph if its bucket has one.

A step is padded to its bucket with rows without queries, tokens without slots and samples without a row. No real row
reads the results of padding.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from step_protocol.columns import I64
from step_protocol.messages import StepBatch
from worker_svc.engine.gpu.attention.paged import Attention, DevicePool
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.kernels.drafts import DraftTables, SampleLines, accept, output_positions, suffix
from worker_svc.engine.gpu.kernels.linears.low_rank import FEW
from worker_svc.engine.gpu.kernels.prepare import prepare
from worker_svc.engine.gpu.kernels.record import apply_deltas
from worker_svc.engine.gpu.kernels.sampler import sample
from worker_svc.engine.gpu.kernels.sampler.banned import mask_banned
from worker_svc.engine.gpu.kernels.sampler.candidates import Thresholds
from worker_svc.engine.gpu.layers.device_slots import DeviceSlots, TokenAdapters
from worker_svc.engine.gpu.model import DeviceDecoder
from worker_svc.engine.gpu.step.device_step import DeviceLogits, DeviceStep
from worker_svc.engine.gpu.step.graphs import Graphs, Recorder
from worker_svc.engine.gpu.step.logprobs import Scorer
from worker_svc.engine.gpu.step.pooling import DevicePooling
from worker_svc.engine.gpu.step.processing import DeviceProcessing
from worker_svc.engine.gpu.step.step_buffer import Bucket, HostStep, StepBuffer, StepColumns
from worker_svc.engine.pooling.weights import PoolingWeights
from worker_svc.engine.step import CheckedStep, RowErrors

NO_ROWS = HostStep(np.zeros(1, np.int64), np.zeros(0, np.int64))
NO_IDS: I64 = np.zeros(0, np.int64)
NO_PLAN = CheckedStep(NO_IDS, NO_IDS, NO_IDS, NO_IDS, NO_IDS, NO_IDS, NO_IDS, NO_IDS, NO_IDS, has_forks=False)
NO_BATCH = StepBatch(0, *(np.zeros(0, np.uint32),) * 3, np.zeros(0, np.bool_), np.zeros(0, np.uint32))
MIN_MIXED = 128  # tokens of the smallest bucket with prompts


def decode_sizes(max_rows: int) -> list[int]:
    """Row counts of the decode buckets, closely spaced for short steps."""
    sizes = [1, 2, 4, *range(8, min(max_rows, 256) + 1, 8), *range(288, max_rows + 1, 32)]
    return [*(size for size in sizes if size < max_rows), max_rows]


def mixed_sizes(max_tokens: int) -> list[int]:
    """Token counts of the buckets for steps with prompts: 2^n and 1.5 * 2^n, so at most a third is padding."""
    sizes, size = [], MIN_MIXED
    while size < max_tokens:
        sizes += [size, size * 3 // 2]
        size *= 2
    return [*(size for size in sizes if size < max_tokens), max_tokens] if max_tokens else []


def rare_sizes(sizes: list[int]) -> list[int]:
    """Powers of two and the largest: few graphs for steps that are rare."""
    return [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]


def shorter_sizes(max_tokens: int) -> list[int]:
    """Token counts that use every tile of linear layers and experts: those tiles change at least twofold apart."""
    sizes, size = [], 1
    while size < max_tokens:
        sizes.append(size)
        size *= 2
    return sizes


def _largest_first(sizes: list[int]) -> list[int]:
    """The largest size, then the others from the smallest."""
    return [*sizes[-1:], *sizes[:-1]]


class StepCompute:
    """Runs the step in a step buffer. `results` int32 [2, max_samples] are its tokens and their statuses."""

    def __init__(
        self,
        model: DeviceDecoder,
        attention: Attention,
        buffer: StepBuffer,
        state: torch.Tensor,
        block_size: int,
        vocab: range,
        group: Group,
        graph_tokens: int,
        pooling: PoolingWeights,
        adapters: DeviceSlots | None = None,
        drafts: DraftTables | None = None,
    ) -> None:
        """`graph_tokens`: the token limit of steps with prompts that are captured as CUDA graphs. `drafts`: None: the
        worker computes none."""
        max_rows, device = len(state), state.device
        self._model = model
        self._buffer = buffer
        self._state = state
        self._block_size = block_size
        self._max_rows = max_rows
        self._group = group
        self._adapters = adapters
        self.drafts = drafts
        self._max_samples = max_samples = buffer.max_samples
        self._sizes = decode_sizes(max_rows)
        self._verify_sizes = (
            [] if drafts is None or model.config.is_recurrent else rare_sizes(decode_sizes(max_samples))[1:]
        )
        self._vocab = vocab
        self._thresholds = Thresholds(max_samples, model.config.vocab_size, device, group)
        self._scores, self._faults = sample.scratch_for(max_samples, len(vocab), device)
        self._graph_tokens = graph_tokens
        self.use_attention(attention)
        self._graphs: Graphs | None = None
        self._is_eager = False
        self._graph_logits: dict[Bucket, torch.Tensor | None] = {}  # results of graphs that end at logits
        self.rotary_at = model.rotary_at
        self.processing = DeviceProcessing(state, vocab)
        self.scorer = Scorer(vocab, group, device)
        self.pooling = DevicePooling(pooling, model.final_norm, model.max_positions, max_rows, self.scorer)
        self.results = torch.zeros(2, max_samples, dtype=torch.int32, device=device)
        self._kept = torch.zeros(max_samples, dtype=torch.int32, device=device)  # rows of samples that are tokens

    def use_attention(self, attention: Attention) -> None:
        """Sets the attention of all later steps."""
        self._attention = attention
        # Recurrent layers of prompts need lengths on the host
        can_capture = attention.can_capture(is_decode=False) and not self._model.config.is_recurrent
        self._mixed_sizes = mixed_sizes(self._graph_tokens) if can_capture else []

    def use_cache(self, cache: DevicePool) -> None:
        """Sets the KV pool of all later steps."""
        self._cache = cache

    def buckets(self) -> list[Bucket]:
        """All buckets that may get a graph, the most useful first, because memory or time may not suffice for all.

        Most steps are decode steps, and short steps gain most. But the largest of a kind comes first: later graphs use
        its memory again.
        """
        found: list[Bucket] = []
        if not self._model.has_logits:
            return found  # all its rows are pooled, which graphs do not compute
        if self._attention.can_capture(is_decode=True):
            found += [self._decode_bucket(size, is_filtered=False) for size in _largest_first(self._sizes)]
        found += [self._mixed_bucket(size, is_filtered=False) for size in _largest_first(self._mixed_sizes)]
        found += [self._verify_bucket(size, is_filtered=False) for size in _largest_first(self._verify_sizes)]
        return [replace(bucket, is_filtered=is_filtered) for bucket in found for is_filtered in (False, True)]

    def _rare_buckets(self) -> list[Bucket]:
        """Of steps that end at their logits, have adapters, or have drafts beside prompts."""
        sizes = {*rare_sizes(self._sizes), *rare_sizes(self._mixed_sizes), *self._verify_sizes}
        chosen = [bucket for bucket in self.buckets() if bucket.tokens in sizes]
        if self.drafts is not None:
            chosen += [self._with_drafts(bucket) for bucket in chosen if bucket.has_prompts]
        found = [replace(bucket, ends_at_logits=True) for bucket in chosen if not bucket.is_filtered]
        found += [bucket for bucket in chosen if bucket.has_drafts and not bucket.is_verify]
        if self._adapters is None:
            return found
        return found + [replace(bucket, has_adapters=True) for bucket in (*chosen, *found)]

    def record(self, recorder: Recorder, limit: int, progress: Callable[[float], None], *, is_lazy: bool) -> None:
        """Records graphs, within `limit` bytes, for later steps to use. The pool must not change afterwards."""
        self._graphs = Graphs(
            self._compute_in_graph, self.buckets(), recorder, limit, self._group, is_lazy=is_lazy,
            rare_buckets=self._rare_buckets(),
        )  # fmt: skip
        self._graphs.record_at_start(progress)

    @property
    def has_used(self) -> bool:
        """Whether a rare size was used that has no graph and may get one."""
        return self._graphs is not None and self._graphs.has_used

    def record_used(self) -> bool:
        """Records a graph of steps that are rare, while the worker is idle. False if there is none to record."""
        return self._graphs is not None and self._graphs.record_used()

    @property
    def num_graphs(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Launches steps kernel by kernel, padded like their graphs, because libraries choose kernels by size."""
        was_eager, self._is_eager = self._is_eager, True
        try:
            yield
        finally:
            self._is_eager = was_eager

    def bucket_of(
        self, plan: CheckedStep, *, is_filtered: bool, ends_at_logits: bool = False, has_adapters: bool = False
    ) -> Bucket:
        """The bucket that a step is padded to. A step with prompts is not padded if it has no graph."""
        num_rows, num_tokens, num_samples = len(plan.rows), int(plan.starts[-1]), len(plan.sampling_rows)
        is_filtered, is_rare = is_filtered and not ends_at_logits, ends_at_logits or has_adapters
        has_drafts = plan.num_after is not None
        if num_tokens == num_rows and not has_drafts:
            bucket = self._decode_bucket(max(num_rows, num_samples), is_filtered=is_filtered, is_rare=is_rare)
            return replace(bucket, ends_at_logits=ends_at_logits, has_adapters=has_adapters)
        if has_drafts and self._verify_sizes and self._is_verify(plan):
            bucket = self._verify_bucket(num_tokens, is_filtered=is_filtered)
            return replace(bucket, ends_at_logits=ends_at_logits, has_adapters=has_adapters)
        is_rare |= has_drafts
        size = max(num_tokens, num_samples)
        if self._graphs is not None and size <= max(self._mixed_sizes, default=0):
            bucket = replace(
                self._mixed_bucket(size, is_filtered=is_filtered, is_rare=is_rare), ends_at_logits=ends_at_logits,
                has_adapters=has_adapters,
            )  # fmt: skip
            bucket = self._with_drafts(bucket) if has_drafts else bucket
            if self._graphs.serves(bucket):
                return bucket
        return Bucket(
            num_tokens, self._max_rows, num_samples, is_decode=False, is_filtered=is_filtered,
            ends_at_logits=ends_at_logits, has_adapters=has_adapters, has_drafts=has_drafts,
        )  # fmt: skip

    def _is_verify(self, plan: CheckedStep) -> bool:
        """Whether all rows of a step decode, some with drafts."""
        num_queries = int((plan.starts[1:] - plan.starts[:-1]).max())
        num_tokens = int(plan.starts[-1])
        return len(plan.sampling_rows) == num_tokens and num_queries <= self._attention.most_queries

    def _verify_bucket(self, num_tokens: int, *, is_filtered: bool) -> Bucket:
        """One per number of tokens: few graphs for any mix of rows and drafts."""
        size = self._verify_sizes[bisect.bisect_left(self._verify_sizes, num_tokens)]
        rows = min(size, self._max_rows)
        return Bucket(size, rows, size, is_decode=False, is_filtered=is_filtered, has_drafts=True, is_verify=True)

    def _with_drafts(self, bucket: Bucket) -> Bucket:
        return replace(bucket, samples=min(bucket.tokens, self._max_samples), has_drafts=True)

    def _decode_bucket(self, num_rows: int, *, is_filtered: bool, is_rare: bool = False) -> Bucket:
        sizes = rare_sizes(self._sizes) if is_rare else self._sizes
        size = sizes[bisect.bisect_left(sizes, num_rows)]
        return Bucket(size, size, size, is_decode=True, is_filtered=is_filtered)

    def _mixed_bucket(self, num_tokens: int, *, is_filtered: bool, is_rare: bool = False) -> Bucket:
        sizes = rare_sizes(self._mixed_sizes) if is_rare else self._mixed_sizes
        size = sizes[bisect.bisect_left(sizes, num_tokens)]
        rows = min(size, self._max_rows)
        return Bucket(size, rows, rows, is_decode=False, is_filtered=is_filtered)

    def run(self, bucket: Bucket, host: HostStep, step: DeviceStep, *, is_filtered: bool) -> None:
        """Launches the uploaded step. `is_filtered` is as in Bucket, for every step. The parts of the step take part in
        it if it ends at logits."""
        finish = partial(self._finish, bucket, step, is_filtered=is_filtered)
        if step.states:
            self._run_with_states(bucket, host, step, finish)
        else:
            self._run(bucket, host, finish)

    def _finish(self, bucket: Bucket, step: DeviceStep, values: torch.Tensor, *, is_filtered: bool) -> None:
        """Launches the kernels behind the logits one by one."""
        columns = self._buffer.columns(bucket)
        kept = columns.sample_rows if self.drafts is None else self._kept[: bucket.samples]
        logits = DeviceLogits(values, columns, kept)
        parts = [part for part in step.parts if part.in_use]
        for part in parts:
            part.process(step, logits)
        self._sample(columns, logits.values, is_filtered=is_filtered)
        for part in parts:
            part.sampled(step, logits, self.results[0, : bucket.samples])

    def _run_with_states(
        self, bucket: Bucket, host: HostStep, step: DeviceStep, finish: Callable[[torch.Tensor], None]
    ) -> None:
        """Launches a step without a graph, of which parts need hidden states."""
        columns = self._prepare(bucket, host)
        tokens = [columns.sample_tokens.long(), *(self.scorer.upload(tokens) for tokens, _ in step.states)]
        hidden = self._model.hidden(columns, self._attention, self._cache, torch.cat(tokens))
        sampled, *wanted = torch.split(hidden, [len(part) for part in tokens])
        for states, (_, read) in zip(wanted, step.states, strict=True):
            read(states, self._model.logits)
        if len(sampled) and self._model.has_logits:
            finish(self._model.logits(sampled))

    def _run(self, bucket: Bucket, host: HostStep, finish: Callable[[torch.Tensor], None]) -> None:
        """`finish` gets the logits of a step that ends at them."""
        graphs = None if self._is_eager else self._graphs
        is_replayed = graphs is not None and host.fits_graph and graphs.replay(bucket)
        logits = self._graph_logits.get(bucket) if is_replayed else self._compute(bucket, host)
        if bucket.ends_at_logits and logits is not None:
            finish(logits)
        if graphs is not None and not is_replayed:
            graphs.record_after(bucket)

    def _compute_in_graph(self, bucket: Bucket) -> None:
        self._graph_logits[bucket] = self._compute(bucket, None)

    def _compute(self, bucket: Bucket, host: HostStep | None) -> torch.Tensor | None:
        """Returns the logits of a step that ends at them; other steps are sampled."""
        columns = self._prepare(bucket, host)
        logits = self._model.forward(columns, self._attention, self._cache)
        if logits is None or bucket.ends_at_logits:
            return logits
        if bucket.is_filtered:
            mask_banned(logits, self._state, columns.sample_rows, columns.output_positions, self._vocab.start)
        self._sample(columns, logits, is_filtered=bucket.is_filtered)
        return None

    def _prepare(self, bucket: Bucket, host: HostStep | None) -> StepColumns:
        columns = self._buffer.columns(bucket, host)
        queries = columns.queries
        made = (columns.token_ids, columns.positions, columns.slots)
        prepare(
            self._state, columns.num_rows, queries.rows, queries.starts, queries.contexts, columns.known, made,
            self._block_size, self.drafts,
        )  # fmt: skip
        if bucket.has_drafts:
            output_positions(_lines(columns), self._state, columns.output_positions)
        if self._adapters is None or not bucket.has_adapters:
            return columns
        return replace(columns, adapters=TokenAdapters(self._adapters, self._buffer.adapter_slots(bucket)))

    def _sample(self, columns: StepColumns, logits: torch.Tensor, *, is_filtered: bool) -> None:
        lowest = None
        if is_filtered:
            lowest = self._thresholds.find(logits, self._state, columns.sample_rows)
        sample.sample(
            logits, self._state, columns.sample_rows, columns.output_positions, lowest,
            (self._scores, self._faults), (self.results[0], self.results[1]), self._vocab.start, self._group,
        )  # fmt: skip
        if self.drafts is not None:
            accept(_lines(columns), self._state, (self.results[0], self.results[1]), self.drafts, self._kept)
            suffix(_lines(columns), self._state, self.drafts)

    def warm_up(self, max_tokens: int) -> None:
        """Runs steps without rows, the largest and some shorter ones: this compiles all kernels, whose tiles depend on
        the number of tokens, and allocates their memory.

        Call it only at start-up, because it writes to a row record.
        """
        apply_deltas(self._state, self._state.new_zeros(1, 2))
        for is_filtered in (False, True):
            rows = self._max_rows
            bucket = Bucket(max_tokens, rows, rows, is_decode=False, is_filtered=is_filtered)
            if self.drafts is not None:
                bucket = self._with_drafts(bucket)
            self.run_empty(bucket)
            self.run_empty(replace(bucket, ends_at_logits=True))
        self.scorer.warm_up(bucket.samples)
        for size in shorter_sizes(max_tokens):
            rows = min(size, self._max_rows)
            self.run_empty(Bucket(size, rows, rows, is_decode=False, is_filtered=False))
        self._warm_up_states(max_tokens)
        self._warm_up_adapters(max_tokens)

    def _warm_up_adapters(self, max_tokens: int) -> None:
        """Steps with adapters whose tiles differ. Their tokens have none, so the kernels return at once."""
        if self._adapters is None:
            return
        for size in (min(FEW, max_tokens), max_tokens):
            rows = min(size, self._max_rows)
            self.run_empty(Bucket(size, rows, rows, is_decode=False, is_filtered=False, has_adapters=True))

    def _warm_up_states(self, max_tokens: int) -> None:
        """Computes the hidden states of all tokens, as a mean over a prompt needs them."""
        bucket = Bucket(max_tokens, self._max_rows, 0, is_decode=False, is_filtered=False, ends_at_logits=True)
        columns = self._prepare(bucket, NO_ROWS)
        tokens = self.scorer.upload(np.arange(max_tokens))
        self.pooling.warm_up(self._model.hidden(columns, self._attention, self._cache, tokens))

    def run_empty(self, bucket: Bucket) -> None:
        """Runs a step of this bucket without rows."""
        step = DeviceStep(NO_BATCH, NO_PLAN, RowErrors(), [self.processing])
        with self.eager():
            self.run(bucket, NO_ROWS, step, is_filtered=bucket.is_filtered)


def _lines(columns: StepColumns) -> SampleLines:
    return SampleLines(columns.sample_rows, columns.nth, columns.sample_tokens, columns.token_ids, columns.positions)
