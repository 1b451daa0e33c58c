"""Replay of agent runs with real services: equal after kills and on another CPU path; each planted change is named."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch
from quire_cli import main
from quire_client import AsyncClient, Message
from quire_client.demo import demo_model_dir
from safetensors.torch import load_file, save_file

from tests.chat_templates import HERMES
from tests.processes.ports import free_port
from tests.processes.stack import ROOT, Service, Stack, is_ready
from tests.processes.test_chat_tools import MODEL, QUESTION, TOOLS, WEATHER, WORKER

FLAGS = ("--record-memory", "16M", "--reasoning-parser", f"{MODEL}=none")
COMPILE = "from worker_svc.engine.kernels.build import load_kernels; load_kernels()"  # no deadline of a start covers it
PATHS = "avx512", "avx2"  # other kernels than the fastest ones; in float32 all give the same bits
OPTIONS: dict[str, Any] = {"temperature": 1.0, "tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 120}


@dataclass
class Running:
    """A stack with tools in its template. `scheduler`, `worker` and `gateway` may be killed."""

    stack: Stack
    scheduler: Service
    worker: Service
    gateway: Service
    template: Path
    url: str

    async def restart(self, client: AsyncClient, *services: Service) -> None:
        for service in services:
            service.kill()
            service.wait()
        for service in services:
            service.start()
        self.gateway.wait_ready()
        await self.stack.until(client, lambda schedulers: is_ready(schedulers, self.worker))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("replay")
    template = folder / "tools.jinja"
    template.write_text(HERMES)
    model = shutil.copytree(demo_model_dir(), folder / "model")
    address = f"127.0.0.1:{free_port()}"
    with Stack(folder) as stack:
        scheduler = stack.start_scheduler()
        worker = stack.start_worker(scheduler, model, *WORKER)
        flags = (*FLAGS, "--chat-template", f"default={template}", "--http-listen", address)
        gateway = stack.start_gateway(scheduler, flags=flags)
        yield Running(stack, scheduler, worker, gateway, template, f"http://{address}")


async def agent_run(client: AsyncClient, rng: random.Random, log: Path, sky: str = "sun") -> None:
    """An agent with three turns: a forced call, one with other options, and an answer."""
    seed = rng.getrandbits(63)
    recorded = client.recorded(log).with_options(**OPTIONS, seed=seed, request_id=f"agent-{seed}")
    if rng.random() < 0.3:  # the server keeps the conversation
        session = recorded.session()
        first = await session.chat(QUESTION, tool_choice="required")
        results = [Message("tool", f"{sky} {rng.random()}", tool_call_id=call.id) for call in first.tool_calls]
        await session.chat(results, tool_choice="none", max_tokens=30)
        await session.chat("And tomorrow?", tool_choice="none", max_tokens=30)
        return
    first = await recorded.chat(QUESTION, tool_choice="required")
    messages = [*QUESTION, first.samples[0].as_message()]
    messages += [Message("tool", f"{sky} {rng.random()}", tool_call_id=call.id) for call in first.tool_calls]
    extra: dict[str, Any] = rng.choice(({"n": 2}, {"json_schema": '{"type": "boolean"}'}, {"presence_penalty": 1.0}))
    async with recorded.stream_chat(messages, tool_choice="none", **extra | {"max_tokens": 40}) as stream:
        second = await stream.result()
    messages += [second.samples[-1].as_message(), Message("user", "Thanks. And tomorrow?")]
    await recorded.chat(messages, tool_choice="none", max_tokens=30)


async def replayed(running: Running, *words: object) -> tuple[int, str]:
    """Exit code and output of `quire replay`."""
    command = ["replay", *map(str, words), "--target", running.gateway.address]
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda text, **_: printed.append(text))
        code = await asyncio.to_thread(main, command)
    return code, "\n".join(printed)


def other_path() -> str:
    flags = Path("/proc/cpuinfo").read_text()
    return next((path for path in PATHS if path.replace("avx512", "avx512f") in flags), "generic")


@pytest.mark.timeout(900)  # may compile kernels
@pytest.mark.parametrize("num_runs", [20, pytest.param(100, marks=pytest.mark.deep)])
async def test_runs_are_equal_after_kills_and_on_another_cpu_path(
    running: Running, tmp_path: Path, num_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, rng = tmp_path / "run.jsonl", random.Random(num_runs)
    async with await running.stack.connect(running.gateway) as client:
        runs = [asyncio.create_task(agent_run(client, random.Random(i), log)) for i in range(num_runs)]
        for victim in (running.worker, running.scheduler):
            await asyncio.sleep(rng.random())
            await running.restart(client, victim)
        await asyncio.gather(*runs)
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        assert len(entries) == 3 * num_runs
        assert sum(bool(entry["tool_results"]) for entry in entries) >= num_runs
        await running.restart(client, running.gateway)
        assert await replayed(running, log) == (0, f"{3 * num_runs} turns are equal")
        with monkeypatch.context() as patch:
            patch.setenv("QUIRE_CPU_PATH", other_path())
            await asyncio.to_thread(subprocess.run, [sys.executable, "-c", COMPILE], check=True, cwd=ROOT)
            await running.restart(client, running.worker)
            code, printed = await replayed(running, log)
        assert code == 0, printed
        assert printed.startswith(f"{3 * num_runs} turns are equal; numerics: ")
        await running.restart(client, running.worker)


async def test_each_planted_change_is_named(running: Running, tmp_path: Path) -> None:
    log, edited = tmp_path / "run.jsonl", tmp_path / "edited.jsonl"
    async with await running.stack.connect(running.gateway) as client:
        await agent_run(client, random.Random(8), log)
        lines = log.read_text().splitlines()
        call_id = json.loads(lines[1])["tool_results"][0][0]
        edited.write_text(log.read_text().replace("sun 0.", "rain 0."))
        await agent_run(client, random.Random(8), again := tmp_path / "again.jsonl")
        assert await replayed(running, log, "--against", again) == (0, "3 turns are equal")
        await agent_run(client, random.Random(8), other := tmp_path / "other.jsonl", "rain")
        for words in ((edited,), (log, "--against", other)):
            code, printed = await replayed(running, *words)
            assert (code, printed) == (1, f"turn 2 of 3 differs: tool result of call {call_id}")
        edited.write_text("\n".join([lines[0], lines[1].replace('"temperature": 1.0', '"temperature": 0.5'), lines[2]]))
        code, printed = await replayed(running, edited)
        assert (code, printed.partition("; ")[0]) == (1, "turn 2 of 3 differs: samples[0].text at character 0"), printed
        code, printed = await replayed(running, log, "--against", edited, "--json")
        assert json.loads(printed)["differs"] == "request.sampling.temperature"
        edited.write_text(lines[0])
        assert await replayed(running, log, "--against", edited) == (1, "turn 2 of 3 differs: the turn is missing")

        running.template.write_text(HERMES.replace("Tools:", "Your tools:"))
        await running.restart(client, running.gateway)
        code, printed = await replayed(running, log)
        assert (code, printed.partition(": ")[2][:18]) == (1, "prompt; template: ")
        running.template.write_text(HERMES)
        await running.restart(client, running.gateway)

        weights = running.stack.folder / "model" / "model.safetensors"
        tensors, kept = load_file(weights), weights.read_bytes()
        name = next(name for name in tensors if "layers.1" in name and "down_proj" in name)
        tensors[name][:, :8] += torch.tensor(2.0, dtype=tensors[name].dtype)
        save_file(tensors, weights, {"format": "pt"})
        await running.restart(client, running.scheduler, running.worker)
        code, printed = await replayed(running, log)
        assert (code, "; weights: " in printed, "template: " in printed) == (1, True, False), printed
        weights.write_bytes(kept)
        await running.restart(client, running.scheduler, running.worker)
        assert (await replayed(running, log))[0] == 0


async def test_a_log_that_cannot_be_computed(running: Running, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    async with await running.stack.connect(running.gateway) as client:
        session = client.session(max_tokens=4)
        await session.chat("Hello")
        recorded = client.recorded(log).session(session.id)
        await recorded.chat("Hello")
        entry = json.loads(log.read_text())
        for text, reason in (
            (log.read_text(), "it continues session 'turn-"),
            ("", "there is no turn in it"),
            ("{", "run.jsonl:1: not a JSON object"),
            ('{"quire_replay": 2}', "not an entry of a replay log of format 1"),
            ('{"quire_replay": 1}', "model is missing or has a wrong type"),
            (json.dumps(entry | {"request": {"request_id": "a", "prompt": 3}}), "the request cannot be read"),
            (json.dumps(entry | {"request": {"request_id": "a", "sampling": {"temperature": -1}}}), "turn 1 cannot"),
        ):
            log.write_text(text)
            code, printed = await replayed(running, log)
            assert (code, reason in printed) == (2, True), printed


async def test_entries_of_http_answers(running: Running, tmp_path: Path) -> None:
    """The three dialects, whole and streamed, with calls, several prompts and a stored response."""
    entries: list[Any] = []
    headers = {"x-quire-replay": "1"}
    options: dict[str, Any] = {"model": MODEL, "extra_headers": headers, "temperature": 1.0}
    url, flat = f"{running.url}/v1", {"type": "function", **WEATHER["function"]}
    async with (
        await running.stack.connect(running.gateway),
        openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as http,
        anthropic.AsyncAnthropic(base_url=running.url, api_key="unused", max_retries=0) as messages,
    ):
        chat: dict[str, Any] = options | {"messages": QUESTION, "tools": TOOLS, "tool_choice": "required"}
        whole: Any = await http.chat.completions.create(**chat, n=2, max_tokens=90)
        stream: Any = await http.chat.completions.create(**chat, stream=True, max_tokens=90)
        chunks = [chunk async for chunk in stream]
        several: Any = await http.completions.create(**options, prompt=["def a", "def b"], max_tokens=8)
        response: Any = await http.responses.create(**options, input="Hello", tools=[flat], tool_choice="required")
        following: Any = None
        async for event in await http.responses.create(
            **options, input="Again", previous_response_id=response.id, stream=True, max_output_tokens=20
        ):
            following = getattr(event, "response", following)
        asked: dict[str, Any] = {"extra_headers": headers, "model": MODEL, "messages": QUESTION, "max_tokens": 20}
        message: Any = await messages.messages.create(**asked)
        last: Any = [event async for event in await messages.messages.create(**asked, stream=True)][-1]
        plain: Any = await http.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2)
        assert "quire_replay" not in plain.model_dump()
        stored: Any = await http.responses.retrieve(response.id)
        assert "quire_replay" not in stored.model_dump()
        for answer, count in ((whole, 1), (chunks[-1], 1), (several, 2), (response, 1), (following, 1), (message, 1)):
            assert len(answer.quire_replay) == count
            entries += answer.quire_replay
        entries += last.quire_replay
        calls = [call.model_dump() for call in whole.choices[1].message.tool_calls]
        assert entries[0]["samples"][1]["tool_calls"] == [{"id": c["id"], **c["function"]} for c in calls]
        with pytest.raises(openai.BadRequestError, match="x-quire-replay is set, but the request has"):
            await http.completions.create(**options, prompt="x" * (2 << 20))
    log = tmp_path / "http.jsonl"
    log.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    assert await replayed(running, log) == (0, f"{len(entries)} turns are equal")
