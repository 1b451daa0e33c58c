"""Every command and example of README.md and docs/ is run with a real stack, or only checked if it needs more than a
test has.

tests/chart/test_docs.py has the pages about Kubernetes. CI runs `make demo` and `make test` in a fresh clone.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quire_cli as cli
import torch
from PIL import Image as Picture
from quire_cli.arguments import make_parser
from quire_cli.commands import doctor
from quire_client import AsyncClient, Client, ToolCall
from quire_client.demo import demo_model_dir
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gateway_svc.limits.buckets import read_limits
from tests.chart.test_docs import PAGES as CHART_PAGES
from tests.embedding_models import make_embedder
from tests.processes.encoder_models import TEXT_SHAPES, make_speech_checkpoint, make_text_checkpoint, tone, wav
from tests.processes.openai_server import OpenAIServer
from tests.processes.ports import free_port
from tests.processes.stack import ROOT, Service, Stack
from tests.processes.vision_model import make_folder

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page not in CHART_PAGES]
BLOCKS = [(page.stem, *block) for page in PAGES for block in FENCE.findall(page.read_text())]
LINES = dict.fromkeys(
    line
    for _, language, text in BLOCKS
    if not language and not text.startswith(" ")  # the drawing at the top
    for line in re.sub(r"\\\n|\n(?=  )", " ", text).splitlines()  # a continued line
    if line
)
QUIRE = [line for line in LINES if line.startswith("quire ")]
SERVICES = [line for line in LINES if line.startswith("quire-")]
BUF = [line for line in LINES if line.startswith(".venv/bin/buf")]
CURL = [line for line in LINES if line.startswith("curl ") and "localhost:8000" in line]
SHELL = [line for line in LINES if line.startswith(("openssl ", "umask 077; for ", "head -c "))]
PYTHON = {page: [text for name, kind, text in BLOCKS if (name, kind) == (page, "python")] for page, *_ in BLOCKS}
ELSEWHERE = (
    *(
        "make ",
        "helm ",
        "export ",
        ". .venv/bin/activate",
        "grpcurl ",
        "curl --header",
        "docker ",
        "ANTHROPIC_BASE_URL=",
    ),
    *("pip install ", "ssh ", "kubectl ", "host-0$ ", "host-1$ ", "python bench/", "bench/gpu/"),
    *("umask 077; mkdir tokens; cd tokens", "for role in ", "accept"),  # tests/chart/test_trust.py
    "codex ",  # tests/clients/test_codex.py
    "--public-prefix ",  # tests/processes/test_isolation.py
)
# Commands that need files or other services. Tests named after them run them.
PARSED = ("up", "serve", "batch", "adapter", "receipt", "verify", "compare", "explain", "replay")
# Blocks of other languages, by page and language: those that this file tests, and the files that test the others.
SETTINGS = {("cli", "json"), ("keys", "json"), ("limits", "toml"), ("recipes", "toml"), ("structured-output", "json")}
OTHERS = {
    ("compare", "json"): "tests/unit/client/test_compare.py",
    ("configuration", "text"): "tests/unit/test_configuration_page.py",
    ("configuration", "toml"): "tests/unit/test_configuration_page.py",
    ("grpc", "json"): "tests/processes/test_grpc_services.py",
    ("grpc", "yaml"): "tests/chart/test_envoy.py",
    ("gpu", "text"): "tests/gpu/test_gpu_page.py",  # a formula and lines of logs
    ("gpu", "yaml"): "tests/chart/test_docs.py",
    ("metrics", "promql"): "tests/chart/test_docs.py",
    ("replay", "py"): "tests/unit/client/test_executor.py",  # recipes for other packages
    ("resume-protocol", "json"): "tests/unit/client/test_resume.py",
    ("trust", "yaml"): "tests/chart/test_trust.py",
}
# Settings behind the `...` of a command.
REQUIRED = {
    "quire-gateway": "--scheduler scheduler-host:50052",
    "quire-scheduler": "",
    "quire-worker": "--model DIR --scheduler scheduler-host:50052",
}
LOAD = {
    "--num-prompts": "12",
    "--request-rate": "50",
    "--concurrency": "4",
}  # less load than the README's, to take less time
FLAGS = ("--dtype", "float32", "--num-blocks", "80", "--block-size", "16", "--max-num-seqs", "6")
# The model of a block that has this text; all others use the bundled model.
MODELS: dict[str, Callable[[Path], object]] = {
    "client.embed": lambda folder: make_embedder(folder, "bert"),
    "Image.of": lambda folder: make_folder(folder, "qwen2_5_vl"),
    "Audio(": make_speech_checkpoint,
    "translate English": lambda folder: make_text_checkpoint(folder, TEXT_SHAPES[0]),
}


async def book(call: ToolCall) -> str:
    """The tool of an agent."""
    return call.id


class Documented:
    """One stack for all pages, with a gateway for each model that a page needs."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.http = f"127.0.0.1:{free_port()}"
        self.weights = stack.folder / "weights"
        self.weights.mkdir()
        self._others: dict[str, Service] = {}
        own = ("--model-name", "demo", "--kv-cache-memory", "64M", "--weights-dir", str(self.weights))
        flags = ("--http-listen", self.http, "--record-memory", "64M", "--batch-dir", str(stack.folder / "batches"))
        self.demo = self._serve(demo_model_dir(), own, flags)

    def target_of(self, code: str) -> str:
        """The address of the gateway with the model that a block needs."""
        (text,) = [text for text in MODELS if text in code] or [""]
        if text and text not in self._others:
            folder = self.stack.folder / f"model-{len(self._others)}"
            folder.mkdir()
            MODELS[text](folder)
            self._others[text] = self._serve(folder, FLAGS, ())
        return self._others.get(text, self.demo).address

    @functools.cached_property
    def names(self) -> dict[str, Any]:
        """The names that the pages leave to their readers."""
        model, tokenizer = (kind.from_pretrained(demo_model_dir()) for kind in (AutoModelForCausalLM, AutoTokenizer))
        soft = torch.zeros(1, 4, model.config.hidden_size)
        return {
            "model": model,
            "tokenizer": tokenizer,
            "peft_model": SimpleNamespace(get_prompt=lambda batch_size: soft),
            "question": "What does len do?",
            "prompt_ids": tokenizer("What does len do?").input_ids,
            "save_file": save_file,
            "messages": [{"role": "user", "content": "What does len do?"}],
            "TOOLS": [{"type": "function", "function": {"name": "book"}}],
            "book": book,
        }

    def _serve(self, folder: Path, worker_flags: tuple[str, ...], gateway_flags: tuple[str, ...]) -> Service:
        scheduler = self.stack.start_scheduler()
        worker = self.stack.start_worker(scheduler, folder, *worker_flags)
        gateway = self.stack.start_gateway(scheduler, flags=gateway_flags)
        worker.wait_ready()
        gateway.wait_ready()
        return gateway


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Documented]:
    with Stack(tmp_path_factory.mktemp("docs")) as stack:
        yield Documented(stack)


