"""Chats with tools in the SDK: messages and options become a request, parts become a typed answer."""

from __future__ import annotations

import struct

import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire_client import InvalidRequest, StreamCorrupted, ToolCall, ToolCallDelta
from quire_client.assembly import StreamAssembler, assembler_of
from quire_client.requests.generate import generate_request
from quire_client.types import Delta
from xxhash import xxh3_64_intdigest

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


def chat(messages, **options):
    return generate_request(None, None, messages, options)


def test_openai_messages_become_a_chat():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Rain?", "name": "Ann"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "no"},
    ]
    request = chat(messages)
    assert list(request.prompt.chat.messages) == [
        pb.ChatMessage(role="developer", content="Be\nbrief."),
        pb.ChatMessage(role="user", content="Rain?", name="Ann"),
        pb.ChatMessage(
            role="assistant",
            reasoning="Hm.",
            tool_calls=[pb.ToolCall(id="c1", name="weather", arguments='{"city": "Paris"}')],
        ),
        pb.ChatMessage(role="tool", content="no", tool_call_id="c1"),
    ]
    assert request.output.parse_chat
    assert not chat("Hi", parse_chat=False).output.parse_chat
    assert not generate_request("Hi", None, None, {}).output.HasField("parse_chat")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": "a", "audio": {"id": "x"}},
        {"role": "user", "content": "a", "unknown": 1},
        {"role": "assistant", "tool_calls": [1]},
        {"role": 1, "content": "a"},
        "text",
    ],
)
def test_invalid_messages_are_refused(message):
    with pytest.raises(InvalidRequest) as caught:
        chat([message])
    assert caught.value.field_violations[0].field == "messages"


def event(seq, **kind):
    return pb.GenerateResponse(event_seq=seq, **kind)


ACCEPTED = pb.Accepted(request_id="r", seed=1, model="m", prompt_tokens=1)


def part(item, offset, *, call=None, **text):
    if call is not None:
        text = {"tool_call": pb.ToolCallPart(index=0, id="c", name="f", arguments=call)}
    return pb.AnswerPart(item=item, offset=offset, **text)


def test_parts_become_deltas_and_a_sample():
    assembler = StreamAssembler(chat("Hi"))
    assembler.feed(event(0, accepted=ACCEPTED))
    deltas = [
        assembler.feed(
            event(1, chunk=pb.Chunk(token_ids=[1], parts=[part(0, 0, reasoning="Hm"), part(1, 0, content="é")]))
        ),
        assembler.feed(
            event(2, chunk=pb.Chunk(offset=1, token_ids=[2], parts=[part(1, 2, content="!"), part(2, 0, call="{")]))
        ),
        assembler.feed(event(3, chunk=pb.Chunk(offset=2, token_ids=[3], parts=[part(2, 1, call="}")]))),
    ]
    finished = pb.Finished(
        reason=types_pb2.FINISH_REASON_EOS, usage=types_pb2.Usage(output_tokens=3, reasoning_tokens=1)
    )
    finished.output_digest = assembler._digest(b"\1\0\0\0\2\0\0\0\3\0\0\0")
    assembler.feed(event(4, finished=finished))
    assert deltas == [
        Delta(0, 0, (1,), "é", "Hm"),
        Delta(0, 1, (2,), "!", "", (ToolCallDelta(0, "c", "f", "{"),)),
        Delta(0, 2, (3,), "", "", (ToolCallDelta(0, "c", "f", "}"),)),
    ]
    result = assembler.result()
    assert (result.text, result.reasoning, result.tool_calls) == ("é!", "Hm", (ToolCall("c", "f", "{}"),))
    assert result.usage.reasoning_tokens == 1


def resuming():
    assembler = StreamAssembler(chat("Hi"), can_resume=True)
    assembler.feed(event(0, accepted=ACCEPTED))
    assembler.feed(event(1, chunk=pb.Chunk(token_ids=[1], parts=[part(0, 0, content="ab"), part(1, 0, call="{é")])))
    assembler.next_request()
    assembler.feed(event(0, accepted=ACCEPTED))
    return assembler


