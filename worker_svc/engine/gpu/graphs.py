"""Steps as CUDA graphs: one per bucket, recorded at the start or when a bucket first comes, within bounds.

A recorded step is the same function over the same memory as an eager one; only what the host launches differs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from worker_svc.engine.gpu.parallel import Group
from worker_svc.engine.gpu.step_buffer import Bucket

logger = logging.getLogger(__name__)

MAX_RECORDING_S = 120.0  # at start; what is not recorded by then stays eager

Step = Callable[[], None]


class GraphError(RuntimeError):
    """A step that cannot be a graph; launched kernel by kernel it runs all the same."""


class Recorder(Protocol):
    """What turns launches into something that launches them again."""

    def record(self, step: Step) -> Step:
        """Notes what `step` launches without running it."""
        ...

    def bytes_taken(self) -> int:
        """Device memory that recordings took so far."""
        ...


class CudaRecorder:
    """CUDA graphs that share one memory pool: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._device = device
        self._bytes_taken = 0

    def record(self, step: Step) -> Step:
        """Raises GraphError, with the launching stream as it was, if something in `step` cannot be recorded."""
        stream = torch.cuda.current_stream(self._device)
        free = self._free()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may wait for events meanwhile: only this one's calls are restricted.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # torch leaves its own in place if the end of a capture fails
            raise GraphError(f"a CUDA graph cannot be recorded: {error.__context__ or error}") from error
        self._bytes_taken += free - self._free()
        return graph.replay

    def bytes_taken(self) -> int:
        return self._bytes_taken

    def _free(self) -> int:
        """Bytes, without what steps launched one by one left to the next such step."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])


def make_recorder(device: torch.device) -> Recorder | None:
    """None where nothing can be recorded."""
    return CudaRecorder(device) if device.type == "cuda" else None


class Graphs:
    """Graphs by bucket, of steps that are all `compute(bucket)`. All ranks record the same ones in the same order.

    `buckets` are those worth a graph, largest first, so that the others find their memory in the first one's.
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
    ) -> None:
        self._compute = compute
        self._recorder = recorder
        self._limit = limit
        self._group = group
        self._replays: dict[Bucket, Step] = {}
        self._buckets = buckets
        self._later = set(buckets) if is_lazy else set()  # to be recorded when they come

    def __len__(self) -> int:
        return len(self._replays)

    def serves(self, bucket: Bucket) -> bool:
        """Whether a step is worth padding to this bucket."""
        return bucket in self._replays or bucket in self._later

    def replay(self, bucket: Bucket) -> bool:
        """Starts the step in the buffer, if its bucket is recorded."""
        step = self._replays.get(bucket)
        if step is None:
            return False
        step()
        return True

    def record_at_start(self, progress: Callable[[float], None]) -> None:
        """Records all, or, of lazy ones, the largest of each kind. Stops at the bounds, and says so.

        The buffer must hold a step without rows, so that the warm-up before each changes neither a row nor the pool.
        """
        deadline = time.monotonic() + MAX_RECORDING_S
        chosen = _largest_of_each_kind(self._buckets) if self._later else self._buckets
        for index, bucket in enumerate(chosen):
            if not self._may_record(time.monotonic() < deadline):
                taken = self._recorder.bytes_taken() >> 20
                logger.warning(
                    "%d of %d CUDA graphs are recorded and take %d MiB; after %d MiB or %.0f s no more are, "
                    "and the kernels of other steps are launched one by one",
                    index, len(chosen), taken, self._limit >> 20, MAX_RECORDING_S,
                )  # fmt: skip
                break
            self._compute(bucket)  # what is not compiled yet cannot be while recording
            self._record(bucket)
            progress((index + 1) / len(chosen))

    def record_after(self, bucket: Bucket) -> None:
        """A step of this bucket was computed without a graph; the next one may have one."""
        if bucket not in self._later:
            return
        if not self._may_record(True):
            self._later.clear()
            logger.warning("CUDA graphs take %d MiB; no more are recorded", self._recorder.bytes_taken() >> 20)
            return
        try:
            self._record(bucket)
        except GraphError as error:
            logger.error("steps of %s go on without a graph: %s", bucket, error)

    def _record(self, bucket: Bucket) -> None:
        self._later.discard(bucket)  # also if it fails: it would fail again
        self._replays[bucket] = self._recorder.record(lambda: self._compute(bucket))

    def _may_record(self, has_time: bool) -> bool:
        may = has_time and self._recorder.bytes_taken() < self._limit
        return bool(self._group.least(int(may)))


def _largest_of_each_kind(buckets: Sequence[Bucket]) -> list[Bucket]:
    kinds: dict[bool, Bucket] = {}
    for bucket in buckets:
        kinds.setdefault(bucket.is_decode, bucket)
    return list(kinds.values())
