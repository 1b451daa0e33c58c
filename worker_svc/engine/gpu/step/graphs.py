"""CUDA graphs of steps: one per bucket, recorded at start-up or on first use, within bounds of memory and time.

A recorded step runs the same kernels on the same memory as an eager one; only the launch differs.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.kernels import forms
from worker_svc.engine.gpu.step.step_buffer import Bucket

logger = logging.getLogger(__name__)

MAX_RECORDING_S = 120.0  # at start-up; buckets not recorded by then stay eager
PATIENCE = 1000  # steps of a rare size without a graph; then it is recorded although the worker is not idle
DRIVER_BYTES = 8 << 20  # of a graph that is recorded while the worker serves
MAX_DRIVER_BYTES = 64 << 20  # of one graph: its nodes and their parameters

Step = Callable[[], None]


class GraphError(RuntimeError):
    """A step cannot be recorded. It can still be launched kernel by kernel."""


class Recorder(Protocol):
    """Records the launches of a step for replay."""

    def record(self, step: Step, *, while_serving: bool = False) -> Step:
        """Records the launches of `step` without running them. The result replays them. `while_serving`: without
        waiting for the device, and without emptying torch's cache, which later steps would fill again."""

    def bytes_taken(self) -> int:
        """Device memory of all recordings so far."""


class CudaRecorder:
    """Records CUDA graphs in one memory pool, which they can share because only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._device = device
        self._bytes_taken = 0
        self._stream: torch.cuda.Stream | None = None

    def record(self, step: Step, *, while_serving: bool = False) -> Step:
        """Raises GraphError, with the current stream restored, if a call in `step` cannot be recorded."""
        stream = torch.cuda.current_stream(self._device)
        free = 0 if while_serving else self._free()
        reserved = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            if while_serving:
                self._capture(graph, step, stream)
            else:
                # thread_local: other threads may wait for events during the capture.
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    step()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # torch does not restore the stream if ending the capture fails
            raise GraphError(f"a CUDA graph cannot be recorded: {error.__context__ or error}") from error
        taken = torch.cuda.memory_reserved(self._device) - reserved
        self._bytes_taken += taken + DRIVER_BYTES if while_serving else bytes_of_graph(free - self._free(), taken)
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, step: Step, stream: torch.cuda.Stream) -> None:
        """As torch.cuda.graph, which also waits for the device and empties caches."""
        self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(stream)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        stream.wait_stream(self._stream)

    def bytes_taken(self) -> int:
        return self._bytes_taken

    def _free(self) -> int:
        """Free bytes of the device, after torch has released its cache of eager steps."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])


def bytes_of_graph(taken: int, reserved: int) -> int:
    """Memory that a graph takes, of the bytes that the device lost and those that torch reserved meanwhile. The rest is
    the driver's, unless it is more than a graph can need: then another process has taken or returned memory."""
    return reserved + min(max(taken - reserved, 0), MAX_DRIVER_BYTES)


def make_recorder(device: torch.device) -> Recorder | None:
    """None on devices without graphs."""
    return CudaRecorder(device) if device.type == "cuda" else None


