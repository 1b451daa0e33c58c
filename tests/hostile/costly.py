"""Small valid requests that could cost a gateway much: memory, its event loop, its threads.

To add one, add a row to REQUESTS (HTTP) or CALLS (gRPC). Each becomes an attack by a client with a key, beside good
streams that may neither pause nor change.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.message import Message
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2

from tests.hostile import http1
from tests.hostile.attacks import Attack, Size, insider
from tests.hostile.examples import INFERENCE, path_of
from tests.hostile.http2 import Http2, frame_message
from tests.hostile.target import Port

WITHIN_S = 20.0


class Request(NamedTuple):
    """A request over HTTP, sent `at_once` times. `body` makes a JSON value, or bytes."""

    name: str
    path: str
    body: Callable[[], Any]
    at_once: int = 1


class Call(NamedTuple):
    """A call of an RPC of InferenceService, made `at_once` times."""

    name: str
    method: str
    message: Callable[[], Message]
    at_once: int = 1


COMPLETIONS = "/v1/completions"
ONE, MANY = {"prompt": [5], "max_tokens": 1}, {"prompt": [[5]] * 256, "max_tokens": 1}
SCHEMA = {"properties": {f"k{number}": {"type": "string"} for number in range(3000)}}
CHOICE = [f"{number} -_-_-_-_-_-_-_-_-_-_-_-_-_-_-_-_-_-_-_-_-_" for number in range(1024)]
MILLION = 1_000_000


def _named(count: int) -> dict[str, int]:
    return {str(number): 1 for number in range(count)}


REQUESTS = (
    Request("many_samples", COMPLETIONS, lambda: {"prompt": "a", "n": MILLION}),
    Request("many_samples_ten_times", COMPLETIONS, lambda: {"prompt": "a", "n": 300_000}, at_once=10),
    Request("prompts_with_samples", COMPLETIONS, lambda: MANY | {"n": 16}),
    Request("prompts_with_a_schema", COMPLETIONS, lambda: MANY | {"guided_json": SCHEMA}),
    Request("prompts_with_a_choice", COMPLETIONS, lambda: MANY | {"guided_choice": CHOICE}),
    Request("prompts_with_allowed_ids", COMPLETIONS, lambda: MANY | {"allowed_token_ids": list(range(4096)) * 15}),
    Request("logprobs_of_prompts", COMPLETIONS, lambda: ONE | {"prompt": [[5] * 2000] * 16, "prompt_logprobs": 20}),
    Request(
        "logprobs_of_long_prompts", COMPLETIONS, lambda: ONE | {"prompt": [[5] * 2000] * 64, "prompt_logprobs": 20}
    ),
    Request("many_ids", COMPLETIONS, lambda: ONE | {"prompt": [[5] * 1500] * 1000}, at_once=2),
    Request("unknown_keys", COMPLETIONS, lambda: ONE | _named(1_200_000)),
    Request("biases", COMPLETIONS, lambda: ONE | {"logit_bias": _named(1_200_000)}),
    Request("empty_lists_eight_times", COMPLETIONS, lambda: ONE | {"x": [[]] * (4 * MILLION)}, at_once=8),
    Request("odd_numbers", COMPLETIONS, lambda: ONE | {"x": [1e308] * 150_000}),
    Request("odd_numbers_ten_times", COMPLETIONS, lambda: ONE | {"x": [1e308] * 9_000}, at_once=10),
    Request("beams", COMPLETIONS, lambda: {"prompt": [5], "beam_width": 64, "max_tokens": 300, "ignore_eos": True}),
    Request("embeddings_of_long_texts", "/v1/embeddings", lambda: {"input": ["word " * 1400] * 2048}),
    Request("a_query_for_many_documents", "/v1/rerank", lambda: {"query": "a " * MILLION, "documents": ["b"] * 1000}),
    Request("strings_of_a_text", "/tokenize", lambda: {"prompt": "a b" * MILLION, "return_token_strs": True}),
    Request("strings_of_a_short_text", "/tokenize", lambda: {"prompt": "a b" * 300_000, "return_token_strs": True}),
    Request("text_of_many_ids", "/detokenize", lambda: {"tokens": [5] * MILLION}),
)
PROMPT = pb.Prompt(tokens=types_pb2.TokenIds(ids=[5]))


def _sampled(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=PROMPT, sampling=types_pb2.SamplingParams(**sampling))


CALLS = (
    Call("many_samples", "Generate", lambda: _sampled(n=MILLION)),
    Call("a_choice", "Generate", lambda: _sampled(choice=CHOICE), at_once=100),
    Call("allowed_ids", "Generate", lambda: _sampled(allowed_token_ids=[5] * (15 * MILLION)), at_once=4),
    Call("bad_words", "Generate", lambda: _sampled(bad_words=["a"] * 50_000), at_once=4),
    Call("many_ids", "Generate", lambda: pb.GenerateRequest(
        prompt=pb.Prompt(tokens=types_pb2.TokenIds(ids=[5] * (15 * MILLION)))
    ), at_once=4),
    Call("claimed_output", "Generate", lambda: pb.GenerateRequest(
        prompt=PROMPT, continuation={"samples": [{"output_token_ids": [5] * MILLION}]}
    ), at_once=4),
    Call("strings_of_a_text", "Tokenize", lambda: pb.TokenizeRequest(
        prompt=pb.Prompt(text="a b" * 300_000), token_strings=True
    )),
    Call("embeddings_of_long_texts", "Embed", lambda: pb.EmbedRequest(inputs=[pb.Prompt(text="word " * 1400)] * 2048)),
)  # fmt: skip


def _request_attack(row: Request) -> Attack:
    @cache
    def body() -> bytes:
        made = row.body()
        return made if isinstance(made, bytes) else json.dumps(made).encode()

    async def attack(port: Port, size: Size) -> None:
        data = http1.post_json(row.path, body(), dict(insider(port)))
        await asyncio.gather(*(http1.exchange(port.address, data, within_s=WITHIN_S) for _ in range(row.at_once)))

    attack.__name__ = f"http_{row.name}"
    PREPARE[attack] = body
    return attack


def _call_attack(row: Call) -> Attack:
    @cache
    def body() -> bytes:
        return frame_message(row.message().SerializeToString())

    async def attack(port: Port, size: Size) -> None:
        data = body()
        path = path_of(INFERENCE.methods_by_name[row.method])
        with contextlib.suppress(OSError):
            async with await Http2.open(port.address) as connection:
                calls = (connection.call(path, data, insider(port), within_s=WITHIN_S) for _ in range(row.at_once))
                await asyncio.gather(*calls)

    attack.__name__ = row.name
    PREPARE[attack] = body
    return attack


# Makes the body of an attack, which may take this process seconds, before good streams are measured.
PREPARE: dict[Attack, Callable[[], bytes]] = {}
COSTLY_REQUESTS = tuple(map(_request_attack, REQUESTS))
COSTLY_CALLS = tuple(map(_call_attack, CALLS))


def costly_attacks_on(port: Port) -> tuple[Attack, ...]:
    """The attacks for a port for inference; none for other ports."""
    if INFERENCE in port.services:
        return COSTLY_CALLS
    return COSTLY_REQUESTS if port.name.endswith("/http") else ()
