"""The prefix index in a real Redis that is stopped, flushed, frozen and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import RedisError

from prefix_index.index import Holder, PrefixChanges
from prefix_index.reader import PrefixSearch
from prefix_index.redis_index import RedisPrefixIndex
from tests.processes.redis_server import RedisServer

DEADLINE_S = 60.0
W0, W1 = Holder("w0", 2**64 - 1), Holder("w1", 5)


def chain(count: int, name: str = "a") -> list[bytes]:
    """Digests of a chain of blocks, which may contain any bytes."""
    return [md5(f"{name}{i}".encode()).digest() for i in range(count)]


def cached(holder: Holder, digests: list[bytes]) -> list[PrefixChanges]:
    return [PrefixChanges(holder, [(digest, True) for digest in digests])]


def evicted(holder: Holder, digests: list[bytes]) -> list[PrefixChanges]:
    return [PrefixChanges(holder, [(digest, False) for digest in digests])]


async def look_up(index: RedisPrefixIndex, digests: list[bytes]) -> dict[Holder, int]:
    """Leading blocks that each live worker has, as readers see them; empty while the server is down."""
    search = PrefixSearch(index._redis, index._prefix)
    try:
        held = await search.leading_blocks(digests)
        return {holder: held[holder] for holder in await search.owners(held)}
    except (RedisError, OSError):
        return {}


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.005)


async def comes_to(index: RedisPrefixIndex, digests: list[bytes], expected: dict[Holder, int]) -> None:
    """Wait until a lookup gives `expected`; a background task publishes."""
    found: dict[Holder, int] | None = None

    async def is_expected() -> bool:
        nonlocal found
        found = await look_up(index, digests)
        return found == expected

    try:
        await until(is_expected)
    except TimeoutError:
        raise AssertionError(f"lookup gives {found}, not {expected}") from None


async def state_is(index: RedisPrefixIndex, expected: str) -> None:
    async def is_expected() -> bool:
        return index.state() == expected

    await until(is_expected)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder: Path = tmp_path_factory.mktemp("redis")
    with RedisServer(folder) as server:
        yield server


class Redis:
    """Creates indexes on one server, one per scheduler. `held` is the content of the scheduler's pools."""

    def __init__(self, server: RedisServer, cleanup: AsyncExitStack) -> None:
        self.server = server
        self._cleanup = cleanup
        self.num_snapshots = 0

    def index(self, owner: str = "s0", held: list[PrefixChanges] | None = None, **options: Any) -> RedisPrefixIndex:
        def snapshot() -> list[PrefixChanges]:
            self.num_snapshots += 1
            return held or []

        # Long enough that a late answer on a busy machine is not an outage. Tests of outages set their own timeout.
        options = {"lease_ttl_s": 0.6, "max_backoff_s": 0.1, "timeout_s": 1.0} | options
        index = RedisPrefixIndex(self.server.url, owner=owner, snapshot=snapshot, **options)
        index.start()
        self._cleanup.push_async_callback(index.close)
        return index


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    redis_server.stop()
    redis_server.start()
    async with AsyncExitStack() as cleanup:
        yield Redis(redis_server, cleanup)


@pytest.fixture
async def index(redis: Redis) -> RedisPrefixIndex:
    return redis.index()


# -- entries and holders ---------------------------------------------------------------------------------------------


async def test_a_new_index_is_empty(index: RedisPrefixIndex) -> None:
    assert await look_up(index, []) == {}
    assert await look_up(index, chain(3)) == {}


async def test_lookup_counts_leading_blocks_per_worker(index: RedisPrefixIndex) -> None:
    digests = chain(6)
    index.register_worker(*W0, "127.0.0.1:1")
    index.register_worker(*W1, "127.0.0.1:2")
    index.publish(cached(W0, digests[:4]) + cached(W1, digests[:2]))
    await comes_to(index, digests, {W0: 4, W1: 2})
    await comes_to(index, digests[:3], {W0: 3, W1: 2})
    await comes_to(index, chain(3, "other"), {})
    await comes_to(index, [*chain(1, "other"), *digests], {})


