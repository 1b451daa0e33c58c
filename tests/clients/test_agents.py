"""Unmodified Codex and Claude Code, from npm, against a gateway. Its scheduler is a fake that plays the answers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.chat_templates import TEMPLATES
from tests.processes.ports import free_port
from tests.processes.stack import ROOT, Service, Stack
from tests.unit.gateway.fakes import EOS, FakeScheduler, make_bundle, make_info
from tests.unit.gateway.test_chat_streams import encode, make_tokenizer
from tests.unit.gateway.test_response_tools import call, prompt_of
from tests.unit.gateway.tokenizer_kinds import bundle_files

PROGRAMS = ROOT / os.environ.get("CLIENTS_VENV", ".clients") / "node/node_modules/.bin"
CODEX, CLAUDE = PROGRAMS / "codex", PROGRAMS / "claude"
MODEL = "gpt-5.5"  # a name for which Codex sends apply_patch with a grammar, and MCP tools behind tool_search
MCP_SERVER = Path(__file__).with_name("mcp_weather.py")
TASK = "Write notes about the weather."
CONFIG = """
model = "{model}"
model_provider = "quire"

[model_providers.quire]
name = "Quire"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
stream_max_retries = 20

[mcp_servers.weather]
command = "{python}"
args = ["{server}"]
"""
PATCH = '*** Begin Patch\n*** Add File: notes.txt\n+It is "warm" \\ sunny.\n*** End Patch'
TURN = [
    call("apply_patch", {"input": PATCH}),
    call("tool_search", {"query": "weather forecast"}),
    call("mcp__weather__forecast", {"city": "Ulm"}),
    call("exec_command", {"cmd": "cat notes.txt"}),
    "The notes are written.",
]
RESULTS = ["notes.txt", "forecast", "sunny in Ulm", 'It is "warm" \\ sunny.']  # in the prompt of the next request

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not CLAUDE.exists(), reason=f"{CLAUDE} does not exist; run scripts/install_clients .venv/bin"),
]


class PlayedModel(FakeScheduler):
    """Answers the requests of a turn in order. An answer is sent again if its request comes again."""

    def __init__(self, answers: list[str]) -> None:
        bundle = make_bundle(bundle_files(make_tokenizer(), {"chat_template": TEMPLATES["hermes"]}))
        facts = {"max_model_len": 400_000, "max_num_blocks": 50_000, "max_num_seqs": 256, "model": MODEL}
        super().__init__(make_info(bundle, **facts), bundle)
        self.answers = answers
        self.pauses_at = -1  # the answer of which only a part is sent
        self.paused = asyncio.Event()
        self.on_submit = self._answer

    def _answer(self, submit: Any) -> None:
        turn = prompt_of(submit).count("<tool_response>")
        ids = encode(self.answers[turn])
        if turn == self.pauses_at:
            self.pauses_at = -1
            self.send(submit.handle, ids[: len(ids) // 2])
            self.paused.set()
            return
        self.finish(submit.handle, EOS, ids=[*ids, 1])


@asynccontextmanager
async def serving(folder: Path, answers: list[str]) -> AsyncIterator[tuple[PlayedModel, Service, str]]:
    scheduler = PlayedModel(answers)
    await scheduler.start()
    address = f"127.0.0.1:{free_port()}"
    with Stack(folder) as stack:
        started: Any = scheduler  # has an address, like a service
        gateway = stack.start_gateway(started, flags=("--http-listen", address))
        await asyncio.to_thread(gateway.wait_ready)
        try:
            yield scheduler, gateway, f"http://{address}"
        finally:
            await scheduler.stop()


async def start_codex(folder: Path, url: str) -> asyncio.subprocess.Process:
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(CONFIG.format(model=MODEL, url=url, python=sys.executable, server=MCP_SERVER))
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json")
    environment = {**os.environ, "CODEX_HOME": str(home), "HOME": str(home), "OPENAI_API_KEY": "unused"}
    return await asyncio.create_subprocess_exec(
        CODEX,
        *("exec", *flags, TASK),
        cwd=work,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


@pytest.mark.parametrize("kills", [False, True])
async def test_a_turn_with_a_patch_an_mcp_tool_and_a_command(tmp_path: Path, kills: bool) -> None:
    """With `kills`, the gateway is killed while it streams the patch, and started again."""
    async with serving(tmp_path, TURN) as (scheduler, gateway, url):
        scheduler.pauses_at = 0 if kills else -1
        codex = await start_codex(tmp_path, url)
        if kills:
            await scheduler.paused.wait()
            await asyncio.to_thread(gateway.kill)
            gateway.start()
        output, _ = await asyncio.wait_for(codex.communicate(), 300)
        assert codex.returncode == 0, output.decode()
        assert (tmp_path / "work/notes.txt").read_text() == 'It is "warm" \\ sunny.\n', output.decode()
        events = [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]
        said = [e["item"]["text"] for e in events if e.get("item", {}).get("type") == "agent_message"]
        assert said == ["The notes are written."]
        prompts = [prompt_of(submit) for submit in scheduler.submits]
        assert len(prompts) == len(TURN) + kills
        for result, prompt in zip(RESULTS, prompts[1 + kills :], strict=True):
            assert result in prompt.rpartition("<tool_response>")[2], output.decode()


async def test_claude_code_goes_through_a_turn_with_a_file_an_mcp_tool_and_a_command(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    turn = [
        call("Write", {"file_path": str(work / "notes.txt"), "content": "It is warm."}),
        call("mcp__weather__forecast", {"city": "Ulm"}),
        call("Bash", {"command": "cat notes.txt", "description": "Show the notes"}),
        "The notes are written.",
    ]
    async with serving(tmp_path, turn) as (scheduler, _, url):
        servers = {"mcpServers": {"weather": {"command": sys.executable, "args": [str(MCP_SERVER)]}}}
        own = {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "unused",
            "ANTHROPIC_MODEL": MODEL,
            "HOME": str(tmp_path),
        }
        claude = await asyncio.create_subprocess_exec(
            CLAUDE,
            *("-p", TASK, "--mcp-config", json.dumps(servers)),
            *("--allowedTools", "Write,Bash,mcp__weather__forecast"),
            cwd=work,
            env={**os.environ, **own, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(claude.communicate(), 300)
        assert (claude.returncode, output.decode().strip().splitlines()[-1]) == (0, turn[-1])
        results = [prompt_of(submit).rpartition("<tool_response>")[2] for submit in scheduler.submits]
        assert (work / "notes.txt").read_text() == "It is warm."
        assert any("sunny in Ulm" in result for result in results)
        assert "It is warm." in results[-1]
