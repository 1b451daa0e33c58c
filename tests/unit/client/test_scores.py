"""Log probabilities in the SDK's results and in the output of the command."""

from __future__ import annotations

import pytest
from quire.v1 import inference_pb2 as pb
from quire_client import StreamCorrupted
from quire_client.assembly import StreamAssembler


def events(*bodies: pb.GenerateResponse) -> list[pb.GenerateResponse]:
    for number, body in enumerate(bodies):
        body.event_seq = number
    return list(bodies)


def accepted() -> pb.GenerateResponse:
    return pb.GenerateResponse(accepted=pb.Accepted(request_id="r", model="m", seed=3, prompt_tokens=3))


def prompt_event(offset: int, *ids: int) -> pb.GenerateResponse:
    scores = pb.Logprobs(logprobs=[-id_ / 4 for id_ in ids], ranks=[1] * len(ids))
    return pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(offset=offset, token_ids=ids, logprobs=scores))


def chunk(offset: int, *ids: int) -> pb.GenerateResponse:
    scores = pb.Logprobs(logprobs=[-id_ / 4 for id_ in ids], ranks=[1] * len(ids))
    return pb.GenerateResponse(chunk=pb.Chunk(offset=offset, token_ids=ids, logprobs=scores))


def feed_all(assembler: StreamAssembler, *body: pb.GenerateResponse) -> None:
    assembler.next_request()
    for event in events(accepted(), *body):
        assembler.feed(event)


def request() -> pb.GenerateRequest:
    return pb.GenerateRequest(output=pb.OutputParams(logprobs=0, prompt_logprobs=0))


def test_a_continuation_has_the_sum_and_the_prompt_positions() -> None:
    assembler = StreamAssembler(request(), can_resume=True)
    feed_all(assembler, prompt_event(1, 5), prompt_event(2, 6), chunk(0, 8), chunk(1, 9))
    continuation = assembler.next_request(is_repeated=True).continuation
    assert continuation.num_prompt_logprobs == 3
    assert continuation.samples[0].cumulative_logprob == -4.25


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([prompt_event(2, 5)], "start at prompt position 2, expected 1"),
        ([prompt_event(1, 5), prompt_event(1, 5)], "start at prompt position 1, expected 2"),
        ([prompt_event(1, 5), chunk(0, 8)], "log probabilities of 2 of 3 prompt tokens"),
    ],
)
def test_missing_or_repeated_prompt_positions_are_corruption(body: list[pb.GenerateResponse], message: str) -> None:
    with pytest.raises(StreamCorrupted, match=message):
        feed_all(StreamAssembler(request()), *body)


def test_a_chunk_without_log_probabilities_is_corruption() -> None:
    assembler = StreamAssembler(pb.GenerateRequest(output=pb.OutputParams(logprobs=0)))
    bare = pb.GenerateResponse(chunk=pb.Chunk(token_ids=[4]))
    with pytest.raises(StreamCorrupted, match="token_ids and logprobs of a chunk differ: 1 and 0"):
        feed_all(assembler, bare)
