"""Mutated messages for every RPC and HTTP endpoint of a port, at the highest rate that the port takes.

A campaign counts how the calls ended. `faults` are the ends that show a weakness.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import aiohttp
from google.protobuf.descriptor import Descriptor, MethodDescriptor

from gateway_svc.http.fields import ALIASES
from gateway_svc.http.openapi import OPEN
from tests.hostile.examples import (
    HEALTH,
    calls_of,
    methods_of,
    path_of,
)
from tests.hostile.http2 import Http2, frame_message
from tests.hostile.mutations import TEXTS, Mutator
from tests.hostile.target import Port, bearer
from tests.hostile.watch import headers

AT_ONCE = 48
# An internal error is a fault of the server. UNKNOWN is an exception that no interceptor has converted.
FAULTS = ("INTERNAL", "UNKNOWN", "DATA_LOSS", "500")
OPEN_SERVICES = {HEALTH.full_name}
REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED", "401", "403")
NEVER_ENDS = ("Watch",)  # cancelled after the first message
CALL_S = 4.0


@dataclass
class Outcomes:
    """How the calls of a campaign ended, by method and code; and one example of each fault."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)

    def note(self, method: str, code: str, details: str, data: bytes) -> None:
        self.counts[method, code] += 1
        if code in FAULTS and f"{method} {code}" not in self.faults:
            self.faults[f"{method} {code}"] = f"{details[:200]}; message {data[:80].hex()} ({len(data)} bytes)"

    def fault(self, name: str, what: str) -> None:
        self.faults.setdefault(name, what)

    @property
    def total(self) -> int:
        return self.counts.total()

    def codes(self) -> Counter[str]:
        codes: Counter[str] = Counter()
        for (_, code), count in self.counts.items():
            codes[code] += count
        return codes


async def mutated_calls(
    port: Port, *, count: int, seed: int, is_insider: bool, skip: Collection[str] = (), within_s: float = CALL_S
) -> Outcomes:
    """`count` calls with mutated messages, by a stranger or with the credentials of the port."""
    outcomes, mutator = Outcomes(), Mutator(f"{port.name}/{seed}/{is_insider}")
    methods = [method for method in methods_of(*port.services) if not is_insider or method.name not in skip]
    weights = [num_fields(method.input_type) for method in methods]
    left = iter(range(count))

    async def lane() -> None:
        """Calls on one connection at a time. Stops when the port refuses connections: `Watch` reports that."""
        while (http2 := await _open(port)) is not None:
            async with http2:
                for _ in left:
                    (method,) = mutator.rng.choices(methods, weights)
                    data = mutated_call(method, mutator)
                    await _call(http2, port, method, data, is_insider, outcomes, within_s)
                    if http2.is_closed:
                        break
                else:
                    return

    await asyncio.gather(*(lane() for _ in range(min(count, AT_ONCE))))
    return outcomes


async def _open(port: Port) -> Http2 | None:
    try:
        return await Http2.open(port.address)
    except OSError:
        return None


@cache
def num_fields(descriptor: Descriptor) -> int:
    """The number of fields of a message and of all messages in it: a method with more fields gets more calls."""
    seen: set[Descriptor] = set()
    waiting = [descriptor]
    while waiting:
        message = waiting.pop()
        if message not in seen:
            seen.add(message)
            waiting += [field.message_type for field in message.fields if field.message_type is not None]
    return 1 + sum(len(message.fields) for message in seen)


def mutated_call(method: MethodDescriptor, mutator: Mutator) -> bytes:
    """The framed messages of one call, of which at least one is mutated."""
    messages = mutator.rng.choice(calls_of(method))
    (changed,) = mutator.rng.choices(range(len(messages)), [len(m.SerializeToString()) + 1 for m in messages])
    return b"".join(
        frame_message(mutator.mutate(m) if i == changed or mutator.rng.random() < 0.2 else m.SerializeToString())
        for i, m in enumerate(messages)
    )


