"""Files and batches without services: parts, checks, limits of an owner, retries, frozen gateways, expiry."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.batches import runner as runners
from gateway_svc.batches.batches import OPEN, Batches, BatchLimits, BatchStore, sweep
from gateway_svc.batches.folder_shelf import FolderShelf
from gateway_svc.batches.lines import (
    BATCH,
    FILE,
    LINE,
    MAX_LINE_BYTES,
    PART_LINES,
    Checker,
    Reply,
    Splitter,
    lines_of,
    request_of,
)
from gateway_svc.batches.runner import BatchRunner
from gateway_svc.callers.caller import Caller, current_caller
from gateway_svc.records.cipher import AesCipher
from svc_common.errors import InvalidRequestError, NotFoundError, OverloadedError
from tests.unit.gateway.fakes import until

URL = "/v1/completions"
LIMITS = BatchLimits(max_lines=200, max_bytes=10_000, max_files=3, ttl_s=3600.0)


def line(name: str, **body: Any) -> bytes:
    return json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": body}).encode()


@pytest.fixture
async def batches(tmp_path: Path) -> AsyncIterator[Batches]:
    cipher = AesCipher([b"k" * 32])
    made = Batches(BatchStore(FolderShelf(tmp_path), cipher), LIMITS)
    yield made
    await made.close()


async def upload(batches: Batches, data: bytes) -> str:
    async def parts() -> AsyncIterator[bytes]:
        splitter = Splitter()
        for part in (*splitter.feed(data), *splitter.end()):
            yield part

    about = {"filename": "x", "purpose": BATCH}
    return str((await batches.upload(parts(), lambda: about))["id"])


@given(st.lists(st.integers(0, 40)), st.integers(1, 50), st.booleans())
def test_parts_are_the_file_in_whole_lines(sizes: list[int], step: int, is_ended: bool) -> None:
    data = b"\n".join(b"x" * size for size in sizes) + b"\n" * is_ended
    splitter, parts = Splitter(), list[bytes]()
    for start in range(0, len(data), step):
        parts += splitter.feed(data[start : start + step])
    parts += splitter.end()
    assert b"".join(parts) == data
    assert all(part.endswith(b"\n") for part in parts[:-1])
    assert [one for part in parts for one in lines_of(part)] == lines_of(data)
    assert max((part.count(b"\n") for part in parts), default=0) <= PART_LINES


def test_a_long_line_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_LINE_BYTES} bytes"):
        list(Splitter().feed(b"x" * (MAX_LINE_BYTES + 1)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{}", "missing required field"),
        (b"[]", "Expected `object`"),
        (line(""), "custom_id has 0 characters"),
        (line("a").replace(b"POST", b"GET"), "must be POST /v1/completions"),
        (line("a").replace(b"{}", b"[]"), "not a request"),
        (line("a", stream=True), "body.stream must be false"),
        (line("a", background=1), "body.background must be false"),
        (line("a") + b"\n" + line("a"), "custom_id is already in line 1"),
        (b"\n", "the file has 0 requests"),
        (b"\n".join(line(str(i)) for i in range(201)), "the file has 201 requests"),
    ],
)
def test_problems_of_an_input(data: bytes, message: str) -> None:
    checker = Checker(URL, LIMITS.max_lines)
    checker.check(data)
    checker.end()
    (problem,) = checker.problems
    assert message in problem["message"]


@pytest.mark.parametrize("body", [{}, {"priority": -5, "seed": 3, "prompt": "a"}, {"prompt": "}"}])
def test_a_line_has_the_lowest_priority_and_its_own_seed(body: dict[str, Any]) -> None:
    first, again, other = (
        json.loads(request_of(LINE.decode(line(name, **body)), "batch_1")) for name in ("a", "a", "b")
    )
    assert first == again
    assert first["priority"] == 1000
    assert (first["seed"] == 3) if "seed" in body else (first["seed"] != other["seed"])


async def test_limits_of_an_owner(batches: Batches) -> None:
    current_caller.set(Caller("a"))
    first = await upload(batches, b"x" * 6000)
    with pytest.raises(InvalidRequestError, match="--batch-max-bytes"):
        await upload(batches, b"x" * 6000)
    with pytest.raises(InvalidRequestError, match="--batch-max-lines"):
        await upload(batches, b"\n" * PART_LINES * 201)
    assert [doc["id"] for doc in await batches.all(FILE)] == [first]
    for _ in range(2):
        await upload(batches, b"x")
    with pytest.raises(OverloadedError, match="--batch-max-files"):
        await upload(batches, b"x")
    current_caller.set(Caller("b"))
    assert await batches.all(FILE) == []
    with pytest.raises(NotFoundError):
        await batches.find(FILE, first)
    await upload(batches, b"x" * 6000)


async def test_calls_with_one_key_make_one_batch(batches: Batches) -> None:
    current_caller.set(Caller("a"))
    files = [await upload(batches, line("x") + b"\n") for _ in range(2)]
    made = [await batches.create(URL, files[0], "1h", {}, key="k") for _ in range(4)]  # more than the limit of batches
    assert len({doc["id"] for doc in made}) == len(await batches.all(BATCH)) == 1
    with pytest.raises(InvalidRequestError, match=f"another batch, {made[0]['id']}"):
        await batches.create(URL, files[1], "1h", {}, key="k")
    assert (await batches.create(URL, files[1], "1h", {}, key="other"))["id"] != made[0]["id"]
    current_caller.set(Caller("b"))
    own = await upload(batches, line("x") + b"\n")
    await batches.create(URL, own, "1h", {}, key="k")
    assert len(await batches.all(BATCH)) == 1


class Endpoint:
    """Answers lines. `again`: how often each of them is refused before."""

    def __init__(self, again: int = 0) -> None:
        self.again = again
        self.calls: dict[str, int] = {}
        self.owners = set[str]()
        self.gate = asyncio.Event()
        self.gate.set()

    async def send(self, url: str, body: bytes) -> Reply:
        prompt = json.loads(body)["prompt"]
        self.owners.add(current_caller.get().counted_as)
        self.calls[prompt] = number = self.calls.get(prompt, 0) + 1
        await self.gate.wait()
        if number <= self.again:
            return Reply(429, "req", b"{}", 0.001)
        return Reply(200, "req", json.dumps({"echo": prompt}).encode())


async def ended(batches: Batches, batch_id: str) -> dict[str, Any]:
    for _ in range(3000):
        if (doc := await batches.find(BATCH, batch_id))["status"] not in OPEN:
            return doc
        await asyncio.sleep(0.01)
    raise TimeoutError(doc)


async def results(batches: Batches, doc: dict[str, Any]) -> list[str]:
    content = b"".join([data async for data in batches.content(doc["output"], doc["errors"])])
    return sorted(json.loads(one)["custom_id"] for one in content.splitlines())


async def test_a_frozen_gateway_repeats_nothing(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first gateway never answers; the second one takes its chunks when their leases have ended."""
    monkeypatch.setattr(runners, "LEASE_S", 600.0)  # the first one does not renew its leases
    current_caller.set(Caller("a"))
    names = [str(i) for i in range(80)]
    file_id = await upload(batches, b"\n".join(line(name, prompt=name) for name in names))
    frozen, healthy = Endpoint(), Endpoint(again=1)
    frozen.gate.clear()
    first, second = (BatchRunner(batches, endpoint.send, len(names)) for endpoint in (frozen, healthy))
    first.start()
    doc = await batches.create(URL, file_id, "1h", {})
    await until(lambda: len(frozen.calls) == len(names))
    chunks = [(f"a/{doc['id']}", chunk) for chunk in range(3)]
    await batches.store.shelf.keep(chunks, 0)  # the leases end
    second.start()
    await until(lambda: len(healthy.calls) == len(names))
    frozen.gate.set()
    doc = await ended(batches, doc["id"])
    for runner in (first, second):
        await runner.close()
    assert (doc["status"], doc["counts"]) == ("completed", {"succeeded": 80})
    assert await results(batches, doc) == sorted(names)
    assert frozen.owners == healthy.owners == {"a/batch"}


