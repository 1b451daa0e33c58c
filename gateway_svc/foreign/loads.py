"""Load reports (ORCA), at the end of each call and out of band: the load of the schedulers behind this gateway."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from quire.foreign import orca_pb2 as pb
from quire.foreign.orca_pb2_grpc import OpenRcaServiceServicer

from gateway_svc.answer.open_streams import OpenStreams
from gateway_svc.schedulers.directory import ModelDirectory

Context = grpc.aio.ServicerContext[Any, Any]

TRAILER = "endpoint-load-metrics-bin"
KEEP_S = 0.2  # a report is sent again for this long
WINDOW_S = 10.0  # rates are those of this time
MIN_UTILIZATION = 0.01  # clients give a server without any utilization no weight
DEFAULT_INTERVAL_S, MIN_INTERVAL_S = 10.0, 1.0


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """The sums over all schedulers, by their last heartbeats. `kv_usage`: of the fullest one."""

    num_running: int
    num_waiting: int
    num_rows: int
    pending_tokens: int
    kv_usage: float

    @classmethod
    def of(cls, directory: ModelDirectory) -> GatewayLoad:
        clients = list(directory.clients)
        beats = [client.heartbeat for client in clients if client.heartbeat is not None]
        return cls(
            sum(beat.num_running for beat in beats),
            sum(beat.num_waiting for beat in beats),
            sum(client.info.max_num_seqs * client.ready_workers for client in clients if client.info is not None),
            sum(beat.pending_tokens for beat in beats),
            max((beat.kv_cache_usage for beat in beats), default=0.0),
        )


class LoadReports(OpenRcaServiceServicer):
    """Owns the rates. `stopping` ends the streams."""

    def __init__(self, directory: ModelDirectory, streams: OpenStreams, stopping: asyncio.Event) -> None:
        self._directory = directory
        self._streams = streams
        self._stopping = stopping
        self._counts: deque[tuple[float, int, int]] = deque()  # time, ended requests, those that failed
        self._made_at = -KEEP_S
        self._trailers: tuple[tuple[str, bytes], ...] = ()

    def report(self) -> pb.OrcaLoadReport:
        """The load now. application_utilization is that of the scarcest: rows, blocks or streams of this gateway."""
        load, (rate, errors) = GatewayLoad.of(self._directory), self._rates(time.monotonic())
        num_requests = load.num_running + load.num_waiting
        used = {
            "rows": num_requests / load.num_rows if load.num_rows else 1.0,
            "kv_cache": load.kv_usage,
            "streams": len(self._streams) / self._streams.max_streams,
        }
        named = {
            "kv_cache_usage_perc": load.kv_usage,
            "num_requests_running": load.num_running,
            "num_requests_waiting": load.num_waiting,
        }
        utilization = {name: min(1.0, value) for name, value in used.items()}
        return pb.OrcaLoadReport(
            application_utilization=max(MIN_UTILIZATION, *used.values()),
            utilization=utilization,
            named_metrics=named,
            rps_fractional=rate,
            eps=errors,
        )

    def trailers(self) -> tuple[tuple[str, bytes], ...]:
        """The metadata at the end of a call."""
        if time.monotonic() - self._made_at > KEEP_S:
            self._made_at = time.monotonic()
            self._trailers = ((TRAILER, self.report().SerializeToString()),)
        return self._trailers

    async def StreamCoreMetrics(
        self, request: pb.OrcaLoadReportRequest, context: Context
    ) -> AsyncIterator[pb.OrcaLoadReport]:
        """A report at every interval."""
        asked_s = request.report_interval.ToNanoseconds() / 1e9
        interval_s = max(MIN_INTERVAL_S, asked_s) if request.HasField("report_interval") else DEFAULT_INTERVAL_S
        while not self._stopping.is_set():
            yield self.report()
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._stopping.wait()

    def _rates(self, now: float) -> tuple[float, float]:
        """Requests that ended and that failed, per second."""
        ends = [times.ends for times in self._streams.metrics.models.values()]
        counts = self._counts
        counts.append((now, sum(sum(one.values()) for one in ends), sum(one["failed"] + one["error"] for one in ends)))
        while now - counts[0][0] > WINDOW_S and len(counts) > 2:
            counts.popleft()
        passed_s = max(now - counts[0][0], MIN_INTERVAL_S)
        return (counts[-1][1] - counts[0][1]) / passed_s, (counts[-1][2] - counts[0][2]) / passed_s
