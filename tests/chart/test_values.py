"""Every value has the effect that its comment describes: one case per value, and no value without a case."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import pytest
import yaml

import gateway_svc.flags
import scheduler_svc.flags
import worker_svc.flags
from deploy.k8s import generate
from svc_common.config import parse, settings_of
from tests.chart.chart import CHART, NAMESPACE, Manifest, Values, dig, render

GATEWAY, SCHEDULER, WORKER, REDIS = (
    "Deployment gateway",
    "Deployment scheduler-demo",
    "StatefulSet worker-cpu",
    "Deployment redis",
)
SERVICES = (GATEWAY, SCHEDULER, WORKER)
LARGE, LEADER = "LeaderWorkerSet worker-cpu", "spec.leaderWorkerTemplate.leaderTemplate.spec.containers.0"
TWO_NODES = {"workerDefaults": {"gpuCount": 4, "nodesPerWorker": 2}}
SPREAD = {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 2}
SIDECAR = {"name": "s", "image": "s:1"}
CLAIM_OF_DEVICE = {"name": "gpu", "resourceClaimTemplateName": "t"}
DELETED = {"type": "OnDelete"}
RESOURCES = {"requests": {"cpu": "3", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
TOLERATION = {"key": "gpu", "operator": "Exists"}
AFFINITY = {"nodeAffinity": {}}
ENV = {"name": "A", "value": "b"}
EXTERNAL = {"enabled": False}
CLAIM = {"modelDefaults": {"path": "/models/m", "storage": {"existingClaim": "c"}}}
EMPTY = {"modelDefaults": {"path": "/models/m", "storage": {"emptyDirSize": "1Gi"}, "download": {"command": ["get"]}}}
PER_POD = {"modelDefaults": {"path": "/models/m", "storage": {"claimSize": "1Gi"}, "download": {"command": ["get"]}}}
SOURCE, STORED = f"hf://o/m@{'a' * 40}", {"modelDefaults": {"storage": {"claimSize": "1Gi"}}}
IMAGE = f"reg/m@sha256:{'b' * 64}"
VOLUME = {"image": {"reference": IMAGE, "pullPolicy": "IfNotPresent"}}
IDLE = {"autoscaling": {"enabled": True, "minReplicas": 0}}
SCALED = {
    "keda": {"enabled": True, "prometheusAddress": "http://p:9090"},
    "workerDefaults": {"autoscaling": {"enabled": True}},
}
CRON = {"type": "cron", "metadata": {"start": "0 8 * * *", "end": "0 18 * * *", "desiredReplicas": "4"}}
OWN_TRIGGER = {"workerDefaults": {"autoscaling": {"triggers": [CRON]}}}
EXTRA = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "x-{{ .Release.Name }}", "namespace": NAMESPACE},
    "data": {"a": "{{ .Release.Namespace }}"},
}
POOL_OF_PODS = {"gateway": {"http": {"enabled": True}, "inferencePool": {"enabled": True, "endpointPicker": "epp"}}}
POLICY = {"networkPolicy": {"enabled": True}}
RELABELING = {"sourceLabels": ["__name__"], "regex": "process_.*", "action": "drop"}
MONITOR = {"metrics": {"serviceMonitor": {"enabled": True}}}
DASHBOARD = {"metrics": {"dashboard": {"enabled": True}}}
INGRESS = {"gateway": {"ingress": {"enabled": True, "hosts": ["llm.example.com"]}}}
ROUTE = {"gateway": {"grpcRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}}}
HTTP = {"gateway": {"http": {"enabled": True}}}
HTTP_INGRESS = {"gateway": {"http": {"enabled": True, "ingress": {"enabled": True, "hosts": ["api.example.com"]}}}}
HTTP_ROUTE = {"gateway": {"http": {"enabled": True, "route": {"enabled": True, "parentRefs": [{"name": "public"}]}}}}
FILTER = {"type": "RequestMirror", "requestMirror": {"backendRef": {"name": "copy", "port": 80}}}
ALERT = "spec.groups.0.rules.0"
RULES = {"metrics": {"prometheusRule": {"enabled": True}}}
KEYS = {"gateway": {"apiKeys": {"existingSecret": "keys", "testEntry": "tester"}}}
TLS = {"gateway": {"tls": {"existingSecret": "cert"}}}
MUTUAL = {"gateway": {"tls": {"existingSecret": "cert"}}, "test": {"tlsSecret": "t"}}
EGRESS = {"networkPolicy": {"enabled": True, "egress": {"enabled": True}}}
OUTSIDE = {"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}
ISSUER = {"trust": {"mode": "tls", "certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}}
CERTIFICATES = {"gateway": "cert-g", "scheduler": "cert-s", "worker": "cert-w"}
TRUST_TLS = {"trust": {"mode": "tls", "tls": {"existingSecrets": CERTIFICATES}}}
JWT = {
    "gateway": KEYS["gateway"] | {"jwt": {"issuer": "https://i", "audiences": ["quire"], "jwksUrl": "https://i/jwks"}},
}
JWT_FILE = {"gateway": KEYS["gateway"] | {"jwt": {"issuer": "https://i", "audiences": ["quire"]}}}
ADMIN = {"gateway": {"admin": {"enabled": True, "existingSecret": "ops"}}}
LIMITS = "[default]\nmax_streams = 5\n"
ROUTES = [{"name": "prod", "targets": {"demo": 1}}]
TEAM = {"namespaceSelector": {"matchLabels": {"team": "a"}}}


def merged(first: Values, second: Values) -> Values:
    both = {
        key: merged(first[key], second[key]) for key in first.keys() & second.keys() if isinstance(second[key], dict)
    }
    return first | second | both


@dataclass(frozen=True, slots=True)
class Case:
    """With `value` set, `path` of the object is `expected`. A path may begin with a shortcut (see `look`)."""

    name: str
    value: Any
    where: str
    path: str
    expected: Any
    others: Values = field(default_factory=dict)


COMMON = [
    Case("nameOverride", "q", "Deployment r-q-gateway", "metadata.labels.app~kubernetes~io/name", "q"),
    Case("fullnameOverride", "full", "Deployment full-gateway", "metadata.name", "full-gateway"),
    Case("clusterDomain", "corp", GATEWAY, "arg --scheduler",
        f"dns:///r-quire-scheduler-demo.{NAMESPACE}.svc.corp:50052"),
    Case("ipFamily", "IPv6", GATEWAY, "arg --listen", "[::]:50051"),
    Case("ipFamily", "IPv6", SCHEDULER, "arg --health-listen", "[::]:50090"),
    Case("ipFamily", "IPv6", WORKER, "arg --advertise", "[$(POD_IP)]:50061"),
    Case("ipFamily", "IPv6", REDIS, "container.args.1", "::"),
    Case("commonAnnotations", {"team": "x"}, "Service gateway", "metadata.annotations", {"team": "x"}),
    Case("commonAnnotations", {"team": "x"}, GATEWAY, "metadata.annotations", {"team": "x"}),
    Case("commonAnnotations", {"team": "x"}, GATEWAY, "spec.template.metadata.annotations", None),
    Case("commonLabels", {"team": "x"}, "Service gateway", "metadata.labels.team", "x"),
    Case("image.registry", "reg/q", GATEWAY, "container.image", "reg/q/quire-gateway:0.1.0"),
    Case("image.registry", "reg/q/", GATEWAY, "container.image", "reg/q/quire-gateway:0.1.0"),
    Case("image.tag", "v9", WORKER, "container.image", "quire-worker:v9-cpu"),
    Case("image.pullPolicy", "Always", SCHEDULER, "container.imagePullPolicy", "Always"),
    Case("image.pullSecrets", [{"name": "login"}], WORKER, "pod.imagePullSecrets", [{"name": "login"}]),
    Case("log.format", "text", GATEWAY, "arg --log-format", "text"),
    Case("log.level", "debug", SCHEDULER, "arg --log-level", "debug"),
    Case("ports.gateway", 7001, GATEWAY, "arg --listen", "0.0.0.0:7001"),
    Case("ports.gateway", 7001, "Service gateway", "spec.ports.0.port", 7001),
    Case("ports.scheduler", 7002, SCHEDULER, "arg --listen", "0.0.0.0:7002"),
    Case("ports.worker", 7003, WORKER, "arg --advertise", "$(POD_IP):7003"),
    Case("ports.nodes", 7006, LARGE, f"{LEADER}.ports.3", {"name": "nodes", "containerPort": 7006}, TWO_NODES),
    Case("ports.health", 7004, WORKER, "arg --health-listen", "0.0.0.0:7004"),
    Case("ports.health", 7004, GATEWAY, "container.readinessProbe.grpc", {"port": 7004, "service": "readiness"}),
    Case("ports.metrics", 7005, SCHEDULER, "arg --metrics-listen", "0.0.0.0:7005"),
    Case("ports.metrics", 7005, "Service worker-cpu", "spec.ports.1.port", 7005),
    Case("serviceAccount.create", False, GATEWAY, "pod.serviceAccountName", "default"),
    Case("serviceAccount.name", "sa", "ServiceAccount =sa", "metadata.name", "sa"),
    Case("serviceAccount.annotations", {"role": "r"}, "ServiceAccount =r-quire", "metadata.annotations", {"role": "r"}),
    Case("podSecurityContext", {"runAsUser": None}, WORKER, "pod.securityContext.runAsUser", None),
    Case("podSecurityContext", {"runAsUser": 7}, WORKER, "pod.securityContext.runAsUser", 7),
    Case("containerSecurityContext", {"runAsUser": 8}, WORKER, "container.securityContext.runAsUser", 8),
    Case("networkPolicy.enabled", True, "NetworkPolicy worker",
        "spec.ingress.0.from.0.podSelector.matchLabels.app~kubernetes~io/component", "scheduler"),
    Case("workerDefaults.kvTransfer", True, "NetworkPolicy worker",
        "spec.ingress.0.from.1.podSelector.matchLabels.app~kubernetes~io/component", "worker", POLICY),
    Case("workerDefaults.kvTransfer", True, "NetworkPolicy scheduler",
        "spec.ingress.0.from.2.podSelector.matchLabels.app~kubernetes~io/component", "scheduler", POLICY),
    Case("networkPolicy.clients", [TEAM], "NetworkPolicy gateway", "spec.ingress.0.from.0", TEAM, POLICY),
    Case("networkPolicy.metricsClients", [TEAM], "NetworkPolicy worker", "spec.ingress.1.from.0", TEAM, POLICY),
    Case("networkPolicy.egress.enabled", False, "NetworkPolicy worker", "spec.egress", None, POLICY),
    Case("networkPolicy.egress.enabled", True, "NetworkPolicy redis", "spec.egress", [], POLICY),
    *(
        Case(f"networkPolicy.egress.{part}", [OUTSIDE], f"NetworkPolicy {part}", "spec.egress.3", OUTSIDE, EGRESS)
        for part in ("gateway", "scheduler")
    ),
    Case("networkPolicy.egress.worker", [OUTSIDE], "NetworkPolicy worker", "spec.egress.2", OUTSIDE, EGRESS),
    *(
        Case("tracing.otlpEndpoint", "http://otel:4317", part, "arg --trace-endpoint", "http://otel:4317")
        for part in SERVICES
    ),
    Case("tracing.samplingRatio", 0.5, GATEWAY, "arg --trace-ratio", None),
    Case("tracing.samplingRatio", 0.5, GATEWAY, "arg --trace-ratio", "0.5",
        {"tracing": {"otlpEndpoint": "http://o:1"}}),
    Case("extraObjects", [EXTRA], "ConfigMap =x-r", "data", {"a": NAMESPACE}),
    Case("extraObjects", [yaml.dump(EXTRA)], "ConfigMap =x-r", "data", {"a": NAMESPACE}),
    *(
        Case(
            f"metrics.prometheusRule.objectives.{name}",
            value,
            "PrometheusRule =r-quire",
            "spec.groups.0.name",
            "r-quire",
            RULES,
        )
        for name, value in (("target", 0.9), ("ttftSeconds", 1), ("itlSeconds", 0.1))  # see test_alerts.py
    ),
    Case("networkPolicy.egress.extra", [OUTSIDE], "NetworkPolicy worker", "spec.egress.2", OUTSIDE, EGRESS),
    Case("metrics.prometheusRule.enabled", True, "PrometheusRule =r-quire", "spec.groups.0.name", "r-quire"),
    Case("metrics.prometheusRule.labels", {"p": "q"}, "PrometheusRule =r-quire", "metadata.labels.p", "q", RULES),
    Case("metrics.prometheusRule.alertLabels", {"p": "q"}, "PrometheusRule =r-quire", f"{ALERT}.labels.p", "q", RULES),
    Case("metrics.prometheusRule.runbookUrl", "https://w#{alert}", "PrometheusRule =r-quire",
        f"{ALERT}.annotations.runbook_url", "https://w#QuireNoWorkerReady", RULES),
    Case("metrics.prometheusRule.disabled", ["QuireNoWorkerReady"], "PrometheusRule =r-quire", f"{ALERT}.alert",
        "QuireGatewaysGone", RULES),
    Case("metrics.prometheusRule.extraRules", [{"record": "a", "expr": "b"}], "PrometheusRule =r-quire",
        "spec.groups.0.rules.-1", {"record": "a", "expr": "b"}, RULES),
    Case("metrics.compat", "vllm", SCHEDULER, "arg --metrics-compat", "vllm"),
    Case("metrics.serviceMonitor.enabled", True, "ServiceMonitor =r-quire", "spec.endpoints.0.port", "metrics"),
    Case("metrics.serviceMonitor.relabelings", [RELABELING], "ServiceMonitor =r-quire", "spec.endpoints.0.relabelings",
        [RELABELING], MONITOR),
    Case("metrics.serviceMonitor.metricRelabelings", [RELABELING], "ServiceMonitor =r-quire",
        "spec.endpoints.0.metricRelabelings", [RELABELING], MONITOR),
    Case("metrics.serviceMonitor.intervalSeconds", 7, "ServiceMonitor =r-quire", "spec.endpoints.0.interval", "7s",
        MONITOR),
    Case("metrics.serviceMonitor.labels", {"p": "q"}, "ServiceMonitor =r-quire", "metadata.labels.p", "q", MONITOR),
    Case("metrics.dashboard.enabled", True, "ConfigMap dashboard", "metadata.labels.grafana_dashboard", "1"),
    Case("metrics.dashboard.labels", {"g": "1"}, "ConfigMap dashboard", "metadata.labels.g", "1", DASHBOARD),
    Case("test.timeoutSeconds", 9, "Pod test", "spec.containers.0.args.7", "--timeout-s=9"),
    Case("test.resources", RESOURCES, "Pod test", "spec.containers.0.resources", RESOURCES),
]  # fmt: skip

NAMED = "{id}.quire-worker"
TRUST_FILE = "/etc/quire/trust/"
TRUST = [
    *(Case("trust.mode", "tokens", part, "arg --token-file", f"{TRUST_FILE}tokens") for part in SERVICES),
    *(Case("trust.mode", "tokens", part, "count --insecure", 0) for part in SERVICES),
    *(Case("trust.mode", "none", part, "arg --token-file", None) for part in SERVICES),
    *(Case("trust.mode", "none", part, "volume trust", {}) for part in SERVICES),
    *(Case("trust.mode", "none", part, "count --insecure", 1) for part in SERVICES[1:]),
    Case("trust.mode", "none", "Secret tokens-worker", "", None),
    *(
        Case("trust.mode", "tls", part, f"arg --internal-tls-{flag}-file", f"{TRUST_FILE}{file}", TRUST_TLS)
        for part in SERVICES
        for flag, file in (("cert", "tls.crt"), ("key", "tls.key"), ("ca", "ca.crt"))
    ),
    *(Case("trust.mode", "tls", part, "arg --token-file", None, TRUST_TLS) for part in SERVICES),
    Case("trust.mode", "tls", "Service worker-cpu", "spec.ports.0.appProtocol", "https", TRUST_TLS),
    Case("trust.mode", "tokens", "Service worker-cpu", "spec.ports.0.appProtocol", "kubernetes.io/h2c"),
    *(
        Case(
            "trust.existingSecret",
            "s",
            part,
            "volume trust",
            {"secret": {"secretName": "s", "items": [{"key": role, "path": "tokens"}]}},
        )
        for part, role in zip(SERVICES, CERTIFICATES, strict=True)
    ),
    *(Case("trust.existingSecret", "s", f"Secret tokens-{role}", "", None) for role in CERTIFICATES),
    *(
        Case("trust.existingSecret", "", part, "volume trust", {"secret": {"secretName": f"r-quire-tokens-{role}"}})
        for part, role in zip(SERVICES, CERTIFICATES, strict=True)
    ),
    *(
        Case("trust.tls.name", "{role}.q.svc", part, "arg --internal-tls-name", "{role}.q.svc", TRUST_TLS)
        for part in SERVICES
    ),
    Case("trust.tls.name", "{role}.q", "Certificate trust-worker", "spec.dnsNames", ["worker.q"], ISSUER),
    *(
        Case(f"trust.tls.existingSecrets.{role}", "c", part, "volume trust", {"secret": {"secretName": "c"}}, TRUST_TLS)
        for part, role in zip(SERVICES, CERTIFICATES, strict=True)
    ),
    *(
        Case(
            "trust.certManager.enabled",
            True,
            part,
            "volume trust",
            {"secret": {"secretName": f"r-quire-trust-{role}"}},
            ISSUER,
        )
        for part, role in zip(SERVICES, CERTIFICATES, strict=True)
    ),
    *(
        Case(
            "trust.certManager.enabled",
            True,
            f"Certificate trust-{role}",
            "spec.secretName",
            f"r-quire-trust-{role}",
            ISSUER,
        )
        for role in CERTIFICATES
    ),
    Case("trust.certManager.issuerRef.name", "i", "Certificate trust-worker", "spec.issuerRef.name", "i", ISSUER),
    Case("trust.certManager.issuerRef.kind", "ClusterIssuer", "Certificate trust-worker", "spec.issuerRef.kind",
        "ClusterIssuer", ISSUER),
    Case("trust.certManager.workerName", NAMED, SCHEDULER, "arg --internal-tls-worker-name", NAMED, ISSUER),
    Case("trust.certManager.workerName", NAMED, "Certificate trust-worker", "", None, ISSUER),
    Case("trust.certManager.workerName", "", SCHEDULER, "arg --internal-tls-worker-name", None, ISSUER),
    Case(
        "trust.certManager.workerName", NAMED, WORKER, "volume trust",
        {
            "csi": {
                "driver": "csi.cert-manager.io", "readOnly": True,
                "volumeAttributes": {
                    "csi.cert-manager.io/issuer-name": "ca", "csi.cert-manager.io/issuer-kind": "Issuer",
                    "csi.cert-manager.io/issuer-group": "cert-manager.io",
                    "csi.cert-manager.io/dns-names": "quire-worker,${POD_NAME}.quire-worker",
                    "csi.cert-manager.io/key-usages": "digital signature,server auth,client auth",
                    "csi.cert-manager.io/fs-group": "10001",
                },
            },
        },
        ISSUER,
    ),
    Case("trust.certManager.issuerRef.group", "g", "Certificate trust-worker", "spec.issuerRef.group", "g", ISSUER),
    Case("gateway.admin.console.enabled", True, GATEWAY, "arg --console-listen", "0.0.0.0:8090", ADMIN),
    Case("gateway.admin.console.enabled", True, "Service gateway-admin", "spec.ports.1.name", "console", ADMIN),
    Case("gateway.admin.console.port", 8091, "Service gateway-admin", "spec.ports.1.port", 8091,
        {"gateway": {"admin": ADMIN["gateway"]["admin"] | {"console": {"enabled": True}}}}),
    Case("networkPolicy.adminClients", [TEAM], "NetworkPolicy gateway", "spec.ingress.2",
        {"ports": [{"port": "admin"}], "from": [TEAM]}, merged(ADMIN, POLICY)),
    Case("networkPolicy.adminClients", [], "NetworkPolicy gateway", "spec.ingress.2", None, merged(ADMIN, POLICY)),
]  # fmt: skip

OPERATORS = [
    Case("gateway.admin.enabled", True, GATEWAY, "arg --admin-listen", "0.0.0.0:50055", ADMIN),
    Case("gateway.admin.enabled", False, "Service gateway-admin", "", None),
    Case("gateway.admin.port", 7077, GATEWAY, "arg --admin-listen", "0.0.0.0:7077", ADMIN),
    Case("gateway.admin.port", 7077, "Service gateway-admin", "spec.ports.0.port", 7077, ADMIN),
    Case("gateway.admin.port", 7077, GATEWAY, "container.ports.3", {"name": "admin", "containerPort": 7077}, ADMIN),
    Case("gateway.admin.existingSecret", "s", GATEWAY, "arg --admin-keys", "/etc/quire/admin-keys", ADMIN),
    Case("gateway.admin.existingSecret", "s", GATEWAY, "volume admin-keys", {"secret": {"secretName": "s"}}, ADMIN),
    Case("gateway.jwt.issuer", "https://j", GATEWAY, "arg --jwt-issuer", "https://j", JWT),
    Case("gateway.jwt.issuer", "", GATEWAY, "arg --jwt-jwks", None),
    Case("gateway.jwt.audiences", ["q"], GATEWAY, "arg --jwt-audience", "q", JWT),
    Case("gateway.jwt.jwksUrl", "https://i/keys", GATEWAY, "arg --jwt-jwks", "https://i/keys", JWT),
    Case("gateway.jwt.existingConfigMap", "c", GATEWAY, "arg --jwt-jwks", "/etc/quire/jwks/jwks.json", JWT_FILE),
    Case("gateway.jwt.existingConfigMap", "c", GATEWAY, "volume jwks", {"configMap": {"name": "c"}}, JWT_FILE),
    Case("gateway.jwt.tenantClaim", "org", GATEWAY, "arg --jwt-tenant-claim", "org", JWT),
    Case("gateway.jwt.scope", "quire.use", GATEWAY, "arg --jwt-scope", "quire.use", JWT),
    Case("gateway.jwt.scope", "", GATEWAY, "arg --jwt-scope", None, JWT),
    Case("gateway.audit.enabled", True, GATEWAY, "arg --audit-log", "-"),
    Case("gateway.audit.enabled", False, GATEWAY, "arg --audit-log", None),
    Case("gateway.isolation", "none", GATEWAY, "arg --isolation", "none", KEYS),
    Case("gateway.isolation", "", GATEWAY, "arg --isolation", None, KEYS),
    Case("gateway.keyLimits.toml", LIMITS, GATEWAY, "arg --key-limits", "/etc/quire/key-limits/limits.toml", KEYS),
    Case("gateway.keyLimits.toml", LIMITS, "ConfigMap gateway-key-limits", "data", {"limits.toml": LIMITS}, KEYS),
    Case("gateway.keyLimits.toml", LIMITS, GATEWAY, "volume key-limits",
        {"configMap": {"name": "r-quire-gateway-key-limits"}}, KEYS),
    Case("gateway.keyLimits.existingConfigMap", "c", GATEWAY, "arg --key-limits", "/etc/quire/key-limits/limits.toml",
        KEYS),
    Case("gateway.keyLimits.existingConfigMap", "c", GATEWAY, "volume key-limits", {"configMap": {"name": "c"}}, KEYS),
    Case("gateway.keyLimits.existingConfigMap", "c", "ConfigMap gateway-key-limits", "", None, KEYS),
    Case("gateway.routes", ROUTES, GATEWAY, "arg --routes", "/etc/quire/routes/routes.json"),
    Case("gateway.routes", ROUTES, GATEWAY, "volume routes", {"configMap": {"name": "r-quire-gateway-routes"}}),
    Case("gateway.routes", ROUTES, "ConfigMap gateway-routes", "data",
        {"routes.json": '{"routes":[{"name":"prod","targets":{"demo":1}}]}'}),
    Case("gateway.routes", [], GATEWAY, "arg --routes", None),
]  # fmt: skip

GATEWAYS = [
    Case("gateway.replicas", 5, GATEWAY, "spec.replicas", 5),
    Case("gateway.replicas", 0, GATEWAY, "spec.replicas", 0),
    Case("gateway.drainSeconds", 60, GATEWAY, "arg --drain-timeout-s", "60"),
    Case("gateway.drainSeconds", 60, GATEWAY, "container.lifecycle.preStop.sleep.seconds", 10),
    Case("gateway.drainSeconds", 3, GATEWAY, "container.lifecycle.preStop.sleep.seconds", 1),
    Case("gateway.drainSeconds", 60, GATEWAY, "pod.terminationGracePeriodSeconds", 110),
    Case("gateway.maxStreams", 2_000_000, GATEWAY, "arg --max-streams", "2000000"),
    Case("gateway.chunkIntervalMs", 50, GATEWAY, "arg --chunk-interval-ms", "50"),
    Case("workerDefaults.gpuCount", 1, GATEWAY, "arg --chunk-interval-ms", "20",
        {"workerDefaults": {"determinism": "exact"}}),
    Case("gateway.images.maxCount", 3, GATEWAY, "arg --max-images", "3"),
    Case("gateway.images.maxBytes", "4M", GATEWAY, "arg --max-image-bytes", "4M"),
    Case("gateway.images.maxPixels", 1_000_000, GATEWAY, "arg --max-image-pixels", "1000000"),
    Case("gateway.maxConnectionAgeSeconds", 60, GATEWAY, "arg --max-connection-age-s", "60"),
    Case("gateway.service.type", "LoadBalancer", "Service gateway", "spec.type", "LoadBalancer"),
    *(
        Case(
            f"gateway.service.{name}",
            value,
            "Service gateway",
            f"spec.{name}",
            value,
            {"gateway": {"service": {"type": "LoadBalancer"}}},
        )
        for name, value in (("externalTrafficPolicy", "Local"), ("loadBalancerClass", "metal"))
    ),
    Case("gateway.tls.serverName", "a.b", "BackendTLSPolicy gateway", "spec.validation",
        {"wellKnownCACertificates": "System", "hostname": "a.b"}, merged(TLS, ROUTE)),
    Case("gateway.tls.caConfigMap", "ca", "BackendTLSPolicy gateway", "spec.validation.caCertificateRefs",
        [{"group": "", "kind": "ConfigMap", "name": "ca"}], merged(TLS, HTTP_ROUTE)),
    Case("gateway.tls.existingSecret", "", "BackendTLSPolicy gateway", "", None, ROUTE),
    Case("gateway.inferencePool.enabled", False, "InferencePool =r-quire", "", None),
    Case("gateway.inferencePool.enabled", True, GATEWAY, "arg --metrics-compat", "inference-pool", POOL_OF_PODS),
    Case("gateway.inferencePool.enabled", True, "InferencePool =r-quire", "spec.targetPorts", [{"number": 8000}],
        POOL_OF_PODS),
    Case("gateway.inferencePool.endpointPicker", "epp", "InferencePool =r-quire", "spec.endpointPickerRef",
        {"name": "epp", "port": {"number": 9002}}, POOL_OF_PODS),
    Case("gateway.inferencePool.endpointPickerPort", 7, "InferencePool =r-quire", "spec.endpointPickerRef.port.number",
        7, POOL_OF_PODS),
    Case("gateway.service.type", "LoadBalancer", "Service gateway", "spec.ports.0.appProtocol", None, TLS),
    Case("gateway.service.type", "NodePort", "Service gateway", "spec.ports.0.appProtocol", "https", TLS),
    Case("gateway.service.annotations", {"a": "b"}, "Service gateway", "metadata.annotations", {"a": "b"}),
    Case("gateway.service.loadBalancerSourceRanges", ["203.0.113.0/24"], "Service gateway",
        "spec.loadBalancerSourceRanges", ["203.0.113.0/24"], {"gateway": {"service": {"type": "LoadBalancer"}}}),
    Case("gateway.apiKeys.existingSecret", "s", GATEWAY, "arg --api-keys", "/etc/quire/api-keys", KEYS),
    Case("gateway.apiKeys.existingSecret", "s", GATEWAY, "volume api-keys", {"secret": {"secretName": "s"}}, KEYS),
    Case("gateway.records.ttlSeconds", 60, GATEWAY, "arg --record-ttl-s", "60"),
    Case("gateway.records.maxBytes", "1M", GATEWAY, "arg --max-record-bytes", "1M"),
    Case("gateway.records.existingSecret", "s", GATEWAY, "arg --record-key-file", "/etc/quire/record-keys/keys"),
    Case("gateway.records.existingSecret", "s", GATEWAY, "volume record-keys", {"secret": {"secretName": "s"}}),
    Case("gateway.apiKeys.testEntry", "t", "Pod test", "spec.containers.0.env.1.valueFrom.secretKeyRef",
        {"name": "keys", "key": "t"}, KEYS),
    Case("gateway.tls.existingSecret", "cert", GATEWAY, "arg --tls-cert-file", "/etc/quire/tls/tls.crt"),
    Case("gateway.tls.existingSecret", "cert", GATEWAY, "arg --tls-key-file", "/etc/quire/tls/tls.key"),
    Case("gateway.tls.existingSecret", "cert", GATEWAY, "volume tls", {"secret": {"secretName": "cert"}}),
    Case("gateway.tls.existingSecret", "cert", "Service gateway", "spec.ports.0.appProtocol", "https"),
    Case("gateway.tls.existingSecret", "", "Service gateway", "spec.ports.0.appProtocol", "kubernetes.io/h2c"),
    Case("gateway.tls.clientCaSecret", "ca", GATEWAY, "arg --tls-client-ca-file", "/etc/quire/client-ca/ca.crt",
        MUTUAL),
    Case("gateway.tls.clientCaSecret", "ca", GATEWAY, "volume client-ca", {"secret": {"secretName": "ca"}}, MUTUAL),
    Case("gateway.tls.serverName", "a.b", "Pod test", "spec.containers.0.args.9", "--tls-server-name=a.b", TLS),
    Case("gateway.tls.serverName", "", "Pod test", "spec.containers.0.args.9",
        f"--tls-server-name=r-quire-gateway.{NAMESPACE}.svc.cluster.local", TLS),
    Case("test.caEntry", "root.crt", "Pod test", "spec.containers.0.args.8", "--tls-ca=/etc/quire/tls/root.crt", TLS),
    Case("test.caEntry", "", "Pod test", "spec.containers.0.args.8", "--tls", TLS),
    Case("test.tlsSecret", "t", "Pod test", "spec.volumes.0.secret.secretName", "t", TLS),
    Case("test.tlsSecret", "", "Pod test", "spec.volumes.0.secret.secretName", "cert", TLS),
    Case("gateway.ingress.enabled", True, "Ingress gateway", "spec.rules.0.host", "llm.example.com", INGRESS),
    Case("gateway.ingress.className", "nginx", "Ingress gateway", "spec.ingressClassName", "nginx", INGRESS),
    Case("gateway.ingress.annotations", {"a": "b"}, "Ingress gateway", "metadata.annotations", {"a": "b"}, INGRESS),
    Case("gateway.ingress.hosts", ["a.b", "c.d"], "Ingress gateway", "spec.rules.1.host", "c.d", INGRESS),
    Case("gateway.ingress.tlsSecret", "cert", "Ingress gateway", "spec.tls",
        [{"secretName": "cert", "hosts": ["llm.example.com"]}], INGRESS),
    Case("gateway.grpcRoute.enabled", True, "GRPCRoute gateway", "spec.rules.0.backendRefs",
        [{"name": "r-quire-gateway", "port": 50051}], ROUTE),
    Case("gateway.grpcRoute.parentRefs", [{"name": "x"}], "GRPCRoute gateway", "spec.parentRefs", [{"name": "x"}],
        ROUTE),
    Case("gateway.grpcRoute.hostnames", ["a.b"], "GRPCRoute gateway", "spec.hostnames", ["a.b"], ROUTE),
    Case("gateway.grpcRoute.annotations", {"a": "b"}, "GRPCRoute gateway", "metadata.annotations", {"a": "b"}, ROUTE),
    Case("gateway.grpcRoute.filters", [FILTER], "GRPCRoute gateway", "spec.rules.0.filters", [FILTER], ROUTE),
    Case("gateway.grpcRoute.timeoutPolicy", "envoy-gateway", "BackendTrafficPolicy gateway",
        "spec.timeout.http.requestTimeout", "0s", ROUTE),
    Case("gateway.http.enabled", True, GATEWAY, "arg --http-listen", "0.0.0.0:8000"),
    Case("gateway.http.enabled", True, "Service gateway", "spec.ports.1.name", "http"),
    Case("gateway.http.enabled", True, "NetworkPolicy gateway", "spec.ingress.0.ports.1.port", "http", POLICY),
    Case("gateway.http.port", 8080, GATEWAY, "arg --http-listen", "0.0.0.0:8080", HTTP),
    Case("gateway.http.port", 8080, "Service gateway", "spec.ports.1.port", 8080, HTTP),
    Case("gateway.http.port", 8080, "HTTPRoute gateway-http", "spec.rules.0.backendRefs.0.port", 8080, HTTP_ROUTE),
    Case("gateway.http.maxConnections", 9, GATEWAY, "arg --http-max-connections", "9", HTTP),
    Case("gateway.http.allowOrigins", ["https://a.b"], GATEWAY, "arg --http-allow-origin", "https://a.b", HTTP),
    Case("gateway.http.allowHosts", ["a.b"], GATEWAY, "count --http-allow-host", 3, HTTP),
    Case("gateway.http.paths", ["/v1"], "Ingress gateway-http", "spec.rules.0.http.paths.0.path", "/v1", HTTP_INGRESS),
    Case("gateway.http.paths", ["/v1"], "HTTPRoute gateway-http", "spec.rules.0.matches",
        [{"path": {"type": "PathPrefix", "value": "/v1"}}], HTTP_ROUTE),
    Case("gateway.http.ingress.enabled", True, "Ingress gateway-http", "spec.rules.0.host", "api.example.com",
        HTTP_INGRESS),
    Case("gateway.http.ingress.className", "n", "Ingress gateway-http", "spec.ingressClassName", "n", HTTP_INGRESS),
    Case("gateway.http.ingress.annotations", {"a": "b"}, "Ingress gateway-http", "metadata.annotations", {"a": "b"},
        HTTP_INGRESS),
    Case("gateway.http.ingress.hosts", ["a.b", "c.d"], "Ingress gateway-http", "spec.rules.1.host", "c.d",
        HTTP_INGRESS),
    Case("gateway.http.ingress.tlsSecret", "cert", "Ingress gateway-http", "spec.tls",
        [{"secretName": "cert", "hosts": ["api.example.com"]}], HTTP_INGRESS),
    Case("gateway.http.route.enabled", True, "HTTPRoute gateway-http", "spec.rules.0.backendRefs",
        [{"name": "r-quire-gateway", "port": 8000}], HTTP_ROUTE),
    Case("gateway.http.route.parentRefs", [{"name": "x"}], "HTTPRoute gateway-http", "spec.parentRefs", [{"name": "x"}],
        HTTP_ROUTE),
    Case("gateway.http.route.hostnames", ["a.b"], "HTTPRoute gateway-http", "spec.hostnames", ["a.b"], HTTP_ROUTE),
    Case("gateway.http.route.annotations", {"a": "b"}, "HTTPRoute gateway-http", "metadata.annotations", {"a": "b"},
        HTTP_ROUTE),
    Case("gateway.http.route.filters", [FILTER], "HTTPRoute gateway-http", "spec.rules.0.filters", [FILTER],
        HTTP_ROUTE),
    Case("gateway.http.route.timeouts", {"request": "9s"}, "HTTPRoute gateway-http", "spec.rules.0.timeouts",
        {"request": "9s"}, HTTP_ROUTE),
    Case("gateway.image", "reg/g@sha256:0", GATEWAY, "container.image", "reg/g@sha256:0"),
    Case("gateway.image", "reg/g@sha256:0", "Pod test", "spec.containers.0.image", "reg/g@sha256:0"),
    Case("gateway.autoscaling.enabled", True, "HorizontalPodAutoscaler gateway", "spec.scaleTargetRef.name",
        "r-quire-gateway"),
    Case("gateway.autoscaling.enabled", True, GATEWAY, "spec.replicas", None),
    Case("gateway.autoscaling.minReplicas", 3, "HorizontalPodAutoscaler gateway", "spec.minReplicas", 3,
        {"gateway": {"autoscaling": {"enabled": True}}}),
    Case("gateway.autoscaling.maxReplicas", 9, "HorizontalPodAutoscaler gateway", "spec.maxReplicas", 9,
        {"gateway": {"autoscaling": {"enabled": True}}}),
    Case("gateway.autoscaling.targetCPUPercent", 55, "HorizontalPodAutoscaler gateway",
        "spec.metrics.0.resource.target.averageUtilization", 55, {"gateway": {"autoscaling": {"enabled": True}}}),
    Case("gateway.extraArgs", ["--max-request-bytes=1G"], GATEWAY, "arg --max-request-bytes", "1G"),
]  # fmt: skip

SCHEDULERS = [
    Case("scheduler.replicas", 3, SCHEDULER, "spec.replicas", 3),
    Case("scheduler.replicas", 3, WORKER, "count --scheduler", 1),
    Case("scheduler.drainSeconds", 11, SCHEDULER, "arg --drain-timeout-s", "11"),
    Case("scheduler.drainSeconds", 11, SCHEDULER, "pod.terminationGracePeriodSeconds", 26),
    Case("scheduler.image", "reg/s@sha256:0", SCHEDULER, "container.image", "reg/s@sha256:0"),
    Case("scheduler.maxWaiting", 1_048_576, SCHEDULER, "arg --max-waiting", "1048576"),
    Case("scheduler.blockKey.existingSecret", "s", SCHEDULER, "arg --block-key-file", "/etc/quire/block-key/keys"),
    Case("scheduler.blockKey.existingSecret", "s", SCHEDULER, "volume block-key", {"secret": {"secretName": "s"}}),
    Case("scheduler.extraArgs", ["--aging-s=1"], SCHEDULER, "arg --aging-s", "1"),
]  # fmt: skip

# Values common to gateways, schedulers and pools.
PLACEMENT = [
    ("resources", RESOURCES, "container.resources", RESOURCES),
    ("nodeSelector", {"n": "1"}, "pod.nodeSelector", {"n": "1"}),
    ("tolerations", [TOLERATION], "pod.tolerations.0", TOLERATION),
    ("affinity", AFFINITY, "pod.affinity", AFFINITY),
    ("topologySpreadConstraints", [SPREAD], "pod.topologySpreadConstraints.0.topologyKey", "zone"),
    ("topologySpreadConstraints", [SPREAD | {"topologyKey": "rack"}, SPREAD], "pod.topologySpreadConstraints.1.maxSkew",
        2),
    ("topologySpreadConstraints", [], "pod.topologySpreadConstraints", None),
    ("topologySpreadConstraints", [SPREAD | {"labelSelector": {}}], "pod.topologySpreadConstraints.0.labelSelector",
        {}),
    ("schedulerName", "kueue", "pod.schedulerName", "kueue"),
    ("podSecurityContext", {"fsGroup": 7}, "pod.securityContext.fsGroup", 7),
    ("podSecurityContext", {"fsGroup": None}, "pod.securityContext.fsGroup", None),
    ("podSecurityContext", {"fsGroup": None}, "pod.securityContext.runAsUser", 10001),
    ("containerSecurityContext", {"privileged": False}, "container.securityContext.privileged", False),
    ("serviceAccountName", "own", "pod.serviceAccountName", "own"),
    ("resourceClaims", [CLAIM_OF_DEVICE], "pod.resourceClaims", [CLAIM_OF_DEVICE]),
    ("labels", {"kueue.x-k8s.io/queue-name": "q"}, "metadata.labels.kueue~x-k8s~io/queue-name", "q"),
    ("annotations", {"a": "b"}, "metadata.annotations", {"a": "b"}),
    ("lifecycle", {"preStop": {"exec": {"command": ["x"]}}}, "container.lifecycle.preStop",
        {"exec": {"command": ["x"]}}),
    ("initContainers", [SIDECAR], "pod.initContainers.0", SIDECAR),
    ("extraContainers", [SIDECAR], "pod.containers.1", SIDECAR),
    ("podSpec", {"hostAliases": [{"ip": "10.0.0.1"}]}, "pod.hostAliases", [{"ip": "10.0.0.1"}]),
    ("tmpSize", "1Gi", "volume tmp", {"emptyDir": {"sizeLimit": "1Gi"}}),
    ("tmpSize", "", "volume tmp", {"emptyDir": {}}),
    ("priorityClassName", "high", "pod.priorityClassName", "high"),
    ("podAnnotations", {"a": "b"}, "spec.template.metadata.annotations", {"a": "b"}),
    ("podLabels", {"l": "m"}, "spec.template.metadata.labels.l", "m"),
    ("extraEnv", [ENV], "env A", "b"),
    ("extraVolumes", [{"name": "v", "configMap": {"name": "c"}}], "volume v", {"configMap": {"name": "c"}}),
    ("extraVolumeMounts", [{"name": "v", "mountPath": "/v"}], "mount v", {"mountPath": "/v"}),
]  # fmt: skip
PLACED = [
    Case(f"{section}.{name}", value, where, path, expected)
    for section, where in (("gateway", GATEWAY), ("scheduler", SCHEDULER), ("workerDefaults", WORKER))
    for name, value, path, expected in PLACEMENT
]
NOT_OF_REDIS = ("resourceClaims", "lifecycle", "tmpSize", "extraEnv", "topologySpreadConstraints")
PLACED += [
    Case(f"redis.{name}", value, REDIS, path, expected)
    for name, value, path, expected in PLACEMENT
    if name not in NOT_OF_REDIS
]
OF_TEST = ("nodeSelector", "tolerations", "affinity", "schedulerName", "serviceAccountName", "podSecurityContext")
OF_TEST += ("containerSecurityContext", "labels", "podSpec", "priorityClassName")
FIRST = "spec.containers.0"
PLACED += [
    Case(f"test.{name}", value, "Pod test", path.replace("pod.", "spec.").replace("container.", f"{FIRST}."), expected)
    for name, value, path, expected in PLACEMENT
    if name in OF_TEST
]
PLACED += [
    Case("test.annotations", {"a": "b"}, "Pod test", "metadata.annotations.a", "b"),
    Case("redis.extraArgs", ["--io-threads=2"], REDIS, "arg --io-threads", "2"),
]

STRATEGY = {"Deployment": "strategy", "StatefulSet": "updateStrategy"}
OF_COMPONENTS = (("gateway", GATEWAY, "gateway"), ("scheduler", SCHEDULER, "scheduler-demo"))
OF_COMPONENTS += (("workerDefaults", WORKER, "worker-cpu"),)
for section, where, name in OF_COMPONENTS:
    kind = where.partition(" ")[0]
    budget = f"PodDisruptionBudget {name}"
    PLACED += [
        Case(f"{section}.updateStrategy", DELETED, where, f"spec.{STRATEGY[kind]}", DELETED),
        Case(f"{section}.podDisruptionBudget.enabled", False, budget, "", None),
        Case(f"{section}.podDisruptionBudget.maxUnavailable", "25%", budget, "spec.maxUnavailable", "25%"),
        Case(f"{section}.podDisruptionBudget.minAvailable", 2, budget, "spec.minAvailable", 2),
        Case(f"{section}.podDisruptionBudget.minAvailable", "50%", budget, "spec.maxUnavailable", None),
        Case(f"{section}.podDisruptionBudget.minAvailable", "", budget, "spec.maxUnavailable", 1),
    ]
PLACED += [
    Case(f"{section}.nodeLostSeconds", 7, where, "pod.tolerations.0.tolerationSeconds", 7)
    for section, where in (("gateway", GATEWAY), ("scheduler", SCHEDULER))
]

MODELS = [
    Case("modelDefaults.name", "other", SCHEDULER, "metadata.name", "r-quire-scheduler-demo"),
    Case("modelDefaults.source", SOURCE, WORKER, "pod.initContainers.0.args.0", SOURCE.removeprefix("hf://"), STORED),
    Case("modelDefaults.source", SOURCE, WORKER, "arg --model", f"/models/models--o--m/snapshots/{'a' * 40}", STORED),
    Case("modelDefaults.storage.image", IMAGE, WORKER, "volume models", VOLUME,
        {"modelDefaults": {"path": "/models/m"}}),
    Case("modelDefaults.servedName", "Org/Model", WORKER, "arg --model-name", "Org/Model"),
    Case("modelDefaults.servedName", "Org/Model", "Pod test", "spec.containers.0.args.1", "--model=Org/Model"),
    Case("modelDefaults.path", "/baked/in", WORKER, "arg --model", "/baked/in"),
    Case("modelDefaults.storage.existingClaim", "c", WORKER, "volume models",
        {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}}, {"modelDefaults": {"path": "/models/m"}}),
    Case("modelDefaults.storage.hostPath", "/data", WORKER, "volume models",
        {"hostPath": {"path": "/data", "type": "Directory"}}, {"modelDefaults": {"path": "/models/m"}}),
    Case("modelDefaults.storage.emptyDirSize", "9Gi", WORKER, "volume models", {"emptyDir": {"sizeLimit": "9Gi"}},
        EMPTY),
    Case("modelDefaults.storage.claimSize", "9Gi", WORKER,
        "spec.volumeClaimTemplates.0.spec.resources.requests.storage", "9Gi", PER_POD),
    Case("modelDefaults.storage.storageClass", "fast", WORKER, "spec.volumeClaimTemplates.0.spec.storageClassName",
        "fast", PER_POD),
    Case("modelDefaults.download.image", "hub:1", WORKER, "pod.initContainers.0.image", "hub:1", EMPTY),
    Case("modelDefaults.download.command", ["fetch", "it"], WORKER, "pod.initContainers.0.command", ["fetch", "it"],
        CLAIM),
    Case("modelDefaults.download.existingSecret", "hf", WORKER, "pod.initContainers.0.envFrom",
        [{"secretRef": {"name": "hf"}}], EMPTY),
    Case("modelDefaults.download.env", [ENV], WORKER, "pod.initContainers.0.env.1", ENV, EMPTY),
    Case("modelDefaults.download.resources", RESOURCES, WORKER, "pod.initContainers.0.resources.requests.cpu", "3",
        EMPTY),
    Case("modelDefaults.scheduler", {"maxWaiting": 7}, SCHEDULER, "arg --max-waiting", "7"),
]  # fmt: skip

POOLS = [
    Case("workerDefaults.replicas", 4, WORKER, "spec.replicas", 4),
    Case("workerDefaults.replicas", 0, WORKER, "spec.replicas", 0),
    Case("workerDefaults.image", "mine:1", WORKER, "container.image", "mine:1"),
    Case("workerDefaults.backend", "reference", WORKER, "arg --backend", "reference"),
    Case("workerDefaults.executor", "sim", WORKER, "arg --executor", "sim"),
    Case("workerDefaults.dtype", "bfloat16", WORKER, "arg --dtype", "bfloat16"),
    Case("workerDefaults.quantize", "int8", WORKER, "arg --quantize", "int8"),
    Case("workerDefaults.adapters", [{"name": "sql", "path": "/a/sql"}], WORKER, "arg --adapter", "sql=/a/sql"),
    Case("workerDefaults.imageCacheMemory", "64M", WORKER, "arg --image-cache-memory", "64M"),
    Case("workerDefaults.kvHostMemory", "32G", WORKER, "arg --kv-host-memory", "32G"),
    Case("workerDefaults.kvDisk", "/tier", WORKER, "arg --kv-disk", "/tier"),
    Case("workerDefaults.kvDiskSize", "5G", WORKER, "arg --kv-disk-size", "5G",
        {"workerDefaults": {"kvDisk": "/tier"}}),
    Case("workerDefaults.kvTransfer", True, WORKER, "count --kv-transfer", 1),
    Case("workerDefaults.role", "decode", WORKER, "arg --role", "decode", {"workerDefaults": {"kvTransfer": True}}),
    Case("workerDefaults.adapterDir", "/adapters", WORKER, "arg --adapter-dir", "/adapters"),
    Case("workerDefaults.dtype", "float16", WORKER, "arg --dtype", "float16", {"workerDefaults": {"gpuCount": 1}}),
    Case("workerDefaults.kvCacheDtype", "fp8", WORKER, "arg --kv-cache-dtype", "fp8",
        {"workerDefaults": {"gpuCount": 1}}),
    Case("workerDefaults.kvCacheDtype", "auto", WORKER, "arg --kv-cache-dtype", None),
    Case("workerDefaults.determinism", "best_effort", WORKER, "arg --determinism", "best_effort"),
    Case("workerDefaults.blockSize", 32, WORKER, "arg --block-size", "32"),
    Case("workerDefaults.numBlocks", 4_000_000, WORKER, "arg --num-blocks", "4000000"),
    Case("workerDefaults.numBlocks", 0, WORKER, "arg --num-blocks", None),
    Case("workerDefaults.kvCacheMemory", "7G", WORKER, "arg --kv-cache-memory", "7G"),
    Case("workerDefaults.kvCacheMemory", "7Gi", WORKER, "arg --kv-cache-memory", "7G"),
    Case("workerDefaults.kvCacheMemory", "", WORKER, "arg --kv-cache-memory", "1G"),
    Case("workerDefaults.kvCacheMemory", "", WORKER, "arg --kv-cache-memory", None,
        {"workerDefaults": {"gpuCount": 1}}),
    Case("workerDefaults.gpuMemoryUtilization", 0.5, WORKER, "arg --gpu-memory-utilization", None),
    Case("workerDefaults.gpuMemoryUtilization", 0.5, WORKER, "arg --gpu-memory-utilization", "0.5",
        {"workerDefaults": {"gpuCount": 1}}),
    Case("workerDefaults.blockSize", 0, WORKER, "arg --block-size", None),
    Case("workerDefaults.maxNumSeqs", 0, WORKER, "arg --max-num-seqs", None),
    Case("workerDefaults.maxNumBatchedTokens", 0, WORKER, "arg --max-num-batched-tokens", None),
    Case("workerDefaults.cacheSize", "2Gi", WORKER, "volume cache", {"emptyDir": {"sizeLimit": "2Gi"}}),
    Case("workerDefaults.maxModelLen", 4096, WORKER, "arg --max-model-len", "4096"),
    Case("workerDefaults.maxNumSeqs", 256, WORKER, "arg --max-num-seqs", "256"),
    Case("workerDefaults.maxNumBatchedTokens", 8192, WORKER, "arg --max-num-batched-tokens", "8192"),
    Case("workerDefaults.threads", 6, WORKER, "env QUIRE_THREADS", "6"),
    Case("workerDefaults.threads", 0, WORKER, "env QUIRE_THREADS",
        {"resourceFieldRef": {"containerName": "worker", "resource": "requests.cpu"}}),
    Case("workerDefaults.resources", {"limits": {"cpu": "4"}}, WORKER, "env QUIRE_THREADS",
        {"resourceFieldRef": {"containerName": "worker", "resource": "limits.cpu"}}),
    Case("workerDefaults.resources", {"requests": {"cpu": None}}, WORKER, "env QUIRE_THREADS", None),
    Case("workerDefaults.gpuCount", 2, WORKER, "container.resources.limits.nvidia~com/gpu", 2),
    Case("workerDefaults.gpuCount", 2, WORKER, "container.resources.requests.nvidia~com/gpu", 2),
    Case("workerDefaults.gpuCount", 1, WORKER, "container.image", "quire-worker:0.1.0-cuda"),
    Case("workerDefaults.gpuCount", 1, WORKER, "arg --backend", "cuda"),
    Case("workerDefaults.gpuCount", 1, WORKER, "arg --tensor-parallel-size", None),
    Case("workerDefaults.gpuCount", 4, WORKER, "arg --tensor-parallel-size", "4"),
    Case("workerDefaults.nodesPerWorker", 1, LARGE, "", None),
    Case("workerDefaults.nodesPerWorker", 3, WORKER, "", None, {"workerDefaults": {"gpuCount": 4}}),
    Case("workerDefaults.nodesPerWorker", 3, LARGE, "spec.leaderWorkerTemplate.size", 3,
        {"workerDefaults": {"gpuCount": 4}}),
    Case("workerDefaults.gpuCount", 1, WORKER, "volume shm", {}),
    Case("workerDefaults.gpuCount", 4, WORKER, "volume shm", {"emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}}),
    Case("workerDefaults.gpuResource", "amd~com/gpu".replace("~", "."), WORKER,
        "container.resources.limits.amd~com/gpu", 1, {"workerDefaults": {"gpuCount": 1}}),
    Case("workerDefaults.runtimeClassName", "nvidia", WORKER, "pod.runtimeClassName", "nvidia"),
    Case("workerDefaults.shmSize", "2Gi", WORKER, "volume shm", {"emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}),
    Case("workerDefaults.startupSeconds", 1800, WORKER, "container.startupProbe.failureThreshold", 360),
    Case("workerDefaults.startupSeconds", 600, WORKER, "container.startupProbe.failureThreshold", 120),
    Case("workerDefaults.startupSeconds", 1800, GATEWAY, "spec.progressDeadlineSeconds", 2100),
    Case("workerDefaults.stuckSeconds", 90, WORKER, "arg --stuck-after-s", "90"),
    Case("workerDefaults.drainSeconds", 20, WORKER, "arg --drain-timeout-s", "20"),
    Case("workerDefaults.drainSeconds", 20, WORKER, "pod.terminationGracePeriodSeconds", 40),
    Case("workerDefaults.autoscaling.enabled", True, WORKER, "spec.replicas", None, SCALED),
    Case("workerDefaults.autoscaling.minReplicas", 2, "ScaledObject worker-cpu", "spec.minReplicaCount", 2, SCALED),
    Case("workerDefaults.autoscaling.maxReplicas", 7, "ScaledObject worker-cpu", "spec.maxReplicaCount", 7, SCALED),
    Case("workerDefaults.extraArgs", ["--sim-step-ms=20"], WORKER, "arg --sim-step-ms", "20"),
]  # fmt: skip
ENTRY_ONLY = [
    Case("workerDefaults.name", "big", "StatefulSet worker-big", "spec.serviceName", "r-quire-worker-big"),
    Case("workerDefaults.model", "demo", WORKER, "metadata.labels.quire/model", "demo"),
    Case("models", [{"name": "demo", "servedName": "d"}], WORKER, "arg --model-name", "d"),
    Case("workers", [{"name": "p", "model": "demo"}], "StatefulSet worker-p", "spec.replicas", 1),
]


def needed_workers(busy: str, worth: str) -> str:
    """The query of the only pool's trigger."""
    labels = f'namespace="{NAMESPACE}", service="r-quire-scheduler-demo"'
    rows = f'{labels}, worker_id=~"r-quire-worker-cpu-[0-9]+"'
    return (
        f"sum(quire_rows_used{{{rows}}} / (quire_rows_limit{{{rows}}} * {busy}) or vector(0)) + "
        f"sum(quire_num_requests_waiting{{{labels}}}) * {worth}"
    )


