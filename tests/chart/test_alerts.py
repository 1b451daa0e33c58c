"""Each alert is silent in normal operation, fires for its cause only, and is documented in the runbook.

tests/processes/test_metrics.py evaluates the same expressions on real scrapes.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from svc_common.observe.metrics import LATENCIES_S
from tests.chart.chart import CHART, NAMESPACE, ROOT, render
from tests.promql import History, Samples, read_scrape

RUNBOOK = (ROOT / "docs" / "operations.md").read_text()
ROW = re.compile(r"^\| `(Quire\w+)` \| `(.+?)` \| (\w+) \| .+ \| .+ \|$", re.MULTILINE)

# `m` has two schedulers, one of them without workers. The pool of `idle` is scaled to zero.
NORMAL = """
quire_workers{model_name="",service="r-quire-scheduler-m",state="ready"} 0
quire_workers{model_name="m",service="r-quire-scheduler-m",state="ready"} 2
quire_workers{model_name="other",service="r-quire-scheduler-other",state="ready"} 1
quire_gateway_schedulers{state="ready"} 1
quire_gateway_schedulers{state="away"} 0
quire_gateway_revisions{model_name="m",service="r-quire-gateway-headless"} 1
quire_rpc_errors_total{code="INVALID_ARGUMENT",method="Generate"} 9
quire_rpc_errors_total{code="INTERNAL",method="Generate"} 3
quire_requests_refused_total{code="RESOURCE_EXHAUSTED",model_name="m"} 5
quire_requests_refused_total{code="DEADLINE_EXCEEDED",model_name="m"} 5
quire_num_requests_waiting{model_name="m"} 40
quire_num_requests_unschedulable{model_name="m"} 0
quire_num_requests_waiting{model_name="",service="r-quire-scheduler-idle"} 0
quire_workers{model_name="",service="r-quire-scheduler-idle",state="ready"} 0
quire_num_requests_unschedulable{model_name="",service="r-quire-scheduler-idle"} 0
quire_kv_blocks{model_name="m",state="used",worker_id="large"} 950
quire_kv_blocks{model_name="m",state="free",worker_id="large"} 50
quire_kv_blocks{model_name="m",state="used",worker_id="small"} 0
quire_kv_blocks{model_name="m",state="free",worker_id="small"} 1
quire_rpc_errors_total{code="UNAVAILABLE",method="Generate",service="r-quire-gateway-headless"} 7
quire_requests_total{finished_reason="length",model_name="m",service="r-quire-gateway-headless"} 100
quire_redis_up{service="r-quire-gateway-headless"} 1
quire_migrations_total{model_name="m",reason="drain"} 4
quire_migrations_total{model_name="m",reason="lost"} 4
quire_worker_kv_tier_errors_total{service="r-quire-worker-m",tier="disk"} 0
quire_audit_lost_lines_total{service="r-quire-gateway-headless"} 2
quire_certificate_remaining_fraction{link="internal",service="r-quire-scheduler-m"} 0.34
quire_time_to_first_token_seconds_bucket{le="5.0",model_name="m"} 99
quire_time_to_first_token_seconds_count{model_name="m"} 100
quire_inter_token_latency_seconds_bucket{le="0.25",model_name="m"} 99
quire_inter_token_latency_seconds_count{model_name="m"} 100
quire_certificate_remaining_fraction{link="public",service="r-quire-gateway-headless"} 0.9
"""
SCHEDULERS = """quire_gateway_schedulers{state="ready"} 1
quire_gateway_schedulers{state="away"} 0"""
# Alert, line that changes from one scrape to the next, its new value. No value: the lines are missing.
BAD = [
    ("QuireNoWorkerReady", 'quire_workers{model_name="other",service="r-quire-scheduler-other",state="ready"} 1', "0"),
    ("QuireNoWorkerStarts", 'quire_num_requests_waiting{model_name="",service="r-quire-scheduler-idle"} 0', "1"),
    ("QuireGatewaysGone", SCHEDULERS, ""),
    ("QuireSchedulerAway", 'quire_gateway_schedulers{state="away"} 0', "1"),
    ("QuireTwoRevisions", 'quire_gateway_revisions{model_name="m",service="r-quire-gateway-headless"} 1', "2"),
    ("QuireInternalErrors", 'quire_rpc_errors_total{code="INTERNAL",method="Generate"} 3', "4"),
    (
        "QuireRequestsFail",
        'quire_rpc_errors_total{code="UNAVAILABLE",method="Generate",service="r-quire-gateway-headless"} 7',
        "17",
    ),
    ("QuireRequestsRefused", 'quire_requests_refused_total{code="RESOURCE_EXHAUSTED",model_name="m"} 5', "6"),
    ("QuireRequestsWait", 'quire_num_requests_waiting{model_name="m"} 40', "41"),
    ("QuireRequestsUnschedulable", 'quire_num_requests_unschedulable{model_name="m"} 0', "1"),
    ("QuirePoolsFull", 'quire_kv_blocks{model_name="m",state="free",worker_id="large"} 50', "40"),
    ("QuireWorkersLost", 'quire_migrations_total{model_name="m",reason="lost"} 4', "5"),
    ("QuireRedisDown", 'quire_redis_up{service="r-quire-gateway-headless"} 1', "0"),
    ("QuireKvTierFails", 'quire_worker_kv_tier_errors_total{service="r-quire-worker-m",tier="disk"} 0', "1"),
    ("QuireAuditLinesLost", 'quire_audit_lost_lines_total{service="r-quire-gateway-headless"} 2', "3"),
    (
        "QuireCertificateExpires",
        'quire_certificate_remaining_fraction{link="internal",service="r-quire-scheduler-m"} 0.34',
        "0.09",
    ),
]
BURNS = [
    (f"Quire{name}BudgetBurns{speed}", histogram)
    for name, histogram in (("Ttft", "quire_time_to_first_token_seconds"), ("Itl", "quire_inter_token_latency_seconds"))
    for speed in ("Fast", "Slow")
]
SERVICE = "r-quire-scheduler-demo"
# Changes that must not alert: invalid requests of clients, drained workers.
HARMLESS = [
    ('quire_rpc_errors_total{code="INVALID_ARGUMENT",method="Generate"} 9', "10"),
    ('quire_requests_refused_total{code="DEADLINE_EXCEEDED",model_name="m"} 5', "6"),
    ('quire_migrations_total{model_name="m",reason="drain"} 4', "5"),
    # five of 105 requests
    ('quire_rpc_errors_total{code="UNAVAILABLE",method="Generate",service="r-quire-gateway-headless"} 7', "12"),
    # a pool that is removed on purpose, and a queue that waits for its first worker
    ('quire_num_requests_unschedulable{model_name="",service="r-quire-scheduler-idle"} 0', "1"),
]


def rules() -> dict[str, dict[str, Any]]:
    """The chart's alerts by name."""
    names = ("demo", "m", "other", "idle")
    models = {"models": [{"name": n} for n in names], "workers": [{"name": n, "model": n} for n in names]}
    models["workers"][-1]["autoscaling"] = {"enabled": True, "minReplicas": 0}
    models["keda"] = {"enabled": True, "prometheusAddress": "http://p:9090"}
    (rule,) = render({"metrics": {"prometheusRule": {"enabled": True}}} | models).all("PrometheusRule")
    return {alert["alert"]: alert for group in rule["spec"]["groups"] for alert in group["rules"]}


