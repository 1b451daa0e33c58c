"""The store of request records, with a real Redis and in memory: runs, leases, limits, expiry, encryption."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from quire.internal.v1 import record_pb2 as pb
from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2
from quire.v1 import types_pb2 as types

from gateway_svc.records import fields as record_fields
from gateway_svc.records import redis_fields
from gateway_svc.records.cipher import Cipher, RecordKeyError, UnreadableValueError, make_cipher
from gateway_svc.records.fields import MemoryFields, RecordLimits, Update
from gateway_svc.records.redis_fields import RedisFields
from gateway_svc.records.store import RecordStore
from svc_common.errors import InvalidRequestError, OverloadedError, RecordsUnavailableError
from svc_common.security import tls
from tests.processes.redis_server import RedisServer

SECRET = "a secret prompt"
REQUEST = inference_pb2.GenerateRequest(request_id="r", prompt={"text": SECRET}, sampling=types.SamplingParams(n=2))
TIMEOUT_S = 30.0
MakeStore = Callable[..., RecordStore]
CONTENT = pb.RequestRecord(request=REQUEST, prompt_token_ids=b"\1\0\0\0", notes=b"notes")


@pytest.fixture
async def make_redis_store(redis_server: RedisServer) -> AsyncIterator[MakeStore]:
    """A function that makes a store in Redis, which is closed at the end."""
    redis_server.flush()
    async with AsyncExitStack() as stores:

        def make(cipher: Cipher | None = None, **options: Any) -> RecordStore:
            store = RecordStore(RedisFields(redis_server.url, **{"timeout_s": TIMEOUT_S} | options), cipher=cipher)
            stores.push_async_callback(store.close)
            return store

        yield make


@pytest.fixture(params=["redis", "memory"])
def make_store(request: pytest.FixtureRequest, make_redis_store: MakeStore) -> MakeStore:
    """A function that makes a store of each kind."""
    if request.param == "redis":
        return make_redis_store
    return lambda **options: RecordStore(MemoryFields(1 << 20, **options))


@pytest.fixture
async def store(make_store: MakeStore) -> RecordStore:
    return make_store()


def column(*ids: int) -> bytes:
    return b"".join(id_.to_bytes(4, "little") for id_ in ids)


def end(num_output: int) -> bytes:
    finish = scheduler_pb2.SampleFinished(reason=types.FINISH_REASON_LENGTH)
    return pb.SampleEnd(finish=finish, num_output=num_output).SerializeToString()


async def outputs(store: RecordStore, record_id: str = "r") -> list[list[int]]:
    record = await store.load(record_id)
    assert record is not None
    return [list(output) for output in record.outputs]


async def test_a_record_has_its_content_and_the_output_without_gaps(store: RecordStore) -> None:
    assert await store.load("r") is None
    await store.create("r", CONTENT, "run")
    record = await store.load("r")
    assert record is not None
    assert (record.content, record.has_run, record.is_finished) == (CONTENT, True, False)
    columns = {(0, 0): column(5, 6), (0, 1): column(6, 7, 8), (0, 9): column(1), (1, 0): column(4)}
    assert await store.write([Update("r", "run", columns)]) == [True]
    assert await outputs(store) == [[5, 6, 7, 8], [4]]


async def test_a_sample_is_finished_when_all_its_output_is_stored(store: RecordStore) -> None:
    await store.create("r", CONTENT, "run")
    await store.write([Update("r", "run", {(0, 0): column(5)}, {0: end(2), 1: end(0)})])
    record = await store.load("r")
    assert record is not None
    assert [known is not None for known in record.ends] == [False, True]
    await store.write([Update("r", "run", {(0, 1): column(6)})])
    record = await store.load("r")
    assert record is not None
    assert record.is_finished


async def test_only_the_last_claiming_run_can_write(store: RecordStore) -> None:
    await store.create("r", CONTENT, "first")
    assert not await store.claim("r", "second", by_force=False)
    assert await store.claim("r", "second", by_force=True)
    answers = await store.write([Update("r", "first", {(0, 0): column(9)}), Update("r", "second", {(0, 0): column(5)})])
    assert answers == [False, True]
    assert await outputs(store) == [[5], []]


async def test_a_record_can_be_claimed_when_its_lease_has_expired(make_store: MakeStore) -> None:
    store = make_store(lease_s=0.2)
    await store.create("r", CONTENT, "first")
    async with asyncio.timeout(30.0):
        while not await store.claim("r", "second", by_force=False):  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.01)
    await store.write([Update("r", "second", releases=True)])
    record = await store.load("r")
    assert record is not None
    assert not record.has_run


async def test_a_deleted_record_is_not_written_again(store: RecordStore) -> None:
    await store.create("r", CONTENT, "run")
    assert await store.delete("r")
    assert not await store.delete("r")
    assert await store.write([Update("r", "run", {(0, 0): column(5)})]) == [False]
    assert not await store.claim("r", "other", by_force=True)
    await store.put_object("r", b"{}")
    assert await store.load("r") is None


async def test_a_new_record_replaces_an_older_one(store: RecordStore) -> None:
    await store.create("r", CONTENT, "run")
    await store.write([Update("r", "run", {(0, 0): column(5)}, {0: end(1)})])
    await store.put_object("r", b"old")
    await store.create("r", CONTENT, "again")
    record = await store.load("r")
    assert record is not None
    assert (record.stored_object, [list(output) for output in record.outputs]) == (b"", [[], []])


async def test_the_first_stored_object_stays(store: RecordStore) -> None:
    await store.create("r", CONTENT, "run")
    assert await store.put_object("r", b"first") == b"first"
    assert await store.put_object("r", b"second") == b"first"
    record = await store.load("r")
    assert record is not None
    assert record.stored_object == b"first"


async def test_each_write_renews_the_time_to_live(make_redis_store: MakeStore, redis_server: RedisServer) -> None:
    store = make_redis_store(ttl_s=1000.0)
    await store.create("r", CONTENT, "run")
    with redis_server.client() as client:
        client.pexpire("quire:record:r", 500_000)
        await store.write([Update("r", "run", {(0, 0): column(5)})])
        assert 500_000 < client.pttl("quire:record:r") <= 1_000_000


async def test_a_record_expires_after_its_last_write(make_store: MakeStore) -> None:
    store = make_store(ttl_s=0.2)
    await store.create("r", CONTENT, "run")
    async with asyncio.timeout(30.0):
        while await store.load("r") is not None:  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.05)


async def test_the_size_of_a_record_is_limited(make_store: MakeStore) -> None:
    store = make_store(max_bytes=200)
    await store.create("r", CONTENT, "run")
    for start in range(0, 100, 10):
        await store.write([Update("r", "run", {(0, start): column(*range(10))}, {0: end(100)})])
    stored = (await outputs(store))[0]
    assert 10 <= len(stored) <= 50
    assert stored == [*range(10)] * (len(stored) // 10)
    large = pb.RequestRecord(notes=bytes(300))
    with pytest.raises(InvalidRequestError, match=r"has 304 bytes; at most 200 .*--max-record-bytes"):
        await store.create("r", large, "run")


def write_keys(path: Path, *keys: bytes) -> Path:
    path.write_text("# a comment\n" + "\n".join(base64.b64encode(key).decode() for key in keys) + "\n")
    return path


def test_keys_of_records_rotate_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "REREAD_S", 0.0)
    old, new = os.urandom(32), os.urandom(32)
    path = write_keys(tmp_path / "keys", old)
    cipher = make_cipher(path)
    before = cipher.seal(b"data", b"place")
    write_keys(path, new, old)
    assert cipher.open(before, b"place") == b"data"
    after = cipher.seal(b"data", b"place")
    path.write_text("not a key")  # a mistake keeps the previous keys
    assert cipher.open(before, b"place") == b"data"
    write_keys(path, new)
    assert cipher.open(after, b"place") == b"data"
    with pytest.raises(UnreadableValueError):
        cipher.open(before, b"place")


async def test_encrypted_records_are_read_only_with_a_key(
    make_redis_store: MakeStore, redis_server: RedisServer, tmp_path: Path
) -> None:
    old, new = os.urandom(32), os.urandom(32)
    before = make_redis_store(cipher=make_cipher(write_keys(tmp_path / "old", old)))
    await before.create("r", CONTENT, "run")
    await before.write([Update("r", "run", {(0, 0): column(5)}, {1: end(0)})])
    await before.put_object("r", SECRET.encode())
    with redis_server.client() as client:
        values = client.hgetall("quire:record:r")
        assert SECRET.encode() not in b"".join(values.values())
        # A value that is moved to another field or record is not accepted.
        client.hset("quire:record:moved", mapping=values)

    both = make_redis_store(cipher=make_cipher(write_keys(tmp_path / "both", new, old)))
    record = await both.load("r")
    assert record is not None
    assert (record.content, list(record.outputs[0]), record.stored_object) == (CONTENT, [5], SECRET.encode())
    assert await both.load("moved") is None

    await both.create("r", CONTENT, "run")
    after = make_redis_store(cipher=make_cipher(write_keys(tmp_path / "new", new)))
    plain = make_redis_store()
    assert await after.load("r") is not None
    assert await before.load("r") is None
    assert await plain.load("r") is None
    await plain.create("p", CONTENT, "run")
    assert await after.load("p") is None


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x01" * 40, CONTENT.SerializeToString()])
def test_the_form_of_a_value_does_not_depend_on_its_bytes(tmp_path: Path, data: bytes) -> None:
    """Encrypted bytes happened to parse as an empty message, so a gateway without keys returned an empty record."""
    plain, encrypted = make_cipher(None), make_cipher(write_keys(tmp_path / "keys", bytes(32)))
    for cipher, other in ((plain, encrypted), (encrypted, plain)):
        assert cipher.open(cipher.seal(data, b"place"), b"place") == data
        with pytest.raises(UnreadableValueError, match="encrypted"):
            other.open(cipher.seal(data, b"place"), b"place")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "c2hvcnQ=\n", "not base64\n"])
def test_a_wrong_key_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(RecordKeyError, match="openssl rand -base64 32"):
        make_cipher(tmp_path / "keys")
    with pytest.raises(RecordKeyError, match="--record-key-file"):
        make_cipher(tmp_path / "missing")


async def test_calls_fail_with_unavailable_while_redis_is_down(
    make_redis_store: MakeStore, redis_server: RedisServer
) -> None:
    store = make_redis_store()
    redis_server.stop()
    try:
        for call in (store.load("r"), store.create("r", CONTENT, "run"), store.claim("r", "run", by_force=True)):
            with pytest.raises(RecordsUnavailableError, match="does not answer"):
                await call
    finally:
        redis_server.start()
    await store.create("r", CONTENT, "run")


async def test_a_full_redis_keeps_no_records(make_redis_store: MakeStore, redis_server: RedisServer) -> None:
    store = make_redis_store()
    with redis_server.client() as redis:
        redis.config_set("maxmemory", 1)
        try:
            with pytest.raises(RecordsUnavailableError, match="refuses a call"):
                await store.create("r", CONTENT, "run")
        finally:
            redis.config_set("maxmemory", 0)
    await store.create("r", CONTENT, "run")


async def test_records_in_memory_make_room_for_new_ones() -> None:
    now = [0.0]
    fields = MemoryFields(2000, lease_s=3.0, clock=lambda: now[0])
    store = RecordStore(fields)
    content = pb.RequestRecord(notes=bytes(600))
    for record_id in "abc":
        await store.create(record_id, content, "run")
    with pytest.raises(OverloadedError, match=r"need more than 2000 bytes \(--record-memory\)"):
        await store.create("d", content, "run")  # all are open
    assert await store.write([Update("a", "run", {(0, 0): column(*range(100))})]) == [True]
    await store.write([Update("a", "run", releases=True), Update("b", "run", releases=True)])
    assert (await outputs(store, "a"))[0] == []  # there was no room for its output
    await store.write([Update("a", "run", {(0, 0): column(1)}, {0: end(1)}, releases=True)])
    await store.create("d", content, "run")
    assert [await store.load(record_id) is not None for record_id in "abcd"] == [True, False, True, True]
    now[0] = 4.0  # all leases have expired
    assert await store.put_object("c", b"{}" * 100) == b"{}" * 100
    await store.create("e", pb.RequestRecord(notes=bytes(1900)), "run")
    assert [await store.load(record_id) is not None for record_id in "abcde"] == [False] * 4 + [True]
    assert sum(len(value) for record in fields._records.values() for value in record.fields.values()) == fields._size


async def test_a_pin_outlives_the_time_to_live_also_after_later_writes(make_store: MakeStore) -> None:
    store = make_store(ttl_s=1.0)
    for name in ("mine/a", "mine/b"):
        await store.create(name, CONTENT, "run")
        assert await store.pin(name, 100.0, 2)
    await store.write([Update("mine/a", "run", {(0, 0): column(1)}, releases=True)])
    assert not await store.pin("mine/a", 100.0, 1), "mine/b is pinned"
    await store.create("other/a", CONTENT, "run")
    assert await store.pin("other/a", 100.0, 1), "another owner's pins do not count"
    assert await store.num_pinned() == {"mine": 2, "other": 1}
    assert await store.pin("mine/b", 0.0, 1)
    assert await store.num_pinned() == {"mine": 1, "other": 1}
    async with asyncio.timeout(TIMEOUT_S):
        while await store.load("mine/b") is not None:  # noqa: ASYNC110  (it expires without an event)
            await asyncio.sleep(0.05)
    a, b = await store.lifetimes(["mine/a", "mine/b"])
    assert b is None
    assert a is not None
    assert a.expires_in_s >= a.pinned_for_s > 90
    assert await outputs(store, "mine/a") == [[1], []]
    assert await store.delete("mine/a")
    assert await store.num_pinned() == {"other": 1}
    await store.create("mine/c", CONTENT, "run")
    assert await store.pin("mine/c", 100.0, 1), "the pin of a deleted record does not count"
    await store.create("mine/c", CONTENT, "run")
    assert await store.num_pinned() == {"other": 1}, "a record that takes the place of a pinned one is not pinned"


async def test_copies_share_content_and_output_until_the_last_is_deleted(make_store: MakeStore) -> None:
    store = make_store()
    await store.create("a", CONTENT, "run")
    await store.write([Update("a", "run", {(0, 0): column(1, 2), (1, 0): column(3)}, {0: end(2)})])
    record = await store.load("a")
    assert record is not None
    changes = pb.RequestRecord(request=inference_pb2.GenerateRequest(request_id="b"), origin_id="a")
    shared = await store.share(record)
    copied = await store.copy(shared, "b", changes)
    copy = await store.load("b")
    assert copy is not None
    assert copied == copy
    assert [await store.is_open(name) for name in ("a", "b", "c")] == [True, False, False]
    content = pb.RequestRecord()
    content.CopyFrom(CONTENT)
    content.MergeFrom(changes)
    assert (copy.outputs, copy.ends, copy.content, copy.has_run) == (record.outputs, record.ends, content, False)
    await store.copy(await store.share(record), "c", changes)
    await store.delete("a")
    await store.delete("b")
    assert await store.claim("c", "more", by_force=True)
    await store.write([Update("c", "more", {(1, 1): column(4)}, {1: end(2)}, releases=True)])
    assert await outputs(store, "c") == [[1, 2], [3, 4]], "its own output follows that of the shared record"
    await store.delete("c")
    assert await store.load(shared.record_id) is None
    with pytest.raises(OverloadedError):
        await store.copy(shared, "d", changes)


async def test_a_shared_record_lives_and_is_pinned_as_long_as_its_copies(make_store: MakeStore) -> None:
    store = make_store(ttl_s=1.0)
    await store.create("mine/a", CONTENT, "run")
    record = await store.load("mine/a")
    assert record is not None
    shared = await store.share(record)
    await store.copy(shared, "mine/b", pb.RequestRecord())
    assert await store.pin("mine/b", 100.0, 9)
    async with asyncio.timeout(TIMEOUT_S):
        while await store.load("mine/a") is not None:  # noqa: ASYNC110  (it expires without an event)
            await asyncio.sleep(0.05)
    copy = await store.load("mine/b")
    assert copy is not None
    assert copy.content.prompt_token_ids == CONTENT.prompt_token_ids


async def test_records_of_one_owner_are_bounded_in_bytes_and_number(redis_server: RedisServer) -> None:
    redis_server.flush()
    limits = {"bytes": RecordLimits(record_bytes=2000), "number": RecordLimits(max_records=2)}
    content = pb.RequestRecord(notes=bytes(600))
    for fields in (RedisFields(redis_server.url, timeout_s=TIMEOUT_S), MemoryFields(1 << 20)):
        store = RecordStore(fields, limits=lambda owner: limits.get(owner, RecordLimits()))
        for owner, allowed in (("bytes", 3), ("number", 2), ("free", 5)):
            for i in range(allowed):
                await store.create(f"{owner}/{i}", content, "run")
            if owner == "free":
                continue
            with pytest.raises(OverloadedError, match=r"record_bytes: .*, max_records: .*; delete some"):
                await store.create(f"{owner}/more", content, "run")
            await store.create(f"{owner}/0", content, "again")  # replaces one
            await store.delete(f"{owner}/0")
            await store.create(f"{owner}/more", content, "run")
        await store.close()


async def test_many_copies_neither_fill_redis_nor_evict_pins(tmp_path: Path) -> None:
    flags = ("--maxmemory", "24mb", "--maxmemory-policy", "volatile-lru")
    with RedisServer(tmp_path, *flags) as server:
        store = RecordStore(RedisFields(server.url, timeout_s=TIMEOUT_S, ttl_s=1000.0))
        await store.create("alice/kept", CONTENT, "run")
        assert await store.pin("alice/kept", 100.0, 9)
        await store.create("mallory/a", pb.RequestRecord(request=REQUEST, notes=os.urandom(900_000)), "run")
        record = await store.load("mallory/a")
        assert record is not None
        with server.client() as client:
            before = client.info("memory")["used_memory"]
            for call in range(12):
                shared = await store.share(record)
                for i in range(64):
                    await store.copy(shared, f"mallory/{call}-{i}", pb.RequestRecord())
            assert client.info("memory")["used_memory"] - before < 4 << 20
            # A pin has no time to live, so it also outlives what fills the memory.
            for i in range(40):
                await store.create(f"mallory/full-{i}", pb.RequestRecord(notes=os.urandom(900_000)), "run")
            assert client.info("stats")["evicted_keys"] > 0
        assert await store.load("alice/kept") is not None
        assert await store.num_pinned() == {"alice": 1}
        await store.close()


async def test_a_record_expires_again_when_its_pin_has_ended(make_redis_store: MakeStore) -> None:
    store = make_redis_store(ttl_s=0.3)
    await store.create("mine/a", CONTENT, "run")
    assert await store.pin("mine/a", 0.2, 9)
    async with asyncio.timeout(TIMEOUT_S):
        while await store.load("mine/a") is not None:
            await store.create("mine/next", CONTENT, "run")  # each new record looks for pins that have ended
            await asyncio.sleep(0.05)


async def test_the_list_of_an_owner_is_bounded_and_in_order(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (record_fields, redis_fields):
        monkeypatch.setattr(module, "MAX_LISTED", 3)
    store = make_store()
    for name in "abcd":
        await store.create(f"mine/{name}", CONTENT, "run")
        await store.enlist("mine", f"mine/{name}", "")
        await asyncio.sleep(0.002)  # Redis lists by milliseconds
    assert await store.listed("mine") == ["mine/d", "mine/c", "mine/b"]
    await store.enlist("mine", "mine/e", "mine/c")
    assert sorted(await store.listed("mine")) == ["mine/b", "mine/d", "mine/e"]
    assert await store.listed("other") == []