KEDA = [
    Case("keda.enabled", True, "ScaledObject worker-cpu", "spec.scaleTargetRef.kind", "StatefulSet", SCALED),
    Case("keda.prometheusAddress", "http://x:1", "ScaledObject worker-cpu", "spec.triggers.0.metadata.serverAddress",
        "http://x:1", SCALED),
    Case("keda.authenticationRef", "token", "ScaledObject worker-cpu", "spec.triggers.0.authenticationRef",
        {"name": "token"}, SCALED),
    Case("keda.enabled", True, "ScaledObject worker-cpu", "spec.triggers.0.metadata.ignoreNullValues", "false", SCALED),
    *(
        Case(f"keda.{name}", value, "ScaledObject worker-cpu", "spec.triggers.0.metadata.query", query, SCALED)
        for name, value, query in (
            ("waitingPerWorker", 3, needed_workers("0.75", "1 / 3")),
            ("busyRowsPercent", 50, needed_workers("0.5", "1 / 5")),
        )
    ),
    Case("keda.cooldownSeconds", 99, "ScaledObject worker-cpu", "spec.cooldownPeriod", 99, SCALED),
    Case("workerDefaults.autoscaling.fallbackReplicas", 3, "ScaledObject worker-cpu", "spec.fallback.replicas", 3,
        SCALED),
    Case("workerDefaults.autoscaling.fallbackReplicas", 0, "ScaledObject worker-cpu", "spec.fallback.replicas", 1,
        SCALED),
    Case("workerDefaults.autoscaling.minReplicas", 0, "ScaledObject worker-cpu", "spec.minReplicaCount", 0, SCALED),
    Case("workerDefaults.autoscaling.triggers", [CRON], "ScaledObject worker-cpu", "spec.triggers.1", CRON, SCALED),
    Case("keda.prometheusAddress", "", "ScaledObject worker-cpu", "spec.triggers", [CRON], merged(SCALED, OWN_TRIGGER)),
    Case("scheduler.workerPatienceSeconds", 5, SCHEDULER, "arg --worker-patience-s", "5"),
    Case("scheduler.workerPatienceSeconds", "", SCHEDULER, "arg --worker-patience-s", "60"),
    Case("scheduler.workerPatienceSeconds", "", SCHEDULER, "arg --worker-patience-s", "2100",
        merged(SCALED, {"workerDefaults": IDLE})),
    Case("keda.pollingSeconds", 9, "ScaledObject worker-cpu", "spec.pollingInterval", 9, SCALED),
    Case("keda.scaleDownSeconds", 99, "ScaledObject worker-cpu",
        "spec.advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.stabilizationWindowSeconds", 99, SCALED),
]  # fmt: skip

