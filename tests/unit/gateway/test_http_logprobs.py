"""Log probabilities in HTTP answers, from events of a generation."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.http.openai import answers
from gateway_svc.http.openai.answers import PromptParts, StreamAnswer, WholeAnswer
from gateway_svc.http.openai.bodies import Generation, chat_generation, completion_generation

CRAB = "\U0001f980".encode()
OUTPUT = pb.Logprobs(
    logprobs=[-0.5, -2.0, -0.25],
    ranks=[1, 3, 1],
    top_token_ids=[5, 6, 6, 7, 9, 5],
    top_logprobs=[-0.5, -1.0, -0.75, -1.5, -0.25, -math.inf],
    token_bytes=[b"a", CRAB[:2], CRAB[2:]],
    top_token_bytes=[b"a", b"b", b"b", b"c", CRAB[2:], b"a"],
)
PROMPT = pb.PromptLogprobs(
    offset=1,
    token_ids=[8],
    logprobs=pb.Logprobs(
        logprobs=[-3.0], ranks=[4], top_token_ids=[1, 2], top_logprobs=[-1.0, -2.0], token_bytes=[b"p"],
        top_token_bytes=[b"x", b"y"],
    ),
    first_token_id=7,
    first_token_bytes=b"o",
)  # fmt: skip


def events(n: int = 1) -> list[pb.GenerateResponse]:
    """Accepted, the prompt's log probabilities, two chunks and the end of each sample."""
    found = [pb.GenerateResponse(accepted=pb.Accepted(prompt_tokens=2)), pb.GenerateResponse(prompt_logprobs=PROMPT)]
    first, rest = (_rows(OUTPUT, 0, 1), _rows(OUTPUT, 1, 3))
    for index in range(n):
        found.append(_chunk(index, "a", first))
        found.append(_chunk(index, "\U0001f980", rest))
        reason = types.FINISH_REASON_LENGTH
        found.append(pb.GenerateResponse(finished=pb.Finished(index=index, reason=reason)))
    return found


def _chunk(index: int, text: str, logprobs: pb.Logprobs) -> pb.GenerateResponse:
    parts = [pb.AnswerPart(content=text)]
    return pb.GenerateResponse(chunk=pb.Chunk(index=index, text=text, logprobs=logprobs, parts=parts))


def _rows(columns: pb.Logprobs, start: int, end: int) -> pb.Logprobs:
    k = len(columns.top_logprobs) // len(columns.logprobs)
    return pb.Logprobs(
        logprobs=columns.logprobs[start:end],
        ranks=columns.ranks[start:end],
        top_token_ids=columns.top_token_ids[start * k : end * k],
        top_logprobs=columns.top_logprobs[start * k : end * k],
        token_bytes=columns.token_bytes[start:end],
        top_token_bytes=columns.top_token_bytes[start * k : end * k],
    )


def completion(**body: Any) -> Generation:
    return completion_generation(json.dumps({"prompt": "op", **body}).encode())


def chat(**body: Any) -> Generation:
    return chat_generation(json.dumps({"messages": [{"role": "user", "content": "a"}], **body}).encode())


def whole(asked: Generation, shape: answers.Shape = answers.COMPLETION) -> Any:
    answer = WholeAnswer(asked, shape, "id", 1, [PromptParts("op" if asked.has_echo else "")])
    for event in events(asked.n):
        answer.take(0, event)
    return json.loads(answer.encoded())


def streamed(asked: Generation, shape: answers.Shape = answers.COMPLETION) -> list[Any]:
    answer = StreamAnswer(asked, shape, "id", 1, [PromptParts("op" if asked.has_echo else "")])
    data = b"".join(answer.take(0, event) for event in events(asked.n)).decode()
    return [json.loads(part.removeprefix("data: ")) for part in data.split("\n\n") if part]


def test_the_prompt_has_as_many_entries_as_the_output() -> None:
    asked = completion(logprobs=0, prompt_logprobs=2, echo=True)
    (choice,) = whole(asked)["choices"]
    assert choice["logprobs"]["top_logprobs"][1] == {"p": -3.0}
    assert choice["prompt_logprobs"][1].keys() == {"1", "2", "8"}


@pytest.mark.parametrize("echo", [False, True])
def test_chunks_have_the_parts_of_the_whole(echo: bool) -> None:
    asked = completion(logprobs=2, echo=echo, n=2)
    expected = [choice["logprobs"] for choice in whole(asked)["choices"]]
    choices = [chunk["choices"][0] for chunk in streamed(asked)]
    for index in range(2):
        parts = [choice["logprobs"] for choice in choices if choice["index"] == index and choice["logprobs"]]
        assert len(parts) == 3 if echo else 2
        joined = {name: [value for part in parts for value in part[name]] for name in expected[index]}
        assert joined == expected[index]


def test_a_chat() -> None:
    (choice,) = whole(chat(logprobs=True, top_logprobs=2), answers.CHAT)["choices"]
    first, second, _ = choice["logprobs"]["content"]
    assert first == {
        "token": "a", "logprob": -0.5, "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.0, "bytes": [98]}
        ],
    }  # fmt: skip
    assert second["bytes"] == list(CRAB[:2])
    chunks = streamed(chat(logprobs=True, top_logprobs=2), answers.CHAT)
    entries = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert entries == choice["logprobs"]["content"]
