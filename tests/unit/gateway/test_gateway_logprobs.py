"""Log probabilities in the gateway: merged for slow readers, checked, summed, and continued after a lost scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import grpc
import pytest
from quire.internal.v1 import logprobs_pb2
from quire.internal.v1 import scheduler_pb2 as internal
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.schedulers.logprobs import MAX_EVENT_ENTRIES, LogprobJournal, TokenLogprobs
from gateway_svc.text.bundle import Tokenizer
from tests.unit.gateway.fakes import LENGTH, FakeScheduler, TestGateway, refused, rest, u32, until
from tests.unit.gateway.tokenizer_kinds import bundle_files, byte_fallback, byte_level

ASKS = pb.OutputParams(logprobs=1)
ASKS_PROMPT = pb.OutputParams(prompt_logprobs=0)


def columns(token_ids: Sequence[int], num_top: int) -> logprobs_pb2.LogprobColumns:
    """Token t has log probability -t / 4 and rank t + 1; the most likely tokens are t + 1, t + 2, ..."""
    entries = [t + i for t in token_ids for i in range(1 + num_top)]
    return logprobs_pb2.LogprobColumns(
        lens=u32([1 + num_top] * len(token_ids)),
        logprobs=array("f", [-entry / 4 for entry in entries]).tobytes(),
        token_ids=u32(entries),
        ranks=u32([t + 1 for t in token_ids]),
    )


def send(scheduler: FakeScheduler, handle: int, ids: Sequence[int], offset: int, *, ends: bool = False) -> None:
    deltas = internal.Deltas(
        handles=u32([handle] * len(ids)), offsets=u32(range(offset, offset + len(ids))), token_ids=u32(ids),
        logprobs=columns(ids, 1),
    )  # fmt: skip
    if ends:
        deltas.finished.add(handle=handle, reason=LENGTH)
    scheduler.say(deltas=deltas)


def send_prompt(scheduler: FakeScheduler, handle: int, positions: Sequence[int]) -> None:
    scheduler.say(
        deltas=internal.Deltas(
            prompt_handles=u32([handle] * len(positions)), prompt_positions=u32(positions),
            prompt_logprobs=columns([100 + p for p in positions], 0),
        )
    )  # fmt: skip


def chunks_of(events: Sequence[pb.GenerateResponse]) -> list[pb.Chunk]:
    return [event.chunk for event in events if event.HasField("chunk")]


async def test_a_slow_reader_gets_every_entry_once(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.generate(output=ASKS, stop=types.StopParams(max_tokens=200))
    events = [await call.read()]
    handle = scheduler.submits[0].handle
    assert scheduler.submits[0].logprobs == 1
    ids = [100 + i for i in range(200)]
    for position in range(199):
        send(scheduler, handle, [ids[position]], position)
    request = gateway.clients[0].stream._by_handle[handle]
    await until(lambda: len(request.samples[0].outputs) == 199)
    send(scheduler, handle, [ids[199]], 199, ends=True)
    events += await rest(call)
    chunks = chunks_of(events)
    for chunk in chunks:
        assert len(chunk.logprobs.logprobs) == len(chunk.logprobs.ranks) == len(chunk.token_ids)
        assert list(chunk.logprobs.top_token_ids) == [id_ + 1 for id_ in chunk.token_ids]
        assert len(chunk.logprobs.token_bytes) == len(chunk.logprobs.top_token_bytes) == len(chunk.token_ids)
    assert [value for chunk in chunks for value in chunk.logprobs.logprobs] == [-id_ / 4 for id_ in ids]
    assert [rank for chunk in chunks for rank in chunk.logprobs.ranks] == [id_ + 1 for id_ in ids]
    assert events[-1].finished.cumulative_logprob == -sum(ids) / 4


async def test_events_stay_small(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    journal = LogprobJournal(128)
    most = journal.tokens_per_event
    assert most * 129 <= MAX_EVENT_ENTRIES
    for token in range(most + 3):
        assert journal.append(TokenLogprobs(array("f", [0.0] * 129), array("I", [token] * 129), 1))
    first, second = journal.take(most), journal.take(3)
    assert (list(first.token_ids), list(second.token_ids)) == ([*range(most)], [most, most + 1, most + 2])
    assert (len(second.top), len(journal)) == (3 * 128, 0)
    assert not journal.append(None)
    assert not journal.append(TokenLogprobs(array("f", [0.0]), array("I", [1]), 1))


@pytest.mark.parametrize("scored", [False, True])
async def test_missing_entries_fail_the_request(gateway: TestGateway, scheduler: FakeScheduler, scored: bool) -> None:
    call = gateway.generate(output=pb.OutputParams(logprobs=1 + scored))
    await call.read()
    handle = scheduler.submits[0].handle
    if scored:
        send(scheduler, handle, [10], 0)
    else:
        scheduler.send(handle, [10])
    error = await refused(call)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "no or too few log probabilities for output position 0" in error.details()


PROMPT = [100, 101, 102, 103, 104, 105]


def prompt_request(**fields: Any) -> dict[str, Any]:
    return {"prompt": pb.Prompt(tokens=types.TokenIds(ids=PROMPT)), "output": ASKS_PROMPT} | fields


def check_prompt(events: Sequence[pb.GenerateResponse], start: int) -> None:
    """The prompt's events have the positions from `start` on, once and in order, before the first chunk."""
    prompts = [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]
    kinds = [event.WhichOneof("event") for event in events if event.WhichOneof("event") != "accepted"]
    assert kinds[: len(prompts)] == ["prompt_logprobs"] * len(prompts)
    assert [token for prompt in prompts for token in prompt.token_ids] == PROMPT[start:]
    assert [value for prompt in prompts for value in prompt.logprobs.logprobs] == [-id_ / 4 for id_ in PROMPT[start:]]
    assert prompts[0].offset == start
    for before, after in pairwise(prompts):
        assert after.offset == before.offset + len(before.token_ids)
    has_first = [prompt.HasField("first_token_id") for prompt in prompts]
    assert has_first == [start == 1, *[False] * (len(prompts) - 1)]
    assert not has_first[0] or prompts[0].first_token_id == PROMPT[0]


