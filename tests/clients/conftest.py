"""One stack with the demo model and the HTTP API, for all client tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from quire_client.demo import demo_model_dir

from tests.chat_templates import HERMES
from tests.processes.ports import free_port
from tests.processes.stack import Stack

MODEL = "demo"


@pytest.fixture(scope="session")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The worker's folder for updates of its weights."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="session")
def addresses(tmp_path_factory: pytest.TempPathFactory, weights_dir: Path) -> Iterator[tuple[str, str]]:
    """The URL of the HTTP API, without /v1, and the address of the gRPC API."""
    with Stack(tmp_path_factory.mktemp("clients")) as stack:
        yield start(stack, demo_model_dir(), "--weights-dir", str(weights_dir))


@pytest.fixture(scope="session")
def url(addresses: tuple[str, str]) -> str:
    """The URL of the HTTP API, without /v1."""
    return addresses[0]


def start(stack: Stack, model_dir: Path, *worker_flags: str) -> tuple[str, str]:
    """Start a scheduler, a worker and a gateway, whose chats can have tools. Returns `addresses`."""
    address = f"127.0.0.1:{free_port()}"
    scheduler = stack.start_scheduler()
    flags = ("--max-model-len", "512", "--kv-cache-memory", "64M", "--model-name", MODEL, "--dtype", "float32")
    worker = stack.start_worker(scheduler, model_dir, *flags, *worker_flags)
    template = stack.folder / "tools.jinja"
    template.write_text(HERMES)
    chats = ("--chat-template", f"tool_use={template}", "--reasoning-parser", "none")
    gateway = stack.start_gateway(scheduler, flags=("--http-listen", address, "--keyless-operators", *chats))
    worker.wait_ready()
    gateway.wait_ready()
    return f"http://{address}", gateway.address