REDISES = [
    Case("redis.enabled", True, GATEWAY, "env QUIRE_REDIS",
        f"redis://r-quire-redis.{NAMESPACE}.svc.cluster.local:6379/0"),
    Case("redis.enabled", False, GATEWAY, "env QUIRE_REDIS", None),
    Case("redis.image", "redis:6.2", REDIS, "container.image", "redis:6.2"),
    Case("redis.maxMemory", "1gb", REDIS, "container.args.9", "1gb"),
    Case("redis.image", "docker.io/a/b:1", REDIS, "container.image", "reg/q/a/b:1", {"image": {"registry": "reg/q/"}}),
    Case("redis.image", "own/b:1", REDIS, "container.image", "own/b:1", {"image": {"registry": "reg/q"}}),
    Case("redis.command", "redis-server", REDIS, "container.command", ["redis-server"]),
    Case("redis.networkPolicy", True, "NetworkPolicy redis", "spec.policyTypes", ["Ingress"]),
    Case("redis.networkPolicy", False, "NetworkPolicy redis", "", None),
    Case("redis.networkPolicy", False, "NetworkPolicy redis", "spec.policyTypes", ["Ingress"], POLICY),
    Case("redis.auth.existingSecret", "s", "Secret redis", "", None),
    Case("redis.auth.existingSecret", "", REDIS, "container.args.14", "--requirepass"),
    Case("redis.auth.existingSecret", "", SCHEDULER, "volume redis-password",
        {"secret": {"secretName": "r-quire-redis"}}),
    Case("redis.auth.existingSecret", "s", SCHEDULER, "volume redis-password", {"secret": {"secretName": "s"}}),
    Case("redis.auth.key", "k", GATEWAY, "env QUIRE_REDIS_PASSWORD_FILE", "/etc/quire/redis-password/k"),
    Case("redis.external.url", "redis+sentinel://a:1,b:2/m/0", GATEWAY, "env QUIRE_REDIS",
        "redis+sentinel://a:1,b:2/m/0", {"redis": EXTERNAL}),
    Case("redis.external.sentinelPasswordSecret", "s", GATEWAY, "volume redis-sentinel",
        {"secret": {"secretName": "s"}}, {"redis": EXTERNAL | {"external": {"url": "redis+sentinel://a:1/m"}}}),
    Case("redis.external.sentinelPasswordKey", "k", GATEWAY, "env QUIRE_REDIS_SENTINEL_PASSWORD_FILE",
        "/etc/quire/redis-sentinel/k",
        {"redis": EXTERNAL | {"external": {"url": "redis+sentinel://a:1/m", "sentinelPasswordSecret": "s"}}}),
    Case("redis.auth.key", "k", REDIS, "env REDIS_PASSWORD", {"secretKeyRef": {"name": "s", "key": "k"}},
        {"redis": {"auth": {"existingSecret": "s"}}}),
    Case("redis.external.url", "redis://h:1/0", GATEWAY, "env QUIRE_REDIS", "redis://h:1/0", {"redis": EXTERNAL}),
    Case("redis.external.existingSecret", "s", SCHEDULER, "env QUIRE_REDIS",
        {"secretKeyRef": {"name": "s", "key": "url"}}, {"redis": EXTERNAL}),
    Case("redis.external.key", "k", GATEWAY, "env QUIRE_REDIS", {"secretKeyRef": {"name": "s", "key": "k"}},
        {"redis": EXTERNAL | {"external": {"existingSecret": "s"}}}),
    Case("redis.external.caSecret", "ca", GATEWAY, "volume redis-ca", {"secret": {"secretName": "ca"}},
        {"redis": EXTERNAL | {"external": {"existingSecret": "s"}}}),
    Case("redis.external.caKey", "tls.crt", SCHEDULER, "env QUIRE_REDIS_TLS_CA_FILE", "/etc/quire/redis-ca/tls.crt",
        {"redis": EXTERNAL | {"external": {"existingSecret": "s", "caSecret": "ca"}}}),
    Case("redis.external.certSecret", "client", SCHEDULER, "volume redis-cert", {"secret": {"secretName": "client"}},
        {"redis": EXTERNAL | {"external": {"url": "rediss://h:1/0"}}}),
    Case("redis.external.certSecret", "client", GATEWAY, "env QUIRE_REDIS_TLS_KEY_FILE",
        "/etc/quire/redis-cert/tls.key", {"redis": EXTERNAL | {"external": {"url": "rediss://h:1/0"}}}),
    Case("redis.external.passwordSecret", "p", GATEWAY, "volume redis-password", {"secret": {"secretName": "p"}},
        {"redis": EXTERNAL | {"external": {"url": "redis://h:1/0"}}}),
    Case("redis.external.passwordKey", "k", SCHEDULER, "env QUIRE_REDIS_PASSWORD_FILE", "/etc/quire/redis-password/k",
        {"redis": EXTERNAL | {"external": {"url": "redis://h:1/0", "passwordSecret": "p"}}}),
    Case("redis.namespace", "team", GATEWAY, "env QUIRE_REDIS_NAMESPACE", "team"),
]  # fmt: skip

