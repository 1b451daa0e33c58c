"""The HTTP API in front of a fake scheduler: answers, streams, errors, keys, disconnects, shutdown."""

from __future__ import annotations

import asyncio
import io
import json
import re
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from quire.internal.v1 import scheduler_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.batches.batches import Batches, BatchLimits
from gateway_svc.callers.authenticator import ApiKeys, Authenticator
from gateway_svc.http import app as http_app
from gateway_svc.http.app import HttpApp, SitePolicy, with_cors
from gateway_svc.http.fields import ALIASES
from gateway_svc.http.handlers import Handlers, StatusHandlers
from gateway_svc.http.server import MAX_CONNECTIONS, HttpServer
from gateway_svc.limits.buckets import LimitsFile, LocalBuckets
from gateway_svc.limits.key_limits import KeyLimits
from gateway_svc.operators.admin import AdminServicer
from gateway_svc.operators.operator_port import NoOperators
from gateway_svc.operators.rollouts import RolloutServicer
from svc_common import memory
from svc_common.calls import RpcStats
from tests.hostile import campaigns
from tests.unit.gateway.fakes import EOS, LENGTH, FakeScheduler, TestGateway, make_bundle, make_info, until
from tests.unit.gateway.tokenizer_kinds import byte_level

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TIMEOUT = aiohttp.ClientTimeout(total=60)


class HttpGateway:
    """The HTTP API of a gateway, and a client of it."""

    def __init__(
        self,
        gateway: TestGateway,
        authenticator: Authenticator | None = None,
        *,
        origins: Sequence[str] = (),
        hosts: Sequence[str] = (),
        max_connections: int = MAX_CONNECTIONS,
        audit: Any = None,
        operators: Authenticator | NoOperators | None = None,
    ) -> None:
        self.is_serving = True
        self.stats = RpcStats()
        streams = gateway.servicer.generation.streams
        status = StatusHandlers(lambda: self.is_serving, streams, lambda: b"quire_up 1\n")
        directory = gateway.directory
        inspector: Any = None  # no endpoint inspects
        admin, rollouts = AdminServicer(directory, inspector), RolloutServicer(directory)
        batches = Batches(None, BatchLimits(1, 1, 1, 1.0))
        handlers = Handlers(gateway.servicer, directory, gateway.threads.requests, status, admin, rollouts, batches)
        self.operator_paths = sorted(handlers.operator_paths)
        self.paths = sorted(route.path for route in handlers.routes())
        app = HttpApp(
            handlers.routes(),
            authenticator=authenticator,
            stats=self.stats,
            audit=audit,
            operators=operators,
            operator_paths=self.operator_paths,
            sites=SitePolicy(hosts, origins),
        )
        app = with_cors(app, origins)
        self.server = HttpServer(app, "127.0.0.1:0", max_connections=max_connections)

    async def __aenter__(self) -> HttpGateway:
        self.session = aiohttp.ClientSession(await self.server.start(), timeout=TIMEOUT)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self.server.stop()

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        host, port = self.server.address
        return openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="unused", **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any, Any]:
        """Status, headers and JSON of an answer."""
        content = {"json": body} if body is not None else {}
        async with self.session.post(path, **content, **options) as reply:
            return reply.status, reply.headers, await reply.json()

    async def get(self, path: str, **options: Any) -> tuple[int, Any, Any]:
        async with self.session.get(path, **options) as reply:
            return reply.status, reply.headers, await reply.json()

    async def stream(self, path: str, body: Any) -> list[Any]:
        """The data of all events."""
        async with self.session.post(path, json={**body, "stream": True}) as reply:
            assert reply.status == 200, await reply.text()
            assert reply.headers["content-type"].startswith("text/event-stream")
            return events_of(await reply.text())


def events_of(text: str) -> list[Any]:
    parts = text.split("\n\n")
    assert parts.pop() == ""
    data = [part.removeprefix("data: ") for part in parts]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


@pytest.fixture
async def http(gateway: TestGateway) -> AsyncIterator[HttpGateway]:
    async with HttpGateway(gateway) as http:
        yield http