async def test_a_gateway_that_leaves_gives_its_lines_back(batches: Batches) -> None:
    current_caller.set(Caller("a"))
    file_id = await upload(batches, line("0", prompt="0"))
    stuck, endpoint = Endpoint(), Endpoint()
    stuck.gate.clear()
    leaving = BatchRunner(batches, stuck.send, 1)
    leaving.start()
    doc = await batches.create(URL, file_id, "1h", {})
    await until(lambda: bool(stuck.calls))
    await leaving.close()
    other = BatchRunner(batches, endpoint.send, 1)
    began = time.monotonic()
    other.start()
    assert (await ended(batches, doc["id"]))["counts"] == {"succeeded": 1}
    assert time.monotonic() - began < 9.0  # the lease would end later
    await other.close()


async def test_what_has_expired_is_deleted(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    current_caller.set(Caller("a"))
    used, unused = await upload(batches, line("0", prompt="0")), await upload(batches, b"x")
    doc = await batches.create(URL, used, "1h", {})
    later = time.time() + 2 * 3600
    monkeypatch.setattr(time, "time", lambda: later)
    await sweep(batches.store)
    assert [one["id"] for one in await batches.all(FILE)] == [used] != [unused]
    await batches.store.shelf.close_batch(f"a/{doc['id']}")
    later += 3600
    await sweep(batches.store)
    assert await batches.all(FILE) == await batches.all(BATCH) == []
