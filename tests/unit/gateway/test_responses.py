"""The Responses API in front of a fake scheduler, with and without records."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway_svc.records.recorder import OutputRecorder
from gateway_svc.records.redis_fields import RedisFields
from gateway_svc.records.store import RecordStore
from tests.processes.redis_server import RedisServer
from tests.unit.gateway.fakes import EOS, LENGTH, FakeScheduler, TestGateway
from tests.unit.gateway.test_chat_streams import serving
from tests.unit.gateway.test_http import HttpGateway
from tests.unit.gateway.test_http_chat import prompt_of
from tests.unit.gateway.tokenizer_kinds import byte_level

PATH = "/v1/responses"
TEXT = "Hello wörld"
IDS = byte_level().encode(TEXT, add_special_tokens=False).ids
INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "must be a string or a list"),
    ({"input": []}, "input", "must be a string or a list"),
    ({"input": [5]}, "input[0]", "must be an object"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "is 'robot'; must be one of"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url", "data:"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].file_id",
        "data:",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", "input_image"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
    ({"input": "x", "truncation": "some"}, "truncation", "must be one of auto, disabled"),
    ({"input": "x", "conversation": "c"}, "conversation", "is not served"),
    ({"input": "x", "temperature": 9}, "temperature", "must be a number from 0 to 2"),
    ({"input": "x", "max_output_tokens": "many"}, "max_output_tokens", "must be an integer"),
    ({"input": "x", "metadata": {"a": 5}}, "metadata.a", "must be a string"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "must be the name of a function"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", "is 'xml'"),
    ({"input": "x", "reasoning": {"effort": 5}}, "reasoning.effort", "must be one of none, minimal"),
    ({"input": "x", "background": True, "store": False}, "background", "must be stored"),
]


@pytest.fixture
async def http(gateway: TestGateway) -> AsyncIterator[HttpGateway]:
    """Without records."""
    async with HttpGateway(gateway) as http:
        yield http


@pytest.fixture
async def stored(redis_server: RedisServer, scheduler: FakeScheduler) -> AsyncIterator[HttpGateway]:
    """With records."""
    redis_server.flush()
    recorder = OutputRecorder(RecordStore(RedisFields(redis_server.url)))
    async with TestGateway([scheduler.address], recorder=recorder) as gateway:
        await gateway.ready()
        recorder.start()
        async with HttpGateway(gateway) as http:
            yield http
        await recorder.close()


def events_of(text: str) -> list[Any]:
    """The data of server-sent events, whose names equal their types."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def stream(http: HttpGateway, body: dict[str, Any]) -> list[Any]:
    async with http.session.post(PATH, json={**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        return events_of(await reply.text())


async def replay(http: HttpGateway, response_id: str, after: int) -> list[Any]:
    path = f"{PATH}/{response_id}?stream=true&starting_after={after}"
    async with http.session.get(path) as reply:
        assert reply.status == 200, await reply.text()
        text = await reply.text()
        return events_of(text) if text else []


@pytest.mark.parametrize("instructions", ["", "Be brief."])
async def test_the_oldest_turns_of_a_long_conversation_are_left_out(instructions: str) -> None:
    turns = [{"role": role, "content": f"{i} " * 100} for i in range(1, 9) for role in ("user", "assistant")]
    asked: Any = {"input": [*turns, {"role": "user", "content": "hello"}], "max_output_tokens": 9}
    asked["instructions"] = instructions or None
    async with serving() as (gateway, scheduler), HttpGateway(gateway) as http:
        scheduler.play([*IDS, 1], EOS)
        status, _, error = await http.post(PATH, asked)
        assert (status, error["error"]["code"]) == (400, "context_length_exceeded")
        status, _, answer = await http.post(PATH, {**asked, "truncation": "auto"})
        assert (status, answer["truncation"], answer["status"]) == (200, "auto", "completed")
        text = await prompt_of(scheduler, gateway)
        used = len(scheduler.submits[-1].prompt_token_ids) // 4
        assert text.startswith(f"<|im_start|>system\n{instructions}" if instructions else "<|im_start|>user\n")
        assert text.endswith("hello<|im_end|>\n<|im_start|>assistant\n")
        first = min(i for i in range(1, 9) if f"user\n{i} " in text)
        assert first > 1
        more = [turn for turn in turns if turn["content"][0] >= str(first - 1)]
        longer = {**asked, "input": [*more, asked["input"][-1]]}
        _, _, counted = await http.post(f"{PATH}/input_tokens", longer)
        assert used <= 2048 - 9 < counted["input_tokens"]
        status, _, _ = await http.post(PATH, {"input": "hello", "truncation": "auto"})
        assert status == 200


async def test_a_response_has_the_output_and_repeats_the_request(http: HttpGateway, scheduler: FakeScheduler) -> None:
    scheduler.play([*IDS, 1], EOS)
    asked = {
        "input": "hello",
        "instructions": "Be brief.",
        "temperature": 0.5,
        "metadata": {"a": "b"},
        "user": "u",
        "max_output_tokens": 50,
    }
    status, _, answer = await http.post(PATH, asked)
    assert (status, answer["status"], answer["object"], answer["model"]) == (200, "completed", "response", "demo")
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"], item["content"][0]["text"]) == (
        "message",
        "assistant",
        "completed",
        TEXT,
    )
    assert {name: answer[name] for name in asked if name != "input"} == {k: v for k, v in asked.items() if k != "input"}
    assert answer["usage"]["output_tokens"] == len(IDS) + 1
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + len(IDS) + 1
    assert answer["store"] is False
    submit = scheduler.submits[0]
    assert submit.sampling.temperature == 0.5
    assert submit.stop.max_tokens == 50


async def test_the_stream_ends_with_the_object_of_a_whole_answer(http: HttpGateway, scheduler: FakeScheduler) -> None:
    scheduler.play(IDS, LENGTH)
    events = await stream(http, {"input": [{"role": "user", "content": "hello"}]})
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["model"] == "demo"
    assert "".join(event.get("delta", "") for event in events) == TEXT
    final = events[-1]
    assert final["type"] == "response.incomplete"
    assert final["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["response"]["output"][0]["content"][0]["text"] == TEXT


@pytest.mark.parametrize(("body", "param", "words"), INVALID, ids=lambda value: str(value)[:40])
async def test_invalid_bodies_are_refused(http: HttpGateway, body: dict[str, Any], param: str, words: str) -> None:
    status, _, answer = await http.post(PATH, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert words in answer["error"]["message"]


async def test_a_stored_response_can_be_read_in_every_way(stored: HttpGateway, scheduler: FakeScheduler) -> None:
    scheduler.play([*IDS, 1], EOS)
    events = await stream(stored, {"input": "hello"})
    response = events[-1]["response"]
    path = f"{PATH}/{response['id']}"
    assert (await stored.get(path))[2] == response
    for after in range(-1, events[-1]["sequence_number"] + 1):
        rest = await replay(stored, response["id"], after)
        assert all(event["sequence_number"] > after for event in rest)
        known = "".join(event.get("delta", "") for event in rest)
        assert TEXT.endswith(known)
    assert await replay(stored, response["id"], events[-2]["sequence_number"]) == [events[-1]]
    listed = (await stored.get(f"{path}/input_items"))[2]
    assert [item["content"] for item in listed["data"]] == [[{"type": "input_text", "text": "hello"}]]
    assert (listed["has_more"], listed["first_id"]) == (False, listed["data"][0]["id"])
    async with stored.session.delete(path) as reply:
        assert await reply.json() == {"id": response["id"], "object": "response", "deleted": True}
    status, _, error = await stored.get(path)
    assert (status, error["error"]["param"]) == (404, "response_id")


async def test_a_response_without_store_is_answered_while_redis_is_lost(
    stored: HttpGateway, scheduler: FakeScheduler, redis_server: RedisServer
) -> None:
    scheduler.play(IDS)
    assert (await stored.post(PATH, {"input": "hello"}))[2]["store"] is True
    with redis_server.client() as redis:
        assert "cmdstat_set" not in redis.info("commandstats")  # nothing is written but the record
        redis.config_set("maxmemory", 1)
        status, _, answer = await stored.post(PATH, {"input": "hello"})
        redis.config_set("maxmemory", 0)
    assert (status, answer["store"]) == (200, False)
    redis_server.stop()
    try:
        status, _, answer = await stored.post(PATH, {"input": "hello"})
        assert (status, answer["store"]) == (200, False)
        assert (await stored.post(PATH, {"input": "hello", "store": True}))[0] == 503
    finally:
        redis_server.start()


async def test_a_failed_answer_ends_with_an_event(http: HttpGateway, scheduler: FakeScheduler) -> None:
    from quire.v1 import types_pb2 as types

    scheduler.on_submit = lambda submit: scheduler.finish(submit.handle, types.FINISH_REASON_ERROR, message="bad luck")
    events = await stream(http, {"input": "hello"})
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "bad luck"}
    status, _, answer = await http.post(PATH, {"input": "hello"})
    assert (status, answer["error"]["message"]) == (500, "bad luck")


NUMBERS = ("x", "-2", "%D9%A3", "+1", "1_0", "9" * 5000, "1&starting_after=2")


@pytest.mark.parametrize("query", ["stream=maybe", *(f"stream=true&starting_after={number}" for number in NUMBERS)])
async def test_wrong_queries_are_refused(stored: HttpGateway, query: str) -> None:
    assert (await stored.get(f"{PATH}/resp_1?{query}"))[0] == 400
