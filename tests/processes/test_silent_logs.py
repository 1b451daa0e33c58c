"""Prompts, outputs, keys and salts are in no log and no metric, also at debug level and for refused requests."""

from __future__ import annotations

import asyncio
import json
import secrets
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from quire_client.demo import demo_model_dir

from tests.processes.ports import free_port
from tests.processes.stack import Stack

# Text that occurs nowhere else. It is part of every field that may have text of a user.
SECRET = "zq7" + secrets.token_hex(6)
KEY = "key-" + secrets.token_hex(16)
DEBUG = ("--log-level", "debug")
AUTHORIZED = (("authorization", f"Bearer {KEY}"),)
CHAT = [{"role": "user", "content": f"What does abs do? {SECRET}"}]
TOOL = {"type": "function", "function": {"name": "f", "description": SECRET, "parameters": {"title": SECRET}}}
BODIES: list[dict[str, Any]] = [
    {"messages": CHAT},
    {"messages": CHAT, "stream": True, "logprobs": True, "stop": [SECRET]},
    {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": SECRET}}}},
    {"messages": CHAT, "tools": [TOOL], "tool_choice": "required"},
    {"messages": CHAT, "temperature": -5, "user": SECRET},  # refused
    {"messages": CHAT, "chat_template": SECRET},  # refused
    {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": SECRET}}}},
    {"messages": [{"role": SECRET, "content": SECRET}]},  # refused
    {"messages": SECRET},  # refused
]


def post(url: str, body: dict[str, Any], key: str = KEY) -> tuple[int, str]:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps({"max_tokens": 8, **body}).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


async def over_grpc(address: str) -> str:
    """Sends requests that succeed, are refused, and are cancelled. Returns the output."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)
        prompt = pb.Prompt(text=f"What does abs do? {SECRET}")
        request = pb.GenerateRequest(
            prompt=prompt,
            sampling=types.SamplingParams(temperature=0),
            stop=types.StopParams(max_tokens=32, min_tokens=32),
        )
        request.scheduling.cache_salt = SECRET
        output = "".join([event.chunk.text async for event in stub.Generate(request, metadata=AUTHORIZED)])
        cancelled = stub.Generate(request, metadata=AUTHORIZED)
        await cancelled.read()
        cancelled.cancel()
        refused = (
            pb.GenerateRequest(prompt=prompt, model=SECRET),
            pb.GenerateRequest(prompt=prompt, request_id=SECRET + " "),
            pb.GenerateRequest(prompt=pb.Prompt(text=SECRET * 100_000)),
        )
        for wrong in refused:
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Generate(wrong, metadata=AUTHORIZED).read()
        with pytest.raises(grpc.aio.AioRpcError, match="key"):
            await stub.Generate(request, metadata=(("authorization", f"Bearer {SECRET}"),)).read()
        ids = (await stub.Tokenize(pb.TokenizeRequest(prompt=prompt), metadata=AUTHORIZED)).ids
        await stub.Detokenize(pb.DetokenizeRequest(ids=ids), metadata=AUTHORIZED)
    return output


def test_no_log_and_no_metric_has_a_prompt_an_output_or_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "alice").write_text(KEY + "\n")
    ports = [free_port() for _ in range(4)]
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler(*DEBUG, "--metrics-listen", f"127.0.0.1:{ports[0]}")
        worker = stack.start_worker(
            scheduler, demo_model_dir(), *DEBUG, "--kv-cache-memory", "64M", "--metrics-listen", f"127.0.0.1:{ports[1]}"
        )
        flags = ("--metrics-listen", f"127.0.0.1:{ports[2]}", "--http-listen", f"127.0.0.1:{ports[3]}")
        gateway = stack.start_gateway(scheduler, flags=(*DEBUG, *flags, "--api-keys", str(keys)))
        worker.wait_ready()
        gateway.wait_ready()
        output = asyncio.run(over_grpc(gateway.address))
        statuses = []
        for body in BODIES:
            status, _ = post(f"http://127.0.0.1:{ports[3]}/v1/chat/completions", body)
            statuses.append(status)
        assert post(f"http://127.0.0.1:{ports[3]}/v1/completions", {"prompt": SECRET}, key=SECRET)[0] == 401
        metrics = "".join(get(port) for port in ports[:3])
        for service in (gateway, worker, scheduler):
            service.terminate()
        logs = stack.logs()
    assert statuses[0] == statuses[1] == 200
    assert all(status in (400, 429) for status in statuses[4:]), statuses  # 429: grammars take long on a busy machine
    assert "debug" in logs.lower(), "the services must log at this level"
    assert len(output) > 24
    for name, secret in (("prompt", SECRET), ("API key", KEY), ("output", output[:24])):
        found = [line for line in (logs + metrics).splitlines() if secret in line]
        assert not found, f"{name}: {found[0][:300]}"