class Graphs:
    """Graphs by bucket, each recording `compute(bucket)`. All ranks record the same buckets in the same order.

    `buckets` are in the order of recording; the first of a kind is the largest, so that later graphs use its memory
    again. Graphs of `rare_buckets` are recorded once used: when the worker is idle, or after PATIENCE uses.
    """

    def __init__(
        self,
        compute: Callable[[Bucket], None],
        buckets: Sequence[Bucket],
        recorder: Recorder,
        limit: int,
        group: Group,
        *,
        is_lazy: bool,
        rare_buckets: Sequence[Bucket] = (),
    ) -> None:
        self._compute = compute
        self._recorder = recorder
        self._limit = limit
        self._group = group
        self._replays: dict[Bucket, Step] = {}
        self._may_overlap = True
        self._buckets = buckets
        self._is_lazy = is_lazy
        self._later = {*buckets, *rare_buckets} if is_lazy else set(rare_buckets)  # recorded after their first use
        self._rare = frozenset(rare_buckets)
        self._uses: Counter[Bucket] = Counter()  # of rare buckets without a graph that were used

    def __len__(self) -> int:
        return len(self._replays)

    def serves(self, bucket: Bucket) -> bool:
        """Whether this bucket has a graph or will get one on first use."""
        return bucket in self._replays or bucket in self._later

    def replay(self, bucket: Bucket) -> bool:
        """Launches the step in the buffer. False if its bucket has no graph."""
        step = self._replays.get(bucket)
        if step is None:
            return False
        step()
        return True

    def record_at_start(self, progress: Callable[[float], None]) -> None:
        """Records all buckets or, if lazy, the largest with prompts and the largest without. If a bound stops the
        recording, this is logged. Raises GraphError if one cannot be recorded on some rank: then those recorded before
        it serve, and no more are recorded.

        The buffer must hold a step without rows, so that the warm-up runs change neither rows nor the pool.
        """
        deadline = time.monotonic() + MAX_RECORDING_S
        chosen = _largest_of_each_kind(self._buckets) if self._is_lazy else self._buckets
        for index, bucket in enumerate(chosen):
            if not self._may_record(time.monotonic() < deadline):
                taken = self._recorder.bytes_taken() >> 20
                logger.warning(
                    "%d of %d CUDA graphs are recorded and take %d MiB; recording stops at %d MiB or %.0f s, so steps "
                    "of other sizes launch their kernels one by one",
                    index, len(chosen), taken, self._limit >> 20, MAX_RECORDING_S,
                )  # fmt: skip
                break
            try:
                self._record(bucket, is_cold=True)
            except GraphError:
                self._later.clear()
                raise
            progress((index + 1) / len(chosen))

    def record_after(self, bucket: Bucket) -> None:
        """After a step of this bucket ran without a graph: records one for later steps, or notes a rare bucket."""
        if bucket not in self._later:
            return
        self._uses[bucket] += 1
        if bucket not in self._rare or self._uses[bucket] >= PATIENCE:
            self._record_later(bucket)

    @property
    def has_used(self) -> bool:
        """Whether a rare bucket was used that has no graph and may get one."""
        return any(bucket in self._later for bucket in self._uses)

    def record_used(self) -> bool:
        """Records the rare bucket that was used most and has no graph. False if there is none."""
        bucket = next((bucket for bucket, _ in self._uses.most_common() if bucket in self._later), None)
        if bucket is None:
            return False
        self._record_later(bucket)
        return True

    def _record_later(self, bucket: Bucket) -> None:
        if not self._may_record(True):
            self._later.clear()
            logger.warning(
                "CUDA graphs take %d MiB, which is the limit; no more are recorded", self._recorder.bytes_taken() >> 20
            )
            return
        try:
            self._record(bucket)
        except GraphError as error:
            logger.error("steps of %s continue without a graph: %s", bucket, error)

    def _record(self, bucket: Bucket, *, is_cold: bool = False) -> None:
        """Records a bucket. `is_cold`: at the start, when no step of the bucket has run. Then its kernels run first,
        because they cannot be compiled during recording, and if it fails, it is recorded without their overlap."""
        self._later.discard(bucket)  # also on failure, because it would fail again
        step, error = self._try(bucket, is_cold=is_cold)
        if step is None and is_cold and self._may_overlap and forms.chosen().may_overlap:
            self._may_overlap = False
            logger.warning("CUDA graphs are recorded without overlap of kernels: %s", error)
            step, error = self._try(bucket, is_cold=True)
        if step is None:
            raise GraphError(error)
        self._replays[bucket] = step

    def _try(self, bucket: Bucket, *, is_cold: bool) -> tuple[Step | None, str]:
        """The recorded step, or None and the error if a rank cannot record it."""
        step, fault = None, "a CUDA graph cannot be recorded on another rank"
        chosen = forms.chosen()
        with forms.using(replace(chosen, may_overlap=chosen.may_overlap and self._may_overlap)):
            try:
                if is_cold:
                    self._compute(bucket)
                step = self._recorder.record(lambda: self._compute(bucket), while_serving=bucket in self._rare)
            except (GraphError, torch.OutOfMemoryError) as error:
                fault = str(error)
        return (step if self._group.all_reduce_min(int(step is not None)) else None), fault

    def _may_record(self, has_time: bool) -> bool:
        may = has_time and self._recorder.bytes_taken() < self._limit
        return bool(self._group.all_reduce_min(int(may)))


def _largest_of_each_kind(buckets: Sequence[Bucket]) -> list[Bucket]:
    kinds: dict[bool, Bucket] = {}
    for bucket in buckets:
        kinds.setdefault(bucket.is_decode, bucket)
    return list(kinds.values())
