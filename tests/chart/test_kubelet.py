"""The chart's pods as local processes: they become ready, serve, scale, and roll under load without losing a token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import sys
import urllib.request
from collections.abc import AsyncIterator
from functools import reduce
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from quire.internal.v1 import scheduler_pb2, worker_pb2
from quire_client import AsyncClient, QuireError, Tls
from quire_client.demo import demo_model_dir

from svc_common.security.trust import ROLES
from tests.chaos.cluster import BUG_WORDS
from tests.chaos.reference import Catalogue, SimRule
from tests.chaos.streams import StreamLoad
from tests.chart.chart import CHART, NAMESPACE, Objects, Values, read_values, render, render_upgrade
from tests.chart.cluster import Cluster
from tests.chart.kubelet import Node, Pod
from tests.chart.test_values import merged
from tests.processes.port_proxy import PortProxy
from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer
from tests.promql import History, merge, read_scrape

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives every process 127.0.0.0/8")

PORTS = {"gateway": 7051, "scheduler": 7052, "worker": 7061, "health": 7090, "metrics": 7091}
PASSWORD = "secret-password"
API_KEY = "a-team-s-key"
SERVER_NAME = "quire.example.com"
LANES = 8
MAX_ROWS = 4 * LANES  # a request may have several samples
SCALED: Values = {
    "keda": {"enabled": True, "prometheusAddress": "http://prometheus:9090"},
    "workerDefaults": {"autoscaling": {"enabled": True}},
}
ROLLED: Values = {part: {"podAnnotations": {"rolled": "yes"}} for part in ("gateway", "scheduler", "workerDefaults")}

# Short shutdown and probe times; everything else is from ci/cpu-values.yaml.
BASE: Values = {
    "ports": PORTS, "log": {"format": "text"},
    "gateway": {
        "drainSeconds": 3, "apiKeys": {"existingSecret": "api-keys", "testEntry": "tester"},
        "tls": {"existingSecret": "gateway-tls", "clientCaSecret": "clients", "serverName": SERVER_NAME},
    },
    "test": {"tlsSecret": "tester"}, "scheduler": {"drainSeconds": 2},
    "redis": {"auth": {"existingSecret": "redis-password"}},
    "models": [
        {
            "name": "demo", "path": "/models/demo", "storage": {"emptyDirSize": "1Gi"},
            "download": {"command": ["cp", "-r", "/opt/quire/demo-model", "/models/demo"]},
        },
    ],
    "workerDefaults": {
        "executor": "sim", "numBlocks": 1024, "kvCacheMemory": "", "drainSeconds": 10,
        "extraArgs": ["--sim-step-ms", "25"],
    },
}  # fmt: skip


def values_with(*changes: Values) -> Values:
    return reduce(merged, changes, merged(read_values(CHART / "ci" / "cpu-values.yaml"), BASE))


def objects(*changes: Values) -> Objects:
    return render(values_with(*changes))


def pool(replicas: int) -> Values:
    """The only pool of the scenario with this number of pods."""
    (entry,) = read_values(CHART / "ci" / "cpu-values.yaml")["workers"]
    return {"workers": [entry | {"replicas": replicas}]}


async def test_a_release_answers_scales_and_rolls_without_losing_a_token(tmp_path: Path) -> None:
    secrets = {
        "redis-password": {"password": PASSWORD},
        "api-keys": {"team": API_KEY, "tester": "another"},
    } | tls_secrets()
    async with Cluster(tmp_path, secrets) as cluster:
        installed = objects()
        await cluster.apply(installed)
        address = cluster.address("r-quire-gateway", PORTS["gateway"])
        client = await AsyncClient.connect(
            address, tls=tls_of(secrets["tester"], tmp_path), api_key=API_KEY, timeout_s=120.0
        )
        async with client:
            await until_ready(client, 2)
            code, log = await cluster.run_pod(objects().get("Pod", "test"))
            assert code == 0, log
            await check_metrics(cluster)
            assert [code async for code in strangers(cluster)] == ["UNAUTHENTICATED"] * 4
            assert await evaluate_scaling(cluster) == [0.0]
            async with streaming(client):
                await cluster.apply(render_upgrade(values_with(pool(3)), installed))
                await until_ready(client, 3)
                await until_rows_are_counted(cluster)
                await cluster.apply(render_upgrade(values_with(pool(3), ROLLED), installed))
                await cluster.apply(render_upgrade(values_with(pool(1), ROLLED), installed))
                await until_ready(client, 1)
        assert cluster.problems == [], cluster.logs()  # exits, failed probes, SIGKILL
        assert [pod.name for pod in cluster.pods("worker")] == ["r-quire-worker-cpu-0"]
        assert all(pod.template["metadata"].get("annotations") for pod in cluster.pods() if "redis" not in pod.name)
        assert [words for words in BUG_WORDS if words in cluster.logs()] == []


ONE_GATEWAY: Values = {
    "gateway": {
        "replicas": 1,
        "apiKeys": {"existingSecret": "", "testEntry": ""},
        "tls": {"existingSecret": "", "clientCaSecret": ""},
        "http": {"enabled": True, "port": 7080},
        "inferencePool": {"enabled": True, "endpointPicker": "epp"},
    },
    "redis": {"enabled": False, "auth": {"existingSecret": ""}},
    "trust": {"mode": "none"},
}


def with_schedulers(replicas: int) -> Objects:
    return objects(pool(3), ONE_GATEWAY, {"scheduler": {"replicas": replicas}})


async def test_schedulers_scale_and_a_lost_scheduler_node_is_replaced_without_a_worker_restart(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.apply(with_schedulers(1))
        address = cluster.address("r-quire-gateway", PORTS["gateway"])
        processes = pids(cluster)
        async with await AsyncClient.connect(address, timeout_s=120.0) as client:
            await until_ready(client, 3)
            async with streaming(client):
                await cluster.lose_node(cluster.pods("scheduler")[0])  # the only one
                await until_spread(client, [3])
                await cluster.apply(with_schedulers(2))
                await until_spread(client, [1, 2])
                await until_picker_sees_load(cluster)
                await cluster.apply(with_schedulers(1))
                await until_spread(client, [3])
        assert pids(cluster) == processes
        assert [p for p in cluster.problems if "scheduler" not in p] == [], cluster.logs()
        assert [words for words in BUG_WORDS if words in cluster.logs()] == []


async def test_the_queue_holds_requests_while_a_pool_has_no_worker(tmp_path: Path) -> None:
    """Scale to zero: KEDA's query is above zero for a waiting request, which runs when a worker has started."""

    def scaled_to(replicas: int) -> Objects:
        idle = {"workerDefaults": {"autoscaling": {"enabled": True, "minReplicas": 0}}}
        rendered = objects(pool(replicas), ONE_GATEWAY, {"scheduler": {"replicas": 1}}, SCALED, idle)
        rendered.get("StatefulSet", "worker-cpu")["spec"]["replicas"] = replicas  # KEDA sets it
        return rendered

    (trigger, _) = scaled_to(0).get("ScaledObject", "worker-cpu")["spec"]["triggers"]

    async def needed_workers() -> float:
        texts = await scrape_all(cluster)
        now = merge(read_scrape(text, namespace=NAMESPACE, service=service_of(name)) for name, text in texts.items())
        answer = History(now, now, 1.0).evaluate(trigger["metadata"]["query"])
        assert isinstance(answer, dict)
        return answer[()]

    async with Cluster(tmp_path) as cluster:
        await cluster.apply(scaled_to(1))
        address = cluster.address("r-quire-gateway", PORTS["gateway"])
        async with await AsyncClient.connect(address, timeout_s=120.0) as client:
            await until_ready(client, 1)
            assert await needed_workers() == 0.0
            await cluster.apply(scaled_to(0))
            await until_ready(client, 0)
            waiting = asyncio.create_task(client.generate(token_ids=[1, 2, 3], max_tokens=4, ignore_eos=True))
            async with asyncio.timeout(30.0):
                while not await needed_workers() > 0.0:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert not waiting.done()
            await cluster.apply(scaled_to(1))
            assert len((await waiting).samples[0].token_ids) == 4
        assert cluster.problems == [], cluster.logs()


