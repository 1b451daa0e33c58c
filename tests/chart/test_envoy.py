"""A real Envoy with the settings of the rendered routes and their policies in front of a real gateway.

A controller of the Gateway API translates these objects into Envoy's configuration; `envoy_config` does the same for
the fields that the chart uses.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import trustme
from quire.v1 import inference_pb2 as pb
from quire_client import AsyncClient, QuireError
from quire_client.demo import demo_model_dir

from tests.chart.chart import Manifest, Objects, program, render
from tests.hostile import attacks, examples
from tests.hostile.target import Port
from tests.processes.children import start_child
from tests.processes.ports import free_port
from tests.processes.stack import ROOT, Stack

pytestmark = pytest.mark.skipif(
    not Path(program("envoy")).exists(), reason="no envoy: its wheel exists for Linux on x86-64 only"
)

HOST = "localhost"
ROUTE = {"grpcRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": [HOST]}}
FILTERS = "envoy.extensions.filters"
DEADLINE_S = 30.0


def envoy_config(objects: Objects, listeners: dict[str, tuple[int, str]], ca: Path | None) -> dict[str, Any]:
    """The configuration that the routes and policies mean. `listeners`: port and backend by kind of route. `ca` is the
    content of the policy's ConfigMap.
    """
    return {
        "static_resources": {
            "listeners": [_listener(objects, kind, port) for kind, (port, _) in listeners.items()],
            "clusters": [_cluster(objects, kind, backend, ca) for kind, (_, backend) in listeners.items()],
        }
    }


def _listener(objects: Objects, kind: str, port: int) -> dict[str, Any]:
    (route,) = objects.all(kind)
    (rule,) = route["spec"]["rules"]
    action = {"cluster": kind} | _timeout(objects, route)
    if kind == "GRPCRoute":
        matches = [{"prefix": f"/{match['method']['service']}/", "grpc": {}} for match in rule["matches"]]
    else:
        matches = [{"prefix": "/"}]
    routes = [{"match": match, "route": action} for match in matches]
    manager = {
        "@type": f"type.googleapis.com/{FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        "strip_any_host_port": True,
        "stat_prefix": "in",
        "codec_type": "AUTO",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"type.googleapis.com/{FILTERS}.http.router.v3.Router"},
            }
        ],
        "route_config": {"virtual_hosts": [{"name": "quire", "domains": route["spec"]["hostnames"], "routes": routes}]},
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {"address": _address(f"127.0.0.1:{port}"), "filter_chains": [chain]}


def _timeout(objects: Objects, route: Manifest) -> dict[str, str]:
    """The timeout of a route as Envoy Gateway sets it. Without one, Envoy ends an answer after 15 seconds."""
    policies = [
        policy["spec"]["timeout"]["http"]["requestTimeout"]
        for policy in objects.all("BackendTrafficPolicy")
        for target in policy["spec"]["targetRefs"]
        if (target["kind"], target["name"]) == (route["kind"], route["metadata"]["name"])
    ]
    own = [rule["timeouts"]["request"] for rule in route["spec"]["rules"] if "timeouts" in rule]
    return {"timeout": (policies + own)[0]} if policies or own else {}


def _cluster(objects: Objects, kind: str, backend: str, ca: Path | None) -> dict[str, Any]:
    (route,) = objects.all(kind)
    (reference,) = route["spec"]["rules"][0]["backendRefs"]
    name = reference["name"]
    (service,) = (s for s in objects.all("Service") if s["metadata"]["name"] == name)
    (port,) = (port for port in service["spec"]["ports"] if port["port"] == reference["port"])
    http = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    protocol = "http2_protocol_options" if kind == "GRPCRoute" else "http_protocol_options"
    cluster: dict[str, Any] = {
        "name": kind,
        "connect_timeout": "5s",
        "load_assignment": {
            "cluster_name": kind,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(backend)}}]}],
        },
        "typed_extension_protocol_options": {
            http: {"@type": f"type.googleapis.com/{http}", "explicit_http_config": {protocol: {}}}
        },
    }
    policies = objects.all("BackendTLSPolicy")
    assert bool(policies) == (port.get("appProtocol") == "https")
    for policy in policies:
        assert policy["spec"]["targetRefs"] == [{"group": "", "kind": "Service", "name": name}]
        cluster["transport_socket"] = _tls(policy["spec"]["validation"]["hostname"], str(ca))
    return cluster


def _tls(hostname: str, ca: str) -> dict[str, Any]:
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "sni": hostname,
            "common_tls_context": {
                "alpn_protocols": ["h2"],
                "validation_context": {
                    "trusted_ca": {"filename": ca},
                    "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": hostname}}],
                },
            },
        },
    }


def _address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


@contextmanager
def envoy(folder: Path, objects: Objects, backends: dict[str, str], ca: Path | None = None) -> Iterator[dict[str, int]]:
    """Envoy in front of the backends of these kinds of routes. Yields its port by kind."""
    listeners = {kind: (free_port(), backend) for kind, backend in backends.items()}
    folder.mkdir(exist_ok=True)
    config = folder / "envoy.json"
    config.write_text(json.dumps(envoy_config(objects, listeners, ca)))
    with running_envoy(config):
        yield {kind: port for kind, (port, _) in listeners.items()}


@contextmanager
def running_envoy(config: Path) -> Iterator[None]:
    """Envoy with this configuration."""
    flags = ["--config-path", str(config), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
    process = start_child([program("envoy"), *flags], config.with_name("envoy.log"))
    try:
        yield
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[AsyncClient]:
    """A client of the gateway through Envoy, with the host name of the route, when a worker is ready."""
    async with await AsyncClient.connect(f"{HOST}:{port}", timeout_s=60.0, connect_timeout_s=DEADLINE_S) as client:
        await until_served(client)
        yield client


async def until_served(client: AsyncClient) -> None:
    """Waits until a worker is ready."""
    async with asyncio.timeout(DEADLINE_S):
        while not any(model.ready_workers for model in await client.models()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("has_tls", [False, True], ids=["plaintext", "tls"])
async def test_envoy_routes_requests_and_no_admin_calls(tmp_path: Path, has_tls: bool) -> None:
    tls = {"tls": {"existingSecret": "cert", "caConfigMap": "ca"}} if has_tls else {}
    objects = render({"gateway": ROUTE | tls})
    flags: tuple[str, ...] = ()
    ca = None
    if has_tls:
        hostname = objects.get("BackendTLSPolicy", "gateway")["spec"]["validation"]["hostname"]
        flags, ca = certificate(tmp_path, hostname)
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), "--executor", "sim")
        gateway = stack.start_gateway(scheduler, flags=flags)
        backends = {"GRPCRoute": gateway.address}
        with envoy(tmp_path / "envoy", objects, backends, ca) as ports:
            async with connected(ports["GRPCRoute"]) as client:
                done = await client.generate(token_ids=[1, 2, 3], max_tokens=8, ignore_eos=True)
                assert len(done.samples[0].token_ids) == 8
                with pytest.raises(QuireError) as refused:
                    await client.drain_worker("worker-0")
                assert refused.value.code.name == "UNIMPLEMENTED"  # Envoy has no route for it
                assert scheduler.is_running


FLOOD = attacks.Size(frames=20_000, connections=0, open_calls=0, slow_s=0.0, bomb_bytes=0)
FLOOD_CPU_S = 0.5  # without Envoy 0.9


async def test_floods_of_frames_end_at_envoy(tmp_path: Path) -> None:
    """Envoy reads the connections in turn and passes calls only, so the gateway does not work for a flood."""
    objects = render({"gateway": ROUTE})
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), "--executor", "sim", "--sim-step-ms", "20")
        gateway = stack.start_gateway(scheduler)
        with envoy(tmp_path / "envoy", objects, {"GRPCRoute": gateway.address}) as ports:
            async with connected(ports["GRPCRoute"]) as client:
                port = Port("envoy", gateway, f"127.0.0.1:{ports['GRPCRoute']}", (examples.INFERENCE,))
                process = psutil.Process(gateway.process.pid)
                before = process.cpu_times()
                stream = asyncio.create_task(client.generate(token_ids=[1, 2, 3], max_tokens=200, ignore_eos=True))
                for flood in attacks.FLOODS:
                    await attacks.launch(flood, port, FLOOD)
                done = await stream
                after = process.cpu_times()
    assert len(done.samples[0].token_ids) == 200
    assert after.user + after.system - before.user - before.system < FLOOD_CPU_S


async def test_grpc_web_as_the_page_says(tmp_path: Path) -> None:
    """The configuration of docs/grpc.md, with other ports: streams in text and binary, of allowed origins only."""
    page = (ROOT / "docs/grpc.md").read_text()
    port, origin = free_port(), "https://chat.example.com"
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), "--executor", "sim")
        gateway = stack.start_gateway(scheduler)
        config = page.split("```yaml\n")[1].split("```")[0].replace("port_value: 8080", f"port_value: {port}")
        backend = gateway.address.rpartition(":")[2]
        (tmp_path / "web.yaml").write_text(config.replace("port_value: 50051", f"port_value: {backend}"))
        async with await stack.connect(gateway):
            pass
        with running_envoy(tmp_path / "web.yaml"):
            request = pb.GenerateRequest(prompt={"tokens": {"ids": [5]}}, stop={"max_tokens": 4, "ignore_eos": True})
            body = bytes(1) + request.ByteSize().to_bytes(4, "big") + request.SerializeToString()
            for kind, sent in (("grpc-web+proto", body), ("grpc-web-text", base64.b64encode(body))):
                status, headers, answer = await web_call(port, f"application/{kind}", sent, origin)
                parts = re.findall(rb"[^=]+=*", answer)  # each message is a text of its own
                found = b"".join(map(base64.b64decode, parts)) if kind.endswith("text") else answer
                assert (status, headers["access-control-allow-origin"]) == (200, origin)
                assert b"grpc-status:0" in found
                first = pb.GenerateResponse.FromString(found[5 : 5 + int.from_bytes(found[1:5], "big")])
                assert first.accepted.prompt_tokens == 1
            _, headers, _ = await web_call(port, "application/grpc-web+proto", body, "https://evil.example")
            assert "access-control-allow-origin" not in headers


async def web_call(port: int, kind: str, body: bytes, origin: str) -> tuple[int, Mapping[str, str], bytes]:
    """A call as a page sends it. Waits until Envoy answers."""
    headers = {"content-type": kind, "accept": kind, "x-grpc-web": "1", "origin": origin}
    url = f"http://127.0.0.1:{port}/quire.v1.InferenceService/Generate"
    async with aiohttp.ClientSession() as session, asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(aiohttp.ClientConnectorError):
                async with session.post(url, data=body, headers=headers) as response:
                    return response.status, response.headers, await response.read()
            await asyncio.sleep(0.05)


NUM_SECONDS = 17  # more than the 15 after which Envoy ends an answer on a route without a timeout
TOKENS = {"token_ids": [1, 2, 3], "max_tokens": NUM_SECONDS, "ignore_eos": True, "temperature": 0.0}


async def test_long_answers_pass_the_routes_of_the_chart(tmp_path: Path) -> None:
    """One token per second, through the routes as the chart renders them. A timeout of the values applies."""
    http = {"enabled": True, "route": ROUTE["grpcRoute"]}
    objects = render({"gateway": {"http": http, "grpcRoute": ROUTE["grpcRoute"] | {"timeoutPolicy": "envoy-gateway"}}})
    short = render({"gateway": {"http": http | {"route": ROUTE["grpcRoute"] | {"timeouts": {"request": "2s"}}}}})
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), "--executor", "sim", "--sim-step-ms", "1000")
        address = f"127.0.0.1:{free_port()}"
        gateway = stack.start_gateway(scheduler, flags=("--http-listen", address))
        backends = {"GRPCRoute": gateway.address, "HTTPRoute": address}
        with (
            envoy(tmp_path / "long", objects, backends) as ports,
            envoy(tmp_path / "short", short, {"HTTPRoute": address}) as short_ports,
        ):
            async with connected(ports["GRPCRoute"]) as client:
                done, answer, cut = await asyncio.gather(
                    client.generate(**TOKENS), completion(ports["HTTPRoute"]), completion(short_ports["HTTPRoute"])
                )
    assert len(done.samples[0].token_ids) == NUM_SECONDS
    assert answer.get("usage", answer)["completion_tokens"] == NUM_SECONDS
    assert cut == {"status": 504}


async def completion(port: int) -> dict[str, Any]:
    """The answer of the completions API, or its status if it is not JSON."""
    body = {"prompt": [1, 2, 3], "max_tokens": NUM_SECONDS, "ignore_eos": True, "temperature": 0}
    url = f"http://{HOST}:{port}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return await response.json() if response.status == 200 else {"status": response.status}


def certificate(folder: Path, hostname: str) -> tuple[tuple[str, ...], Path]:
    """Flags of a gateway with a certificate of this name, and the CA."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    issued = authority.issue_cert(hostname)
    issued.private_key_pem.write_to_path(str(folder / "tls.key"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
    return ("--tls-cert-file", str(folder / "tls.crt"), "--tls-key-file", str(folder / "tls.key")), folder / "ca.crt"