async def test_prompt_positions_come_before_the_first_chunk(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.generate(**prompt_request())
    events = [await call.read()]
    handle = scheduler.submits[0].handle
    send_prompt(scheduler, handle, [1, 2])
    events.append(await call.read())
    send_prompt(scheduler, handle, [2, 3, 4])  # a repeated position is dropped
    send_prompt(scheduler, handle, [5])
    scheduler.finish(handle, ids=[9])
    events += await rest(call)
    check_prompt(events, 1)
    assert [list(chunk.token_ids) for chunk in chunks_of(events)] == [[9]]


@pytest.mark.parametrize(
    ("positions", "message"), [([2], "prompt position 2, expected 1"), ([1, 2], "a token before all prompt_logprobs")]
)
async def test_a_missing_prompt_position_fails_the_request(
    gateway: TestGateway, scheduler: FakeScheduler, positions: list[int], message: str
) -> None:
    call = gateway.generate(**prompt_request())
    await call.read()
    send_prompt(scheduler, scheduler.submits[0].handle, positions)
    scheduler.finish(scheduler.submits[0].handle, ids=[9])
    error = await refused(call)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert message in error.details()


@pytest.mark.parametrize(("num_received", "has_output"), [(3, False), (0, True)])
async def test_a_continuation_gets_the_missing_positions(
    gateway: TestGateway, scheduler: FakeScheduler, num_received: int, has_output: bool
) -> None:
    samples = [types.SampleState(output_token_ids=[8])] if has_output else []
    continuation = types.Continuation(samples=samples, num_prompt_logprobs=num_received)
    call = gateway.generate(**prompt_request(sampling=types.SamplingParams(seed=1), continuation=continuation))
    events = [await call.read()]
    submit = scheduler.submits[0]
    assert submit.continuation.num_prompt_logprobs == (len(PROMPT) if has_output else num_received)
    if not has_output:
        send_prompt(scheduler, submit.handle, [3, 4, 5])
    scheduler.finish(submit.handle, ids=[9], offset=len(submit.continuation.samples))
    events += await rest(call)
    if has_output:
        assert not any(event.HasField("prompt_logprobs") for event in events)
    else:
        check_prompt(events, 3)


# -- the bytes of tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_token_bytes_add_up_to_the_text(kind: Any) -> None:
    backend = kind()
    tokenizer = Tokenizer.from_files(bundle_files(backend))
    text = "Hello wörld 😀 ok"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(ids)).decode().strip() == text
    added = backend.get_added_tokens_decoder()
    for id_, token in added.items():
        assert tokenizer.token_bytes([id_]) == [token.content.encode()]
    assert tokenizer.token_bytes([10**6]) == [b""]