async def until_picker_sees_load(cluster: Cluster) -> None:
    """Waits until the pods of the InferencePool export load under the names that an endpoint picker reads."""
    pool = with_schedulers(2).all("InferencePool")[0]["spec"]
    pods = [pod for pod in cluster.pods() if pod.labels.items() >= pool["selector"]["matchLabels"].items()]
    assert [pod.name.rpartition("-")[0] for pod in pods] == ["r-quire-gateway"]
    labels = (("engine", "0"), ("model_name", "demo"))
    async with asyncio.timeout(30.0):
        while True:
            text = await asyncio.to_thread(scrape, f"http://{pods[0].ip}:{PORTS['metrics']}/metrics")
            samples = read_scrape(text)
            assert samples["vllm:num_requests_waiting"][labels] >= 0
            assert samples["vllm:gpu_cache_usage_perc"] == samples["vllm:kv_cache_usage_perc"]
            if samples["vllm:num_requests_running"][labels] and 0 < samples["vllm:kv_cache_usage_perc"][labels] < 1:
                return


def pids(cluster: Cluster) -> dict[str, list[int]]:
    """The processes of gateways and workers."""
    return {pod.name: pod.pids for pod in cluster.pods() if "scheduler" not in pod.name}


async def until_spread(client: AsyncClient, counts: list[int]) -> None:
    """Waits until exactly these numbers of workers are leased by the schedulers that the gateway knows."""
    async with asyncio.timeout(60.0):
        while True:
            schedulers = (await client.status()).schedulers
            if sorted(sum(w.state == "ready" for w in s.workers) for s in schedulers) == counts:
                return
            await asyncio.sleep(0.1)


