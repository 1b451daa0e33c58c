"""Metrics of a service for Prometheus. An event changes a plain number; names and text are produced at a scrape.

A service lists its metrics as `Spec`s, keeps ints, `Counter`s and `Buckets` where the events happen, and has one
function that reads them all as rows. docs/metrics.md is generated from the lists of `Spec`s.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from svc_common.calls import RpcStats
from svc_common.security.tls import remaining_fraction

PREFIX = "quire_"

# Upper bounds of buckets, in seconds: from a fast decode step to the longest time that a user may wait.
LATENCIES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
SHORT_TIMES_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 10)
TOKEN_COUNTS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

# Label values that differ in vLLM.
VLLM_VALUES = {
    "finished_reason": {"eos": "stop", "stop": "stop", "length": "length", "aborted": "abort", "cancelled": "abort"}
}


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric. `meaning` is its help text, `unit` is empty for plain counts, `vllm` lists its names in vLLM."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    meaning: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()


class Buckets:
    """One series of a histogram. One thread may write while another thread reads."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count `value` as observed `weight` times."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.total += value * weight

    def cumulative(self) -> list[tuple[str, float]]:
        """The (le, count) pairs of the Prometheus format."""
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


@cache
def quire_version() -> str:
    """The version of the installed services: of `quire` in a checkout, else of the wheel `quire-server`."""
    try:
        return version("quire")
    except PackageNotFoundError:
        return version("quire-server")


Labels: TypeAlias = tuple[str, ...]
Row: TypeAlias = tuple[str, Labels, "float | Buckets"]  # metric name, label values, value

COMMON = (
    Spec(
        "build_info", "gauge", "always 1; the labels are service and version, for joins", labels=("service", "version")
    ),
    Spec(
        "rpc_errors_total",
        "counter",
        "served RPCs and HTTP requests (method http/...) that ended with an error, by status code",
        labels=("method", "code"),
    ),
    Spec("rpc_received_bytes_total", "counter", "size of messages received by served RPCs", "bytes", ("method",)),
    Spec(
        "certificate_remaining_fraction",
        "gauge",
        "fraction of a certificate's lifetime that is left, negative after its end, by link: public (port of clients), "
        "internal, redis; absent without certificates",
        labels=("link",),
    ),
    Spec("rpc_sent_bytes_total", "counter", "size of messages sent by served RPCs", "bytes", ("method",)),
)


@dataclass(frozen=True, slots=True, eq=False)
class ServiceMetrics(Collector):
    """All metrics of one service: its own and the common ones. `has_vllm`: export them under vLLM's names as well.

    `certificates`: files by link.
    """

    service: str
    specs: tuple[Spec, ...]
    read: Callable[[], Iterable[Row]]
    rpc: RpcStats = field(default_factory=RpcStats)
    has_vllm: bool = False
    certificates: Mapping[str, Path | None] = field(default_factory=dict)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at a scrape. A KeyError means a row without a Spec, which is a bug."""
        rows: dict[str, list[tuple[Labels, float | Buckets]]] = {spec.name: [] for spec in (*COMMON, *self.specs)}
        for name, labels, value in (*self._common_rows(), *self.read()):
            rows[name].append((labels, value))
        for spec in (*COMMON, *self.specs):
            yield _family(PREFIX + spec.name, spec, spec.labels, rows[spec.name])
            for name in spec.vllm if self.has_vllm else ():
                yield _family(f"vllm:{name}", spec, (*spec.labels, "engine"), _as_vllm(spec, rows[spec.name]))

    def _common_rows(self) -> Iterator[Row]:
        yield "build_info", (self.service, quire_version()), 1
        for labels, count in list(self.rpc.errors.items()):
            yield "rpc_errors_total", labels, count
        for method, num_bytes in list(self.rpc.received_bytes.items()):
            yield "rpc_received_bytes_total", (method,), num_bytes
        for method, num_bytes in list(self.rpc.sent_bytes.items()):
            yield "rpc_sent_bytes_total", (method,), num_bytes
        for link, path in self.certificates.items():
            fraction = None if path is None else remaining_fraction(path, time.time())
            if fraction is not None:
                yield "certificate_remaining_fraction", (link,), fraction


def make_registry(metrics: ServiceMetrics) -> CollectorRegistry:
    """The registry behind /metrics: the metrics of the service and of its process."""
    registry = CollectorRegistry()
    registry.register(metrics)
    ProcessCollector(registry=registry)
    return registry


def _family(name: str, spec: Spec, labels: Sequence[str], rows: Iterable[tuple[Labels, float | Buckets]]) -> Metric:
    meaning = f"{spec.meaning} ({spec.unit})" if spec.unit else spec.meaning
    if spec.kind == "histogram":
        histogram = HistogramMetricFamily(name, meaning, labels=labels)
        for values, buckets in rows:
            if isinstance(buckets, Buckets):
                histogram.add_metric(values, buckets.cumulative(), buckets.total)
        return histogram
    family = (CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily)(name, meaning, labels=labels)
    for values, value in rows:
        if not isinstance(value, Buckets):
            family.add_metric(values, value)
    return family


def _as_vllm(spec: Spec, rows: Iterable[tuple[Labels, float | Buckets]]) -> list[tuple[Labels, float | Buckets]]:
    """The rows with vLLM's label values. Rows with equal labels are added; rows without a value in vLLM are dropped."""
    merged: dict[Labels, float | Buckets] = {}
    for labels, value in rows:
        pairs = zip(spec.labels, labels, strict=True)
        renamed = [VLLM_VALUES.get(name, {label: label}).get(label) for name, label in pairs]
        if None in renamed:
            continue
        key = (*(label for label in renamed if label is not None), "0")
        before = merged.get(key, 0)
        merged[key] = value if isinstance(value, Buckets) or isinstance(before, Buckets) else before + value
    return list(merged.items())