# Defaults and list entries accept the same values.
AS_ENTRY = [case for case in (*POOLS, *PLACED) if case.name.startswith("workerDefaults.")]
CASES = [*COMMON, *TRUST, *OPERATORS, *GATEWAYS, *SCHEDULERS, *PLACED, *MODELS, *POOLS, *ENTRY_ONLY, *KEDA, *REDISES]
NOT_BY_DEFAULT = ("workerDefaults.name", "workerDefaults.model")


def nested(path: str, value: Any) -> Values:
    """{"a": {"b": value}} of a.b."""
    return reduce(lambda inner, key: {key: inner}, reversed(path.split(".")), value)


def values_of(case: Case) -> Values:
    if case.name in NOT_BY_DEFAULT:
        return {"workers": [{"name": "cpu", "model": "demo"} | nested(case.name.partition(".")[2], case.value)]}
    return merged(case.others, nested(case.name, case.value))


def look(values: Values, where: str, path: str) -> Any:
    """The element at `path` of an object; None if it does not exist."""
    kind, _, name = where.partition(" ")
    objects = render(values)
    candidates = {name.removeprefix("="), f"r-quire-{name}"}
    manifest = next((m for m in objects.all(kind) if m["metadata"]["name"] in candidates), None)
    if manifest is None or not path:
        return manifest
    try:
        return _look_into(manifest, path)
    except (KeyError, IndexError):
        return None


