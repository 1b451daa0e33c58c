"""Counting, scrapes, probes, and the evaluator that other tests use for PromQL expressions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import generate_latest

from svc_common.observe.admin import MAX_PAGES_PER_S, AdminServer
from svc_common.observe.metrics import Buckets, Row, ServiceMetrics, Spec, make_registry
from tests.promql import History, read_scrape

SPECS = (
    Spec("num_requests_waiting", "gauge", "queue", "", ("model_name",), ("num_requests_waiting",)),
    Spec("requests_total", "counter", "ends", "", ("model_name", "finished_reason"), ("request_success_total",)),
    Spec("e2e_seconds", "histogram", "time", "seconds", ("model_name",), ("e2e_request_latency_seconds",)),
    Spec("gateways", "gauge", "without a twin"),
)


def rows() -> list[Row]:
    times = Buckets((0.1, 1.0))
    times.observe(0.05)
    times.observe(0.1)  # a bound belongs to its bucket
    times.observe(0.5, weight=3)
    times.observe(7.0)
    return [
        ("num_requests_waiting", ("m",), 3),
        ("requests_total", ("m", "eos"), 2),
        ("requests_total", ("m", "stop"), 1),
        ("requests_total", ("m", "cancelled"), 5),
        ("requests_total", ("m", "failed"), 9),
        ("e2e_seconds", ("m",), times),
        ("gateways", (), 1),
    ]


def scrape(*, has_vllm: bool = False) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    metrics = ServiceMetrics("test", SPECS, rows, has_vllm=has_vllm)
    return read_scrape(generate_latest(make_registry(metrics)).decode())


def test_a_scrape_shows_every_row_and_the_process() -> None:
    samples = scrape()
    model = ("model_name", "m")
    assert samples["quire_num_requests_waiting"] == {(model,): 3.0}
    assert samples["quire_requests_total"][("finished_reason", "failed"), model] == 9.0
    buckets = {dict(labels)["le"]: value for labels, value in samples["quire_e2e_seconds_bucket"].items()}
    assert buckets == {"0.1": 2.0, "1.0": 5.0, "+Inf": 6.0}
    assert samples["quire_e2e_seconds_count"] == {(model,): 6.0}
    assert samples["quire_e2e_seconds_sum"] == {(model,): pytest.approx(0.05 + 0.1 + 1.5 + 7.0)}
    assert samples["process_resident_memory_bytes"][()] > 0
    assert next(iter(samples["quire_build_info"]))[0] == ("service", "test")
    assert not any(name.startswith("vllm:") for name in samples)


def test_vllm_names_have_vllms_labels_and_values() -> None:
    samples = scrape(has_vllm=True)
    engine, model = ("engine", "0"), ("model_name", "m")
    assert samples["vllm:num_requests_waiting"] == {(engine, model): 3.0}
    assert samples["vllm:request_success_total"] == {
        (engine, ("finished_reason", "stop"), model): 3.0,  # vLLM has one value for eos and stop
        (engine, ("finished_reason", "abort"), model): 5.0,
    }
    assert samples["vllm:e2e_request_latency_seconds_count"] == {(engine, model): 6.0}
    assert not any("gateways" in name for name in samples if name.startswith("vllm:"))


# -- the ports --------------------------------------------------------------------------------------------------------


class Probed:
    """An AdminServer and the results of its checks."""

    def __init__(self) -> None:
        self.is_started = self.is_alive = self.is_ready = True
        metrics = ServiceMetrics("test", SPECS, rows)
        self.server = AdminServer(
            metrics_listen="127.0.0.1:0",
            health_listen="127.0.0.1:0",
            registry=make_registry(metrics),
            is_alive=lambda: self.is_alive,
            is_ready=lambda: self.is_ready,
            is_started=lambda: self.is_started,
        )

    async def send(self, request: bytes) -> tuple[int, str]:
        host, _, port = self.server.metrics_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        answer = (await reader.read()).decode()
        writer.close()
        return (int(answer.split(" ")[1]) if answer else 0), answer.partition("\r\n\r\n")[2]

    async def get(self, path: str) -> tuple[int, str]:
        return await self.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


@pytest.fixture
async def probed() -> AsyncIterator[Probed]:
    probed = Probed()
    await probed.server.start()
    yield probed
    await probed.server.close()


async def test_http_answers_metrics_and_probes(probed: Probed) -> None:
    status, text = await probed.get("/metrics?x=1")
    assert status == 200
    assert read_scrape(text)["quire_gateways"] == {(): 1.0}
    status, text = await probed.send(b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text\r\n\r\n")
    assert text.endswith("# EOF\n")
    checks = ("/startupz", "/livez", "/readyz")
    assert [await probed.get(path) for path in checks] == [(200, "ok\n")] * 3
    probed.is_started = probed.is_alive = probed.is_ready = False
    assert [await probed.get(path) for path in checks] == [(503, "not ok\n")] * 3


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /nowhere HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"hello\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: " + b"x" * 40_000 + b"\r\n\r\n", 0),  # closed without an answer
    ],
)
async def test_http_refuses_unknown_requests(probed: Probed, request_bytes: bytes, status: int) -> None:
    try:
        assert (await probed.send(request_bytes))[0] == status
    except ConnectionResetError:
        assert status == 0


@pytest.mark.parametrize("version", ["x.y", "1.", "2.0.x", '"1.0.0"', "²", "9" * 5000, "0.0.4", "-1"])
@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
async def test_an_invalid_version_gets_the_text_format(probed: Probed, kind: str, version: str) -> None:
    request = f"GET /metrics HTTP/1.1\r\nAccept: {kind}; version={version}\r\n\r\n"
    status, text = await probed.send(request.encode("latin-1"))
    assert status == 200
    assert read_scrape(text)["quire_gateways"] == {(): 1.0}
    assert "# EOF" not in text


async def test_many_scrapes_at_once_share_a_page(probed: Probed, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 scrapes at once used to pause the streams of a gateway for 3 s."""
    monkeypatch.setattr("svc_common.observe.admin.time.monotonic", lambda: 7.5)
    made: list[bytes] = []

    def encode() -> bytes:
        made.append(b"%d" % len(made))
        return made[-1]

    pages = [probed.server._page("text", encode) for _ in range(2 * MAX_PAGES_PER_S)]
    assert pages == made + MAX_PAGES_PER_S * [made[-1]]
    monkeypatch.setattr("svc_common.observe.admin.time.monotonic", lambda: 8.5)
    assert probed.server._page("text", encode) == b"%d" % MAX_PAGES_PER_S