async def test_a_gap_ends_the_prefix(index: RedisPrefixIndex) -> None:
    digests = chain(5)
    index.register_worker(*W0, "127.0.0.1:1")
    index.publish(cached(W0, digests))
    index.publish(evicted(W0, digests[2:3]))
    await comes_to(index, digests, {W0: 2})
    index.publish(evicted(W0, digests[:1]))
    await comes_to(index, digests, {})


async def test_eviction_affects_one_worker_only(index: RedisPrefixIndex) -> None:
    digests = chain(3)
    for holder in (W0, W1):
        index.register_worker(*holder, "127.0.0.1:1")
        index.publish(cached(holder, digests))
    index.publish(evicted(W0, digests[1:]))
    await comes_to(index, digests, {W0: 1, W1: 3})


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 500, 1025])
async def test_lookup_finds_the_end_of_long_chains(index: RedisPrefixIndex, count: int) -> None:
    digests = chain(1100)
    index.register_worker(*W0, "127.0.0.1:1")
    index.register_worker(*W1, "127.0.0.1:2")
    index.publish(cached(W0, digests[:count]) + cached(W1, digests[: 1 + count // 3]))
    await comes_to(index, digests, {W0: count, W1: 1 + count // 3})


async def test_a_restarted_worker_starts_empty(index: RedisPrefixIndex) -> None:
    digests = chain(3)
    index.register_worker(*W1, "127.0.0.1:1")
    index.publish(cached(W1, digests))
    await comes_to(index, digests, {W1: 3})
    restarted = Holder("w1", 6)
    index.register_worker(*restarted, "127.0.0.1:1")
    await comes_to(index, digests, {})
    index.publish(cached(restarted, digests[:1]))
    await comes_to(index, digests, {restarted: 1})
    index.forget(*W1)  # a late change of the previous process
    index.publish(evicted(W1, digests[:1]))
    await asyncio.sleep(0.05)
    await comes_to(index, digests, {restarted: 1})


async def test_a_forgotten_worker_is_ignored(index: RedisPrefixIndex) -> None:
    digests = chain(3)
    index.register_worker(*W0, "127.0.0.1:1")
    index.publish(cached(W0, digests))
    await comes_to(index, digests, {W0: 3})
    index.forget(*W0)
    index.forget(*W0)
    index.forget("unlisted", 1)
    await comes_to(index, digests, {})


async def test_the_newest_event_of_a_block_counts(index: RedisPrefixIndex) -> None:
    digests = chain(2)
    index.register_worker(*W0, "127.0.0.1:1")
    for _ in range(3):
        index.publish(cached(W0, digests))
        index.publish(evicted(W0, digests))
    index.publish(cached(W0, digests))
    await comes_to(index, digests, {W0: 2})


async def test_scheduler_epochs_never_decrease(index: RedisPrefixIndex) -> None:
    first = await index.next_scheduler_epoch()
    assert 0 < first < 40
    index.record_scheduler_epoch(40)

    async def is_above() -> bool:
        return await index.next_scheduler_epoch() > 40

    await until(is_above)


@pytest.mark.parametrize("value", ["-5", "2e3", "x\n", "1.5", "", str(2**53), str(2**63 - 1), "9" * 400, None])
async def test_a_bad_scheduler_epoch_counts_as_0_and_is_replaced(
    index: RedisPrefixIndex, caplog: pytest.LogCaptureFixture, value: str | None
) -> None:
    key = "quire:scheduler_epoch"
    await index._redis.delete(key)
    await (index._redis.lpush(key, "a list") if value is None else index._redis.set(key, value))  # type: ignore[misc]
    assert await index.next_scheduler_epoch() == 0
    assert await index.next_scheduler_epoch() == 0
    assert index.num_errors == 0
    assert caplog.text.count("redis key quire:scheduler_epoch is ") == 1
    index.record_scheduler_epoch(7)

    async def counts_again() -> bool:
        return await index.next_scheduler_epoch() >= 8

    await until(counts_again)


async def test_a_second_revision_is_refused_until_the_first_is_released(redis: Redis) -> None:
    one, two = redis.index("s0"), redis.index("s1")
    assert await one.claim_revision("m", "r1", replaces=False) == ""
    assert await two.claim_revision("m", "r2", replaces=False) == "r1"
    assert await two.claim_revision("m", "r1", replaces=False) == ""
    assert await two.claim_revision("other", "r2", replaces=False) == ""
    assert await one.claim_revision("m", "r2", replaces=False) == "r1"  # the other scheduler still serves it
    assert await one.claim_revision("m", "r2", replaces=True) == ""


async def test_two_first_workers_of_a_scheduler_cannot_claim_two_revisions(redis: Redis) -> None:
    """The refused one must not replace the claim of the other."""
    index, other = redis.index("s0"), redis.index("s1")
    assert await index.claim_revision("m", "r1", replaces=False) == ""
    assert await index.claim_revision("m", "r2", replaces=False) == "r1"
    assert await other.claim_revision("m", "r2", replaces=False) == "r1"


async def test_a_released_or_expired_revision_can_be_replaced(redis: Redis) -> None:
    one, two = redis.index("s0", lease_ttl_s=0.3), redis.index("s1")
    assert await one.claim_revision("m", "r1", replaces=False) == ""
    await asyncio.sleep(0.6)  # several renewals later it is still served
    assert await two.claim_revision("m", "r2", replaces=False) == "r1"
    one.release_revision()
    one.release_revision()  # two leases may end at the same time

    async def is_free() -> bool:
        return await two.claim_revision("m", "r2", replaces=False) == ""

    await until(is_free)


async def test_a_revision_of_a_lost_scheduler_expires(redis: Redis) -> None:
    lost, other = redis.index("s0", lease_ttl_s=0.3), redis.index("s1")
    assert await lost.claim_revision("m", "r1", replaces=False) == ""
    await lost.close()

    async def is_free() -> bool:
        return await other.claim_revision("m", "r2", replaces=False) == ""

    await until(is_free)


async def test_without_redis_a_revision_is_accepted(redis: Redis) -> None:
    index = redis.index()
    redis.server.stop()
    assert await index.claim_revision("m", "r1", replaces=False) == ""


async def test_an_epoch_far_too_large_is_not_published(index: RedisPrefixIndex) -> None:
    index.record_scheduler_epoch(2**64 - 1)
    index.record_scheduler_epoch(40)

    async def is_above() -> bool:
        return await index.next_scheduler_epoch() > 40

    await until(is_above)
    assert await index.next_scheduler_epoch() < 1000


# -- several schedulers, leases, outages -----------------------------------------------------------------------------


async def test_schedulers_see_each_other(redis: Redis) -> None:
    mine, other = redis.index("s0"), redis.index("s1")
    digests = chain(40)
    mine.register_worker(*W0, "127.0.0.1:1")
    mine.publish(cached(W0, digests))
    await comes_to(other, digests, {W0: 40})
    assert mine.state() == other.state() == "redis"


async def test_the_former_scheduler_does_not_remove_a_worker_taken_over(redis: Redis) -> None:
    old, new = redis.index("s0"), redis.index("s1")
    digests = chain(2)
    old.register_worker(*W0, "127.0.0.1:1")
    old.publish(cached(W0, digests))
    await comes_to(new, digests, {W0: 2})
    new.register_worker(*W0, "127.0.0.1:1")
    with redis.server.client() as client:

        async def is_taken_over() -> bool:
            return bool(client.hget("quire:worker:w0", "owner") == b"s1")

        await until(is_taken_over)
    old.forget(*W0)
    old.register_worker(*W1, "127.0.0.1:1")  # written after the forget, so it shows that the forget was applied
    old.publish(cached(W1, digests[:1]))
    await comes_to(new, digests, {W0: 2, W1: 1})


async def test_a_lease_expires_without_renewal(redis: Redis) -> None:
    reader, gone = redis.index("s0"), redis.index("s1")
    digests = chain(2)
    gone.register_worker(*W0, "127.0.0.1:1")
    gone.publish(cached(W0, digests))
    await comes_to(reader, digests, {W0: 2})
    await gone.close()
    await comes_to(reader, digests, {})


async def test_a_lease_is_renewed(redis: Redis) -> None:
    index = redis.index(lease_ttl_s=2.0)
    digests = chain(2)
    index.register_worker(*W0, "127.0.0.1:1")
    index.publish(cached(W0, digests))
    await comes_to(index, digests, {W0: 2})
    await renewed(redis, b"quire:worker:w0", times=3)
    assert await look_up(index, digests) == {W0: 2}


async def renewed(redis: Redis, key: bytes, times: int) -> None:
    """Wait until the time to live of a key has grown `times` times; the key must not expire meanwhile."""
    left = [2**62]
    with redis.server.client() as client:

        async def has_grown() -> bool:
            left.append(client.pttl(key))
            assert left[-1] > 0, f"{key!r} has expired"
            return sum(later > earlier for earlier, later in itertools.pairwise(left)) >= times

        await until(has_grown)


async def test_every_key_except_two_counters_expires(redis: Redis) -> None:
    index = redis.index()
    index.register_worker(*W0, "127.0.0.1:1")
    index.publish(cached(W0, chain(5)))
    await index.next_scheduler_epoch()
    await comes_to(index, chain(5), {W0: 5})
    with redis.server.client() as client:
        eternal = {key for key in client.scan_iter() if client.ttl(key) == -1}
    assert eternal == {b"quire:generation", b"quire:scheduler_epoch"}


async def test_entries_are_refreshed_before_they_expire(redis: Redis) -> None:
    digests = chain(3)
    index = redis.index(held=cached(W0, digests), entry_ttl_s=2.0, lease_ttl_s=1.0)
    index.register_worker(*W0, "127.0.0.1:1")
    index.publish(cached(W0, digests))
    await comes_to(index, digests, {W0: 3})
    await renewed(redis, b"quire:prefix:" + digests[2], times=2)
    assert await look_up(index, digests) == {W0: 3}
    assert redis.num_snapshots >= 2


async def test_the_index_starts_without_a_server_and_connects_later(redis: Redis) -> None:
    redis.server.stop()
    index = redis.index()
    digests = chain(3)
    index.register_worker(*W0, "127.0.0.1:1")
    index.publish(cached(W0, digests))
    assert await index.next_scheduler_epoch() == 0
    assert index.state() == "redis (down)"
    redis.server.start()
    await comes_to(index, digests, {W0: 3})
    assert index.state() == "redis"


async def test_after_a_restart_the_snapshot_is_published(redis: Redis) -> None:
    digests = chain(700)
    held = cached(W0, digests[:600])
    index = redis.index(held=held)
    index.register_worker(*W0, "127.0.0.1:1")
    index.publish(held)
    await comes_to(index, digests, {W0: 600})
    redis.server.stop()
    await state_is(index, "redis (down)")
    held += cached(W0, digests[600:])
    index.publish(held[-1:])
    redis.server.start()
    await comes_to(index, digests, {W0: 700})
    assert await index.next_scheduler_epoch() > 0


async def test_a_flush_is_detected_without_traffic(redis: Redis) -> None:
    digests = chain(9)
    one = redis.index("s0", held=cached(W0, digests))
    two = redis.index("s1", held=cached(W1, digests[:5]))
    one.register_worker(*W0, "127.0.0.1:1")
    two.register_worker(*W1, "127.0.0.1:2")
    one.publish(cached(W0, digests))
    two.publish(cached(W1, digests[:5]))
    await comes_to(one, digests, {W0: 9, W1: 5})
    redis.server.flush()
    await comes_to(two, digests, {W0: 9, W1: 5})


async def test_evictions_during_an_outage_are_not_lost(redis: Redis) -> None:
    index = redis.index(timeout_s=0.1)
    digests = chain(4)
    index.register_worker(*W0, "127.0.0.1:1")
    index.publish(cached(W0, digests))
    await comes_to(index, digests, {W0: 4})
    with frozen(redis.server):
        index.publish(evicted(W0, digests[2:]))
        await state_is(index, "redis (down)")
    await comes_to(index, digests, {W0: 2})


@contextlib.contextmanager
def frozen(server: RedisServer) -> Iterator[None]:
    """A server that keeps its connections open but does not answer."""
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


async def test_a_frozen_server_delays_no_caller(redis: Redis) -> None:
    index = redis.index(timeout_s=0.1)
    index.register_worker(*W0, "127.0.0.1:1")
    index.publish(cached(W0, chain(2)))
    await comes_to(index, chain(2), {W0: 2})
    with frozen(redis.server):
        async with asyncio.timeout(DEADLINE_S):
            assert await index.next_scheduler_epoch() == 0
            for i in range(100):
                index.publish(cached(W0, chain(20, str(i))))
    await comes_to(index, chain(20, "99"), {W0: 20})


async def test_pending_entries_are_bounded_and_published_later(redis: Redis) -> None:
    redis.server.stop()
    held: list[PrefixChanges] = []
    index = redis.index(held=held, max_pending=50)
    index.register_worker(*W0, "127.0.0.1:1")
    for i in range(100):
        held += cached(W0, chain(10, str(i)))
        index.publish(held[-1:])
        assert len(index._pending) <= 50
    redis.server.start()
    for i in (0, 50, 99):
        await comes_to(index, chain(10, str(i)), {W0: 10})


async def test_the_index_survives_repeated_restarts_of_the_server(redis: Redis) -> None:
    digests = chain(300)
    held: list[PrefixChanges] = []
    index = redis.index(held=held)
    index.register_worker(*W0, "127.0.0.1:1")
    for i in range(3):
        for digest in digests[100 * i : 100 * i + 100]:
            held += cached(W0, [digest])
            index.publish(held[-1:])
            await asyncio.sleep(0)
        redis.server.stop()
        await state_is(index, "redis (down)")
        redis.server.start()
    await comes_to(index, digests, {W0: 300})


async def test_entries_lost_before_the_answer_to_the_first_write_is_read_are_rewritten(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = RedisPrefixIndex._execute

    async def execute_and_flush(index: RedisPrefixIndex, *args: Any) -> bytes | None:
        monkeypatch.setattr(RedisPrefixIndex, "_execute", execute)
        found = await execute(index, *args)
        redis.server.flush()
        return found

    monkeypatch.setattr(RedisPrefixIndex, "_execute", execute_and_flush)
    index = redis.index(held=cached(W0, chain(2)))
    index.register_worker(*W0, "127.0.0.1:1")
    index.publish(cached(W0, chain(2)))
    await comes_to(index, chain(2), {W0: 2})


async def test_deployments_on_one_server_are_separate(redis: Redis) -> None:
    one, two = redis.index("s0", namespace="one"), redis.index("s1", namespace="two")
    one.register_worker(*W0, "127.0.0.1:1")
    one.publish(cached(W0, chain(2)))
    await comes_to(one, chain(2), {W0: 2})
    assert await look_up(two, chain(2)) == {}


@pytest.mark.parametrize("url", ["foo", "http://localhost:1", ""])
def test_a_malformed_url_is_refused_at_start(url: str) -> None:
    with pytest.raises(ValueError, match="redis://"):
        RedisPrefixIndex(url, owner="s", snapshot=list)
