"""Checks the grammars of requests before they are submitted, in processes that are killed when they exceed a limit.

A checked grammar compiles on every worker of the model within the same limits, so it cannot delay other requests there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import zlib
from collections import OrderedDict
from functools import partial
from typing import Any

from quire.v1 import types_pb2 as types

from gateway_svc.callers.caller import current_caller
from gateway_svc.request.models import ServedModel
from gateway_svc.request.sandbox.child import to_frame
from gateway_svc.request.sandbox.pool import RETRY_S, Job, ModelSetup, SandboxPool, SlowAnswerError
from request_fields.parameters import Grammar
from svc_common.errors import InvalidRequestError, OverloadedError
from svc_common.tasks import cancel

TOKENIZER_CPU_S = 60
MAX_RUNNING = 256  # checks that run or wait
OWNER_FRACTION = 0.25  # fraction of MAX_RUNNING for one owner
MAX_CACHED = 4096
JOB = Job(
    "grammar_process",
    "check grammars",
    "simplify it: fewer alternatives, smaller repetitions and numbers",
    cpu_s=0.3,  # a worker compiles the grammar again, in a step, so a grammar that takes longer is refused
    timeout_s=3.0,
    wait_s=1.8,  # together with timeout_s below 5 s, the limit for an answer
    max_answer_bytes=64 << 20,
)


Result = str | InvalidRequestError  # the grammar's text in the form that workers compile, or its error


class GrammarChecker(SandboxPool):
    """The processes, and a cache of results and errors by digest of model and grammar."""

    def __init__(self) -> None:
        super().__init__(JOB.new_process, 2)  # one may be busy with an expensive grammar
        self._results: OrderedDict[bytes, Result] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[Result]] = {}
        self.num_compiled = 0  # checks that were not answered from earlier results

    async def check(self, grammar: Grammar, model: ServedModel) -> Grammar:
        """The grammar in the form that workers compile. Raises InvalidRequestError, or OverloadedError if too many
        grammars are being checked."""
        model.require_tokenizer(grammar.field)
        key = _key(grammar, model)
        result = self._results.get(key)
        if result is None:
            result = await self._check_once(key, grammar, model)
        else:
            self._results.move_to_end(key)
        if isinstance(result, InvalidRequestError):
            raise InvalidRequestError(result.message, field=result.field)
        return Grammar(grammar.kind, result, grammar.field)

    async def close(self) -> None:
        """End the processes."""
        await cancel(*self._running.values())
        await super().close()

    async def _check_once(self, key: bytes, grammar: Grammar, model: ServedModel) -> Result:
        """Check a grammar, or wait for a running check of the same grammar."""
        task = self._running.get(key)
        if task is None:
            owner = current_caller.get().owner
            num_own = sum(task.get_name() == owner for task in self._running.values())
            if len(self._running) >= MAX_RUNNING or (owner and num_own >= OWNER_FRACTION * MAX_RUNNING):
                words = "too many grammars are being checked on this gateway; retry later, or reuse a grammar"
                raise OverloadedError(words, retry_after_s=RETRY_S)
            task = self._running[key] = asyncio.create_task(self._check(key, grammar, model), name=owner)
            task.add_done_callback(lambda done: self._end_check(key, done))
        return await asyncio.shield(task)  # a client that disconnects must not cancel the check of another client

    def _end_check(self, key: bytes, task: asyncio.Task[Result]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # mark as retrieved: all clients may have disconnected

    async def _check(self, key: bytes, grammar: Grammar, model: ServedModel) -> Result:
        self.num_compiled += 1
        tokenizer, refused = _tokenizer_key(model.info), partial(_refused, grammar)
        words = f"cannot be applied by model {model.name!r} (leave it unset)"
        setup = ModelSetup(tokenizer, partial(_setup_frame, model), words)
        result: Result
        try:
            answer = json.loads(await JOB.ask(self, _frame(tokenizer, grammar), refused, setup))
            result = str(answer["text"]) if not answer["error"] else _located(grammar, answer)
        except SlowAnswerError:  # not cached: the machine may have been busy
            return refused(f"was not compiled within {JOB.timeout_s:g} s; simplify it")
        except InvalidRequestError as error:
            result = error
        self._results[key] = result
        if len(self._results) > MAX_CACHED:
            self._results.popitem(last=False)
        return result


def _key(grammar: Grammar, model: ServedModel) -> bytes:
    fields = [schema.field for schema in grammar.schemas]  # errors name them
    content = (_tokenizer_key(model.info), grammar.kind.value, grammar.text, fields)
    return hashlib.sha256(json.dumps(content).encode()).digest()


def _tokenizer_key(info: types.ModelInfo) -> str:
    return f"{info.bundle_digest.hex()} {info.vocab_size} {sorted(info.eos_token_ids)}"


def _frame(tokenizer: str, grammar: Grammar) -> bytes:
    schemas = [schema.text for schema in grammar.schemas]
    content = {"tokenizer": tokenizer, "kind": grammar.kind.value, "text": grammar.text, "schemas": schemas}
    return to_frame({**content, "cpu_s": JOB.cpu_s})


def _setup_frame(model: ServedModel) -> bytes:
    return to_frame(
        {
            "cpu_s": TOKENIZER_CPU_S,
            "tokenizer": _tokenizer_key(model.info),
            "json": zlib.decompress(model.text.packed_tokenizer).decode(),
            "vocab_size": model.info.vocab_size,
            "eos_token_ids": list(model.info.eos_token_ids),
        }
    )


def _refused(grammar: Grammar, words: str) -> InvalidRequestError:
    return InvalidRequestError(f"{grammar.field} {words}", field=grammar.field)


def _located(grammar: Grammar, answer: dict[str, Any]) -> InvalidRequestError:
    """The error of an answer, if it says so of the part of a schema: `place` is the schema's number and the path."""
    words = f"cannot be used: {answer['error']}"
    if answer.get("place") is None:
        return _refused(grammar, words)
    number, path = answer["place"]
    schema = grammar.schemas[number]
    return InvalidRequestError(f"{schema.field}{path}{schema.owner} {words}", field=f"{schema.field}{path}")
