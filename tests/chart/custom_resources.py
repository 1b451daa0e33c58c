"""Schemas of the custom resources that the chart creates, with only the fields that the chart may use.

Fields and types match the definitions of KEDA 2.17, the Prometheus operator 0.80, Gateway API 1.4, its Inference
Extension 1.0, Envoy Gateway 1.6, cert-manager 1.17 and LeaderWorkerSet v1.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def _closed(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def _resource(api_version: str, kind: str, spec: Schema) -> Schema:
    metadata = _closed(
        ("name",), name={"type": "string"}, namespace={"type": "string"}, labels=STRINGS, annotations=STRINGS
    )
    return _closed(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


INTEGER: Schema = {"type": "integer"}
SCALING_RULES = _closed(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    policies={
        "type": "array",
        "items": _closed(
            ("type", "value", "periodSeconds"),
            type={"enum": ["Pods", "Percent"]},
            value={"type": "integer", "minimum": 1},
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        ),
    },
)
TRIGGER = _closed(
    ("type", "metadata"),
    type={"type": "string"},
    name={"type": "string"},
    metricType={"enum": ["AverageValue", "Value", "Utilization"]},
    metadata=STRINGS,
    authenticationRef=_closed(("name",), name={"type": "string"}),
)
SCALED_OBJECT = _closed(
    ("scaleTargetRef", "triggers"),
    scaleTargetRef=_closed(("name",), apiVersion={"type": "string"}, kind={"type": "string"}, name={"type": "string"}),
    pollingInterval=INTEGER, cooldownPeriod=INTEGER, minReplicaCount=INTEGER, maxReplicaCount=INTEGER,
    fallback=_closed(
        ("failureThreshold", "replicas"), failureThreshold=INTEGER, replicas=INTEGER,
        behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
    ),
    advanced=_closed(horizontalPodAutoscalerConfig=_closed(behavior=_closed(scaleDown=SCALING_RULES))),
    triggers={"type": "array", "minItems": 1, "items": TRIGGER},
)  # fmt: skip
RELABELING = _closed(
    sourceLabels={"type": "array", "items": {"type": "string"}},
    **{name: {"type": "string"} for name in ("separator", "targetLabel", "regex", "replacement", "action")},
)
SERVICE_MONITOR = _closed(
    ("selector", "endpoints"),
    selector=_closed(matchLabels=STRINGS),
    endpoints={
        "type": "array",
        "items": _closed(
            port={"type": "string"},
            interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
            **{name: {"type": "array", "items": RELABELING} for name in ("relabelings", "metricRelabelings")},
        ),
    },
)

EXPRESSION: Schema = {"type": "string", "minLength": 1}
ALERT = _closed(
    ("alert", "expr", "for", "labels", "annotations"),
    alert=EXPRESSION,
    expr=EXPRESSION,
    **{"for": {"type": "string", "pattern": "^[0-9]+(s|m|h)$"}, "labels": STRINGS, "annotations": STRINGS},
)
RULE: Schema = {"anyOf": [ALERT, _closed(("record", "expr"), record=EXPRESSION, expr=EXPRESSION, labels=STRINGS)]}
PROMETHEUS_RULE = _closed(
    ("groups",),
    groups={
        "type": "array",
        "items": _closed(("name", "rules"), name={"type": "string"}, rules={"type": "array", "items": RULE}),
    },
)
HOSTNAME: Schema = {"type": "string", "maxLength": 253, "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
FILTERS: Schema = {"type": "array", "maxItems": 16, "items": {"type": "object", "required": ["type"]}}
GRPC_RULE = _closed(
    matches={
        "type": "array",
        "maxItems": 8,
        "items": _closed(
            method=_closed(
                service={"type": "string", "pattern": r"^[A-Za-z_][A-Za-z_0-9]*(\.[A-Za-z_][A-Za-z_0-9]*)*$"}
            )
        ),
    },
    backendRefs={"type": "array", "items": _closed(("name",), name={"type": "string"}, port=PORT)},
    filters=FILTERS,
)
HTTP_RULE = _closed(
    backendRefs={"type": "array", "items": _closed(("name",), name={"type": "string"}, port=PORT)},
    filters=FILTERS,
    timeouts=_closed(request=DURATION, backendRequest=DURATION),
)


def _route(rule: Schema) -> Schema:
    return _closed(
        parentRefs={
            "type": "array",
            "maxItems": 32,
            "items": _closed(
                ("name",),
                name={"type": "string"},
                namespace={"type": "string"},
                sectionName={"type": "string"},
                port=PORT,
            ),
        },
        hostnames={"type": "array", "maxItems": 16, "items": HOSTNAME},
        rules={"type": "array", "minItems": 1, "maxItems": 16, "items": rule},
    )


GRPC_ROUTE, HTTP_ROUTE = _route(GRPC_RULE), _route(HTTP_RULE)

CERTIFICATE = _closed(
    ("secretName", "issuerRef"),
    secretName={"type": "string"},
    dnsNames={"type": "array", "minItems": 1, "items": HOSTNAME},
    usages={"type": "array", "items": {"enum": ["digital signature", "server auth", "client auth"]}},
    privateKey=_closed(
        algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
        size={"enum": [256, 384, 521, 2048, 4096, 8192]},
        rotationPolicy={"enum": ["Never", "Always"]},
    ),
    issuerRef=_closed(("name",), name={"type": "string"}, kind={"type": "string"}, group={"type": "string"}),
)

LOCAL_REFERENCE = _closed(("group", "kind", "name"), **{name: {"type": "string"} for name in ("group", "kind", "name")})
BACKEND_TLS_POLICY = _closed(
    ("targetRefs", "validation"),
    targetRefs={"type": "array", "minItems": 1, "maxItems": 16, "items": LOCAL_REFERENCE},
    validation=_closed(
        ("hostname",),
        hostname=HOSTNAME,
        caCertificateRefs={"type": "array", "maxItems": 8, "items": LOCAL_REFERENCE},
        wellKnownCACertificates={"const": "System"},
    ),
)
BACKEND_TRAFFIC_POLICY = _closed(
    ("targetRefs",),
    targetRefs={"type": "array", "minItems": 1, "maxItems": 16, "items": LOCAL_REFERENCE},
    timeout=_closed(http=_closed(requestTimeout=DURATION, maxStreamDuration=DURATION)),
)
INFERENCE_POOL = _closed(
    ("selector", "targetPorts", "endpointPickerRef"),
    selector=_closed(("matchLabels",), matchLabels=STRINGS),
    targetPorts={"type": "array", "minItems": 1, "maxItems": 8, "items": _closed(("number",), number=PORT)},
    endpointPickerRef=_closed(
        ("name", "port"), name={"type": "string", "minLength": 1}, port=_closed(("number",), number=PORT)
    ),
)

LEADER_WORKER_SET = _closed(
    ("leaderWorkerTemplate",),
    replicas={"type": "integer", "minimum": 0},
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    networkConfig=_closed(("subdomainPolicy",), subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
    rolloutStrategy=_closed(
        ("type",),
        type={"const": "RollingUpdate"},
        rollingUpdateConfiguration=_closed(
            partition=INTEGER, maxUnavailable={"type": ["integer", "string"]}, maxSurge={"type": ["integer", "string"]}
        ),
    ),
    leaderWorkerTemplate=_closed(
        ("size", "leaderTemplate", "workerTemplate"),
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
        # pod templates, which chart.validate compares with the schema of pods
        leaderTemplate={"type": "object"},
        workerTemplate={"type": "object"},
    ),
)

SCHEMAS: dict[tuple[str, str], Schema] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _resource(
        "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", LEADER_WORKER_SET
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): _resource("keda.sh/v1alpha1", "ScaledObject", SCALED_OBJECT),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _resource(
        "monitoring.coreos.com/v1", "ServiceMonitor", SERVICE_MONITOR
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _resource(
        "monitoring.coreos.com/v1", "PrometheusRule", PROMETHEUS_RULE
    ),
    ("cert-manager.io/v1", "Certificate"): _resource("cert-manager.io/v1", "Certificate", CERTIFICATE),
    ("gateway.networking.k8s.io/v1", "BackendTLSPolicy"): _resource(
        "gateway.networking.k8s.io/v1", "BackendTLSPolicy", BACKEND_TLS_POLICY
    ),
    ("gateway.envoyproxy.io/v1alpha1", "BackendTrafficPolicy"): _resource(
        "gateway.envoyproxy.io/v1alpha1", "BackendTrafficPolicy", BACKEND_TRAFFIC_POLICY
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): _resource(
        "inference.networking.k8s.io/v1", "InferencePool", INFERENCE_POOL
    ),
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): _resource("gateway.networking.k8s.io/v1", "GRPCRoute", GRPC_ROUTE),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _resource("gateway.networking.k8s.io/v1", "HTTPRoute", HTTP_ROUTE),
}