TOKENIZER = byte_level()
ERROR = types.FINISH_REASON_ERROR


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def texts(chunks: list[Any], index: int = 0) -> str:
    choices = [c for chunk in chunks if chunk != "[DONE]" for c in chunk["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


async def test_completions_of_a_model_without_a_tokenizer_are_token_ids() -> None:
    data = make_bundle({})
    scheduler = FakeScheduler(make_info(data), data)
    await scheduler.start()
    async with TestGateway([scheduler.address]) as gateway, HttpGateway(gateway) as http:
        await gateway.ready()
        scheduler.play([9, 10])
        status, _, answer = await http.post(COMPLETIONS, {"prompt": [5, 6, 7]})
        (choice,) = answer["choices"]
        assert (status, choice["text"], choice["token_ids"]) == (200, "", [9, 10])
        assert choice["prompt_token_ids"] == [5, 6, 7]
        scheduler.play([9, 10])
        chunks = await http.stream(COMPLETIONS, {"prompt": [[5], [6, 7]]})
        found = [one for chunk in chunks[:-1] for one in chunk["choices"]]
        for index in (0, 1):
            assert [id_ for one in found if one["index"] == index for id_ in one.get("token_ids", [])] == [9, 10]
        for body in ({"prompt": "text"}, {"prompt": [5], "stop": "x"}, {"prompt": [5], "echo": True}):
            status, _, answer = await http.post(COMPLETIONS, body)
            assert (status, "has no tokenizer.json" in answer["error"]["message"]) == (400, True)
        status, _, answer = await http.post(CHAT, HELLO)
        assert (status, answer["error"]["param"]) == (400, "messages")
    await scheduler.stop()


async def test_a_chat(http: HttpGateway, scheduler: FakeScheduler) -> None:
    output = [*ids_of("hi you"), 1]
    scheduler.play(output, EOS)
    status, headers, answer = await http.post(CHAT, {**HELLO, "user": "me"}, headers={"x-request-id": "mine-1"})
    assert status == 200
    assert headers["x-request-id"] == "mine-1"
    assert headers["x-ignored-fields"] == "user"
    assert answer.pop("id") == scheduler.submits[0].request_id
    assert answer.pop("created") > 0
    num_prompt = len(ids_of("hello"))
    assert answer == {
        "object": "chat.completion",
        "model": "demo",
        "system_fingerprint": "r1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi you", "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(output),
            "total_tokens": num_prompt + len(output),
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_a_streamed_chat(http: HttpGateway, scheduler: FakeScheduler) -> None:
    output = ids_of("hi you")
    scheduler.play(output)
    body = {**HELLO, "n": 2, "max_tokens": len(output), "stream_options": {"include_usage": True}}
    *chunks, usage, done = await http.stream(CHAT, body)
    assert done == "[DONE]"
    assert texts(chunks, 0) == texts(chunks, 1) == "hi you"
    first = [chunk["choices"][0] for chunk in chunks[:2]]
    assert [(choice["index"], choice["delta"]["role"]) for choice in first] == [(0, "assistant"), (1, "assistant")]
    ends = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert [(end["index"], end["finish_reason"]) for end in ends] == [(0, "length"), (1, "length")]
    assert all(chunk["usage"] is None and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in (*chunks, usage)}) == 1
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2 * len(output)


async def test_prompts_of_one_body_are_choices_of_one_answer(http: HttpGateway, scheduler: FakeScheduler) -> None:
    def play(submit: pb.Submit) -> None:
        output = ids_of(f" output {scheduler.submits.index(submit)}")
        for sample in range(submit.sampling.n):
            scheduler.finish(submit.handle, LENGTH, ids=output, sample=sample)

    scheduler.on_submit = play
    body = {"prompt": ["one", "two"], "n": 2, "echo": True}
    _, _, answer = await http.post(COMPLETIONS, body)
    first = {"one": 0, "two": 1} if answer["choices"][0]["text"] == "one output 0" else {"one": 1, "two": 0}
    expected = [f"{prompt} output {first[prompt]}" for prompt in ("one", "one", "two", "two")]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["object"] == "text_completion"
    assert answer["usage"]["prompt_tokens"] == len(ids_of("one")) + len(ids_of("two"))
    scheduler.submits.clear()
    chunks = await http.stream(COMPLETIONS, body)
    assert sorted(texts(chunks, i) for i in range(4)) == sorted(expected)
    assert [texts(chunks, i)[:3] for i in range(4)] == ["one", "one", "two", "two"]


@pytest.mark.parametrize("prompt", [ids_of("one two three"), "one two three"])
async def test_a_truncated_prompt_is_returned_as_it_is_computed(
    http: HttpGateway, scheduler: FakeScheduler, prompt: Any
) -> None:
    scheduler.play(ids_of(" you"))
    kept = ids_of("one two three")[-3:]
    body = {"prompt": prompt, "truncate_prompt_tokens": 3, "return_token_ids": True, "echo": True}
    _, _, answer = await http.post(COMPLETIONS, body)
    (choice,) = answer["choices"]
    shown = TOKENIZER.decode(kept)
    assert (choice["prompt_token_ids"], choice["text"]) == (kept, f"{shown} you")
    assert list(array("I", scheduler.submits[-1].prompt_token_ids)) == kept
    chunks = await http.stream(COMPLETIONS, body)
    assert (chunks[0]["choices"][0]["prompt_token_ids"], texts(chunks, 0)) == (kept, f"{shown} you")
    _, _, answer = await http.post(COMPLETIONS, {**body, "truncate_prompt_tokens": 99})
    assert answer["choices"][0]["prompt_token_ids"] == ids_of("one two three")
    _, _, answer = await http.post(CHAT, {**HELLO, "truncate_prompt_tokens": 1, "return_token_ids": True})
    assert answer["prompt_token_ids"] == ids_of("hello")[-1:]
    rollout = {"token_ids": ids_of("one two three"), "sampling_params": {"truncate_prompt_tokens": 3}}
    _, _, answer = await http.post("/inference/v1/generate", rollout)
    assert answer["prompt_token_ids"] == kept


async def test_every_route_is_attacked(http: HttpGateway) -> None:
    """A route without a row in the tables of tests/hostile would be missed by `make hostile`."""
    routes = await campaigns.routes_of(http.session, {})
    assert {path for _, path in routes} == {re.sub(r":\w+}", "}", path) for path in http.paths}
    assert {path for method, path in routes if method == "POST"} - set(ALIASES) == set(campaigns.BODIES)


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        (CHAT, {**HELLO, "temperature": 3}, 400, "temperature", None),
        (CHAT, {**HELLO, "max_tokens": 1000}, 400, "max_tokens", "context_length_exceeded"),
        (CHAT, {**HELLO, "model": "other"}, 404, "model", "model_not_found"),
        (CHAT, {"messages": [{"role": "king", "content": "a"}]}, 400, "messages[0].role", None),
        (CHAT, {**HELLO, "min_tokens": 9, "max_tokens": 5}, 400, "min_tokens", None),
        (COMPLETIONS, {"prompt": ""}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": [5] * 300}, 400, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "a " * 400_000}, 400, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": [9999]}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": ["a", [9999]]}, 400, "prompt", None),
        ("/tokenize", {"prompt": ""}, 400, "prompt", None),
        ("/detokenize", {"tokens": [9999]}, 400, "tokens", None),
        ("/nothing", {}, 404, None, None),
        ("/health", {}, 405, None, None),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_errors(
    http: HttpGateway, path: str, body: Any, status: int, param: str | None, code: str | None, is_stream: bool
) -> None:
    got, headers, answer = await http.post(path, {**body, "stream": is_stream})
    assert got == status, answer
    assert answer["error"]["param"] == param
    assert answer["error"]["code"] == code
    assert headers["x-request-id"].startswith("req-")
    assert headers["x-should-retry"] == "false"
    if code == "context_length_exceeded":
        assert answer["error"]["message"].startswith("This model's maximum context length is 256 tokens. However, ")
    assert sum(http.stats.errors.values()) == 1


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/unknown", "docs/http.md lists the endpoints"),
    ],
)
async def test_an_unknown_path_names_a_similar_one(http: HttpGateway, path: str, advice: str) -> None:
    status, _, answer = await http.post(path, HELLO)
    assert (status, answer["error"]["message"]) == (404, f"there is no endpoint {path}; {advice}")
    status, _, answer = await http.post("/x" * 1000, HELLO)
    assert (status, len(answer["error"]["message"]) < 200) == (404, True)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_full_queue(http: HttpGateway, scheduler: FakeScheduler, is_stream: bool) -> None:
    scheduler.refusals.append(pb.Refusal(code=8, message="full", retry_after_ms=1500))
    status, headers, answer = await http.post(CHAT, {**HELLO, "stream": is_stream})
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    assert (headers["retry-after-ms"], headers["retry-after"]) == ("1500", "2")
    assert headers["x-should-retry"] == "true"


