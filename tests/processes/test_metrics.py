"""One real stack is driven through every state that has a metric. The metrics page, the dashboard and the autoscaling
expressions are compared with its answers, and one request is followed through the logs of all services.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from quire_client import AsyncClient, InvalidRequest, Overloaded
from quire_client.demo import demo_model_dir
from quire_client.retry import RetryPolicy

from tests.chart.chart import NAMESPACE, render
from tests.chart.test_alerts import SERVICE, firing
from tests.processes.metrics_page import read_expressions, read_tables
from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack
from tests.promql import History, Samples, merge, read_scrape
from tests.unit.test_pages import dashboard_expressions

DEADLINE_S = 30.0
ROWS, MAX_WAITING = 4, 4  # rows per worker; queue limit of the scheduler
PROMPT = list(range(100, 164))
NUM_BLOCKS = 4096  # blocks of each worker
HOLD_TOKENS = 12_000  # four minutes: a request keeps its row until the test cancels it, on any machine
SIM = (
    *("--executor", "sim", "--sim-step-ms", "20", "--num-blocks", str(NUM_BLOCKS), "--max-num-seqs", str(ROWS)),
    *("--max-model-len", str(2 * HOLD_TOKENS)),
)
WORKER_IDS = [f"r-quire-worker-cpu-{i}" for i in range(2)]  # names in the chart
MODEL = "demo"
# Metrics of what this stack does not use: certificates (tests/unit/client/test_cert.py), and options of workers
# (tests/unit/worker/test_kv_store.py, tests/contract/test_worker_blocks.py, tests/processes/test_speculation.py).
ELSEWHERE = (
    "quire_certificate_remaining_fraction",
    *("quire_worker_kv_tier_", "quire_worker_kv_transfer_", "quire_worker_draft_", "quire_worker_accepted_draft_"),
)
GENERATE = "quire.v1.InferenceService/Generate"


class Observed:
    """A stack with its metrics and health ports."""

    def __init__(self, stack: Stack, redis: RedisServer) -> None:
        self.stack = stack
        self.ports: dict[str, tuple[int, int]] = {}
        self.scheduler = stack.start_scheduler(
            "--redis", redis.url, "--max-waiting", str(MAX_WAITING), *self._flags("scheduler-0")
        )
        model_dir = Path(demo_model_dir())
        self.workers = [
            stack.start_worker(
                self.scheduler, model_dir, "--model-name", MODEL, "--worker-id", worker_id, *SIM,
                *self._flags(f"worker-{i}"),
            )
            for i, worker_id in enumerate(WORKER_IDS)
        ]  # fmt: skip
        flags = ("--redis", redis.url, "--audit-log", "/dev/null", *self._flags("gateway-0"))
        self.gateway = stack.start_gateway(self.scheduler, flags=flags)

    def _flags(self, name: str) -> tuple[str, ...]:
        self.ports[name] = metrics, health = free_port(), free_port()
        return (
            *("--metrics-listen", f"127.0.0.1:{metrics}", "--health-listen", f"127.0.0.1:{health}"),
            *("--metrics-compat", "vllm", "--log-format", "json", "--log-level", "debug"),
        )

    async def get(self, service: Service, path: str) -> tuple[int, str]:
        """Status and body; status 0 if the connection fails."""
        return await asyncio.to_thread(_get, f"http://127.0.0.1:{self.ports[service.name][0]}{path}")

    async def pages(self) -> dict[str, str]:
        """/metrics of all running services."""
        pages = {name: await self.get(s, "/metrics") for name, s in self.services().items() if s.is_running}
        return {name: text for name, (status, text) in pages.items() if status == 200}

    def services(self) -> dict[str, Service]:
        return {service.name: service for service in self.stack.services}

    async def samples(self) -> Samples:
        """All metrics, with the labels that a Prometheus in the cluster adds."""
        pages = await self.pages()
        return merge(read_scrape(text, namespace=NAMESPACE, pod=name, service=SERVICE) for name, text in pages.items())

    async def value(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels."""
        return total(await self.samples(), name, **labels)

    async def until(self, holds: Callable[[Samples], bool]) -> Samples:
        """Wait until `holds(samples)`. Raises TimeoutError with the logs."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds(samples := await self.samples()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{samples}\n{self.stack.logs()}")
            await asyncio.sleep(0.05)
        return samples

    async def health(self, service: Service, name: str) -> int:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports[service.name][1]}") as channel:
            request = health_pb2.HealthCheckRequest(service=name)
            return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60.0)).status


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60.0) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def total(samples: Samples, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(value for have, value in samples.get(name, {}).items() if wanted <= set(have))


async def generate(client: AsyncClient, prompt: list[int], max_tokens: int, **options: Any) -> Any:
    return await client.generate(token_ids=prompt, max_tokens=max_tokens, ignore_eos=True, **options)


async def test_every_metric_exists_and_moves(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        observed = Observed(stack, redis)
        async with await stack.connect(observed.gateway, workers=2) as client:
            older = await observed.samples()
            await check_probes(observed)
            await check_two_requests(observed, client)
            newer = await check_overload_and_losses(observed, client)
            check_expressions(History(older, newer, seconds=10.0))
            check_vllm_twins(newer)
            assert firing(History(older, newer, seconds=10.0)) == set(), (
                "a full queue must not alert before it refuses a request"
            )
            pages = await observed.pages()
            later = merge(
                read_scrape(text, namespace=NAMESPACE, pod=name, service=SERVICE) for name, text in pages.items()
            )
            late = {"QuireTtftBudgetBurnsFast", "QuireTtftBudgetBurnsSlow"}  # requests have waited for the worker
            fired = firing(History(older, later, seconds=10.0))
            assert fired - late == {"QuireRequestsRefused", "QuireWorkersLost"}
            await check_scheduler_restart(observed, client)
            await check_errors_and_resumes(observed, client)
            redis.stop()
            await check_redis_outage(observed, client)
            check_pages(pages, await observed.pages())
        check_logs(stack)


async def test_a_scheduler_that_never_had_a_worker_fires_an_alert(tmp_path: Path) -> None:
    """It knows no model, so its metrics have no model label. A total outage across a restart must still alert."""
    ports = free_port(), free_port()

    def is_attached(samples: Samples) -> bool:
        return "quire_workers" in samples and total(samples, "quire_gateway_schedulers", state="attached") == 1

    async def scrape() -> Samples:
        pages = [await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/metrics") for port in ports]
        services = ("r-quire-scheduler-demo", "r-quire-gateway-headless")
        return merge(
            read_scrape(text, namespace=NAMESPACE, service=service)
            for service, (_, text) in zip(services, pages, strict=True)
        )

    with Stack(tmp_path) as stack:
        listen = [("--metrics-listen", f"127.0.0.1:{port}") for port in ports]
        stack.start_gateway(stack.start_scheduler(*listen[0]), flags=listen[1])
        deadline = time.monotonic() + DEADLINE_S
        while not is_attached(samples := await scrape()):
            assert time.monotonic() < deadline, stack.logs()
            await asyncio.sleep(0.05)
        assert firing(History(samples, samples, seconds=10.0)) == {"QuireNoWorkerReady"}
    samples = await scrape()
    assert firing(History(samples, samples, seconds=10.0)) == {"QuireGatewaysGone"}


async def check_probes(observed: Observed) -> None:
    for service in (observed.gateway, observed.scheduler, *observed.workers):
        assert [await observed.get(service, path) for path in ("/livez", "/readyz")] == [(200, "ok\n")] * 2
        assert [await observed.health(service, name) for name in ("liveness", "readiness")] == [1, 1]


async def check_two_requests(observed: Observed, client: AsyncClient) -> None:
    """The counts of two undisturbed requests are exact; the second hits the prefix of the first."""
    results = [await generate(client, PROMPT, 8, request_id=f"logged-{i}") for i in range(2)]
    num_cached = sum(result.usage.cached_tokens for result in results)
    assert num_cached == 48
    await observed.until(lambda s: total(s, "quire_rows_used") == 0 == total(s, "quire_worker_rows_used"))
    samples = await observed.until(
        lambda s: total(s, "quire_steps_total") == total(s, "quire_step_round_trip_seconds_count")
    )
    expected = {
        "quire_prompt_tokens_total": 128,
        "quire_generation_tokens_total": 16,
        "quire_prefix_cache_queries_total": 128,
        "quire_prefix_cache_hits_total": num_cached,
        "quire_time_to_first_token_seconds_count": 2,
        "quire_inter_token_latency_seconds_count": 14,
        "quire_e2e_request_latency_seconds_count": 2,
        "quire_request_time_per_output_token_seconds_count": 2,
        "quire_request_queue_time_seconds_count": 2,
        "quire_request_prefill_time_seconds_count": 2,
        "quire_request_decode_time_seconds_count": 2,
        "quire_request_prompt_tokens_sum": 128,
        "quire_request_generation_tokens_sum": 16,
        "quire_worker_tokens_total": 128 - num_cached + 14,  # the first token of each comes with its prompt
    }
    assert {name: total(samples, name) for name in expected} == expected
    assert total(samples, "quire_requests_total", finished_reason="length") == 2
    parts = [total(samples, f"quire_request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    # An output may be handled a few ms after its arrival, also the one that starts the interval.
    assert 14 * 0.02 * 0.9 <= parts[2] <= sum(parts) <= total(samples, "quire_e2e_request_latency_seconds_sum")
    assert total(samples, "quire_kv_blocks", state="cached") >= 4
    assert total(samples, "quire_kv_blocks") == 2 * NUM_BLOCKS
    assert 16 <= total(samples, "quire_steps_total") <= total(samples, "quire_scheduler_turn_seconds_count")


async def check_overload_and_losses(observed: Observed, client: AsyncClient) -> Samples:
    """Fill every row, preempt one, fill the queue, kill a worker, drain the other. Returns a scrape of the peak."""
    async with AsyncExitStack() as holders:
        for i in range(2 * ROWS):
            prompt = [7 * i + 200] * 20
            stream = client.stream(token_ids=prompt, max_tokens=HOLD_TOKENS, ignore_eos=True, request_id=f"holder-{i}")
            await anext(aiter(await holders.enter_async_context(stream)))  # it runs: the queue is empty again
        assert await observed.value("quire_num_requests_running") == 2 * ROWS
        await generate(client, [300] * 20, 2, priority=-10)
        assert await observed.value("quire_num_preemptions_total") == 1
        await observed.until(lambda s: total(s, "quire_num_requests_running") == 2 * ROWS)
        waiting = [asyncio.create_task(generate(client, [400 + i] * 20, 4)) for i in range(MAX_WAITING)]
        peak = await observed.until(lambda s: total(s, "quire_num_requests_waiting") == MAX_WAITING)
        await check_refusal(observed)
        check_peak(peak)
        await check_losses(observed, client)
    results = await asyncio.gather(*waiting)
    assert all(result.usage.output_tokens == 4 for result in results)
    samples = await observed.until(lambda s: total(s, "quire_gateway_streams") == 0)
    assert total(samples, "quire_requests_total", finished_reason="cancelled") == 2 * ROWS
    assert total(samples, "quire_gateway_request_bytes") == 0
    return peak


def check_peak(peak: Samples) -> None:
    assert total(peak, "quire_rows_used") == total(peak, "quire_num_requests_running") == 2 * ROWS
    assert total(peak, "quire_rows_limit") == 2 * ROWS
    assert total(peak, "quire_gateway_streams") == 2 * ROWS + MAX_WAITING
    assert total(peak, "quire_max_requests_waiting") == MAX_WAITING
    assert total(peak, "quire_pending_tokens") >= 20 * MAX_WAITING
    used = total(peak, "quire_kv_blocks", state="used")
    assert used >= 2 * ROWS * 2
    assert total(peak, "quire_kv_cache_usage_perc") == pytest.approx(used / (2 * NUM_BLOCKS))
    assert total(peak, "quire_workers", state="ready") == total(peak, "quire_gateway_ready_workers") == 2
    assert total(peak, "quire_worker_ready") == total(peak, "quire_worker_load_progress") == 2


async def check_refusal(observed: Observed) -> None:
    async with await AsyncClient.connect(observed.gateway.address, retry=RetryPolicy(max_attempts=1)) as hasty:
        with pytest.raises(Overloaded):
            await generate(hasty, [500] * 20, 4)
    samples = await observed.samples()
    assert total(samples, "quire_requests_refused_total", code="RESOURCE_EXHAUSTED") == 1
    assert total(samples, "quire_rpc_errors_total", code="RESOURCE_EXHAUSTED", method=GENERATE) == 1
    assert total(samples, "quire_requests_total", finished_reason="failed") == 1


async def check_losses(observed: Observed, client: AsyncClient) -> None:
    """Sequences that leave a killed or draining worker are counted with the reason."""
    first, second = observed.workers
    second.kill()
    await observed.until(lambda s: total(s, "quire_migrations_total", reason="lost") == ROWS)
    assert await observed.value("quire_workers", state="lost") == 1
    second.start()
    await observed.until(lambda s: total(s, "quire_workers", state="ready") == 2)
    await observed.until(lambda s: total(s, "quire_rows_used", worker_id=WORKER_IDS[1]) == ROWS)
    await client.drain_worker(WORKER_IDS[0])
    samples = await observed.until(lambda s: total(s, "quire_migrations_total", reason="drain") == ROWS)
    assert total(samples, "quire_num_preemptions_total") == 1, "a move counted as a preemption"
    assert await asyncio.to_thread(first.wait) == 0


def check_expressions(history: History) -> None:
    """The queries of the chart's autoscaling, of the metrics page and of the dashboard have results."""
    values = {"enabled": True, "prometheusAddress": "http://prometheus:9090"}
    scaled = render({"keda": values, "workerDefaults": {"autoscaling": {"enabled": True}}}).all("ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in scaled[0]["spec"]["triggers"]]
    answers = [history.evaluate(query) for query in queries]
    assert answers == [{(): pytest.approx(2 / 0.75 + MAX_WAITING / 5)}], queries
    page = [history.evaluate(e.replace('namespace="quire"', f'namespace="{NAMESPACE}"')) for e in read_expressions()]
    assert page[:1] == answers
    assert [math.isfinite(next(iter(answer.values()))) for answer in page[1:-1]] == [True, True]
    assert page[-1] == {}, "the alert fires before a request is refused"
    without_answer = {e for e in dashboard_expressions() if not history.evaluate(e)}
    refused, errors = "quire_requests_refused_total", "quire_rpc_errors_total"
    assert not [e for e in without_answer if refused not in e and errors not in e]


def check_vllm_twins(samples: Samples) -> None:
    """Every metric with a name in vLLM is also exported under that name, with the same values."""
    twins = {
        name: (documented.kind, twin)
        for table in read_tables().values()
        for name, documented in table.items()
        for twin in documented.vllm
    }
    assert len(twins) >= 17
    for name, (kind, twin) in twins.items():
        end = "_count" if kind == "histogram" else ""
        ours, theirs = total(samples, name + end), total(samples, twin + end, engine="0", model_name=MODEL)
        assert ours == theirs, f"{name} is {ours}, {twin} is {theirs}"


async def check_scheduler_restart(observed: Observed, client: AsyncClient) -> None:
    """A gateway without a scheduler is alive and not ready; its open request continues and is counted as moved."""
    await observed.until(lambda s: total(s, "quire_num_requests_running") == 0)
    async with client.stream(token_ids=PROMPT, max_tokens=60, ignore_eos=True) as stream:
        await anext(aiter(stream))
        observed.scheduler.kill()
        samples = await observed.until(lambda s: total(s, "quire_gateway_schedulers", state="away") == 1)
        assert firing(History(samples, samples, seconds=10.0)) == {"QuireSchedulerAway"}
        assert [(await observed.get(observed.gateway, path))[0] for path in ("/livez", "/readyz")] == [200, 503]
        assert [await observed.health(observed.gateway, name) for name in ("liveness", "readiness")] == [1, 2]
        with pytest.raises(TimeoutError):  # a new request waits
            await asyncio.wait_for(client.generate(token_ids=PROMPT, max_tokens=2), 0.5)
        assert total(await observed.samples(), "quire_gateway_unready_requests_total", model_name=MODEL) == 1
        observed.scheduler.start()
        result = await stream.result()
    assert result.usage.output_tokens == 60
    samples = await observed.samples()
    assert total(samples, "quire_request_moves_total") >= 1
    assert total(samples, "quire_worker_leases_total") >= 2
    assert total(samples, "quire_request_decode_time_seconds_count") == 0, (
        "a request that was taken over has no first token"
    )


async def check_errors_and_resumes(observed: Observed, client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest):
        await generate(client, PROMPT, 10_000_000)
    assert await observed.value("quire_rpc_errors_total", code="INVALID_ARGUMENT", method=GENERATE) == 1
    request = pb.GenerateRequest(
        prompt=pb.Prompt(tokens=types.TokenIds(ids=PROMPT)),
        stop=types.StopParams(max_tokens=4, ignore_eos=True),
        sampling=types.SamplingParams(seed=7),
        continuation=types.Continuation(samples=[types.SampleState(index=0, output_token_ids=[5, 6])]),
    )
    await check_internal_refusals(observed)
    before = await observed.value("quire_generation_tokens_total")
    async for _ in client.raw.Generate(request):
        pass
    samples = await observed.until(lambda s: total(s, "quire_requests_resumed_total") == 1)
    assert total(samples, "quire_generation_tokens_total") == before + 2, (
        "tokens that the client already had were sent again"
    )


async def check_internal_refusals(observed: Observed) -> None:
    """Scheduler and worker count their refusals too. Earlier service restarts may already have caused some refusals."""
    calls: list[tuple[Service, str, str, Callable[[grpc.aio.Channel], Any]]] = [
        (observed.scheduler, "NOT_FOUND", "quire.internal.v1.SchedulerService/GetBundle", no_such_bundle),
        (observed.workers[1], "FAILED_PRECONDITION", "quire.internal.v1.WorkerService/StepBatch", step_without_lease),
    ]
    for service, code, method, call in calls:
        where = {"pod": service.name, "code": code, "method": method}
        before = await observed.value("quire_rpc_errors_total", **where)
        async with grpc.aio.insecure_channel(service.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await call(channel)
        assert await observed.value("quire_rpc_errors_total", **where) == before + 1


async def no_such_bundle(channel: grpc.aio.Channel) -> None:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    await stub.GetBundle(scheduler_pb2.GetBundleRequest(digest=b"no such bundle")).read()


async def step_without_lease(channel: grpc.aio.Channel) -> None:
    await worker_pb2_grpc.WorkerServiceStub(channel).StepBatch(worker_pb2.StepBatchRequest())


async def check_redis_outage(observed: Observed, client: AsyncClient) -> None:
    name = {"pod": observed.scheduler.name}
    await generate(client, [600] * 64, 4)
    samples = await observed.until(lambda s: total(s, "quire_redis_up", **name) == 0)
    samples = await observed.until(lambda s: total(s, "quire_redis_pending_entries") > 0)
    assert total(samples, "quire_redis_errors_total", **name) > 0


def check_pages(*scrapes: dict[str, str]) -> None:
    """The page and a scrape list the same metrics: names, types and labels."""
    tables, seen = read_tables(), set()
    for name, text in (page for scrape in scrapes for page in scrape.items()):
        service = name.partition("-")[0]
        table = tables[service] | {twin: d for d in tables[service].values() for twin in d.vllm}
        families = {
            (family.name + "_total" if family.type == "counter" else family.name): family
            for family in text_string_to_metric_families(text)
        }
        assert families.keys() == table.keys(), f"docs/metrics.md and /metrics of {name} differ"
        for metric, family in families.items():
            assert family.type == table[metric].kind, metric
            labels = {frozenset(sample.labels) - {"le", "engine"} for sample in family.samples}
            assert labels <= {table[metric].labels}, metric
            seen |= {(service, metric)} if family.samples else set()
    documented = {(service, metric) for service, table in tables.items() for metric in table}
    assert {pair for pair in documented - seen if not pair[1].startswith(ELSEWHERE)} == set()


def check_logs(stack: Stack) -> None:
    """The lines of one request_id appear in the logs of all three services, in order."""
    lines = [json.loads(line) for service in stack.services for line in service.log().splitlines()]
    assert all(line["instance"] for line in lines)
    logged = sorted((line for line in lines if line.get("request_id") == "logged-1"), key=lambda line: line["time"])
    assert {line["service"] for line in logged} == {"gateway", "scheduler", "worker"}

    def line_of(service: str, words: str) -> dict[str, Any]:
        return next(line for line in logged if line["service"] == service and words in line["message"])

    assert line_of("gateway", "accepted")["prompt_tokens"] == 64
    assert line_of("scheduler", "queued")["max_tokens"] == 8
    opened = line_of("worker", "has row")
    assert opened["instance"] in WORKER_IDS
    assert opened["computed_tokens"] == 48
    finished = line_of("scheduler", "ended")
    assert (finished["reason"], finished["output_tokens"], finished["cached_tokens"]) == ("length", 8, 48)
    assert line_of("worker", "closed")["row"] == opened["row"]
    ended = line_of("gateway", "ended")
    assert (ended["level"], ended["reason"], ended["output_tokens"]) == ("info", "length", 8)
    assert 0 < ended["first_token_s"] < ended["seconds"]
