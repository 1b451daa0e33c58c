"""The stack of the tests that show the effect of each field: a demo model whose chat template uses all variables."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path

from quire_client.demo import demo_model_dir

from tests.chat_templates import HERMES
from tests.processes.browser import wait_for
from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack

MODEL = "demo"
MAX_NUM_SEQS = 8
VARIABLES = """{{- extra | default('') }}{{- reasoning_effort | default('') }}
{%- for message in messages %}
    {{- message.name or '' }}{{- message.tool_call_id or '' }}
    {%- for call in message.tool_calls or [] %}{{- call.id }}{%- endfor %}
{%- endfor %}
"""
# Text starts with <|endoftext|> if special tokens are added.
POST_PROCESSOR = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}


class FieldStack:
    """One process of each service and Redis. `url`: the HTTP API, without /v1."""

    def __init__(self, stack: Stack, redis: RedisServer, folder: Path) -> None:
        model_dir = write_model(folder / "model")
        templates = {"default": VARIABLES + HERMES, "bare": "{{ messages[-1].content }}"}
        flags = ["--reasoning-parser", f"{MODEL}=none", "--redis", redis.url]
        for name, text in templates.items():
            path = folder / f"{name}.jinja"
            path.write_text(text)
            flags += ["--chat-template", f"{name}={path}"]
        address = f"127.0.0.1:{free_port()}"
        self.stack = stack
        self.url = f"http://{address}"
        self.scheduler = stack.start_scheduler("--redis", redis.url)
        self.worker = self.start_worker(model_dir)
        self.gateway: Service = stack.start_gateway(self.scheduler, flags=("--http-listen", address, *flags))
        self.worker.wait_ready()
        self.gateway.wait_ready()
        # A Redis that has just started may lack routes, so an unknown model is refused for certain a moment later.
        wait_for("the table of routes", lambda: self._status_of("unknown") == 404)

    def _status_of(self, model: str) -> int:
        body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/v1/completions", body, timeout=60) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    def start_worker(self, model_dir: Path) -> Service:
        flags = ("--kv-cache-memory", "64M", "--model-name", MODEL, "--dtype", "float32")
        rows = ("--max-num-seqs", str(MAX_NUM_SEQS), "--determinism", "best_effort", "--speculate", "suffix")
        return self.stack.start_worker(self.scheduler, model_dir, *flags, *rows)


def write_model(folder: Path) -> Path:
    """A copy of the demo model whose tokenizer adds a special token."""
    shutil.copytree(demo_model_dir(), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer["post_processor"] = POST_PROCESSOR
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    return folder