async def _call(
    http2: Http2,
    port: Port,
    method: MethodDescriptor,
    data: bytes,
    is_insider: bool,
    outcomes: Outcomes,
    within_s: float,
) -> None:
    key = port.credentials.get(method.name) or port.credentials.get("")
    metadata = bearer(key) if is_insider and key else ()
    if method.name in NEVER_ENDS:
        within_s = 0.2
    outcome = await http2.call(path_of(method), data, metadata, within_s=within_s)
    outcomes.note(method.name, outcome.code, outcome.details, data)
    is_open = method.containing_service.full_name in OPEN_SERVICES
    # A connection that a busy server has closed gave no answer; a process that ended is found by the watch.
    if not is_insider and not is_open and outcome.code not in (*REFUSALS, "connection closed"):
        outcomes.fault(f"{method.name} {outcome.code}", "a call without credentials was not refused")


async def stranger_calls(port: Port) -> Outcomes:
    """One valid call of each method without credentials."""
    outcomes = Outcomes()
    async with await Http2.open(port.address) as http2:
        for method in methods_of(*port.services):
            for messages in calls_of(method):
                data = b"".join(frame_message(message.SerializeToString()) for message in messages)
                await _call(http2, port, method, data, False, outcomes, CALL_S)
    return outcomes


# -- HTTP API --------------------------------------------------------------------------------------------------------

