"""Tool calls run exactly once while gateway, scheduler, worker and client are killed at random."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path

import openai
import pytest
from quire_client.demo import demo_model_dir

from tests.chat_templates import HERMES
from tests.processes.agent import lines_of
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack
from tests.processes.test_chat_tools import MODEL, QUESTION, WEATHER

SIM = ("--executor", "sim", "--sim-step-ms", "1", "--num-blocks", "4096", "--model-name", MODEL)
DEADLINE_S = 120.0  # without a run that ends
MAX_BETWEEN_KILLS = 40
POLL_S = 0.1
NUM_CHECKED = 40


class Running:
    """Two gateways, a scheduler and two simulated workers."""

    def __init__(self, stack: Stack) -> None:
        template = stack.folder / "tools.jinja"
        template.write_text(HERMES)
        flags = ("--chat-template", f"default={template}", "--reasoning-parser", f"{MODEL}=none")
        self.url = f"127.0.0.1:{free_port()}"
        self.scheduler = stack.start_scheduler()
        self.workers = [stack.start_worker(self.scheduler, demo_model_dir(), *SIM) for _ in range(2)]
        more = ("--http-listen", self.url)
        self.gateways = [stack.start_gateway(self.scheduler, flags=(*flags, *more[: 2 - 2 * i])) for i in range(2)]
        self.services = [self.scheduler, *self.workers, *self.gateways]

    def agent(self, folder: Path, num_runs: int) -> Service:
        targets = [gateway.address for gateway in self.gateways]
        command = [sys.executable, "-m", "tests.processes.agent", str(folder), str(num_runs), *targets]
        return Service("agent", command, "", folder / "agent.log")


async def run_to_end(agent: Service, folder: Path, victims: list[Service], rng: random.Random) -> Counter[str]:
    """Let the agent end its runs. After each 1 to 40 of them a process is killed, at once or a moment later. Returns
    the number of kills by name.
    """
    kills, next_kill, deadline = Counter[str](), rng.randint(1, MAX_BETWEEN_KILLS), time.monotonic() + DEADLINE_S
    agent.start()
    while agent.is_running:
        await asyncio.sleep(POLL_S * rng.random())
        num_done = len(lines_of(folder / "done"))
        if not victims or num_done < next_kill:
            assert time.monotonic() < deadline, agent.log()
            continue
        next_kill, deadline = num_done + rng.randint(1, MAX_BETWEEN_KILLS), time.monotonic() + DEADLINE_S
        victim = rng.choice(victims)
        kills[victim.name] += 1
        victim.kill()
        victim.wait()
        victim.start()
    assert agent.exit_code == 0, agent.log()
    return kills


@pytest.mark.parametrize("num_runs", [400, pytest.param(10_000, marks=[pytest.mark.deep, pytest.mark.timeout(3600)])])
async def test_each_call_is_executed_once(tmp_path: Path, num_runs: int) -> None:
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    for folder in (disturbed, undisturbed):
        folder.mkdir()
    rng = random.Random(num_runs)
    with Stack(tmp_path) as stack:
        running = Running(stack)
        async with await stack.connect(running.gateways[0], workers=2):
            running.gateways[1].wait_ready()
            agent = running.agent(disturbed, num_runs)
            kills = await run_to_end(agent, disturbed, [*running.services, agent, agent], rng)
            executed, done = lines_of(disturbed / "executed"), lines_of(disturbed / "done")
            assert {line.split()[0] for line in done} == {f"run-{i}" for i in range(num_runs)}
            assert len(executed) == len(set(executed)) == num_runs, "an execution per run, and none twice"
            assert kills["agent"] > 0
            await run_to_end(running.agent(undisturbed, NUM_CHECKED), undisturbed, [], rng)
            again = dict(line.split(" ", 1) for line in lines_of(undisturbed / "done"))
            assert again.items() <= dict(line.split(" ", 1) for line in done).items()
    print(f"{num_runs} runs, kills: {dict(kills)}")


async def test_a_retry_over_http_has_the_same_calls(tmp_path: Path) -> None:
    """With the same Idempotency-Key the ids of the calls are equal; another key or another prompt has other ids."""
    with Stack(tmp_path) as stack:
        running = Running(stack)
        async with (
            await stack.connect(running.gateways[0], workers=2),
            openai.AsyncOpenAI(base_url=f"http://{running.url}/v1", api_key="unused", max_retries=0) as http,
        ):

            async def calls(key: str, question: str = "Where?", path: str = "chat") -> list[tuple[str, str]]:
                headers = {"idempotency-key": key}
                if path == "chat":
                    asked = [*QUESTION, {"role": "user", "content": question}]
                    answer = await http.chat.completions.create(
                        model=MODEL, messages=asked, tools=[WEATHER], tool_choice="required", extra_headers=headers
                    )
                    found = answer.choices[0].message.tool_calls or []
                    return [(call.id, call.function.arguments) for call in found]  # type: ignore[union-attr]
                flat = {"type": "function", **WEATHER["function"]}
                response = await http.responses.create(
                    model=MODEL, input=question, tools=[flat], tool_choice="required", extra_headers=headers
                )
                return [(item.call_id, item.arguments) for item in response.output if item.type == "function_call"]

            for path in ("chat", "responses"):
                first = await calls("a", path=path)
                assert first
                assert await calls("a", path=path) == first
                ids = {call_id for call_id, _ in first}
                for key, question in (("b", "Where?"), ("a", "When?")):
                    assert ids.isdisjoint({call_id for call_id, _ in await calls(key, question, path)})
