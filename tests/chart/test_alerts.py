"""Each alert is silent in normal operation, fires for its cause only, and is documented in the runbook.

tests/processes/test_metrics.py evaluates the same expressions on real scrapes.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.chart.chart import NAMESPACE, ROOT, render
from tests.promql import History, read_scrape

RUNBOOK = (ROOT / "docs" / "operations.md").read_text()
ROW = re.compile(r"^\| `(Quire\w+)` \| `(.+?)` \| (\w+) \| .+ \| .+ \|$", re.MULTILINE)

# `m` has two schedulers, one of them without workers.
NORMAL = """
quire_workers{model_name="",service="r-quire-scheduler-m",state="ready"} 0
quire_workers{model_name="m",service="r-quire-scheduler-m",state="ready"} 2
quire_workers{model_name="other",service="r-quire-scheduler-other",state="ready"} 1
quire_gateway_schedulers{state="ready"} 1
quire_gateway_schedulers{state="away"} 0
quire_rpc_errors_total{code="INVALID_ARGUMENT",method="Generate"} 9
quire_rpc_errors_total{code="INTERNAL",method="Generate"} 3
quire_requests_refused_total{code="RESOURCE_EXHAUSTED",model_name="m"} 5
quire_requests_refused_total{code="DEADLINE_EXCEEDED",model_name="m"} 5
quire_num_requests_waiting{model_name="m"} 40
quire_kv_cache_usage_perc{model_name="m"} 0.95
quire_migrations_total{model_name="m",reason="drain"} 4
quire_migrations_total{model_name="m",reason="lost"} 4
quire_audit_lost_lines_total{service="r-quire-gateway"} 2
quire_certificate_remaining_fraction{link="internal",service="r-quire-scheduler-m"} 0.34
quire_certificate_remaining_fraction{link="public",service="r-quire-gateway"} 0.9
"""
SCHEDULERS = """quire_gateway_schedulers{state="ready"} 1
quire_gateway_schedulers{state="away"} 0"""
# Alert, line that changes from one scrape to the next, its new value. No value: the lines are missing.
BAD = [
    ("QuireNoWorkerReady", 'quire_workers{model_name="other",service="r-quire-scheduler-other",state="ready"} 1', "0"),
    ("QuireGatewaysGone", SCHEDULERS, ""),
    ("QuireSchedulerAway", 'quire_gateway_schedulers{state="away"} 0', "1"),
    ("QuireInternalErrors", 'quire_rpc_errors_total{code="INTERNAL",method="Generate"} 3', "4"),
    ("QuireRequestsRefused", 'quire_requests_refused_total{code="RESOURCE_EXHAUSTED",model_name="m"} 5', "6"),
    ("QuireRequestsWait", 'quire_num_requests_waiting{model_name="m"} 40', "41"),
    ("QuirePoolsFull", 'quire_kv_cache_usage_perc{model_name="m"} 0.95', "0.96"),
    ("QuireWorkersLost", 'quire_migrations_total{model_name="m",reason="lost"} 4', "5"),
    ("QuireAuditLinesLost", 'quire_audit_lost_lines_total{service="r-quire-gateway"} 2', "3"),
    (
        "QuireCertificateExpires",
        'quire_certificate_remaining_fraction{link="internal",service="r-quire-scheduler-m"} 0.34',
        "0.09",
    ),
]
# Changes that must not alert: invalid requests of clients, drained workers.
HARMLESS = [
    ('quire_rpc_errors_total{code="INVALID_ARGUMENT",method="Generate"} 9', "10"),
    ('quire_requests_refused_total{code="DEADLINE_EXCEEDED",model_name="m"} 5', "6"),
    ('quire_migrations_total{model_name="m",reason="drain"} 4', "5"),
]


def rules() -> dict[str, dict[str, Any]]:
    """The chart's alerts by name."""
    (rule,) = render({"metrics": {"prometheusRule": {"enabled": True}}}).all("PrometheusRule")
    return {alert["alert"]: alert for group in rule["spec"]["groups"] for alert in group["rules"]}


def firing(history: History) -> set[str]:
    """Alerts whose expressions have a result."""
    return {name for name, rule in rules().items() if history.evaluate(rule["expr"])}


def after(line: str, value: str) -> History:
    """Normal operation, except for the value of one line or for missing lines."""
    assert line in NORMAL
    worse = NORMAL.replace(line, f"{line.rpartition(' ')[0]} {value}" if value else "")
    older, newer = (read_scrape(text, namespace=NAMESPACE) for text in (NORMAL, worse))
    return History(older, newer, 15.0)


def test_every_alert_has_a_case() -> None:
    assert [name for name, _, _ in BAD] == list(rules())


@pytest.mark.parametrize(("name", "line", "value"), BAD, ids=[name for name, _, _ in BAD])
def test_only_the_expected_alert_fires(name: str, line: str, value: str) -> None:
    assert firing(after(line, value)) == {name}


@pytest.mark.parametrize(("line", "value"), HARMLESS)
def test_harmless_changes_do_not_alert(line: str, value: str) -> None:
    assert firing(after(line, value)) == set()


def test_summaries_use_labels_of_the_result() -> None:
    for name, rule in rules().items():
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        (answer,) = firing_labels(name)
        assert labels <= answer


def firing_labels(name: str) -> list[set[str]]:
    line, value = next((line, value) for other, line, value in BAD if other == name)
    answer = after(line, value).evaluate(rules()[name]["expr"])
    return [{label for label, _ in labels} for labels in answer] if isinstance(answer, dict) else []


def test_the_runbook_has_all_alerts() -> None:
    here = f'namespace="{NAMESPACE}"'
    documented = {name: (expression.replace("\\|", "|"), wait) for name, expression, wait in ROW.findall(RUNBOOK)}
    wanted = {
        name: (rule["expr"].replace(f"{{{here}, ", "{").replace(f"{{{here}}}", ""), rule["for"])
        for name, rule in rules().items()
    }
    assert documented == wanted
