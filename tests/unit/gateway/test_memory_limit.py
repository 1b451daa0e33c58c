"""Requests are refused while the gateway uses too much memory, and the limit of the container is found."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from svc_common import memory
from svc_common.memory import MemoryLimit, container_limit, resident_bytes
from tests.unit.gateway.fakes import FakeScheduler, TestGateway, refused, rest, until


async def test_requests_above_the_limit_are_refused_while_others_are_open(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "READ_INTERVAL_S", 0.0)
    limit = MemoryLimit(1)
    async with TestGateway([scheduler.address], memory=limit) as gateway:
        await gateway.ready()
        first = gateway.generate()  # the only one, so it is served
        await until(lambda: scheduler.submits)
        error = await refused(gateway.generate())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the limit is 1 (--max-memory-bytes); retry later" in (error.details() or "")
        limit.max_bytes = resident_bytes() + (1 << 30)
        second = gateway.generate()
        await until(lambda: len(scheduler.submits) == 2)
        for submit in scheduler.submits:
            scheduler.finish(submit.handle, ids=[5])
        await rest(first)
        await rest(second)


def test_memory_is_read_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    monkeypatch.setattr(memory, "resident_bytes", lambda: reads.append(1) or 100)
    monkeypatch.setattr(memory, "READ_INTERVAL_S", 60.0)
    limit = MemoryLimit(200)
    assert [limit.exceeded_by() for _ in range(100)] == [None] * 100
    assert len(reads) == 1
    limit.max_bytes = 99
    assert limit.exceeded_by() == 100
    assert MemoryLimit(None).exceeded_by() is None


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "1048576\n"}, 1 << 20),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/a/b\n", {"a/b/memory.max": "500\n", "memory.max": "1000\n"}, 500),
        ("4:memory:/x\n", {"memory/memory.limit_in_bytes": "4096\n"}, 4096),
        ("4:memory:/x\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_the_limit_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], limit: int | None
) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(memory, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    assert container_limit() == limit
    expected = None if limit is None else int(limit * memory.DEFAULT_FRACTION)
    assert MemoryLimit.of_container().max_bytes == expected
