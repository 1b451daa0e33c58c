"""Schemas of the custom resources that the chart makes: the fields it may use, and no others.

Fields and types are those of the definitions that KEDA 2.16 and the Prometheus operator 0.80 install.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def _closed(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def _resource(api_version: str, kind: str, spec: Schema) -> Schema:
    metadata = _closed(("name",), name={"type": "string"}, namespace={"type": "string"}, labels=STRINGS)
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
    metricType={"enum": ["AverageValue", "Value", "Utilization"]},
    metadata=STRINGS,
    authenticationRef=_closed(("name",), name={"type": "string"}),
)
SCALED_OBJECT = _closed(
    ("scaleTargetRef", "triggers"),
    scaleTargetRef=_closed(("name",), apiVersion={"type": "string"}, kind={"type": "string"}, name={"type": "string"}),
    pollingInterval=INTEGER,
    minReplicaCount=INTEGER,
    maxReplicaCount=INTEGER,
    advanced=_closed(horizontalPodAutoscalerConfig=_closed(behavior=_closed(scaleDown=SCALING_RULES))),
    triggers={"type": "array", "minItems": 1, "items": TRIGGER},
)
SERVICE_MONITOR = _closed(
    ("selector", "endpoints"),
    selector=_closed(matchLabels=STRINGS),
    endpoints={
        "type": "array",
        "items": _closed(port={"type": "string"}, interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}),
    },
)

SCHEMAS: dict[tuple[str, str], Schema] = {
    ("keda.sh/v1alpha1", "ScaledObject"): _resource("keda.sh/v1alpha1", "ScaledObject", SCALED_OBJECT),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _resource(
        "monitoring.coreos.com/v1", "ServiceMonitor", SERVICE_MONITOR
    ),
}
