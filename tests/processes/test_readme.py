"""Every command and example of the pages below is run with a real stack, or only checked if it needs more than a test
has.

tests/chart/test_docs.py checks the helm commands, test_http.py the curl command. CI runs `make demo` and
`make test` in a fresh clone.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import quire_cli as cli
from quire_cli.arguments import make_parser
from quire_cli.commands import doctor

from tests.processes.openai_server import OpenAIServer
from tests.processes.stack import ROOT, demo_gateway

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("README.md", "docs/sdk.md", "docs/running.md", "docs/chat.md", "docs/vllm.md", "docs/recipes.md")
BLOCKS = [block for page in PAGES for block in FENCE.findall((ROOT / page).read_text())]
LINES = dict.fromkeys(
    line
    for language, text in BLOCKS
    if not language and not text.startswith(" ")  # the drawing at the top
    for line in text.replace("\\\n", " ").splitlines()
    if line
)
QUIRE = [line for line in LINES if line.startswith("quire ")]
SERVICES = [line for line in LINES if line.startswith("quire-")]
BUF = [line for line in LINES if line.startswith(".venv/bin/buf")]
ELSEWHERE = (
    *("make ", "helm ", "export ", ". .venv/bin/activate", "grpcurl ", "curl ", "docker ", "ANTHROPIC_BASE_URL="),
)
LOAD = {
    "--num-prompts": "12",
    "--request-rate": "50",
    "--concurrency": "4",
}  # less load than the README's, to take less time


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with demo_gateway(tmp_path_factory.mktemp("readme")) as address:
        yield address


def test_every_command_is_covered() -> None:
    others = set(LINES) - {*QUIRE, *SERVICES, *BUF}
    assert QUIRE
    assert SERVICES
    assert BUF
    assert [line for line in others if not line.startswith(ELSEWHERE)] == []


@pytest.mark.parametrize("line", QUIRE)
def test_quire_commands_run(line: str, target: str, tmp_path: Path, monkeypatch, capsys) -> None:
    words = shlex.split(line, comments=True)[1:]
    if words[0] in ("up", "serve", "batch"):  # test_up.py, test_hub.py and test_batch.py run them
        values = vars(make_parser().parse_args(words)).values()
        parsed = {str(item) for value in values for item in (value if isinstance(value, list) else [value])}
        assert {word for word in words[1:] if not word.startswith("-")} <= parsed
        return
    monkeypatch.setenv("QUIRE_TARGET", target)
    monkeypatch.chdir(tmp_path)
    words = [LOAD.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    if words[0] == "bench" and "--num-prompts" not in words:
        words += ["--num-prompts", LOAD["--num-prompts"]]
    if words[0] == "doctor":  # test_probe.py measures another path, which compiles it
        monkeypatch.setattr(doctor, "PROBE", doctor.PROBE[:-1])
    if words[0] == "top":
        words += ["--count", "2", "--interval-s", "0.1"]
    with OpenAIServer() as server:
        code = cli.main([word.replace("http://localhost:8000", server.url) for word in words])
    assert (code, capsys.readouterr().out != "") == (0, True)


@pytest.mark.parametrize("line", SERVICES)
def test_services_accept_the_flags(line: str) -> None:
    name, *flags = shlex.split(line)
    command = [str(Path(sys.executable).with_name(name)), *flags, "--print-config"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        (setting,) = re.findall(rf"^{flag.removeprefix('--')} = .*# flag.*$", shown, re.MULTILINE)
        assert value.removeprefix("./") in setting


@pytest.mark.parametrize("line", BUF)
def test_buf_curl_streams_an_answer(line: str, target: str) -> None:
    words = shlex.split(line.replace("localhost:50051", target))
    command = [str(Path(sys.executable).with_name("buf")), *words[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert '"accepted"' in done.stdout
    assert '"finished"' in done.stdout


@pytest.mark.parametrize("code", [text for language, text in BLOCKS if language == "python"])
def test_examples_run(code: str, target: str) -> None:
    code = code.replace("localhost:50051", target)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