@pytest.fixture(scope="module")
def target(documented: Documented) -> str:
    return documented.demo.address


def test_every_command_is_covered() -> None:
    others = set(LINES) - {*QUIRE, *SERVICES, *BUF, *CURL, *SHELL}
    assert all((QUIRE, SERVICES, BUF, CURL))
    assert {block[:2] for block in BLOCKS if block[1] not in ("", "python")} == SETTINGS | OTHERS.keys()
    assert [line for line in others if not line.startswith(ELSEWHERE)] == []


@pytest.mark.parametrize("line", QUIRE)
def test_quire_commands_run(line: str, target: str, tmp_path: Path, monkeypatch, capsys) -> None:
    words = shlex.split(line, comments=True)[1:]
    if words[0] in PARSED or {"--path", "--receipt", "--api-key"} & {*words}:
        assert make_parser().parse_args(words)
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
    name = line.partition(" ")[0]
    _, *flags = shlex.split(line.replace("...", REQUIRED[name]), comments=True)
    command = [str(Path(sys.executable).with_name(name)), *flags, "--print-config"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        (setting,) = re.findall(rf"^{flag.removeprefix('--')} = .*# flag.*$", shown, re.MULTILINE)
        assert value.removeprefix("./").rpartition("quire@")[2] in setting  # names of users are not shown


@pytest.mark.parametrize("line", BUF)
def test_buf_curl_streams_an_answer(line: str, target: str) -> None:
    words = shlex.split(line.replace("localhost:50051", target))
    command = [str(Path(sys.executable).with_name("buf")), *words[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert '"accepted"' in done.stdout
    assert '"finished"' in done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("line", CURL)
def test_curl_commands_are_answered(line: str, documented: Documented) -> None:
    words = shlex.split(line.replace("localhost:8000", documented.http))
    done = subprocess.run(
        ["curl", "--fail-with-body", "--silent", *words[1:]], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("data: [DONE]\n\n") or json.loads(done.stdout)["choices"]


def test_files_of_settings_and_requests_are_read(documented: Documented, tmp_path: Path) -> None:
    found = {block[:2]: block[2] for block in BLOCKS if block[:2] in SETTINGS}
    (tmp_path / "limits.toml").write_text(found["limits", "toml"])
    default, owners = read_limits(tmp_path / "limits.toml")
    assert (default.max_rows, [*owners]) == (64, ["team-a"])
    assert tomllib.loads(found["recipes", "toml"])["model_providers"]["quire"]["wire_api"] == "responses"
    assert set(json.loads(found["keys", "json"])) <= {*re.findall(r"`(\w+)`", (ROOT / "docs/keys.md").read_text())}
    (tmp_path / "input.jsonl").write_text(found["cli", "json"])
    names = [str(tmp_path / name) for name in ("input.jsonl", "output.jsonl")]
    assert cli.main(["batch", names[0], "-o", names[1], "--base-url", f"http://{documented.http}"]) == 0
    with Client.connect(documented.demo.address) as client:
        client.generate("add", structural_tag=found["structured-output", "json"], max_tokens=4)


@pytest.mark.parametrize("line", SHELL)
def test_shell_commands_run(line: str, tmp_path: Path) -> None:
    line = "; ".join([*(before for before in SHELL[: SHELL.index(line)] if "receipts.pem" in before), line])
    subprocess.run(["bash", "-ec", line], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.parametrize("page", [page for page, blocks in PYTHON.items() if blocks])
def test_examples_run(page: str, documented: Documented, tmp_path: Path, monkeypatch) -> None:
    """The blocks of a page run one after the other, each with a client named `client` and the names of those before."""
    monkeypatch.chdir(tmp_path)
    Picture.new("RGB", (60, 60), (200, 30, 30)).save("cat.jpg")
    Path("speech.wav").write_bytes(wav(tone(1, 1.0)))
    names = dict(documented.names)
    for code in PYTHON[page]:
        target = documented.target_of(code)
        monkeypatch.setenv("QUIRE_TARGET", target)
        code = re.sub(r"http://[\w.-]+:8000", f"http://{documented.http}", code.replace("localhost:50051", target))
        run_block(page, code.replace("/weights", str(documented.weights)), names)
        result = names.get("result")
        names["sample"] = getattr(result, "samples", [None])[0]


def run_block(page: str, code: str, names: dict[str, Any]) -> None:
    """Run a block; one with `await` or `async` outside of functions runs in an event loop."""
    compiled = compile(code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if not compiled.co_flags & inspect.CO_COROUTINE:
        with Client() as names["client"]:
            exec(compiled, names)
        return

    async def run() -> None:
        async with AsyncClient() as names["client"]:
            await eval(compiled, names)

    asyncio.run(run())