CHAT = {
    "model": "demo",
    "messages": [
        {"role": "system", "content": "You answer."},
        {"role": "user", "content": [{"type": "text", "text": "What does os.path.join do?"}]},
    ],
    "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "n": 1, "stop": ["zq"], "seed": 7, "logprobs": True,
    "top_logprobs": 2, "logit_bias": {"5": 1.0}, "stream": True, "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    "tool_choice": "auto", "response_format": {"type": "text"},
}  # fmt: skip
TEXT_INPUT = {"input": ["Hello", "w1 w2"], "dimensions": 3, "encoding_format": "float", "truncate_prompt_tokens": 5}
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF$\0\0\0WAVEfmt \r\n'
    b'--b\r\nContent-Disposition: form-data; name="temperature"\r\n\r\n0.5\r\n--b--\r\n'
)
# The body of each POST, by path. The route table of the gateway says which there are (`routes_of`).
BODIES: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Return a new", "max_tokens": 4, "logprobs": 1, "echo": False, "n": 2, "best_of": 2},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "n": 2, "logprobs": 1}},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4, "store": False, "stream": True, "metadata": {"a": "b"}},
    "/v1/responses/compact": {"input": [{"role": "user", "content": "Hello"}]},
    "/v1/responses/{response_id}/cancel": {},
    "/v1/messages": {name: CHAT[name] for name in ("messages", "max_tokens", "temperature", "stream")}
    | {"system": "You answer.", "tools": [{"name": "look", "input_schema": {"type": "object"}}]},
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/files": FORM.replace(b"temperature", b"purpose").replace(b"0.5", b"batch"),
    "/v1/batches": {
        "input_file_id": "file-x",
        "endpoint": "/v1/completions",
        "completion_window": "1h",
        "metadata": {},
    },
    "/v1/messages/batches": {
        "requests": [{"custom_id": "a", "params": {"max_tokens": 4, "messages": CHAT["messages"]}}]
    },
    **{f"/v1/{kind}/{{batch_id}}/cancel": {} for kind in ("batches", "messages/batches")},
    "/v1/audio/transcriptions": FORM,
    "/v1/audio/translations": FORM,
    "/v1/embeddings": TEXT_INPUT,
    "/v2/embed": {"texts": ["Hello"], "input_type": "search_query", "embedding_types": ["float"]},
    "/pooling": TEXT_INPUT,
    "/classify": {"input": ["Hello"]},
    "/v1/score": {"text_1": "w1", "text_2": ["w2", "w3"], "instruction": "match"},
    "/v1/decisions": {
        "input": "Hello",
        "questions": [
            {"type": "predicate", "instructions": "Is it?"},
            {"type": "choice", "instructions": [{"type": "input_json", "data": {}}], "choices": [{"value": True}] * 2},
            {"type": "score", "name": "s", "instructions": "How?", "levels": [{"label": "a"}, {"label": "b"}]},
        ],
    },
    "/v1/rerank": {"query": "w1", "documents": ["w2", "w3"], "top_n": 1},
    "/tokenize": {"prompt": "Return a new", "add_special_tokens": True},
    "/detokenize": {"tokens": [5, 6, 7]},
    **{path: {} for path in ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/abort_weight_update")},
    "/init_weight_transfer_engine": {"init_info": {"backend": "files"}},
    "/start_weight_update": {"version": 3},
    "/update_weights": {"update_info": {"path": "../a", "names": ["a"], "dtype_names": ["F32"], "shapes": [[1]]}},
    "/finish_weight_update": {"running_rows": "keep", "digest": "0" * 32},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "../a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
QUERIES = ("", "?stream=true&starting_after=-1", "?limit=1e9&after=%00", "?model=%ff&model=", "?tags=" + "x" * 2000)
LASTING = ("/pause", "/sleep")  # an operator's call of these changes the system until another call
JSON_VALUES = (
    None, True, 0, -1, 1, 2**31, 2**63, 2**70, 1e308, -1e-300, 0.5, [], {}, [[]], [None], {"": None}, ["x"] * 1000,
    *TEXTS,
)  # fmt: skip


async def routes_of(session: aiohttp.ClientSession, credentials: dict[str, str]) -> list[tuple[str, str]]:
    """Method and path of each route of a gateway, from its own description."""
    async with session.get("/openapi.json", headers=credentials) as answer:
        described = await answer.json()
    return [(method.upper(), path) for path, methods in described["paths"].items() for method in methods]


def body_of(method: str, path: str) -> Any:
    """A valid body of a route; None: the route takes none. Raises KeyError for a POST without a row in BODIES."""
    return BODIES[ALIASES.get(path, path)] if method == "POST" else None


async def mutated_bodies(port: Port, *, count: int, seed: int, is_insider: bool) -> Outcomes:
    """`count` requests to all routes of the HTTP API with mutated bodies, paths and queries."""
    outcomes, rng = Outcomes(), random.Random(f"{port.name}/{seed}/{is_insider}")
    left = iter(range(count))
    timeout = aiohttp.ClientTimeout(total=CALL_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://{port.address}", timeout=timeout, connector=connector) as session:
        routes = await routes_of(session, headers(port))
        weights = [2 + len(str(body_of(*route))) // 40 for route in routes]

        async def lane() -> None:
            for _ in left:
                ((method, path),) = rng.choices(routes, weights)
                data, url = mutated_request(body_of(method, path), path, rng)
                status = await _send(session, method, url, data, headers(port) if is_insider else {})
                if status in REFUSALS and is_insider and path not in LASTING:
                    status = await _send(session, method, url, data, dict(bearer(port.credentials["operator"])))
                outcomes.note(path, status, "", data)
                if not is_insider and path not in OPEN and status not in REFUSALS:
                    outcomes.fault(f"{path} {status}", "a request without credentials was not refused")

        await asyncio.gather(*(lane() for _ in range(min(count, AT_ONCE))))
    return outcomes


async def _send(session: aiohttp.ClientSession, method: str, url: str, data: bytes, credentials: dict[str, str]) -> str:
    kind = "multipart/form-data; boundary=b" if data.startswith(b"--b") else "application/json"
    try:
        async with session.request(method, url, data=data, headers={"Content-Type": kind, **credentials}) as answer:
            await answer.read()
            return str(answer.status)
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__


def mutated_request(body: Any, path: str, rng: random.Random) -> tuple[bytes, str]:
    """A body with changes, and a URL whose placeholders are filled."""
    name = rng.choice(("resp_x", "a/b", "%00", "..", "x" * 3000))
    url = re.sub(r"{\w+}", name, path) + (rng.choice(QUERIES) if body is None or rng.random() < 0.1 else "")
    if isinstance(body, bytes):
        return Mutator(rng.random()).damage(body), url
    return b"" if body is None else mutated_json(body, rng), url


def mutated_json(body: Any, rng: random.Random) -> bytes:
    """The body with changed values; in some cases bytes that are not JSON."""
    changed = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2, 4))):
        changed = _change(changed, rng)
    data = json.dumps(changed).encode()
    if rng.random() < 0.15:
        data = Mutator(rng.random()).damage(data)
    if rng.random() < 0.05:
        data = data.replace(b"0.7", rng.choice((b"NaN", b"Infinity", b"1e999", b"-")))
    return data


def _change(value: Any, rng: random.Random) -> Any:
    """The value with one part replaced, removed or added."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.05:
            return value | {rng.choice(TEXTS): 1}
        return value | {key: _change(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        return [*value[:at], _change(value[at], rng), *value[at + 1 :]]
    return copy.deepcopy(rng.choice(JSON_VALUES))
