"""Limits per owner: the file, and one suite for buckets in the process and in Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.limits.buckets import (
    ADMITTED,
    LimitsError,
    LimitsFile,
    LocalBuckets,
    OwnerLimits,
    RedisBuckets,
    Take,
    Verdict,
    read_limits,
)
from gateway_svc.limits.key_limits import KeyLimits
from svc_common.errors import InvalidRequestError, OverloadedError, PermissionDeniedError
from svc_common.security.tls import REREAD_S
from tests.processes.redis_server import RedisServer
from tests.unit.gateway.fakes import FakeScheduler, TestGateway, rest, until

SEEDED = types.SamplingParams(seed=1)

FILE = """
[default]
requests_per_s = 2
models = ["a"]
[owners.big]
requests_per_s = 100
max_streams = 3
"""

RateBuckets = LocalBuckets | RedisBuckets


def file_of(folder: Path, text: str = FILE) -> Path:
    path = folder / "limits.toml"
    path.write_text(text)
    return path


def test_an_owner_has_the_default_limits_unless_it_has_others(tmp_path: Path) -> None:
    limits = LimitsFile(file_of(tmp_path))
    assert limits.of("small") == OwnerLimits(requests_per_s=2, models=frozenset("a"))
    assert limits.of("big") == OwnerLimits(requests_per_s=100, models=frozenset("a"), max_streams=3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[default]\nrequest_per_s = 1", "request_per_s is not a limit; there are requests_per_s, tokens_per_min"),
        ("[default]\nrequests_per_s = 0", "requests_per_s is 0; must be a number from 0.001 to 1e"),
        ("[default]\nrequests_per_s = nan", "requests_per_s is nan"),
        ("[default]\nmax_streams = 1.5", "max_streams is 1.5; must be a whole number"),
        ("[default]\nmax_streams = true", "max_streams is True"),
        ("[default]\nmodels = 'a'", "models is not a list of names"),
        ("[owner.a]\nmax_streams = 1", r"owner is not a table; use \[default\] and \[owners.NAME\]"),
        ("[owners]\na = 1", r"\[owners.a\] is not a table"),
        ("owners = 3", "owners is not a table"),
        ("x", "limits.toml: "),
    ],
)
def test_a_bad_file_is_refused_with_table_and_setting(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(LimitsError, match=words):
        read_limits(file_of(tmp_path, text))


def test_the_file_is_read_again_and_a_bad_version_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    limits = LimitsFile(file_of(tmp_path), clock=lambda: now[0])
    file_of(tmp_path, "[default]\nmax_streams = 7")
    assert limits.of("x").max_streams is None
    now[0] += REREAD_S
    assert limits.of("x").max_streams == 7
    file_of(tmp_path, "bad")
    for _ in range(3):
        now[0] += REREAD_S
        assert limits.of("x").max_streams == 7
    assert caplog.text.count("keeping the previous limits") == 1


def test_models_and_priorities_are_checked(tmp_path: Path) -> None:
    limits = KeyLimits(LimitsFile(file_of(tmp_path, "[default]\nmodels = ['a']\nmin_priority = 5")))
    limits.check("x", "a", 5)
    with pytest.raises(PermissionDeniedError, match="model 'b' is not allowed for this owner; allowed: a"):
        limits.check("x", "b", 5)
    with pytest.raises(InvalidRequestError, match="is 4; must be at least 5"):
        limits.check("x", "a", 4)
    KeyLimits().check("x", "anything", -1000)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["local", "redis"])
async def buckets(request: pytest.FixtureRequest) -> AsyncIterator[RateBuckets]:
    made: RateBuckets
    if request.param == "local":
        made = LocalBuckets()
    else:
        server = request.getfixturevalue("redis")
        server.flush()
        made = RedisBuckets(server.url, timeout_s=60.0)
    yield made
    await made.close()


async def test_requests_are_admitted_at_their_rate(buckets: RateBuckets) -> None:
    limits, began, num_admitted = OwnerLimits(requests_per_s=40), time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < 1.5 or num_admitted < 60:
        verdict = await buckets.take("x", limits, Take(str(num_admitted), 1))
        assert not verdict.limit or num_admitted >= 40, "the bucket was full at the beginning"
        num_admitted += not verdict.limit
        assert num_admitted <= 40 * (elapsed + 1.0) + 2
        assert not verdict.limit or 0 < verdict.retry_after_s <= 0.1
        await asyncio.sleep(0.001)
    assert not (await buckets.take("other", limits, Take("o", 1))).limit, "owners do not share a bucket"


async def test_a_debt_refuses_requests_until_unused_tokens_are_put_back(buckets: RateBuckets) -> None:
    limits, began = OwnerLimits(tokens_per_min=6000), time.monotonic()  # 100 per second
    assert not (await buckets.take("x", limits, Take("1", 1000))).limit, "larger than the bucket"
    verdict = await buckets.take("x", limits, Take("2", 1))
    assert verdict.limit == "tokens_per_min"
    assert 7.9 - (time.monotonic() - began) < verdict.retry_after_s <= 8.0
    await buckets.give_back("x", limits, "1", 1000)
    assert not (await buckets.take("x", limits, Take("2", 1))).limit


async def test_a_call_is_counted_once_and_before_its_request_is_known(tmp_path: Path, buckets: RateBuckets) -> None:
    limits = KeyLimits(LimitsFile(file_of(tmp_path, "[default]\nrequests_per_s = 0.001")), buckets)
    await limits.begin("a")
    async with limits.admitted("a", "first", 1, lambda: 1):
        pass
    with pytest.raises(OverloadedError, match="requests per second"):
        async with limits.admitted("a", "second", 1, lambda: 1):
            raise AssertionError("a call pays for its second request")
    with pytest.raises(OverloadedError):
        await limits.begin("a")


async def test_a_call_that_is_cancelled_while_it_is_counted_leaves_no_stream(
    tmp_path: Path, buckets: RateBuckets
) -> None:
    limits = KeyLimits(LimitsFile(file_of(tmp_path, "[default]\nmax_streams = 1\ntokens_per_min = 60")), buckets)

    async def call() -> None:
        async with limits.admitted("x", "first", 1000, lambda: 1000):
            await asyncio.sleep(3600)

    task = asyncio.create_task(call())
    await asyncio.sleep(0)  # the stream is counted, or Redis is asked
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with limits.admitted("x", "second", 1, lambda: 1):
        pass


async def test_open_streams_are_counted_until_they_end(buckets: RateBuckets) -> None:
    limits = OwnerLimits(max_streams=2)
    verdicts = [(await buckets.take("x", limits, Take(str(i), 1))).limit for i in range(3)]
    assert verdicts == ["", "", "max_streams"]
    await buckets.keep([("x", "0"), ("x", "1")])
    await buckets.give_back("x", limits, "0", 0)
    assert [(await buckets.take("x", limits, Take(str(i), 1))).limit for i in (3, 4)] == ["", "max_streams"]


async def test_samples_of_open_requests_are_counted_until_they_end(tmp_path: Path, buckets: RateBuckets) -> None:
    limits = KeyLimits(LimitsFile(file_of(tmp_path, "[default]\nmax_rows = 10")), buckets)
    async with limits.admitted("x", "first", 1, lambda: 1, num_rows=8), limits.admitted("x", "2", 1, lambda: 1):
        with pytest.raises(OverloadedError, match=r"samples and beams of open requests: 10\)"):
            async with limits.admitted("x", "3", 1, lambda: 1, num_rows=2):
                raise AssertionError("it was admitted")
        async with limits.admitted("x", "3", 1, lambda: 1), limits.admitted("x", "4", 1, lambda: 1, num_rows=0):
            pass
    async with limits.admitted("x", "5", 1, lambda: 1, num_rows=10):
        pass
    with pytest.raises(InvalidRequestError, match="11 samples or beams; at most 10"):
        async with limits.admitted("x", "6", 1, lambda: 1, num_rows=11):
            raise AssertionError("it was admitted")


async def test_two_gateways_share_the_buckets_of_redis(redis: RedisServer) -> None:
    redis.flush()
    both = [RedisBuckets(redis.url, timeout_s=60.0) for _ in range(2)]
    limits = OwnerLimits(max_streams=3)
    verdicts = [(await both[i % 2].take("x", limits, Take(str(i), 1))).limit for i in range(5)]
    assert verdicts == ["", "", "", "max_streams", "max_streams"]
    for buckets in both:
        await buckets.close()


async def test_each_process_counts_for_itself_without_redis(caplog: pytest.LogCaptureFixture) -> None:
    buckets = RedisBuckets("redis://127.0.0.1:1/0")
    limits = OwnerLimits(max_streams=1)
    verdicts = [(await buckets.take("x", limits, Take(str(i), 1))).limit for i in range(2)]
    assert verdicts == ["", "max_streams"]
    await buckets.give_back("x", limits, "0", 0)
    assert caplog.text.count("are counted by each gateway process") == 1
    await buckets.close()


async def test_unused_tokens_of_a_request_are_put_back(tmp_path: Path) -> None:
    limits = KeyLimits(LimitsFile(file_of(tmp_path, "[default]\ntokens_per_min = 60")), LocalBuckets())
    async with limits.admitted("x", "1", 1000, lambda: 0):
        with pytest.raises(OverloadedError, match=r"tokens per minute: 60\); retry in") as refused:
            async with limits.admitted("x", "2", 1, lambda: 1):
                raise AssertionError("it was admitted")
    assert refused.value.retry_after_s > 900
    async with limits.admitted("x", "3", 1, lambda: 1):
        pass


class Taken:
    """Buckets that admit everything and keep what was taken and given back."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.unused: list[int] = []

    async def take(self, owner: str, limits: OwnerLimits, take: Take) -> Verdict:
        self.taken.append(take.num_tokens)
        return ADMITTED

    async def give_back(self, owner: str, limits: OwnerLimits, stream_id: str, num_tokens: int) -> None:
        self.unused.append(num_tokens)

    async def keep(self, streams: list[tuple[str, str]]) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.fixture