async def test_grpc_health_runs_the_check_each_time(probed: Probed) -> None:
    async with grpc.aio.insecure_channel(probed.server.health_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        assert [await status(name) for name in ("liveness", "readiness", "")] == [1, 1, 1]
        probed.is_ready = False
        assert [await status(name) for name in ("liveness", "readiness", "")] == [1, 2, 2]
        with pytest.raises(grpc.aio.AioRpcError, match="known services: startup, liveness, readiness"):
            await status("shutdown")


async def test_the_port_for_probes_refuses_other_calls_without_a_traceback(
    probed: Probed, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger may reach this port. A traceback per call would fill the log."""
    codes = grpc.StatusCode
    async with grpc.aio.insecure_channel(probed.server.health_address) as channel:
        for method, data, code in (
            ("Check", b"\xff\xff\xff", codes.INVALID_ARGUMENT),
            ("Check", b"\x0a\x01\xff", codes.INVALID_ARGUMENT),
            ("Check", bytes(1 << 20), codes.RESOURCE_EXHAUSTED),
            ("Watch", b"", codes.UNIMPLEMENTED),
        ):
            call = channel.unary_stream(f"/grpc.health.v1.Health/{method}")(data, timeout=10)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is code, caught.value.details()
    assert "Traceback" not in caplog.text


# -- the evaluator ----------------------------------------------------------------------------------------------------

OLDER = """
steps_total{pod="a"} 10
steps_total{pod="b"} 0
"""
NEWER = """
steps_total{pod="a"} 40
steps_total{pod="b"} 30
waiting{pod="a"} 6
waiting{pod="b"} 2
ready{pod="a"} 0
t_bucket{le="1"} 50
t_bucket{le="2"} 90
t_bucket{le="+Inf"} 100
"""


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("sum(waiting)", {(): 8.0}),
        ('sum(waiting{pod!="a"})', {(): 2.0}),
        ('sum(waiting{pod=~"a|c"}) / clamp_min(sum(ready), 1)', {(): 6.0}),
        ("avg by (pod) (waiting)", {(("pod", "a"),): 6.0, (("pod", "b"),): 2.0}),
        ("sum(rate(steps_total[5m]))", {(): 6.0}),
        ("waiting > 4", {(("pod", "a"),): 6.0}),
        ("2 * 3 - 1", 5.0),
        ("histogram_quantile(0.5, t_bucket)", {(): 1.0}),
        ("histogram_quantile(0.7, t_bucket)", {(): 1.5}),
        ("histogram_quantile(0.99, t_bucket)", {(): 2.0}),
    ],
)
def test_expressions(expression: str, value: object) -> None:
    assert History(read_scrape(OLDER), read_scrape(NEWER), 10.0).evaluate(expression) == value