async def test_more_prompts_than_streams_are_refused_before_the_first_one_starts(
    http: HttpGateway, scheduler: FakeScheduler
) -> None:
    status, _, body = await http.post(COMPLETIONS, {"prompt": [[5]] * 65})
    assert (status, scheduler.submits) == (429, [])
    assert "this request needs 65 more; the limit is 64 (--max-streams)" in body["error"]["message"]


async def test_a_refused_prompt_cancels_the_other_prompts(
    http: HttpGateway, scheduler: FakeScheduler, gateway: TestGateway
) -> None:
    scheduler.refusals.extend([None, pb.Refusal(code=8, message="full")])
    assert (await http.post(COMPLETIONS, {"prompt": ["a", "b"], "stream": True}))[0] == 429
    await until(lambda: gateway.num_open == 0 and len(scheduler.cancels) == 1)


async def test_a_body_that_is_too_large(http: HttpGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "MAX_BODY_BYTES", 1000)
    status, _, answer = await http.post(CHAT, data=io.BytesIO(b"x" * 3_000_000))
    assert (status, answer["error"]["message"]) == (
        413,
        "the body has 3000000 bytes; at most 1000 are allowed: send a smaller body",
    )


async def test_a_body_that_does_not_arrive(http: HttpGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "REQUEST_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_connection(*http.server.address)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n{")
    assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    writer.close()


