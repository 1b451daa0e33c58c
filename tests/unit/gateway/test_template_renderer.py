"""Hostile chat templates: they run in processes with limits, and harm no chat of another model."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from quire.v1 import inference_pb2 as pb

from gateway_svc.request.models import ServedModel, read_bundle
from gateway_svc.request.prompts.readers import PromptReaders
from gateway_svc.request.sandbox import template_process, template_renderer
from gateway_svc.request.sandbox.child import ARCHITECTURES
from gateway_svc.request.sandbox.template_renderer import TemplateRenderer
from gateway_svc.request.threads import Threads
from svc_common.errors import InvalidRequestError, OverloadedError
from tests.unit.gateway.fakes import make_bundle, make_info, until
from tests.unit.gateway.tokenizer_kinds import bundle_files, byte_level

GOOD = "{% for message in messages %}{{ message.content }}{% endfor %}"
FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Template, and words of the error. Jinja computes constant expressions when it compiles a template.
HOSTILE = [
    (FOREVER, "model 'demo' takes more than 0.2 s of CPU time; send a shorter chat"),
    ("{% if messages %}" + "{{ 'a' | center(10**9) | length }}" * 20 + "{% endif %}", "memory|CPU time"),
    ("{{ messages[0].content * 10**10 }}", "needs more memory than is allowed"),
    ("{{ ('a' * 10**10) | length }}", "MemoryError|needs more memory"),
    ("{{ messages[0].content * 10**6 }}", r"wrote 5000000 characters; at most \d+ are allowed here"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "sandbox forbids|undefined value"),
    ("{{ cycler.__init__.__globals__.os.environ }}", "sandbox forbids|undefined value"),
    ("{{ messages.__reduce_ex__(2) }}", "sandbox forbids|undefined value"),
    ("{{ '{0.__class__.__mro__}'.format(messages) }}", "sandbox forbids|undefined value"),
    (r"{{ '\ud800' }}", "not valid Unicode"),
]
CHAT = pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")]))


def model_with(template: str) -> ServedModel:
    bundle = make_bundle(bundle_files(byte_level(), chat_template=template))
    info = make_info(bundle)
    return ServedModel(info, read_bundle(bundle, info.bundle_digest))


def limit(monkeypatch: pytest.MonkeyPatch, **limits: float) -> None:
    monkeypatch.setattr(template_renderer, "JOB", replace(template_renderer.JOB, **limits))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, cpu_s=0.2)


@pytest.fixture
async def templates() -> AsyncIterator[TemplateRenderer]:
    templates = TemplateRenderer()
    yield templates
    await templates.close()


@pytest.fixture
async def reader(templates: TemplateRenderer) -> AsyncIterator[PromptReaders]:
    threads = Threads()
    yield PromptReaders(threads, templates)
    threads.close()


async def text_of(reader: PromptReaders, model: ServedModel) -> str:
    return model.require_tokenizer("").decode(await reader.token_ids(CHAT, model), skip_special_tokens=False)


@pytest.mark.parametrize(("template", "words"), HOSTILE)
async def test_a_hostile_template_is_the_callers_error(reader: PromptReaders, template: str, words: str) -> None:
    bad, good = model_with(template), model_with(GOOD)
    assert await text_of(reader, good) == "hello"
    with pytest.raises(InvalidRequestError, match=words) as caught:
        await reader.token_ids(CHAT, bad)
    assert caught.value.field == "prompt.chat"
    with pytest.raises(InvalidRequestError, match=words):
        await reader.tokenize(pb.TokenizeRequest(prompt=CHAT), bad)
    assert await text_of(reader, good) == "hello"


async def test_a_template_that_never_ends_delays_only_its_own_model(
    reader: PromptReaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, cpu_s=60.0)
    bad, good = model_with(FOREVER), model_with(GOOD)
    waiting = [asyncio.create_task(reader.token_ids(CHAT, bad)) for _ in range(5)]
    await asyncio.sleep(0)
    assert [await text_of(reader, good) for _ in range(20)] == ["hello"] * 20
    assert not any(task.done() for task in waiting)
    limit(monkeypatch, wait_s=0.05)
    with pytest.raises(OverloadedError, match="all processes that render chats of model 'demo' are busy") as caught:
        await reader.token_ids(CHAT, bad)
    assert caught.value.retry_after_s
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_template_that_only_waits_is_stopped(
    reader: PromptReaders, templates: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that escapes from Jinja's sandbox could wait without using CPU time."""
    model = model_with(GOOD)
    await reader.token_ids(CHAT, model)
    (pid,) = pids(templates)
    limit(monkeypatch, timeout_s=0.2)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(OverloadedError, match=r"did not render chats of model 'demo' within 0\.2 s; retry later"):
        await reader.token_ids(CHAT, model)
    monkeypatch.undo()
    assert await text_of(reader, model) == "hello"
    assert pids(templates) != [pid]