async def test_workers_without_a_scheduler_outlive_their_startup_limit(tmp_path: Path) -> None:
    """Nothing restarts a worker that has loaded its model: it waits, and is leased when a scheduler comes."""
    limit_s = 8
    everything = with_schedulers(1)
    probe = everything.get("StatefulSet", "worker-cpu")["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    probe |= {"periodSeconds": limit_s, "failureThreshold": 1}
    workers = (*everything.all("StatefulSet"), *everything.all("Service"), *everything.all("Secret"))
    async with Cluster(tmp_path) as cluster:
        installing = asyncio.create_task(cluster.apply(Objects(workers, "")))
        await asyncio.sleep(limit_s + 1)  # the time is what is tested
        pods = cluster.pods("worker")
        assert [(pod.is_started, pod.is_ready) for pod in pods] == [(True, False)] * 3
        assert cluster.problems == []
        processes = pids(cluster)
        await cluster.apply(Objects(tuple(everything.all("Deployment")), ""))
        await installing
        assert all(pod.is_ready for pod in pods)
        assert pids(cluster).items() >= processes.items()


async def strangers(cluster: Cluster) -> AsyncIterator[str]:
    """The code that a process without a role gets from each scheduler and worker."""
    for part, module, method in (("scheduler", scheduler_pb2, "GetSchedulerStatus"), ("worker", worker_pb2, "Lease")):
        service = next(iter(module.DESCRIPTOR.services_by_name.values())).full_name
        for pod in cluster.pods(part):
            async with grpc.aio.insecure_channel(f"{pod.ip}:{PORTS[part]}") as channel:
                call: Any = channel.unary_unary(f"/{service}/{method}")
                try:
                    await call(b"", timeout=10)
                    yield "OK"
                except grpc.aio.AioRpcError as error:
                    yield error.code().name


OPERATOR = "key-of-an-operator"
WITH_CERTIFICATES: Values = {
    "trust": {"mode": "tls", "tls": {"existingSecrets": {role: f"cert-{role}" for role in ROLES}}},
    "gateway": {
        "replicas": 1,
        "tls": {"existingSecret": "", "clientCaSecret": ""},
        "admin": {"enabled": True, "port": 7055, "existingSecret": "operators"},
        "keyLimits": {"toml": '[default]\nmodels = ["another"]\n[owners.team]\nmodels = ["demo"]\n'},
    },
    "scheduler": {"replicas": 1, "blockKey": {"existingSecret": "block-key"}},
    "redis": {"enabled": False, "auth": {"existingSecret": ""}},
}


async def test_a_release_with_certificates_limits_and_a_port_for_operators(tmp_path: Path) -> None:
    authority = trustme.CA()
    ca = {"ca.crt": authority.cert_pem.bytes().decode()}
    secrets = {f"cert-{role}": secret_of(authority.issue_cert(f"quire-{role}")) | ca for role in ROLES} | {
        "api-keys": {"team": API_KEY, "tester": "another-key"},
        "operators": {"alice": OPERATOR},
        "block-key": {"keys": "5e" * 32},
    }
    async with Cluster(tmp_path, secrets) as cluster:
        await cluster.apply(objects(pool(1), WITH_CERTIFICATES))
        address = cluster.address("r-quire-gateway", PORTS["gateway"])
        async with await AsyncClient.connect(address, api_key=API_KEY, timeout_s=60.0) as client:
            await until_ready(client, 1)
            done = await client.generate(token_ids=[1, 2, 3], max_tokens=4)
            assert len(done.samples[0].token_ids) == 4
            with pytest.raises(QuireError, match="admin-listen"):
                await client.drain_worker("r-quire-worker-cpu-0")
        async with await AsyncClient.connect(address, api_key="another-key", timeout_s=60.0) as client:
            with pytest.raises(QuireError) as refused:
                await client.generate(token_ids=[1, 2, 3], max_tokens=4)
            assert refused.value.code.name == "PERMISSION_DENIED"
        assert [code async for code in strangers(cluster)] == ["UNAVAILABLE"] * 2
        admin = cluster.address("r-quire-gateway-admin", 7055)
        async with await AsyncClient.connect(admin, api_key=OPERATOR, timeout_s=60.0) as operator:
            await operator.drain_worker("r-quire-worker-cpu-0")


def tls_secrets() -> dict[str, dict[str, str]]:
    """Secrets as cert-manager creates them: gateway certificate, client CA, client certificate."""
    authority = trustme.CA()
    ca = authority.cert_pem.bytes().decode()
    own = {"gateway-tls": authority.issue_cert(SERVER_NAME), "tester": authority.issue_cert("tester@example.com")}
    return {"clients": {"ca.crt": ca}} | {name: secret_of(cert) | {"ca.crt": ca} for name, cert in own.items()}


def secret_of(cert: trustme.LeafCert) -> dict[str, str]:
    chain = b"".join(part.bytes() for part in cert.cert_chain_pems)
    return {"tls.crt": chain.decode(), "tls.key": cert.private_key_pem.bytes().decode()}


def tls_of(secret: dict[str, str], folder: Path) -> Tls:
    """TLS options of a client from its secret."""
    for name, text in secret.items():
        (folder / name).write_text(text)
    return Tls(folder / "ca.crt", folder / "tls.crt", folder / "tls.key", SERVER_NAME)


@contextlib.asynccontextmanager
async def streaming(client: AsyncClient) -> AsyncIterator[None]:
    """Runs streams with known tokens during the block; then they finish and every token is compared."""
    vocab_size = (await client.model()).vocab_size
    catalogue = await Catalogue.build(SimRule(client, demo_model_dir()), seed=1, count=12, vocab_size=vocab_size)
    load = StreamLoad(client, catalogue, seed=1, lanes=LANES, at_least=0)
    running = asyncio.create_task(load.run(float("inf")))
    try:
        yield
        load.stop()
        await asyncio.wait_for(running, 60.0)
    finally:
        load.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    bad = [f"{record.request}: {record.difference()}" for record in load.records if record.is_bad]
    assert bad == []
    assert len(load.records) > LANES


async def until_ready(client: AsyncClient, num_workers: int) -> None:
    """Waits until the schedulers together lease this number of workers."""
    async with asyncio.timeout(60.0):
        while True:
            if sum(model.ready_workers for model in await client.models()) == num_workers:
                return
            await asyncio.sleep(0.1)


async def until_rows_are_counted(cluster: Cluster) -> None:
    """Waits until the metrics that KEDA reads reflect the streams."""
    async with asyncio.timeout(30.0):
        while True:
            (needed,) = await evaluate_scaling(cluster)
            assert 0.0 <= needed <= MAX_ROWS  # workers
            if needed:
                return


async def until_logged(pod: Pod, words: str) -> None:
    async with asyncio.timeout(30.0):
        while words not in pod.log():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def check_metrics(cluster: Cluster) -> None:
    """Every pod has the port that the ServiceMonitor scrapes."""
    texts = await scrape_all(cluster)
    assert [name for name, text in texts.items() if "quire_build_info" not in text] == []


async def evaluate_scaling(cluster: Cluster) -> list[float]:
    """The results of Prometheus for each trigger of the pool's ScaledObject."""
    scaled = objects(pool(2), SCALED).get("ScaledObject", "worker-cpu")
    # The operator adds the namespace label to targets of a ServiceMonitor.
    texts = await scrape_all(cluster)
    now = merge(read_scrape(text, namespace=NAMESPACE, service=service_of(name)) for name, text in texts.items())
    answers = [History(now, now, 1.0).evaluate(t["metadata"]["query"]) for t in scaled["spec"]["triggers"]]
    return [vector[()] for vector in answers if isinstance(vector, dict)]


def service_of(pod: str) -> str:
    """The headless Service of a pod."""
    return "r-quire-gateway-headless" if "-gateway-" in pod else pod.rpartition("-")[0]


async def scrape_all(cluster: Cluster) -> dict[str, str]:
    pods = [pod for pod in cluster.pods() if "redis" not in pod.name]
    urls = {pod.name: f"http://{pod.ip}:{PORTS['metrics']}/metrics" for pod in pods}
    return {name: await asyncio.to_thread(scrape, url) for name, url in urls.items()}


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


async def test_schedulers_use_a_redis_with_password_and_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    values = merged(read_values(CHART / "ci" / "external-redis-values.yaml"), {"ports": PORTS})
    port = free_port()
    release = render(merged(values, {"redis": {"external": {"url": f"rediss://127.0.0.1:{port}/0"}}}))
    schedulers = tuple(m for m in release.manifests if "scheduler" in m["metadata"]["name"])
    with RedisServer(tmp_path) as redis:
        with redis.client() as client:
            client.config_set("requirepass", PASSWORD)
        client = authority.issue_cert("quire-scheduler")
        async with tls_in_front_of(redis, authority, port):
            secrets = {
                "redis-password": {"password": PASSWORD},
                "redis-ca": {"ca.crt": authority.cert_pem.bytes().decode()},
                "redis-client": {
                    "tls.crt": b"".join(part.bytes() for part in client.cert_chain_pems).decode(),
                    "tls.key": client.private_key_pem.bytes().decode(),
                },
            }
            async with Cluster(tmp_path, secrets) as cluster:
                await cluster.apply(Objects(schedulers, ""))
                assert len(cluster.pods()) == 2
                for pod in cluster.pods():
                    await until_logged(pod, "redis answers; the prefix index is shared")


@contextlib.asynccontextmanager
async def tls_in_front_of(redis: RedisServer, authority: trustme.CA, port: int) -> AsyncIterator[None]:
    """A TLS port of Redis. It and its clients have certificates of this CA."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    proxy = PortProxy(lambda: asyncio.open_connection("127.0.0.1", redis.port))
    await proxy.start("127.0.0.1", port, ssl=context)
    try:
        yield
    finally:
        await proxy.close()


async def test_a_pod_that_fails_to_start_reports_its_log(tmp_path: Path) -> None:
    wrong: Any = objects({"gateway": {"extraArgs": ["--max-streams=0"]}})
    async with Cluster(tmp_path, {"redis-password": {"password": PASSWORD}}) as cluster:
        gateway = wrong.get("Deployment", "gateway")
        with pytest.raises(ExceptionGroup) as failed:
            await cluster.apply(Objects((gateway, *wrong.all("Service"), *wrong.all("Secret")), ""))
        assert failed.group_contains(RuntimeError, match="--max-streams: 0 is outside")


STUBBORN = """
import signal, socket, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.create_server(("0.0.0.0", 7200))
time.sleep(60)
"""
SHORT_LIVED = """
import socket
server = socket.create_server(("0.0.0.0", 7200))
server.accept()
server.accept()
raise SystemExit(3)
"""


def pod_of(script: str) -> dict[str, Any]:
    probe = {"tcpSocket": {"port": "http"}, "periodSeconds": 1}
    container = {
        "name": "main",
        "command": ["python", "-c", script],
        "ports": [{"name": "http", "containerPort": 7200}],
        "startupProbe": probe | {"failureThreshold": 30},
        "livenessProbe": probe,
        "readinessProbe": probe,
    }
    return {"metadata": {"labels": {}}, "spec": {"containers": [container], "terminationGracePeriodSeconds": 1}}


async def test_the_kubelet_kills_a_pod_that_ignores_sigterm(tmp_path: Path) -> None:
    node = Node(tmp_path)
    pod = Pod("stubborn", pod_ip(), pod_of(STUBBORN), node)
    await pod.start()
    await pod.wait_ready()
    await pod.terminate()
    assert node.problems == ["stubborn: main was still running at the end of its grace period"]


async def test_the_kubelet_notices_an_exit(tmp_path: Path) -> None:
    node = Node(tmp_path)
    pod = Pod("short-lived", pod_ip(), pod_of(SHORT_LIVED), node)
    await pod.start()
    async with asyncio.timeout(30.0):
        while not node.problems:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert not pod.is_ready
    await pod.terminate()
    assert node.problems == ["short-lived: it exited or the liveness probe failed", "short-lived: main exited with 3"]


def pod_ip() -> str:
    """An address for a pod outside a cluster."""
    return f"127.{64 + os.getpid() % 128}.9.9"