@pytest.mark.parametrize("rest", [b"zz\r\n", b"-1\r\nx\r\n", b"5\r\nhello\r\n" + b"1;" + b"e" * 70_000])
async def test_a_malformed_body_gets_one_answer_and_no_traceback(
    http: HttpGateway, caplog: pytest.LogCaptureFixture, rest: bytes
) -> None:
    """The handler of the request used to answer too, which failed."""
    reader, writer = await asyncio.open_connection(*http.server.address)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    await writer.drain()
    writer.write(rest)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert (await http.get("/version"))[0] == 200
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


async def test_only_operators_control_weights_and_pauses(gateway: TestGateway, tmp_path: Path) -> None:
    for owner, key in (("clients/me", "secret"), ("operators/me", "operator")):
        (tmp_path / owner).parent.mkdir()
        (tmp_path / owner).write_text(key)
    clients, operators = (Authenticator(ApiKeys(tmp_path / name)) for name in ("clients", "operators"))

    async def statuses(http: HttpGateway, key: str) -> set[int]:
        """Statuses of a request that every endpoint refuses, if it is not refused because of the key."""
        options = {"headers": {"authorization": f"Bearer {key}"}, "data": b"[]"}
        found = [await http.post(path, **options) for path in http.operator_paths]
        return {status for status, _, _ in found}

    async with HttpGateway(gateway, clients, operators=operators) as http:
        assert "/update_weights" in http.operator_paths
        assert await statuses(http, "secret") == {401}
        assert (await http.get("/v1/models", headers={"authorization": "Bearer operator"}))[0] == 401
        assert not await statuses(http, "operator") & {401, 403}
    async with HttpGateway(gateway, clients, operators=NoOperators()) as http:
        assert await statuses(http, "secret") == {403}


async def test_requests_that_fail_and_pages_count_against_the_owner(gateway: TestGateway, tmp_path: Path) -> None:
    (tmp_path / "me").write_text("secret")
    file = tmp_path.with_name("limits.toml")
    file.write_text("[default]\nrequests_per_s = 0.01")
    for path, body, status in ((CHAT, b"[1e308", 400), ("/metrics", None, 200), ("/unknown", b"{}", 404)):
        limits = KeyLimits(LimitsFile(file), LocalBuckets())
        async with HttpGateway(gateway, Authenticator(ApiKeys(tmp_path), begin=limits.begin)) as http:
            options = {"headers": {"authorization": "Bearer secret"}, "data": body}
            found = []
            for _ in range(3):
                async with http.session.request("GET" if body is None else "POST", path, **options) as reply:
                    found.append(reply.status)
        assert found == [status, 429, 429]