async def test_a_killed_process_is_replaced_unseen_by_the_chat(
    reader: PromptReaders, templates: TemplateRenderer
) -> None:
    model = model_with(GOOD)
    templates.start()
    for _ in range(3):
        assert await text_of(reader, model) == "hello"
        (pid,) = pids(templates)
        os.kill(pid, signal.SIGKILL)


async def test_a_client_that_disconnects_ends_no_process(reader: PromptReaders, templates: TemplateRenderer) -> None:
    model = model_with(GOOD)
    await reader.token_ids(CHAT, model)
    before = pids(templates)
    for _ in range(20):
        task = asyncio.create_task(reader.token_ids(CHAT, model))
        await asyncio.sleep(0)
        task.cancel()
    await until(lambda: all(pool.is_idle for pool in templates._pools.values()))
    assert await text_of(reader, model) == "hello"
    assert set(before) <= set(pids(templates))


async def test_the_process_cannot_open_files_and_has_no_passwords(
    reader: PromptReaders, templates: TemplateRenderer
) -> None:
    """The limits of the process hold even for code that escapes from Jinja's sandbox."""
    await reader.token_ids(CHAT, model_with(GOOD))
    (pid,) = pids(templates)
    assert limit_of(pid, "Max open files") == limit_of(pid, "Max file size") == 0
    assert oom_score_of(pid) == 1000
    assert limit_of(pid, "Max address space") == template_process.MAX_MEMORY_BYTES
    names = {entry.split("=")[0] for entry in environment_of(pid)}
    assert names <= {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ"}


ATTACKS = """
import ctypes, os
from gateway_svc.request.sandbox.child import limit_process
libc, parent, secret = ctypes.CDLL(None, use_errno=True), os.getppid(), int(os.environ["SECRET"])
here, there = (ctypes.create_string_buffer(6) for _ in range(2))
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
local, remote = Part(ctypes.addressof(here), 6), Part(secret, 6)
limit_process(1 << 30)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
for attack in (
    lambda: os.close(os.open(f"/proc/{parent}/environ", os.O_RDONLY)),
    lambda: os.close(os.open(f"/proc/{parent}/mem", os.O_RDONLY)),
    lambda: call("process_vm_readv", parent, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0),
    lambda: call("ptrace", 0x4206, parent, 0, 0),  # PTRACE_SEIZE
    lambda: os.kill(parent, 0),
    lambda: os.mkdir(os.environ["FOLDER"]),
    lambda: os.rmdir(os.environ["FOLDER"]),
    lambda: os.fork() or os._exit(0),
):
    try:
        attack()
        print("done")
    except OSError as error:
        print(error.errno)
print(bytes(here))
"""


@pytest.mark.skipif(platform.machine() not in ARCHITECTURES, reason="no filter of system calls for this architecture")
def test_the_process_reaches_no_other(tmp_path: Path) -> None:
    secret = ctypes.create_string_buffer(b"secret")
    environment = {"SECRET": str(ctypes.addressof(secret)), "FOLDER": str(tmp_path / "made"), **os.environ}
    found = subprocess.run(
        [sys.executable, "-c", ATTACKS], env=environment, check=True, capture_output=True, text=True, timeout=60
    ).stdout.split("\n")
    assert found == [*[str(errno.EPERM)] * 8, repr(bytes(6)), ""]


async def test_no_process_of_the_user_reads_the_gateway(reader: PromptReaders, templates: TemplateRenderer) -> None:
    await reader.token_ids(CHAT, model_with(GOOD))
    assert ctypes.CDLL(None).prctl(3) == 0  # PR_GET_DUMPABLE


def limit_of(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    return int(line.split()[3])


def oom_score_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def environment_of(pid: int) -> list[str]:
    return [entry for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if entry]


def pids(templates: TemplateRenderer) -> list[int]:
    return [pid for pool in templates._pools.values() for pid in pool.pids]


async def test_many_models_share_a_bounded_number_of_processes(
    reader: PromptReaders, templates: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_renderer, "MAX_POOLS", 2)
    models = [model_with(GOOD + str(i)) for i in range(4)]
    for i, model in enumerate(models):
        assert await text_of(reader, model) == f"hello{i}"
        assert len(pids(templates)) <= 2
    assert await text_of(reader, models[0]) == "hello0"
