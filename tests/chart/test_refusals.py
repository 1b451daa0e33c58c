"""Invalid combinations of values fail the rendering with an error that names the value to set."""

from __future__ import annotations

from typing import Any

import pytest
from helm_python.errors import HelmError

from tests.chart.chart import Values, render
from tests.chart.test_values import NEEDED, merged

ENV = {"name": "A", "value": "b"}
IMAGE = f"reg/m@sha256:{'b' * 64}"
SOURCE = f"hf://o/m@{'a' * 40}"


def models(*entries: dict[str, Any]) -> Values:
    return {"models": list(entries), "workers": [{"name": f"p{i}", "model": e["name"]} for i, e in enumerate(entries)]}


def pools(*entries: dict[str, Any]) -> Values:
    return {"workers": [{"name": "cpu", "model": "demo"} | entry for entry in entries]}


def stored(**storage: str) -> Values:
    return {"models": [{"name": "demo", "path": "/models/m", "storage": storage}]}


GET = {"command": ["get"]}
KEDA = {"enabled": True, "prometheusAddress": "http://p:9090"}

COMBINATIONS = [
    (
        {"gateway": {"admin": {"console": {"enabled": True}}}},
        "set gateway.admin.enabled and gateway.admin.existingSecret",
    ),
    (
        {"gateway": {"admin": {"enabled": True, "existingSecret": "k", "console": {"enabled": True, "port": 9090}}}},
        "gateway.admin.console.port is 9090, the same as ports.metrics: set different ports",
    ),
    (pools({"role": "decode"}), 'pool "cpu" has role decode, but its streams cannot move: set kvTransfer'),
    (
        pools({"gpuCount": 2, "kvTransfer": True}),
        'pool "cpu" has gpuCount 2, whose blocks cannot move: leave kvHostMemory',
    ),
    # a removed section or value
    ({"gateway": {"tls": None}}, "at '/gateway': missing property 'tls'"),
    ({"gateway": {"replicas": None}}, "at '/gateway': missing property 'replicas'"),
    ({"workers": [{"name": "a", "model": "demo", "autoscaling": None}]}, "got null, want object"),
    (
        {"metrics": {"prometheusRule": {"enabled": True, "disabled": ["QuireNoSuch"]}}},
        "metrics.prometheusRule.disabled has QuireNoSuch, which is not an alert of this release",
    ),
    (models({"name": "a"}, {"name": "a"}), 'two entries named "a"'),
    (models({"name": "a", "servedName": "x"}, {"name": "b", "servedName": "x"}), "set another servedName"),
    ({"models": [{"name": "demo"}, {"name": "b"}]}, "add a pool with model: b"),
    (
        {"fullnameOverride": "a" * 40} | models({"name": "b" * 20}),
        f"the name of Service {'a' * 40}-scheduler-{'b' * 20} would have 71 characters, but the limit is 63",
    ),
    ({"fullnameOverride": "a" * 30} | pools({"name": "c" * 20}), "or the name of the pool"),
    (stored(existingClaim="c", hostPath="/d"), "storage.existingClaim and storage.hostPath: set only one"),
    ({"models": [{"name": "demo", "download": GET}]}, "no storage to download to: set storage.emptyDirSize"),
    (
        {"models": [{"name": "demo", "path": "/elsewhere", "storage": {"existingClaim": "c"}}]},
        "set path to a folder under /models",
    ),
    ({"models": [{"name": "demo", "path": "/models/m"}]}, "has path /models/m but no storage"),
    (stored(emptyDirSize="1Gi"), "but no download: set source or download.command"),
    (stored(claimSize="1Gi"), "but no download: set source or download.command"),
    (stored(existingClaim="c", storageClass="fast"), "set storage.claimSize too"),
    (pools({}, {}), 'two pools named "cpu"'),
    (pools({"model": "nope"}, {"name": "b"}), 'model "nope", which is not a name in models (demo)'),
    (
        pools({"gpuCount": 1, "kvCacheDtype": "fp8"}, {"name": "b", "gpuCount": 1}),
        'pools "cpu" and "b" of model "demo" have kvCacheDtype "fp8" and "auto": set the same kvCacheDtype in all',
    ),
    (pools({"blockSize": 16}, {"name": "b", "blockSize": 32}), "have blockSize 16 and 32: set the same blockSize"),
    (pools({}, {"name": "b", "quantize": "int8"}), 'have quantize "" and "int8"'),
    (pools({}, {"name": "b", "maxModelLen": 1048576}), "have maxModelLen 0 and 1048576"),
    (pools({"dtype": "float32"}, {"name": "b", "dtype": "bfloat16"}), 'have dtype "float32" and "bfloat16"'),
    (pools({"executor": "sim"}, {"name": "b"}), 'have executor "sim" and "model"'),
    (
        pools({}, {"name": "b", "gpuCount": 1, "determinism": "best_effort"}),
        'have determinism "exact" and "best_effort"',
    ),
    (
        pools({"kvCacheMemory": "5G"}, {"name": "b", "kvCacheMemory": "4G"}),
        'have kvCacheMemory "5G", numBlocks 0, gpuCount 0 and kvCacheMemory "4G", numBlocks 0, gpuCount 0, so '
        "the maximum sequence length of their workers may differ: set maxModelLen in all of them",
    ),
    (pools({"numBlocks": 8}, {"name": "b"}), "set maxModelLen in all of them"),
    (
        pools({"gpuCount": 1}, {"name": "b", "gpuCount": 1}),
        "leave the size of the KV cache to the workers",
    ),
    (pools({"kvCacheDtype": "fp8"}), "float16 and fp8 need gpuCount 1 or more"),
    (pools({"gpuCount": 1, "backend": "cpu"}), "set gpuCount to 0, or leave backend empty"),
    (pools({"backend": "cuda"}), "set gpuCount to 1 or more"),
    (pools({"gpuCount": 1, "executor": "sim"}), "executor sim, which uses no GPU"),
    (pools({"nodesPerWorker": 2}), "several nodes need GPUs, so set gpuCount to the GPUs of each node"),
    ({"ports": {"nodes": 50061}}, "ports.nodes and ports.worker are both 50061"),
    ({"ports": {"nodes": 9090}}, "ports.nodes is 9090, the same as ports.metrics"),
    (
        pools({"gpuCount": 1, "nodesPerWorker": 2}) | NEEDED["PER_POD"],
        "has storage.claimSize, a volume per pod of a StatefulSet: use storage.existingClaim",
    ),
    (
        {"fullnameOverride": "a" * 30} | pools({"gpuCount": 1, "nodesPerWorker": 2, "name": "c" * 12}),
        f"the name of LeaderWorkerSet {'a' * 30}-worker-{'c' * 12} would have 50 characters, but the limit is 48",
    ),
    (
        {"workers": [{"name": "a", "model": "demo"}, {"name": "b", "model": "demo", "gpuCount": 2}]},
        'pools of model "demo" have backend cpu, gpuCount 0 and backend cuda, gpuCount 2, which give different tokens',
    ),
    (pools({"resources": {"limits": {"nvidia.com/gpu": 1}}}), "set gpuCount instead"),
    ({"redis": {"external": {"url": "redis://h:1"}}}, "set redis.enabled to false to use the external Redis"),
    ({"redis": {"enabled": False, "external": {"url": "redis://h:1", "existingSecret": "s"}}}, "set only one"),
    ({"redis": {"enabled": False, "auth": {"existingSecret": "s"}}}, "redis.auth is for the bundled Redis"),
    (
        {"redis": {"enabled": False, "external": {"caSecret": "s"}}},
        "set redis.external.url or redis.external.existingSecret",
    ),
    (
        {"redis": {"enabled": False, "external": {"caSecret": "s", "url": "redis://h:1"}}},
        "does not begin with rediss://",
    ),
    (
        {"redis": {"enabled": False, "external": {"certSecret": "s", "url": "redis://h:1"}}},
        "redis.external.certSecret is set, but redis.external.url does not begin with rediss://",
    ),
    (
        {"redis": {"enabled": False, "external": {"passwordSecret": "s"}}},
        "redis.external.passwordSecret is set without an external Redis",
    ),
    (
        {"redis": {"enabled": False, "external": {"url": "redis://:pw@h:1"}}},
        "contains a password: put the password into a secret",
    ),
    ({"gateway": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "set maxReplicas to 9 or more"),
    (
        {"gateway": {"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": ""}}}},
        "set gateway.resources.requests.cpu",
    ),
    (pools({"autoscaling": {"enabled": True}}), "set keda.enabled and keda.prometheusAddress"),
    ({"keda": KEDA} | pools({"autoscaling": {"enabled": True, "minReplicas": 9}}), "set maxReplicas to 9 or more"),
    ({"keda": {"enabled": True}} | pools({"autoscaling": {"enabled": True}}), "set keda.prometheusAddress"),
    ({"keda": KEDA}, "no pool has autoscaling: set autoscaling.enabled"),
    ({"gateway": {"ingress": {"enabled": True}}}, "it has no host: set gateway.ingress.hosts"),
    ({"gateway": {"grpcRoute": {"enabled": True}}}, "has no parent Gateway: set gateway.grpcRoute.parentRefs"),
    ({"gateway": {"http": {"ingress": {"enabled": True}}}}, "the HTTP API is off: set gateway.http.enabled"),
    ({"gateway": {"http": {"enabled": True, "ingress": {"enabled": True}}}}, "set gateway.http.ingress.hosts"),
    ({"gateway": {"http": {"enabled": True, "route": {"enabled": True}}}}, "set gateway.http.route.parentRefs"),
    ({"gateway": {"http": {"enabled": True, "port": 9090}}}, "the same as ports.metrics: set different ports"),
    ({"gateway": {"apiKeys": {"existingSecret": "s"}}}, "set both; helm test uses that entry of the secret"),
    ({"gateway": {"tls": {"clientCaSecret": "ca"}}}, "set gateway.tls.existingSecret too"),
    ({"gateway": {"tls": {"existingSecret": "c", "clientCaSecret": "ca"}}}, "helm test has none: set test.tlsSecret"),
    ({"networkPolicy": {"egress": {"enabled": True}}}, "set networkPolicy.enabled"),
    (
        {"trust": {"mode": "tls", "existingSecret": "s"}},
        "trust.existingSecret has tokens, but trust.mode is tls: set trust.mode to tokens",
    ),
    ({"trust": {"mode": "none", "existingSecret": "s"}}, "but trust.mode is none: set trust.mode to tokens"),
    (
        {"trust": {"tls": {"existingSecrets": {"worker": "c"}}}},
        "trust.tls.existingSecrets.worker is set, but trust.mode is tokens: set trust.mode to tls",
    ),
    (
        {"trust": {"mode": "none", "certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}},
        "trust.certManager.enabled is set, but trust.mode is none: set trust.mode to tls",
    ),
    (
        {"trust": {"mode": "tls", "tls": {"existingSecrets": {"gateway": "g", "worker": "w"}}}},
        "the schedulers have no certificate: set trust.tls.existingSecrets.scheduler, or trust.certManager.enabled",
    ),
    (
        {"trust": {"mode": "none", "certManager": {"workerName": "{id}.w"}}},
        "trust.certManager.workerName is set, but trust.certManager.enabled is false",
    ),
    ({"trust": {"mode": "tls", "certManager": {"enabled": True}}}, "set trust.certManager.issuerRef.name"),
    (
        merged(NEEDED["ISSUER"], {"trust": {"tls": {"existingSecrets": {"gateway": "g"}}}}),
        "trust.tls.existingSecrets.gateway is set, but trust.certManager creates all certificates",
    ),
    (
        merged(NEEDED["ISSUER"], {"trust": {"tls": {"name": "spiffe://a.b/{role}"}}}),
        "set a DNS name such as {role}.quire.svc",
    ),
    ({"gateway": {"admin": {"enabled": True}}}, "set gateway.admin.existingSecret"),
    ({"gateway": {"admin": {"existingSecret": "s"}}}, "the admin port is off: set gateway.admin.enabled"),
    (
        merged(NEEDED["ADMIN"], {"gateway": {"admin": {"port": 50051}}}),
        "gateway.admin.port is 50051, the same as ports.gateway: set different ports",
    ),
    (
        merged(NEEDED["ADMIN"], {"gateway": {"admin": {"port": 8000}, "http": {"enabled": True}}}),
        "gateway.admin.port is 8000, the same as gateway.http.port",
    ),
    ({"networkPolicy": {"enabled": True, "adminClients": [{}]}}, "set gateway.admin.enabled and networkPolicy.enabled"),
    (
        merged(NEEDED["KEYS"], {"gateway": {"keyLimits": {"toml": "[default]", "existingConfigMap": "c"}}}),
        "gateway.keyLimits.toml and gateway.keyLimits.existingConfigMap are both set",
    ),
    ({"gateway": {"jwt": {"scope": "s"}}}, "set gateway.jwt.issuer too"),
    ({"gateway": {"jwt": {"issuer": "i"}}}, "set gateway.jwt.audiences, such as [quire]"),
    ({"gateway": {"jwt": {"issuer": "i", "audiences": ["a"]}}}, "set one of gateway.jwt.jwksUrl and gateway.jwt"),
    (
        merged(NEEDED["JWT"], {"gateway": {"jwt": {"existingConfigMap": "c"}}}),
        "set one of gateway.jwt.jwksUrl and gateway.jwt",
    ),
    (
        {"gateway": {"jwt": NEEDED["JWT"]["gateway"]["jwt"]}},
        "helm test has no token: set gateway.apiKeys.existingSecret",
    ),
    ({"gateway": {"isolation": "tenant"}}, "set gateway.apiKeys.existingSecret too"),
    ({"gateway": {"keyLimits": {"toml": "[default]"}}}, "set gateway.apiKeys.existingSecret too"),
    (
        {"networkPolicy": {"enabled": True, "egress": {"enabled": True}}}
        | {"redis": {"enabled": False, "external": {"url": "redis://h:1"}}},
        "add its address to networkPolicy.egress.extra",
    ),
    (
        {"networkPolicy": {"enabled": True, "egress": {"enabled": True}}}
        | {"models": [{"name": "demo", "path": "/models/m", "storage": {"emptyDirSize": "1Gi"}, "download": GET}]},
        'blocks the download of model "demo": add the address of its source to networkPolicy.egress.extra',
    ),
    (
        {"commonLabels": {"app.kubernetes.io/component": "llm"}},
        "commonLabels sets the label app.kubernetes.io/component",
    ),
    ({"workerDefaults": {"podLabels": {"quire/model": "m"}}}, "podLabels sets the label quire/model, which"),
    (
        merged(NEEDED["MONITOR"], {"metrics": {"serviceMonitor": {"labels": {"app.kubernetes.io/instance": "x"}}}}),
        "use another label",
    ),
    (
        {"gateway": {"service": {"type": "NodePort", "loadBalancerSourceRanges": ["203.0.113.0/24"]}}},
        "gateway.service.type is NodePort: set gateway.service.type to LoadBalancer",
    ),
    # -- values as users wrote them, which Kubernetes or a service accepted with another meaning or refused later
    ({"image": {"registry": "https://reg.example.com"}}, "write a host and a path, such as registry.example.com/quire"),
    (
        pools({"kvCacheMemory": "8G"}),
        "kvCacheMemory is 8G, but the pod's memory limit is 8Gi, which must hold the weights",
    ),
    (pools({"kvCacheMemory": "512MB"}), 'kvCacheMemory is "512MB", which is not an amount of memory: write 8G or 8Gi'),
    (
        stored(emptyDirSize="512MB"),
        'storage.emptyDirSize is "512MB", which is not an amount of memory or storage: write',
    ),
    (pools({"resources": {"limits": {"memory": "8GB"}}}), 'resources.limits.memory is "8GB", which is not an amount'),
    (pools({"tmpSize": "1 Gi"}), 'tmpSize is "1 Gi", which is not an amount'),
    (pools({"gpuCount": 2, "shmSize": "64Gi"}), "it counts towards the pod's memory, whose limit is 64Gi"),
    (
        pools({"gpuCount": 1, "resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}),
        "set gpuCount instead, and gpuResource to nvidia.com/mig-1g.10gb",
    ),
    (
        pools({"gpuCount": 2, "gpuResource": "nvidia.com/mig-3g.40gb"}),
        "GPUs cannot exchange data between MIG slices, so set gpuCount to 1",
    ),
    ({"commonLabels": {"team": "llm team"}}, 'commonLabels.team is "llm team", which is not a label value'),
    ({"gateway": {"podLabels": {"a": "x" * 64}}}, "which is not a label value: write at most 63 letters"),
    ({"scheduler": {"nodeSelector": {"a": "-x"}}}, 'models[demo].scheduler.nodeSelector.a is "-x"'),
    (pools({"labels": {"bad key": "x"}}), 'has the key "bad key", which is not a label key'),
    (
        {"gateway": {"extraEnv": [{"name": "HOME", "value": "/"}]}},
        "gateway.extraEnv has the name HOME, which the chart",
    ),
    (
        pools({"extraEnv": [{"name": "QUIRE_THREADS", "value": "1"}]}),
        "workers[cpu].extraEnv has the name QUIRE_THREADS",
    ),
    (
        {"scheduler": {"extraEnv": [ENV, ENV]}},
        "scheduler.extraEnv has the name A, which the chart or another entry uses",
    ),
    ({"gateway": {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}}, "gateway.extraVolumes has the name tmp"),
    (
        pools({"extraVolumes": [{"name": "cache", "emptyDir": {}}]}),
        "workers[cpu].extraVolumes has the name cache, which the chart or another entry uses",
    ),
    (
        {"scheduler": {"extraVolumeMounts": [{"name": "x", "mountPath": "/tmp"}]}},
        "scheduler.extraVolumeMounts has the mountPath /tmp",
    ),
    ({"gateway": {"podSpec": {"containers": []}}}, "podSpec of the gateways sets containers, which the chart sets"),
    (
        {"gateway": {"service": {"externalTrafficPolicy": "Local"}}},
        "set gateway.service.type to NodePort or LoadBalancer",
    ),
    ({"gateway": {"service": {"loadBalancerClass": "x"}}}, "gateway.service.type is ClusterIP: set it to LoadBalancer"),
    (
        {"gateway": {"inferencePool": {"enabled": True}}},
        "gateway.inferencePool.enabled needs gateway.inferencePool.endpoint",
    ),
    (
        {"gateway": {"podDisruptionBudget": {"maxUnavailable": 0}}},
        "so nodes could never be drained: set it to 1 or more",
    ),
    (
        merged(NEEDED["EGRESS"], {"tracing": {"otlpEndpoint": "http://o:1"}}),
        "networkPolicy.egress blocks the export of traces",
    ),
    (
        {"models": [{"name": "demo", "source": "hf://o/m@main"}]},
        "with the 40 hexadecimal digits of a commit, because a",
    ),
    (
        {"models": [{"name": "demo", "source": SOURCE, "download": GET}]},
        "has source and download.command: set only one",
    ),
    ({"models": [{"name": "demo", "source": SOURCE, "path": "/models/m"}]}, "remove path, because source determines"),
    ({"models": [{"name": "demo", "source": SOURCE}]}, "has source but no storage to download to"),
    (stored(image="reg/m:1"), "has storage.image reg/m:1: add its digest, @sha256:..., because a tag may change"),
    (
        {"models": [{"name": "demo", "source": SOURCE, "storage": {"image": IMAGE}}]},
        "has storage.image, which is read-only, and a download",
    ),
    (
        {"redis": {"enabled": False, "external": {"url": "redis://h:1", "sentinelPasswordSecret": "s"}}},
        "redis.external.url names no Sentinels: write redis+sentinel://HOST:26379",
    ),
    ({"redis": {"enabled": False, "external": {"url": "redis+sentinel://:p@h:1/m"}}}, "contains a password"),
    ({"fullnameOverride": "Quire"}, 'would begin with "Quire"'),
    ({"nameOverride": "Q"}, 'would begin with "r-Q"'),
    ({"ports": {"health": 9090}}, "ports.health and ports.metrics are both 9090"),
    ({"ports": {"worker": 9090}}, "ports.worker is 9090, the same as ports.metrics"),
    ({"ports": {"gateway": 50090}}, "ports.gateway is 50090, the same as ports.health"),
]

BAD_VALUES = [
    ({"gatway": {}}, "additional properties 'gatway' not allowed"),
    ({"nameOverride": "a name"}, "/nameOverride"),
    ({"gateway": {"replicas": "2"}}, "got string, want integer"),
    ({"gateway": {"replicas": -1}}, "minimum: got -1, want 0"),
    ({"gateway": {"drainSeconds": 0}}, "minimum: got 0, want 1"),
    ({"gateway": {"service": {"type": "Public"}}}, "/gateway/service/type"),
    ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
    ({"trust": {"mode": "mtls"}}, "/trust/mode"),
    ({"trust": {"mode": "tls", "tls": {"name": "quire"}}}, "/trust/tls/name"),
    ({"trust": {"certManager": {"workerName": "{id}"}}}, "/trust/certManager/workerName"),
    ({"ports": {"metrics": 70000}}, "maximum: got 70,000, want 65,535"),
    ({"models": []}, "minItems: got 0, want 1"),
    ({"models": [{"path": "/m"}]}, "missing property 'name'"),
    ({"models": [{"name": "Qwen3"}]}, "does not match pattern"),
    ({"workers": []}, "minItems: got 0, want 1"),
    ({"workers": [{"name": "a"}]}, "missing property 'model'"),
    ({"workers": [{"name": "a", "model": "demo", "gpus": 1}]}, "additional properties 'gpus' not allowed"),
    ({"workers": [{"name": "a", "model": "demo", "blockSize": 24}]}, "/workers/0/blockSize"),
    ({"workers": [{"name": "a", "model": "demo", "dtype": "int4"}]}, "/workers/0/dtype"),
    ({"redis": {"maxMemory": "1 gigabyte"}}, "/redis/maxMemory"),
    ({"redis": {"external": {"url": "http://h"}}}, "/redis/external/url"),
    ({"metrics": {"compat": "sglang"}}, "/metrics/compat"),
    ({"keda": {"prometheusAddress": "prometheus:9090"}}, "/keda/prometheusAddress"),
    ({"scheduler": {"resources": {"request": {}}}}, "additional properties 'request' not allowed"),
]


@pytest.mark.parametrize(
    ("values", "words"), [*COMBINATIONS, *BAD_VALUES], ids=lambda value: value if isinstance(value, str) else ""
)
def test_invalid_values_are_refused_with_advice(values: Values, words: str) -> None:
    with pytest.raises(HelmError) as refused:
        render(values)
    assert words in str(refused.value)


@pytest.mark.parametrize("name", ["quire.v2", "1234"])
def test_release_names_that_are_invalid_for_services_are_refused(name: str) -> None:
    with pytest.raises(HelmError, match="set fullnameOverride, or choose another release name"):
        render(name=name)
    assert render({"fullnameOverride": "q"}, name=name).all("Service")[0]["metadata"]["name"].startswith("q-")
