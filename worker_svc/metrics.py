"""Metrics of the worker: the work of its model thread, step by step."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from step_protocol.messages import StepBatch
from svc_common.calls import RpcStats
from svc_common.observe.metrics import SHORT_TIMES_S, Buckets, Row, ServiceMetrics, Spec, make_registry
from svc_common.security.tls import certificate_files
from worker_svc.engine.adapters.store import AdapterStore
from worker_svc.engine.config import EngineInfo
from worker_svc.engine.speculation.drafts import DraftCounts

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STEP_TIMES_S = (*SHORT_TIMES_S, 60.0)
IDLE_TIMES_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1, 10)

SPECS = (
    Spec(
        "worker_info", "gauge", "1; the loaded model in its labels",
        labels=("model_name", "dtype", "determinism", "backend", "block_size", "num_blocks", "max_num_seqs"),
    ),
    Spec("worker_load_progress", "gauge", "fraction of weights loaded, 0 to 1"),
    Spec("worker_ready", "gauge", "1 while the model is loaded, a scheduler holds this worker, and it does not drain"),
    Spec("worker_leases_total", "counter", "times that a scheduler has leased this worker"),
    Spec("worker_rows_used", "gauge", "rows that hold a sequence"),
    Spec("worker_steps_in_flight", "gauge", "steps accepted and not yet answered"),
    Spec("worker_step_seconds", "histogram", "time of one step in the model thread", "seconds"),
    Spec("worker_step_queue_seconds", "histogram", "time that a step waited for earlier steps", "seconds"),
    Spec("worker_step_rows", "histogram", "rows that one step computes"),
    Spec(
        "worker_tokens_total", "counter",
        "tokens computed, by stage: prefill (rows that compute more than one in a step) and decode", "tokens",
        ("stage",),
    ),
    Spec("worker_encoder_inputs_total", "counter", "encoder inputs computed; cached ones are not computed again"),
    Spec("worker_adapters_loaded", "gauge", "LoRA adapters in host memory"),
    Spec("worker_adapters_resident", "gauge", "LoRA adapters that rows can use without a swap"),
    Spec("worker_adapter_swaps_total", "counter", "times that a LoRA adapter became resident"),
    Spec(
        "worker_idle_seconds", "histogram",
        "idle time of the model before a step while rows were open: the cost of scheduling and network", "seconds",
    ),
    Spec(
        "worker_draft_tokens_total", "counter", "drafts computed, by proposer and position in the row's step, from 1",
        "tokens", ("proposer", "position"),
    ),
    Spec(
        "worker_accepted_draft_tokens_total", "counter", "drafts that became output tokens", "tokens",
        ("proposer", "position"),
    ),
    Spec("worker_images_encoded_total", "counter", "images that the vision tower computed"),
    Spec("worker_image_cache_hits_total", "counter", "images of rows that were computed before and still kept"),
    Spec("worker_image_cache_bytes", "gauge", "embeddings of images that are kept", "bytes"),
    Spec(
        "worker_kv_tier_bytes", "gauge", "records of a tier: memory (--kv-host-memory), disk (--kv-disk)", "bytes",
        ("tier",),
    ),
    Spec(
        "worker_kv_tier_writable", "gauge",
        "1 while this worker writes to a tier, 0 if it only reads the folder of another one", labels=("tier",),
    ),
    Spec("worker_kv_tier_queued_blocks", "gauge", "committed blocks that the writer of the tiers has not looked at"),
    Spec(
        "worker_kv_tier_reads_total", "counter",
        "blocks read from a tier, by result: hit, miss (in no tier), corrupt (its checksum or key differs; not used)",
        labels=("tier", "result"),
    ),
    Spec("worker_kv_tier_read_seconds_total", "counter", "time of the hits, checks included", "seconds", ("tier",)),
    Spec("worker_kv_tier_read_bytes_total", "counter", "bytes read from a tier", "bytes", ("tier",)),
    Spec("worker_kv_tier_written_bytes_total", "counter", "bytes written to a tier", "bytes", ("tier",)),
    Spec(
        "worker_kv_tier_dropped_blocks_total", "counter",
        "committed blocks that were not written: evicted before their turn, no lock, or the disk refused",
        labels=("tier",),
    ),
    Spec("worker_kv_tier_errors_total", "counter", "errors of the file system", labels=("tier",)),
    Spec(
        "worker_kv_transfer_bytes_total", "counter",
        "bytes of blocks exchanged with other workers, by direction: in, out", "bytes", ("direction",),
    ),
    Spec(
        "worker_kv_transfer_refused_blocks_total", "counter",
        "blocks of other workers that were not used, because checksum, key or tokens differ",
    ),
)  # fmt: skip
STUCK_AFTER_S = 10.0  # a shorter step never hangs
STUCK_TIMES = 10.0  # a step that takes this many times as long as earlier ones hangs
MIN_MEASURED = 8  # steps of a size before one of them is judged
SLOWEST_DECAY = 0.99  # per step
MAX_LOOK_S = 5.0


class StuckWatch:
    """Tells a step that hangs from a slow one by the times of earlier steps with about as many tokens.

    `begin` and `end` are called in the thread that waits for the step, `look` by the event loop. Only time between two
    looks counts, at most MAX_LOOK_S each, so that a stopped process or a suspended machine is no hang. The first steps
    of a size may compile kernels, and steps that encode images or audio have times of their own: none is judged.
    """

    def __init__(self) -> None:
        self._slowest: dict[int, tuple[int, float]] = {}  # by bits of the number of tokens: steps, decaying maximum
        self._running: tuple[int, float] | None = None
        self._seen: tuple[int, float] | None = None
        self._seen_s = self._looked_at = 0.0

    def begin(self, batch: StepBatch, now: float) -> None:
        encodes = any(opened.encoder is not None or opened.images for opened in batch.opens)
        self._running = None if encodes else (int(batch.query_lens.sum()).bit_length(), now)

    def end(self, now: float, *, is_done: bool) -> None:
        running, self._running = self._running, None
        if running is not None and is_done:
            size, began = running
            num_steps, slowest = self._slowest.get(size, (0, 0.0))
            self._slowest[size] = num_steps + 1, max(now - began, SLOWEST_DECAY * slowest)

    def look(self, now: float) -> bool:
        """Whether the running step hangs. Call it every few seconds."""
        pause_s, self._looked_at = now - self._looked_at, now
        running = self._running
        if running is None or running is not self._seen:
            self._seen, self._seen_s = running, 0.0
            return False
        self._seen_s += min(pause_s, MAX_LOOK_S)
        num_steps, slowest = self._slowest.get(running[0], (0, 0.0))
        return num_steps >= MIN_MEASURED and self._seen_s >= max(STUCK_AFTER_S, STUCK_TIMES * slowest)


class StepMeter:
    """Measures steps. Written by the model thread, read by others."""

    def __init__(self) -> None:
        self.step = Buckets(STEP_TIMES_S)
        self.queue = Buckets(STEP_TIMES_S)
        self.rows = Buckets(ROW_COUNTS)
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.encoder_inputs = 0
        self.idle = Buckets(IDLE_TIMES_S)
        self.stuck = StuckWatch()
        self._running_since: float | None = None
        self._ended_at: float | None = None  # end of the last step with rows

    def begin(self, batch: StepBatch, queued_at: float) -> None:
        """A step leaves the queue. Times are from time.monotonic. A step without rows counts as idle time."""
        now = time.monotonic()
        self.queue.observe(now - queued_at)
        if self._ended_at is not None and len(batch.rows) > len(batch.opens):
            self.idle.observe(now - self._ended_at)
        self._running_since = now
        self.stuck.begin(batch, now)

    def end(self, batch: StepBatch, *, is_done: bool) -> None:
        """The step ended or failed."""
        now = time.monotonic()
        self.stuck.end(now, is_done=is_done)
        if is_done and self._running_since is not None:
            self._count(batch, now - self._running_since)
        if len(batch.rows):
            self._ended_at = now
        self._running_since = None

    def _count(self, batch: StepBatch, step_s: float) -> None:
        num_rows = len(batch.rows)
        num_tokens = int(batch.query_lens.sum())
        num_decode = num_rows if num_tokens == num_rows else int((batch.query_lens == 1).sum())
        self.step.observe(step_s)
        self.rows.observe(num_rows)
        self.decode_tokens += num_decode
        self.prefill_tokens += num_tokens - num_decode
        self.encoder_inputs += sum(row_open.computes_encoder for row_open in batch.opens)


class ImageCounts(Protocol):
    """The parts of an image encoder that metrics read."""

    num_encoded: int
    num_hits: int
    num_bytes: int


class MeasuredExecutor(Protocol):
    """The parts of the executor that metrics read."""

    meter: StepMeter
    rows_used: int
    num_leases: int

    @property
    def num_in_flight(self) -> int: ...
    @property
    def adapters(self) -> AdapterStore[Any, Any] | None: ...

    @property
    def images(self) -> ImageCounts | None: ...
    @property
    def drafts(self) -> DraftCounts | None: ...


class WorkerReader:
    """The current values of all SPECS."""

    def __init__(
        self,
        executor: MeasuredExecutor,
        load_progress: Callable[[], float],
        is_ready: Callable[[], bool],
        info: Callable[[], EngineInfo | None],
        more: Callable[[], Iterable[Row]] = tuple,
    ) -> None:
        self._more = more
        self._executor = executor
        self._load_progress = load_progress
        self._is_ready = is_ready
        self._info = info

    def registry(self, args: argparse.Namespace, rpc: RpcStats) -> CollectorRegistry:
        """All metrics of the process."""
        has_vllm = args.metrics_compat != "none"
        return make_registry(ServiceMetrics("worker", SPECS, self, rpc, has_vllm, certificate_files(args)))

    def __call__(self) -> Iterator[Row]:
        executor, meter = self._executor, self._executor.meter
        info = self._info()
        if info is not None:
            sizes = (str(info.block_size), str(info.num_blocks), str(info.max_num_seqs))
            yield "worker_info", (info.model, info.dtype, info.determinism, info.backend, *sizes), 1
        yield "worker_load_progress", (), self._load_progress()
        yield "worker_ready", (), float(self._is_ready())
        yield "worker_leases_total", (), executor.num_leases
        yield "worker_rows_used", (), executor.rows_used
        yield "worker_steps_in_flight", (), executor.num_in_flight
        yield "worker_step_seconds", (), meter.step
        yield "worker_step_queue_seconds", (), meter.queue
        yield "worker_step_rows", (), meter.rows
        yield "worker_tokens_total", ("prefill",), meter.prefill_tokens
        yield "worker_tokens_total", ("decode",), meter.decode_tokens
        yield "worker_encoder_inputs_total", (), meter.encoder_inputs
        if (adapters := executor.adapters) is not None:
            yield "worker_adapters_loaded", (), len(adapters.entries())
            yield "worker_adapters_resident", (), adapters.num_resident
            yield "worker_adapter_swaps_total", (), adapters.num_swaps
        yield "worker_idle_seconds", (), meter.idle
        yield from _draft_rows(executor.drafts)
        images = executor.images
        yield "worker_images_encoded_total", (), 0 if images is None else images.num_encoded
        yield "worker_image_cache_hits_total", (), 0 if images is None else images.num_hits
        yield "worker_image_cache_bytes", (), 0 if images is None else images.num_bytes
        yield from self._more()


def _draft_rows(counts: DraftCounts | None) -> Iterator[Row]:
    if counts is None:
        return
    for position, (drafted, accepted) in enumerate(zip(counts.drafted, counts.accepted, strict=True), start=1):
        yield "worker_draft_tokens_total", (counts.proposer, str(position)), int(drafted)
        yield "worker_accepted_draft_tokens_total", (counts.proposer, str(position)), int(accepted)