def scrape(text: str) -> Samples:
    """The samples of a release. Lines without a service are those of a scheduler."""
    lines = [line if "service=" in line else line.replace("{", f'{{service="{SERVICE}",') for line in text.splitlines()]
    return read_scrape("\n".join(lines) + "\n", namespace=NAMESPACE)


def firing(history: History) -> set[str]:
    """Alerts whose expressions have a result."""
    return {name for name, rule in rules().items() if history.evaluate(rule["expr"])}


def after(line: str, value: str) -> History:
    """100 requests in normal operation, except for the value of one line or for missing lines."""
    assert line in NORMAL
    served = 'quire_requests_total{finished_reason="length",model_name="m",service="r-quire-gateway-headless"} '
    worse = NORMAL.replace(f"{served}100", f"{served}200")
    worse = worse.replace(line, f"{line.rpartition(' ')[0]} {value}" if value else "")
    return History(scrape(NORMAL), scrape(worse), 15.0)


def test_every_alert_has_a_case() -> None:
    assert [name for name, _, _ in BAD] + [name for name, _ in BURNS] == list(rules())


@pytest.mark.parametrize(("name", "line", "value"), BAD, ids=[name for name, _, _ in BAD])
def test_only_the_expected_alert_fires(name: str, line: str, value: str) -> None:
    assert firing(after(line, value)) == {name}


def burning(histogram: str, num_slow: int) -> History:
    """100 more requests or tokens, of which this number was too slow."""
    count = f'{histogram}_count{{model_name="m"}} '
    bucket = next(line for line in NORMAL.splitlines() if line.startswith(f"{histogram}_bucket"))
    worse = NORMAL.replace(f"{count}100", f"{count}200").replace(bucket, f"{bucket[:-2]}{99 + 100 - num_slow}")
    return History(scrape(NORMAL), scrape(worse), 15.0)