async def counted(scheduler: FakeScheduler, tmp_path: Path) -> AsyncIterator[tuple[TestGateway, Taken]]:
    taken = Taken()
    limits = KeyLimits(LimitsFile(file_of(tmp_path, "[default]\ntokens_per_min = 1000")), taken)
    async with TestGateway([scheduler.address], limits=limits) as gateway:
        yield await gateway.ready(), taken


CLAIMED = types.Continuation(samples=[types.SampleState(output_token_ids=[7] * 19)])
REQUESTS: dict[str, tuple[pb.GenerateRequest, list[int], int]] = {  # with the tokens that come back, and those taken
    "output": (pb.GenerateRequest(stop=types.StopParams(max_tokens=20)), [7, 7], 24),
    "claimed output": (pb.GenerateRequest(stop=types.StopParams(max_tokens=20), continuation=CLAIMED), [7], 24),
    "an empty continuation": (
        pb.GenerateRequest(stop=types.StopParams(max_tokens=1), continuation=types.Continuation()),
        [7],
        5,
    ),
    "best_of": (
        pb.GenerateRequest(stop=types.StopParams(max_tokens=10), sampling=types.SamplingParams(n=1, best_of=3)),
        [],
        34,
    ),
    "beams": (
        pb.GenerateRequest(stop=types.StopParams(max_tokens=10), sampling=types.SamplingParams(n=2, beam_width=4)),
        [7],
        44,
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_counts_what_it_computes(
    counted: tuple[TestGateway, Taken], scheduler: FakeScheduler, name: str
) -> None:
    gateway, taken = counted
    request, ids, expected = REQUESTS[name]
    sent = pb.GenerateRequest(prompt=pb.Prompt(tokens=types.TokenIds(ids=[1, 2, 3, 4])), sampling=SEEDED)
    sent.MergeFrom(request)
    stream = gateway.stub.Generate(sent)
    await until(lambda: scheduler.submits)
    (submit,) = scheduler.submits
    for sample in range(submit.sampling.n):
        known = len(submit.continuation.samples[0].output_token_ids) if submit.continuation.samples else 0
        scheduler.send(submit.handle, ids, sample=sample, offset=known)
        scheduler.finish(submit.handle, sample=sample)
    await rest(stream)
    await until(lambda: taken.unused)
    computed = 4 if name == "beams" else len(ids)
    known = 19 if name == "claimed output" else 0
    assert (taken.taken, taken.unused) == ([expected], [expected - 4 - known - computed])


async def test_a_cancelled_beam_search_counts_in_full(
    counted: tuple[TestGateway, Taken], scheduler: FakeScheduler
) -> None:
    gateway, taken = counted
    sent = pb.GenerateRequest(prompt=pb.Prompt(tokens=types.TokenIds(ids=[1, 2, 3, 4])))
    sent.MergeFrom(REQUESTS["beams"][0])
    stream = gateway.stub.Generate(sent)
    await until(lambda: scheduler.submits)
    stream.cancel()
    await until(lambda: taken.unused)
    assert (taken.taken, taken.unused) == ([44], [0])


async def test_calls_without_a_worker_are_counted(counted: tuple[TestGateway, Taken]) -> None:
    gateway, taken = counted
    text = pb.Prompt(text="x" * 4000)
    await gateway.stub.Tokenize(pb.TokenizeRequest(prompt=text))
    await gateway.stub.CountTokens(pb.CountTokensRequest(request=pb.GenerateRequest(prompt=pb.Prompt(text="x" * 400))))
    await gateway.stub.Detokenize(pb.DetokenizeRequest(ids=[5] * 100))
    await gateway.stub.ListModels(pb.ListModelsRequest())
    await gateway.stub.GetModel(pb.GetModelRequest())
    assert [round(num_tokens, -2) for num_tokens in taken.taken] == [1000, 100, 100, 0, 0]
    assert taken.unused == [0] * 5