def _look_into(manifest: Manifest, path: str) -> Any:
    word, _, name = path.partition(" ")
    if word == "arg":
        return next((a.partition("=")[2] for a in _args(manifest) if a.partition("=")[0] == name), None)
    if word == "count":
        return sum(a.partition("=")[0] == name for a in _args(manifest))
    if word in LISTS:
        items = dig(manifest, LISTS[word])
        item = next((item for item in items if item["name"] == name), {})
        rest = {key: value for key, value in item.items() if key != "name"}
        return (rest.get("value") or rest.get("valueFrom")) if word == "env" else rest
    return dig(manifest, path.replace("container.", f"{CONTAINER}.", 1).replace("pod.", "spec.template.spec.", 1))


CONTAINER = "spec.template.spec.containers.0"
LISTS = {"env": f"{CONTAINER}.env", "mount": f"{CONTAINER}.volumeMounts", "volume": "spec.template.spec.volumes"}


def _args(manifest: Manifest) -> list[str]:
    return list(dig(manifest, f"{CONTAINER}.args"))


def case_id(case: Case) -> str:
    return f"{case.name}={case.value!s:.24}-{case.path.rpartition('.')[2]}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_value(case: Case) -> None:
    assert look(values_of(case), case.where, case.path) == case.expected


@pytest.mark.parametrize("case", AS_ENTRY, ids=case_id)
def test_entries_of_workers_override_the_defaults(case: Case) -> None:
    own = nested(case.name.removeprefix("workerDefaults."), case.value)
    values = case.others | {
        "workers": [{"name": "cpu", "model": "demo"} | merged(case.others.get("workerDefaults", {}), own)]
    }
    assert look(values, case.where, case.path) == case.expected