@pytest.mark.parametrize(("name", "histogram"), BURNS)
def test_latency_objectives_alert_by_burn_rate(name: str, histogram: str) -> None:
    """The budget is 1 % slow: 14.4 times as many alert fast, 6 times as many alert slowly, 5 times do not alert."""
    slow, fast = (name.replace("Fast", kind).replace("Slow", kind) for kind in ("Slow", "Fast"))
    assert firing(burning(histogram, 5)) == set()
    assert firing(burning(histogram, 7)) == {slow}
    assert firing(burning(histogram, 15)) == {slow, fast}


def test_objectives_follow_the_values() -> None:
    """The limit, the target, and an objective that is off."""
    objectives = {"target": 0.9, "ttftSeconds": 2.5, "itlSeconds": 0}
    values = {"metrics": {"prometheusRule": {"enabled": True, "objectives": objectives}}}
    (rule,) = render(values).all("PrometheusRule")
    burns = [r for group in rule["spec"]["groups"] for r in group["rules"] if "Burns" in r["alert"]]
    assert [r["alert"] for r in burns] == ["QuireTtftBudgetBurnsFast", "QuireTtftBudgetBurnsSlow"]
    assert all('le=~"2[.]5"' in r["expr"] for r in burns)
    assert "> 14.4 * (1 - 0.9)" in burns[0]["expr"]
    assert "longer than 2.5 s" in burns[0]["annotations"]["summary"]


def test_alerts_take_labels_a_runbook_and_more_rules_and_can_be_off() -> None:
    more = {"record": "team:requests:rate5m", "expr": "sum(rate(quire_requests_total[5m]))"}
    settings = {
        "enabled": True,
        "alertLabels": {"team": "a"},
        "runbookUrl": "https://wiki/quire#{alert}",
        "disabled": ["QuireRedisDown"],
        "extraRules": [more],
    }
    (rule,) = render({"metrics": {"prometheusRule": settings}}).all("PrometheusRule")
    *alerts, last = (r for group in rule["spec"]["groups"] for r in group["rules"])
    assert last == more
    assert {alert["labels"]["team"] for alert in alerts} == {"a"}
    assert all(alert["annotations"]["runbook_url"].endswith(f"#{alert['alert']}") for alert in alerts)
    assert set(rules()) - {alert["alert"] for alert in alerts} == {"QuireRedisDown", "QuireNoWorkerStarts"}


def test_limits_of_objectives_are_bounds_of_buckets() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["metrics"]["properties"]
    objectives = schema["prometheusRule"]["properties"]["objectives"]["properties"]
    for name in ("ttftSeconds", "itlSeconds"):
        assert set(objectives[name]["enum"]) - {0} <= set(LATENCIES_S)


def test_two_releases_in_a_namespace_have_rules_and_queries_of_their_own() -> None:
    values = {
        "metrics": {"prometheusRule": {"enabled": True}},
        "keda": {"enabled": True, "prometheusAddress": "http://p:9090"},
        "workerDefaults": {"autoscaling": {"enabled": True, "minReplicas": 0}},
    }
    releases = [render(values, name=name) for name in ("a", "ab")]
    for one, other in (releases, releases[::-1]):
        services = {s["metadata"]["name"] for s in other.all("Service")}
        expressions = [
            r["expr"] for rule in one.all("PrometheusRule") for g in rule["spec"]["groups"] for r in g["rules"]
        ]
        expressions += [t["metadata"]["query"] for s in one.all("ScaledObject") for t in s["spec"]["triggers"]]
        for expression in expressions:
            matchers = re.findall(r'service=~?"([^"]+)"', expression)
            assert len(matchers) == len(re.findall(r"quire_\w+\{", expression))
            assert not [s for s in services for m in matchers if re.fullmatch(m, s)]


@pytest.mark.parametrize(("line", "value"), HARMLESS)
def test_harmless_changes_do_not_alert(line: str, value: str) -> None:
    assert firing(after(line, value)) == set()


def test_summaries_use_labels_of_the_result() -> None:
    for name, rule in rules().items():
        if "Burns" in name:
            continue  # by model_name, as the test above shows
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        (answer,) = firing_labels(name)
        assert labels <= answer


def firing_labels(name: str) -> list[set[str]]:
    line, value = next((line, value) for other, line, value in BAD if other == name)
    answer = after(line, value).evaluate(rules()[name]["expr"])
    return [{label for label, _ in labels} for labels in answer] if isinstance(answer, dict) else []


def test_the_runbook_has_all_alerts() -> None:
    here = rf'namespace="{NAMESPACE}", service=~"[^"]+"'
    documented = {name: (expression.replace("\\|", "|"), wait) for name, expression, wait in ROW.findall(RUNBOOK)}
    wanted = {
        name: (re.sub(rf"\{{{here}, ", "{", re.sub(rf"\{{{here}\}}", "", rule["expr"])), rule["for"])
        for name, rule in rules().items()
    }
    assert documented == wanted
