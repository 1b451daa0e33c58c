"""Renders chats with the templates of their model, in processes that are killed when they exceed a limit.

A template comes with its checkpoint and may be hostile. Each model has its own processes, so its template can neither
delay nor read the chats of other models.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gateway_svc.request.field_errors import CHAT
from gateway_svc.request.models import ServedModel
from gateway_svc.request.sandbox.child import to_frame
from gateway_svc.request.sandbox.pool import Job, ModelSetup, SandboxPool, Spares
from gateway_svc.text.bundle import RenderOptions
from svc_common.errors import InvalidRequestError

NUM_PROCESSES = 2  # processes of each model for generations; one may be busy with a chat that takes long
NUM_CALL_PROCESSES = 1  # processes of each model for Tokenize calls, which never delay a generation
JOB = Job(
    "template_process", "render chats",
    "send a shorter chat, or prompt.text. An operator can replace the template (--chat-template of the gateway)",
    cpu_s=2.0, timeout_s=10.0, wait_s=10.0, max_answer_bytes=64 << 20,
)  # fmt: skip
# A template may write this many characters, plus a multiple of its input: tokenizing costs time and memory as well.
MIN_OUTPUT_CHARS = 256 << 10
OUTPUT_CHARS_PER_BYTE = 16
MAX_OUTPUT_CHARS = 16 << 20
MAX_POOLS = 32


def render_frame(template: str, messages: Sequence[Mapping[str, Any]], options: RenderOptions, size: int) -> bytes:
    """The message that renders a chat of `size` bytes. `template`: its name."""
    max_chars = min(MAX_OUTPUT_CHARS, MIN_OUTPUT_CHARS + OUTPUT_CHARS_PER_BYTE * size)
    content = {"template": template, "messages": messages, "options": options}
    return to_frame(content | {"cpu_s": JOB.cpu_s, "max_chars": max_chars})


def rendered_text(answer: bytes) -> str:
    """The text of an answer. Raises InvalidRequestError with the template's message."""
    content = json.loads(answer)
    if content["error"]:
        raise InvalidRequestError(f"{CHAT}: {content['error']}", field=CHAT)
    return str(content["text"])


class TemplateRenderer:
    """Owns the processes. They start with the first chat of a model; one spare process waits for the next model."""

    def __init__(self) -> None:
        self._pools: OrderedDict[tuple[bytes, bool], SandboxPool] = OrderedDict()
        self._spares = Spares(JOB.new_process)

    def start(self) -> None:
        """Start the spare process."""
        self._spares.start()

    async def render(self, frame: bytes, model: ServedModel, *, is_call: bool) -> bytes:
        """The answer to `frame`, for `rendered_text`. `is_call`: for a Tokenize call.

        Raises InvalidRequestError, or OverloadedError if the processes of the model are busy.
        """
        pool = await self._pool_of(model, is_call=is_call)
        setup = ModelSetup(model.info.bundle_digest.hex(), partial(_setup_frame, model), "cannot be used")
        return await JOB.ask(pool, frame, partial(_refused, model), setup, of=f" of model {model.name!r}")

    async def close(self) -> None:
        """End the processes."""
        for pool in self._pools.values():
            await pool.close()
        self._spares.close()

    async def _pool_of(self, model: ServedModel, *, is_call: bool) -> SandboxPool:
        key = model.info.bundle_digest, is_call
        pool = self._pools.get(key)
        if pool is None:
            await self._drop_oldest()
            num_processes = NUM_CALL_PROCESSES if is_call else NUM_PROCESSES
            pool = self._pools[key] = SandboxPool(JOB.new_process, num_processes, self._spares)
        self._pools.move_to_end(key)
        return pool

    async def _drop_oldest(self) -> None:
        """End the processes of the model that was used least recently, if there are too many."""
        idle = [key for key, pool in self._pools.items() if pool.is_idle]
        if len(self._pools) >= MAX_POOLS and idle:
            await self._pools.pop(idle[0]).close()


def _setup_frame(model: ServedModel) -> bytes:
    tokenizer = model.require_tokenizer(CHAT)
    return to_frame({"templates": tokenizer.templates, "special_tokens": model.text.special_tokens, "cpu_s": JOB.cpu_s})


def _refused(model: ServedModel, words: str) -> InvalidRequestError:
    return InvalidRequestError(f"{CHAT}: the chat template of model {model.name!r} {words}", field=CHAT)
