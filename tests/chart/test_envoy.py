"""A real Envoy with the settings of the rendered GRPCRoute and BackendTLSPolicy in front of a real gateway.

A controller of the Gateway API translates these objects into Envoy's configuration; `envoy_config` does the same for
the fields that the chart uses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from quire_client import AsyncClient, QuireError
from quire_client.demo import demo_model_dir

from tests.chart.chart import Objects, program, render
from tests.processes.children import start_child
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack

pytestmark = pytest.mark.skipif(
    not Path(program("envoy")).exists(), reason="no envoy: its wheel exists for Linux on x86-64 only"
)

HOST = "localhost"
ROUTE = {"grpcRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": [HOST]}}
FILTERS = "envoy.extensions.filters"
DEADLINE_S = 30.0


def envoy_config(objects: Objects, *, listen: int, backend: str, ca: Path | None) -> dict[str, Any]:
    """The configuration that the route and the policy mean. `ca` is the content of the policy's ConfigMap."""
    route = objects.get("GRPCRoute", "gateway")["spec"]
    (rule,) = route["rules"]
    cluster = rule["backendRefs"][0]["name"]
    routes = [
        {
            "match": {"prefix": f"/{match['method']['service']}/", "grpc": {}},
            "route": {"cluster": cluster, "timeout": "0s"},
        }
        for match in rule["matches"]
    ]
    manager = {
        "@type": f"type.googleapis.com/{FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        "strip_any_host_port": True,
        "stat_prefix": "in",
        "codec_type": "HTTP2",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"type.googleapis.com/{FILTERS}.http.router.v3.Router"},
            }
        ],
        "route_config": {"virtual_hosts": [{"name": "quire", "domains": route["hostnames"], "routes": routes}]},
    }
    return {
        "static_resources": {
            "listeners": [
                {
                    "address": _address(f"127.0.0.1:{listen}"),
                    "filter_chains": [
                        {
                            "filters": [
                                {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
                            ]
                        }
                    ],
                }
            ],
            "clusters": [_cluster(objects, cluster, backend, ca)],
        }
    }


def _cluster(objects: Objects, name: str, backend: str, ca: Path | None) -> dict[str, Any]:
    (service,) = (s for s in objects.all("Service") if s["metadata"]["name"] == name)
    protocol = next(port["appProtocol"] for port in service["spec"]["ports"] if port["name"] == "grpc")
    http = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    cluster: dict[str, Any] = {
        "name": name,
        "connect_timeout": "5s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(backend)}}]}],
        },
        "typed_extension_protocol_options": {
            http: {"@type": f"type.googleapis.com/{http}", "explicit_http_config": {"http2_protocol_options": {}}}
        },
    }
    policies = objects.all("BackendTLSPolicy")
    assert bool(policies) == (protocol == "https")
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


@asynccontextmanager
async def through_envoy(
    folder: Path, objects: Objects, gateway: Service, ca: Path | None
) -> AsyncIterator[AsyncClient]:
    """A client of the gateway through Envoy, with the host name of the route."""
    port = free_port()
    config, log = folder / "envoy.json", folder / "envoy.log"
    config.write_text(json.dumps(envoy_config(objects, listen=port, backend=gateway.address, ca=ca)))
    flags = ["--config-path", str(config), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
    process = start_child([program("envoy"), *flags], log)
    try:
        async with await AsyncClient.connect(f"{HOST}:{port}", timeout_s=60.0, connect_timeout_s=DEADLINE_S) as client:
            await until_served(client)
            yield client
    finally:
        process.kill()
        process.wait()


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
        async with through_envoy(tmp_path, objects, gateway, ca) as client:
            done = await client.generate(token_ids=[1, 2, 3], max_tokens=8, ignore_eos=True)
            assert len(done.samples[0].token_ids) == 8
            with pytest.raises(QuireError) as refused:
                await client.drain_worker("worker-0")
            assert refused.value.code.name == "UNIMPLEMENTED"  # Envoy has no route for it
            assert scheduler.is_running


def certificate(folder: Path, hostname: str) -> tuple[tuple[str, ...], Path]:
    """Flags of a gateway with a certificate of this name, and the CA."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    issued = authority.issue_cert(hostname)
    issued.private_key_pem.write_to_path(str(folder / "tls.key"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
    return ("--tls-cert-file", str(folder / "tls.crt"), "--tls-key-file", str(folder / "tls.key")), folder / "ca.crt"