OWN = ("127.0.0.1:8000", "localhost", "localhost:1", "[::1]:8080", "10.0.0.3", "gateway:8000", "q.default.svc", "")
FOREIGN = ("evil.example:8000", "evil.example", "localhost.evil.example:1", "127.0.0.1.evil", "localhost.", "svc.x")


async def test_without_keys_only_local_names_are_hosts(gateway: TestGateway) -> None:
    async with HttpGateway(gateway) as http:
        for host in OWN:
            assert (await http.get("/v1/models", headers={"host": host}))[0] == 200, host
        for host in FOREIGN:
            status, _, answer = await http.get("/v1/models", headers={"host": host})
            assert (status, f"not at {host!r}" in answer["error"]["message"]) == (403, True)
            assert (await http.get("/health", headers={"host": host}))[0] == 403
    async with HttpGateway(gateway, hosts=["evil.example"]) as http:
        assert (await http.get("/v1/models", headers={"host": "evil.example:8000"}))[0] == 200


async def test_without_keys_pages_of_other_sites_are_refused_on_every_path(
    gateway: TestGateway, tmp_path: Path
) -> None:
    foreign: list[dict[str, str]] = [{"sec-fetch-site": site} for site in ("cross-site", "same-site")]
    foreign += [{"origin": origin} for origin in ("https://evil.example", "http://127.0.0.1:1", "null")]
    foreign += [{"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}]
    chat = "https://chat.example"
    async with HttpGateway(gateway) as http, HttpGateway(gateway, origins=[chat]) as permitting:
        for path in (*http.paths, "/unknown"):
            for headers in foreign:
                status, _, answer = await http.post(path, data=b"{}", headers=headers)
                assert (status, "another site" in answer["error"]["message"]) == (403, True), (path, headers)
        own = {"origin": f"http://127.0.0.1:{http.server.address[1]}", "sec-fetch-site": "same-origin"}
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        for headers in (own, link, {"sec-fetch-site": "none"}):
            assert (await http.get("/v1/models", headers=headers))[0] == 200
        allowed = {"origin": chat, "sec-fetch-site": "cross-site"}
        assert (await permitting.get("/v1/models", headers=allowed))[0] == 200
        assert (await permitting.get("/v1/models", headers=foreign[2]))[0] == 403
    (tmp_path / "me").write_text("secret")
    async with HttpGateway(gateway, Authenticator(ApiKeys(tmp_path))) as http:
        headers = {"host": "llm.example.com", "origin": "https://evil.example", "authorization": "Bearer secret"}
        assert (await http.get("/v1/models", headers=headers))[0] == 200, "a page of another site has no key"


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/v1/load_lora_adapter"])
async def test_a_nested_body_of_an_operator_is_refused(gateway: TestGateway, path: str) -> None:
    async with HttpGateway(gateway) as http:
        status, _, answer = await http.post(path, data=b'{"a":' + b"[" * 5_000)
    assert (status, answer["error"]["message"][:20]) == (400, "the body is not JSON")


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]])
async def test_requests_belong_to_the_owner_of_the_key(
    gateway: TestGateway, scheduler: FakeScheduler, tmp_path: Path, prompts: list[str]
) -> None:
    (tmp_path / "team").write_text("secret")
    scheduler.play(ids_of("hi"))
    async with HttpGateway(gateway, Authenticator(ApiKeys(tmp_path))) as http:
        key = {"authorization": "Bearer secret"}
        _, _, answer = await http.post(COMPLETIONS, {"prompt": prompts}, headers=key)
    assert len(scheduler.submits) == len(prompts)
    assert all(submit.request_id.startswith(f"team/{answer['id']}") for submit in scheduler.submits)


async def test_a_stream_that_fails_ends_with_an_error_event(
    http: HttpGateway, scheduler: FakeScheduler, gateway: TestGateway
) -> None:
    scheduler.on_submit = lambda submit: scheduler.send(submit.handle, ids_of("hi"))
    call = asyncio.create_task(http.stream(COMPLETIONS, {"prompt": "a"}))
    await until(lambda: len(scheduler.submits) == 1)
    await gateway.streams.drain(0.05)
    *chunks, error = await call
    assert texts(chunks) == "hi"
    assert error["error"]["type"] == "server_error"
    status, headers, _ = await http.post(COMPLETIONS, {"prompt": "a"})
    assert (status, headers["x-should-retry"]) == (503, "true")
