"""Files and batches over HTTP: stock clients, several gateways, kills, isolation of owners, ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from quire_client.demo import demo_model_dir

from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack

SIM = ("--executor", "sim", "--sim-step-ms", "2", "--model-name", "demo", "--num-blocks", "4000")
DEADLINE_S = 60.0
ENDED = ("completed", "failed", "cancelled", "expired")


class Running:
    """Two gateways that share batches, in Redis or in a folder; owners a and b, each with a key of its name."""

    def __init__(self, stack: Stack, shared: tuple[str, ...], sim: tuple[str, ...] = SIM) -> None:
        self.stack = stack
        self.scheduler = stack.start_scheduler()
        self.worker = stack.start_worker(self.scheduler, demo_model_dir(), *sim)
        keys = stack.folder / "keys"
        keys.mkdir()
        for owner in "ab":
            (keys / owner).write_text(f"key-of-{owner}")
        self.urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        self.gateways = [
            stack.start_gateway(
                self.scheduler,
                flags=("--http-listen", url.removeprefix("http://"), "--api-keys", str(keys), *shared),
            )
            for url in self.urls
        ]
        for service in (self.worker, *self.gateways):
            service.wait_ready()

    def client(self, gateway: int = 0, owner: str = "a") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.urls[gateway]}/v1", api_key=f"key-of-{owner}", max_retries=3)

    def anthropic(self, gateway: int = 0, owner: str = "a") -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.urls[gateway], api_key=f"key-of-{owner}", max_retries=3)


@pytest.fixture(scope="module", params=["redis", "folder"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("batches")
    with RedisServer(folder) as redis, Stack(folder) as stack:
        shared = ("--redis", redis.url) if request.param == "redis" else ("--batch-dir", str(folder / "shared"))
        yield Running(stack, shared)


def line(number: int, max_tokens: int = 4, **body: Any) -> dict[str, Any]:
    body = {"prompt": f"line {number}", "max_tokens": max_tokens, "ignore_eos": True, **body}
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def upload(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    data = "".join(json.dumps(one) + "\n" for one in lines).encode()
    return client.files.create(file=("lines.jsonl", data), purpose="batch").id


def start(client: openai.OpenAI, lines: list[dict[str, Any]], **options: Any) -> Any:
    given = {"completion_window": "24h", "endpoint": "/v1/completions", **options}
    return client.batches.create(input_file_id=upload(client, lines), **given)


def until(client: openai.OpenAI, batch_id: str, holds: Callable[[Any], bool], deadline_s: float = DEADLINE_S) -> Any:
    deadline = time.monotonic() + deadline_s
    while not holds(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def is_over(batch: Any) -> bool:
    return batch.status in ENDED


def results_of(client: openai.OpenAI, batch: Any) -> list[dict[str, Any]]:
    ids = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id]
    texts = [client.files.content(file_id).text for file_id in ids]
    return [json.loads(one) for text in texts for one in text.splitlines()]


def test_openais_client_runs_a_batch(running: Running) -> None:
    client, other = running.client(0), running.client(1)
    lines = [line(number) for number in range(100)] + [line(100, temperature=99.0)]
    batch = start(client, lines, metadata={"name": "test"})
    assert batch.status == "validating"
    batch = until(other, batch.id, is_over)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 101, 100, 1)
    assert batch.metadata == {"name": "test"}
    found = {one["custom_id"]: one["response"] for one in results_of(other, batch)}
    assert sorted(found) == sorted(one["custom_id"] for one in lines)
    assert found["id-100"]["status_code"] == 400
    assert "temperature" in found["id-100"]["body"]["error"]["message"]
    assert {one["body"]["usage"]["completion_tokens"] for name, one in found.items() if name != "id-100"} == {4}
    output = other.files.retrieve(batch.output_file_id or "")
    assert output.bytes == len(other.files.content(output.id).content)
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    other.files.delete(batch.input_file_id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.input_file_id)


def test_anthropics_client_runs_a_batch(running: Running) -> None:
    client = running.anthropic()
    params: Any = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    requests: Any = [{"custom_id": str(i), "params": params} for i in range(10)]
    requests.append({"custom_id": "bad", "params": {**params, "max_tokens": -1}})
    batch = client.messages.batches.create(requests=requests)
    deadline = time.monotonic() + DEADLINE_S
    while (batch := client.messages.batches.retrieve(batch.id)).processing_status != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (10, 1)
    found = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
    assert sorted(found) == sorted(one["custom_id"] for one in requests)
    assert all(
        one.type == "succeeded" and one.message.usage.output_tokens == 4 for name, one in found.items() if name != "bad"
    )
    assert "max_tokens" in found["bad"].error.error.message
    assert batch.id in [one.id for one in client.messages.batches.list()]
    client.messages.batches.delete(batch.id)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_results_are_read_while_the_batch_runs(running: Running) -> None:
    client = running.client()
    lines = [line(number, max_tokens=8 if number < 32 else 2000) for number in range(40)]
    batch = start(client, lines)
    batch = until(client, batch.id, lambda one: one.request_counts.completed >= 32)
    assert batch.status == "in_progress"
    assert len(client.files.content(batch.output_file_id or "").text.splitlines()) >= 32
    with pytest.raises(openai.BadRequestError, match="belongs to an open batch"):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    batch = until(client, batch.id, is_over)
    assert batch.status == "cancelled"
    found = results_of(client, batch)
    assert sorted(one["custom_id"] for one in found) == sorted(one["custom_id"] for one in lines)
    unanswered = [one["error"]["code"] for one in found if one["response"] is None]
    assert unanswered == ["batch_cancelled"] * len(unanswered) != []


def test_a_batch_expires(running: Running) -> None:
    client = running.client()
    batch = start(client, [line(0), line(1, max_tokens=2000)], completion_window="2s")
    batch = until(client, batch.id, is_over)
    assert batch.status == "expired"
    codes = {one["custom_id"]: one["error"] and one["error"]["code"] for one in results_of(client, batch)}
    assert codes == {"id-0": None, "id-1": "batch_expired"}


def test_others_see_nothing(running: Running) -> None:
    client, other = running.client(), running.client(owner="b")
    batch = start(client, [line(0)])
    calls: list[Callable[[], Any]] = [
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.files.retrieve(batch.input_file_id),
        lambda: other.files.content(batch.input_file_id),
        lambda: other.files.delete(batch.input_file_id),
        lambda: running.anthropic(owner="b").messages.batches.retrieve(batch.id),
    ]
    for call in calls:
        with pytest.raises((openai.NotFoundError, anthropic.NotFoundError)):
            call()
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")
    assert [*other.files.list(), *other.batches.list()] == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(0), line(0)], "already in line 1"),
        ([line(0, stream=True)], "body.stream must be false"),
        ([{**line(0), "url": "/v1/embeddings"}], "must be POST /v1/completions"),
        ([{"custom_id": "a"}], "not a request"),
        ([], "the file has 0 requests"),
    ],
)
def test_an_invalid_file_fails(running: Running, lines: list[dict[str, Any]], message: str) -> None:
    client = running.client()
    batch = until(client, start(client, lines).id, is_over)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert message in (batch.errors.data or [])[0].message
    assert (batch.output_file_id, batch.request_counts.total) == (None, 0)


@pytest.mark.parametrize("size", [600, pytest.param(10_000, marks=[pytest.mark.deep, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("shelf", ["redis", "folder"])
def test_kills_lose_and_repeat_no_line(tmp_path: Path, size: int, shelf: str) -> None:
    """All gateways are killed twice and the scheduler once, at a quarter, a half and three quarters of the lines."""
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        shared = ("--redis", redis.url) if shelf == "redis" else ("--batch-dir", str(tmp_path / "shared"))
        running = Running(stack, shared)
        client = running.client()
        lines = [line(number, max_tokens=2 + number % 30) for number in range(size)]
        batch = start(client, lines)
        killed = [running.gateways, [running.scheduler], running.gateways]
        for quarter, services in enumerate(killed, 1):
            at = quarter * size // 4
            until(client, batch.id, lambda one, at=at: one.request_counts.completed >= at, 15 * DEADLINE_S)
            kill(services)
        batch = until(client, batch.id, is_over, 15 * DEADLINE_S)
        counts = batch.request_counts
        assert (batch.status, counts.completed, counts.failed) == ("completed", size, 0)
        found = results_of(client, batch)
        assert sorted(one["custom_id"] for one in found) == sorted(one["custom_id"] for one in lines)
        tokens = {one["custom_id"]: one["response"]["body"]["usage"]["completion_tokens"] for one in found}
        assert tokens == {one["custom_id"]: one["body"]["max_tokens"] for one in lines}


def kill(services: list[Service]) -> None:
    for service in services:
        service.kill()
    for service in services:
        service.start()
    for service in services:
        service.wait_ready()
