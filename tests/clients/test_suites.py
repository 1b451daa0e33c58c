"""Public test suites against the HTTP API: llm-comply checks answers, schemathesis fuzzes by openapi.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gateway_svc.http.fields import ALIASES

BIN = Path(sys.executable).parent
# The demo model calls no tools by itself, and has no reasoning and no pictures. The error test sends no model, which a
# gateway with one model accepts, as vLLM does.
UNSUPPORTED = {
    *("chat-image-input", "chat-tool-calling", "chat-reasoning-summary", "chat-error-handling"),
    *("image-input", "tool-calling", "reasoning-summary", "error-handling", "compact-response"),
}
FUZZED = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "response_headers_conformance,unsupported_method,allow_header_conformance"
)


@pytest.mark.parametrize(("suite", "num_cases"), [("openai-chat", 9), ("open-responses", 13)])
def test_llm_comply(url: str, suite: str, num_cases: int) -> None:
    command = [
        BIN / "llm-comply",
        "run",
        "--format",
        suite,
        "--json",
        "-u",
        f"{url}/v1",
        "-k",
        "none",
        "-m",
        "demo",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    results = {one["id"]: one for one in json.loads(done.stdout)["results"]}
    failed = {name for name, one in results.items() if one["status"] != "passed"}
    assert len(results) == num_cases
    assert failed <= UNSUPPORTED, {name: results[name] for name in failed}


def fuzz(url: str, folder: Path, *flags: str) -> None:
    command = [BIN / "st", "run", f"{url}/openapi.json", "--checks", FUZZED, "--seed", "1", "--request-timeout", "30"]
    command += ["--suppress-health-check", "all", "--warnings", "off", *flags]
    command += ["--exclude-path", "/pause", "--exclude-path", "/sleep"]  # after them requests wait, by order
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=folder)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_schemathesis(url: str, tmp_path: Path) -> None:
    fuzz(
        url,
        tmp_path,
        "--phases",
        "coverage,fuzzing",
        "--max-examples",
        "4",
        *(word for path in ALIASES for word in ("--exclude-path", path)),
    )


@pytest.mark.deep
@pytest.mark.timeout(1300)
def test_schemathesis_with_more_examples(url: str, tmp_path: Path) -> None:
    fuzz(url, tmp_path, "--max-examples", "400")