def test_every_value_has_a_case() -> None:
    names = {value.name for value in CASES}
    missing = [v.path for v in all_values() if v.path not in names]
    assert missing == []


def test_every_value_has_a_comment() -> None:
    assert [value.path for value in all_values() if not value.comment] == []


def all_values() -> list[generate.Value]:
    return list(generate.leaves(generate.read_values((CHART / "values.yaml").read_text())))


def test_two_pools_of_one_model_differ() -> None:
    pools = [
        {"name": "a", "model": "demo", "replicas": 2, "nodeSelector": {"gpu": "a"}},
        {"name": "b", "model": "demo", "maxNumSeqs": 8},
    ]
    values = {"workers": pools}
    assert look(values, "StatefulSet worker-a", "pod.nodeSelector") == {"gpu": "a"}
    assert look(values, "StatefulSet worker-b", "pod.nodeSelector") is None
    assert look(values, "StatefulSet worker-b", "arg --max-num-seqs") == "8"
    assert look(values, SCHEDULER, "spec.replicas") == 1


def test_null_in_an_entry_removes_a_key_of_the_defaults() -> None:
    placed = {"nodeSelector": {"accelerator": "a100", "zone": "z"}, "podLabels": {"l": "m"}, "affinity": AFFINITY}
    entry = {
        "nodeSelector": {"accelerator": None, "disk": "ssd"},
        "podLabels": {"l": None},
        "affinity": {"nodeAffinity": None, "podAffinity": {"x": None}},
        "resources": {"requests": {"cpu": None}},
    }
    own = [{"name": "cpu", "model": "demo"} | entry]
    pools, models = {"workers": own, "workerDefaults": placed}, {"models": [{"name": "demo", "scheduler": entry}]}
    for values, where, memory in ((pools, WORKER, "4Gi"), (models | {"scheduler": placed}, SCHEDULER, "512Mi")):
        assert look(values, where, "pod.nodeSelector") == {"disk": "ssd", "zone": "z"}
        assert look(values, where, "spec.template.metadata.labels.l") is None
        assert look(values, where, "pod.affinity") == {"podAffinity": {}}
        assert look(values, where, "container.resources.requests") == {"memory": memory}


