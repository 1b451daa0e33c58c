"""The state that the console reads, and the hosts at which it answers without keys."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2 as pb

from gateway_svc.http.console import app
from gateway_svc.http.console.app import ConsoleState, read_assets
from gateway_svc.schedulers.routes import ModelRoutes

ERRORS = {("Generate", "INVALID_ARGUMENT"): 7, ("GetModel", "NOT_FOUND"): 1}


class Client:
    """A scheduler with one pool."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.asked: list[str] = []
        self.address = "s:1"

    @property
    def stub(self) -> Client:
        return self

    async def GetPools(self, request: scheduler_pb2.GetPoolsRequest, timeout: float) -> scheduler_pb2.GetPoolsResponse:
        self.num_calls += 1
        self.asked = sorted(request.worker_ids)
        await asyncio.sleep(0)
        pool = scheduler_pb2.PoolState(worker_id="w", num_blocks=3, blocks_per_cell=1, states=bytes([0, 2, 3]))
        return scheduler_pb2.GetPoolsResponse(pools=[pool])

    async def GetHistory(
        self, request: scheduler_pb2.GetHistoryRequest, timeout: float
    ) -> scheduler_pb2.GetHistoryResponse:
        self.num_calls += 1
        await asyncio.sleep(0)
        if request.request_id:
            return scheduler_pb2.GetHistoryResponse(
                request=scheduler_pb2.RequestTimeline(request_id=request.request_id)
            )
        return scheduler_pb2.GetHistoryResponse(events=[scheduler_pb2.SchedulerEvent(at=5.0, text="worker w joined")])


async def status() -> pb.GetStatusResponse:
    response = pb.GetStatusResponse(open_streams=2, pinned_sessions=3)
    response.schedulers.add(address="s:1", output_tokens=1 << 40)
    response.pins_by_owner.add(owner="team-a", num_sessions=3)
    return response


def make_state(client: Client) -> ConsoleState:
    directory: Any = SimpleNamespace(clients=[client], routes=ModelRoutes())
    return ConsoleState(status, directory, ERRORS)


async def test_many_pages_cause_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: 0.0))
    client = Client()
    state = make_state(client)
    await asyncio.gather(*(state.newest() for _ in range(10)))
    assert client.num_calls == 1
    now = app.MIN_INTERVAL_S
    await state.newest()
    assert client.num_calls == 2
    await asyncio.gather(*(state.newest(["b", "a"]) for _ in range(10)), state.newest(["a", "b"]))
    assert (client.num_calls, client.asked) == (3, ["a", "b"])
    found = await asyncio.gather(*(state.history() for _ in range(10)))
    assert client.num_calls == 4
    (scheduler,) = json.loads(found[0])
    assert (scheduler["address"], scheduler["events"][0]["text"]) == ("s:1", "worker w joined")
    assert json.loads(await state.history("a"))[0]["request"]["request_id"] == "a"


def test_the_page_has_no_inline_code_and_no_other_hosts() -> None:
    assets = {name: data.decode() for name, data in read_assets().items()}
    assert {"index.html", "style.css", "app.js", "icon.svg"} <= set(assets)
    page = assets["index.html"]
    assert "<style" not in page
    assert " style=" not in page
    assert not re.search(r"\son\w+=", page)
    for name, text in assets.items():
        assert "//" not in text.replace("// ", "").replace("http://www.w3.org/2000/svg", ""), name
        assert "innerHTML" not in text, f"{name}: text of models must not become elements"
        assert "eval(" not in text, name