def test_text_that_is_repeated_after_a_break_is_dropped():
    assembler = resuming()
    delta = assembler.feed(event(1, chunk=pb.Chunk(offset=1, token_ids=[2], parts=[part(1, 1, call="é}")])))
    assert delta == Delta(0, 1, (2,), "", "", (ToolCallDelta(0, "c", "f", "}"),))


@pytest.mark.parametrize(
    "wrong", [part(1, 0, call="[é"), part(1, 9, call="}"), part(3, 0, content="x"), part(1, 3, content="x")]
)
def test_parts_that_do_not_continue_the_answer_are_refused(wrong):
    with pytest.raises(StreamCorrupted):
        resuming().feed(event(1, chunk=pb.Chunk(offset=1, token_ids=[2], parts=[wrong])))


PARTS = [
    part(0, 0, reasoning="Hm"), part(1, 0, content="é"), part(1, 2, content="!"), part(2, 0, call="{"),
    part(2, 1, call='"a"'), part(2, 4, call="}"), part(3, 0, content="."),
]  # fmt: skip


def answer_after(start, break_at):
    """The parts after `start` tokens, of which the one before `break_at` is sent again after a break."""
    request = pb.ResumeRequest(request_id="r", after=[pb.ResumePosition(index=0, num_tokens=start)])
    assembler = assembler_of(request, can_resume=True)
    accepted = pb.Accepted(request_id="r", seed=1, model="m", n=1)
    assembler.next_request()
    assembler.feed(event(0, accepted=accepted))
    seq = 0
    for at in range(start, len(PARTS)):
        parts = [PARTS[at]]
        if at == break_at:
            assembler.next_request()
            assembler.feed(event(0, accepted=accepted))
            seq, parts = 0, PARTS[max(start, at - 1) : at + 1]
        seq += 1
        assembler.feed(event(seq, chunk=pb.Chunk(offset=at, token_ids=[at], parts=parts)))
    digest = xxh3_64_intdigest(struct.pack(f"<{len(PARTS)}I", *range(len(PARTS))))
    finished = pb.Finished(reason=types_pb2.FINISH_REASON_EOS, output_digest=digest)
    assembler.feed(event(seq + 1, finished=finished))
    return assembler.result()


@pytest.mark.parametrize("start", range(len(PARTS)))
def test_an_answer_that_is_resumed_has_the_parts_after_its_start(start):
    for break_at in range(start + 1, len(PARTS) + 1):
        sample = answer_after(start, break_at).samples[0]
        rest = PARTS[start:]
        assert sample.token_ids == tuple(range(start, len(PARTS)))
        assert sample.reasoning == "".join(one.reasoning for one in rest)
        assert sample.text == "".join(one.content for one in rest)
        calls = "".join(one.tool_call.arguments for one in rest)
        assert sample.tool_calls == ((ToolCall("c", "f", calls),) if calls else ())


@pytest.mark.parametrize("wrong", [part(0, 0, reasoning="H"), part(1, 0, content="é"), part(1, 9, content="x")])
def test_parts_before_the_start_of_a_resumed_answer_are_refused(wrong):
    request = pb.ResumeRequest(request_id="r", after=[pb.ResumePosition(index=0, num_tokens=2)])
    assembler = assembler_of(request, can_resume=True)
    accepted = pb.Accepted(request_id="r", seed=1, model="m", n=1)
    assembler.feed(event(0, accepted=accepted))
    assembler.feed(event(1, chunk=pb.Chunk(offset=2, token_ids=[2], parts=[PARTS[2]])))
    assembler.next_request()
    assembler.feed(event(0, accepted=accepted))
    with pytest.raises(StreamCorrupted):
        assembler.feed(event(1, chunk=pb.Chunk(offset=3, token_ids=[3], parts=[wrong])))
