"""The chart's rules and queries in a real Prometheus: it loads them, and promtool tests when alerts fire."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.chart import NAMESPACE, program, render
from tests.processes.children import start_child
from tests.processes.ports import free_port

pytestmark = pytest.mark.skipif(
    not Path(program("promtool")).exists(), reason="no promtool: scripts/install_promtool installs it where apt-get is"
)

VALUES = {
    "metrics": {"prometheusRule": {"enabled": True}},
    "keda": {"enabled": True, "prometheusAddress": "http://p:9090"},
    "models": [{"name": "demo"}, {"name": "on"}],
    "workers": [
        {"name": "on", "model": "on"},
        *(
            {"name": n, "model": "demo", "autoscaling": {"enabled": True, "minReplicas": 0, "maxReplicas": most}}
            for n, most in (("a", 6), ("b", 2))
        ),
    ],
}
DEADLINE_S = 30.0
TTFT = "quire_time_to_first_token_seconds"


def groups() -> list[dict[str, Any]]:
    (rule,) = render(VALUES).all("PrometheusRule")
    return list(rule["spec"]["groups"])


def queries() -> dict[str, str]:
    """The queries of KEDA by pool and trigger."""
    return {
        f"{scaled['metadata']['name'].rpartition('-')[2]} {trigger['name']}": trigger["metadata"]["query"]
        for scaled in render(VALUES).all("ScaledObject")
        for trigger in scaled["spec"]["triggers"]
    }


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.dump({"groups": groups()}))
    return path


def promtool(*arguments: str) -> str:
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules(rules: Path) -> None:
    num_rules = sum(len(group["rules"]) for group in groups())
    assert f"{num_rules} rules found" in promtool("check", "rules", str(rules))


def series(name: str, values: str, service: str = "scheduler-demo", **labels: str) -> dict[str, str]:
    labels = {"namespace": NAMESPACE, "service": f"r-quire-{service}", "model_name": "demo"} | labels
    return {"series": f"{name}{{{', '.join(f'{k}={json.dumps(v)}' for k, v in labels.items())}}}", "values": values}


# 10 requests per minute: all quick for six hours, then a fifth of them slow, then quick again.
GATEWAY = "gateway-headless"
SLOW_THEN_QUICK = [
    series(f"{TTFT}_count", "0+10x360 3610+10x60 4210+10x120", GATEWAY),
    series(f"{TTFT}_bucket", "0+10x360 3608+8x60 4090+10x120", GATEWAY, le="5.0"),
    # Prometheus 3 and OpenMetrics may write the bound in another way; a second series must not count twice.
    series(f"{TTFT}_bucket", "0+10x360 3608+8x60 4090+10x120", GATEWAY, le="2.5"),
]
HEALTHY = [
    series("quire_gateway_schedulers", "1+0x600", GATEWAY, state="ready"),
    series("quire_workers", "2+0x600", state="ready"),
]
UNIT_TESTS = [
    {
        "interval": "1m",
        "input_series": HEALTHY + SLOW_THEN_QUICK,
        "alert_rule_test": [
            {"eval_time": time, "alertname": f"QuireTtftBudgetBurns{speed}", "exp_alerts": alerts}
            for time, speed, fires in (
                ("355m", "Fast", False),
                ("355m", "Slow", False),
                ("415m", "Fast", True),
                ("415m", "Slow", False),  # an hour of slow requests is a small part of six hours
                ("435m", "Fast", False),  # the short window ends it, although the long one still has slow requests
            )
            for alerts in [
                [
                    {
                        "exp_labels": {
                            "severity": {"Fast": "critical", "Slow": "warning"}[speed],
                            "model_name": "demo",
                        },
                        "exp_annotations": {"summary": "Too many first tokens of demo take longer than 5 s"},
                    }
                ]
                if fires
                else []
            ]
        ],
    },
    {
        "interval": "1m",
        "input_series": [*HEALTHY[:1], series("quire_workers", "2 2 0+0x10", "scheduler-on", state="ready")],
        "alert_rule_test": [
            {
                "eval_time": "4m",
                "alertname": "QuireNoWorkerReady",
                "exp_alerts": [
                    {
                        "exp_labels": {"severity": "critical", "service": "r-quire-scheduler-on"},
                        "exp_annotations": {"summary": "No worker is ready for r-quire-scheduler-on"},
                    }
                ],
            }
        ],
    },
    {
        # A pool at zero is no failure; a request that waits for it too long is one.
        "interval": "1m",
        "input_series": [
            *HEALTHY[:1],
            series("quire_workers", "0+0x100", state="ready"),
            series("quire_num_requests_waiting", "0+0x20 1+0x80"),
        ],
        "alert_rule_test": [
            {"eval_time": "19m", "alertname": "QuireNoWorkerReady", "exp_alerts": []},
            {"eval_time": "50m", "alertname": "QuireNoWorkerStarts", "exp_alerts": []},
            {
                "eval_time": "60m",
                "alertname": "QuireNoWorkerStarts",
                "exp_alerts": [
                    {
                        "exp_labels": {"severity": "critical", "service": "r-quire-scheduler-demo"},
                        "exp_annotations": {
                            "summary": "Requests wait for r-quire-scheduler-demo, "
                            "which has no worker, and none has started"
                        },
                    }
                ],
            },
        ],
    },
    {
        # Half of the requests fail for an hour.
        "interval": "1m",
        "input_series": [
            *HEALTHY,
            series("quire_requests_total", "0+10x60", GATEWAY, finished_reason="length"),
            series("quire_rpc_errors_total", "0+10x60", GATEWAY, code="UNAVAILABLE", method="Generate"),
        ],
        "alert_rule_test": [
            {
                "eval_time": "20m",
                "alertname": "QuireRequestsFail",
                "exp_alerts": [
                    {
                        "exp_labels": {"severity": "critical"},
                        "exp_annotations": {
                            "summary": "More than 5 % of the requests fail with errors that clients did not cause"
                        },
                    }
                ],
            }
        ],
    },
    {
        # Another release in the namespace has no worker; its alert is its own.
        "interval": "1m",
        "input_series": [*HEALTHY, series("quire_workers", "0+0x10", "other-scheduler-on", state="ready")],
        "alert_rule_test": [{"eval_time": "5m", "alertname": "QuireNoWorkerReady", "exp_alerts": []}],
    },
]
ROWS = [
    *(series("quire_rows_used", "24+0x5", worker_id=f"r-quire-worker-a-{i}") for i in range(2)),
    *(series("quire_rows_limit", "64+0x5", worker_id=f"r-quire-worker-a-{i}") for i in range(2)),
    series("quire_rows_used", "48+0x5", worker_id="r-quire-worker-b-0"),
    series("quire_rows_limit", "64+0x5", worker_id="r-quire-worker-b-0"),
]
SCALING = [
    # (series, result by trigger): 48 of 64 rows fill one worker; 40 waiting ones are worth 8, 6 of them in a.
    ([*ROWS, series("quire_num_requests_waiting", "40+0x5")], {"a needed-workers": 7.0, "b needed-workers": 3.0}),
    ([*ROWS, series("quire_num_requests_waiting", "0+0x5")], {"a needed-workers": 1.0, "b needed-workers": 1.0}),
    # Without workers only the queue counts. The first request starts a worker of one pool, not of both.
    ([series("quire_num_requests_waiting", "1+0x5")], {"a needed-workers": 0.15, "b needed-workers": 0.0}),
    ([series("quire_num_requests_waiting", "20+0x5")], {"a needed-workers": 3.0, "b needed-workers": 1.0}),
    # Background work starts one worker.
    (
        [series(f"quire_num_requests_{state}", f"{count}+0x5") for state, count in (("waiting", 0), ("background", 9))],
        {"a needed-workers": 0.01, "b needed-workers": 0.0},
    ),
    # Without schedulers there is no result, which KEDA takes for an error.
    ([], {"a needed-workers": None, "a refused-requests": None}),
    # Refused requests start a worker only while there is none, and only one of their model.
    (
        [
            series("quire_gateway_unready_requests_total", "0+60x5", GATEWAY, model_name="demo"),
            series("quire_workers", "0+0x5", state="ready"),
        ],
        {"a refused-requests": 120.0},
    ),
    (
        [
            series("quire_gateway_unready_requests_total", "0+60x5", GATEWAY, model_name="other"),
            series("quire_workers", "0+0x5", state="ready"),
        ],
        {"a refused-requests": None},
    ),
    (
        [
            series("quire_gateway_unready_requests_total", "0+60x5", GATEWAY, model_name="demo"),
            series("quire_workers", "1+0x5", state="loading"),
        ],
        {"a refused-requests": None},
    ),
]


def test_promtool_tests_the_rules_and_the_queries_of_keda(rules: Path) -> None:
    by_trigger = queries()
    scaling = [
        {
            "interval": "1m",
            "input_series": given,
            "promql_expr_test": [
                {
                    "expr": by_trigger[name],
                    "eval_time": "5m",
                    "exp_samples": [] if value is None else [{"value": value}],
                }
                for name, value in results.items()
            ],
        }
        for given, results in SCALING
    ]
    path = rules.with_name("tests.yaml")
    path.write_text(yaml.dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": UNIT_TESTS + scaling}))
    assert "SUCCESS" in promtool("test", "rules", str(path))


@pytest.fixture
def prometheus(tmp_path: Path, rules: Path) -> Iterator[str]:
    (tmp_path / "prometheus.yml").write_text(yaml.dump({"rule_files": [str(rules)]}))
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    log = tmp_path / "log"
    process = start_child([program("prometheus"), *flags, f"--web.listen-address={address}"], log)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not _is_ready(address):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield address
    finally:
        process.kill()
        process.wait()


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def ask(address: str, path: str, **parameters: str) -> Any:
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)["data"]


def test_a_prometheus_loads_the_rules_and_answers_the_queries(prometheus: str) -> None:
    loaded = [rule for group in ask(prometheus, "rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in loaded] == [rule["alert"] for group in groups() for rule in group["rules"]]
    assert {rule.get("lastError", "") for rule in loaded} == {""}
    for query in queries().values():
        assert ask(prometheus, "query", query=query)["result"] == []