def test_a_download_has_the_volumes_of_its_worker() -> None:
    mount = {"name": "ca", "mountPath": "/etc/ssl/corporate"}
    values = merged(EMPTY, {"workerDefaults": {"extraVolumeMounts": [mount]}})
    assert mount in look(values, WORKER, "pod.initContainers.0.volumeMounts")


def test_a_model_may_override_some_scheduler_values() -> None:
    values = {
        "models": [{"name": "demo", "scheduler": {"resources": {"requests": {"cpu": "4"}}}}],
        "scheduler": {"replicas": 3},
    }
    assert look(values, SCHEDULER, "container.resources.requests") == {"cpu": "4", "memory": "512Mi"}
    assert look(values, SCHEDULER, "spec.replicas") == 3


EVERYTHING: Values = {
    "metrics": {"compat": "vllm"},
    "gateway": JWT["gateway"]
    | ADMIN["gateway"]
    | {"tls": {"existingSecret": "cert", "clientCaSecret": "ca"}, "keyLimits": {"toml": LIMITS}},
    "scheduler": {"blockKey": {"existingSecret": "b"}},
    "test": {"tlsSecret": "t"},
    "workerDefaults": {"numBlocks": 8, "maxModelLen": 64, "quantize": "int8", "dtype": "bfloat16"},
}


@pytest.mark.parametrize(
    ("family", "trust"), [("IPv4", {}), ("IPv6", TRUST_TLS), ("IPv4", {"trust": {"mode": "none"}})]
)
@pytest.mark.parametrize("part", ["gateway", "scheduler", "worker"])
def test_services_accept_every_flag_and_variable(part: str, family: str, trust: Values) -> None:
    make = {
        "gateway": gateway_svc.flags.make_parser,
        "scheduler": scheduler_svc.flags.make_parser,
        "worker": worker_svc.flags.make_parser,
    }[part]
    owners = [*render(EVERYTHING | {"ipFamily": family} | trust).pods()]
    (container,) = next(p["spec"]["containers"] for _, p in owners if p["spec"]["containers"][0]["name"] == part)
    names = {name for name, _ in settings_of(make())}
    for item in container["env"]:
        if item["name"].startswith("QUIRE_") and item["name"] != "QUIRE_CACHE_DIR":
            assert item["name"].removeprefix("QUIRE_").lower().replace("_", "-") in names
    args = [arg.replace("$(POD_IP)", "10.0.0.1" if family == "IPv4" else "fd00::1") for arg in container["args"]]
    assert parse(make(), args).drain_timeout_s > 0
