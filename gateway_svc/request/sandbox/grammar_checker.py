"""Checks the grammars of requests before they are submitted, in processes that are killed when they exceed a limit.

A checked grammar compiles on every worker of the model within the same limits, so it cannot delay other requests there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from functools import partial

from quire.v1 import types_pb2 as types

from gateway_svc.callers.caller import current_caller
from gateway_svc.request.models import ServedModel
from gateway_svc.request.sandbox.frames import to_frame
from gateway_svc.request.sandbox.pool import RETRY_S, SandboxErrors, SandboxPool
from gateway_svc.request.sandbox.process import SandboxProcess
from request_fields.grammar import Grammar
from svc_common.errors import InvalidRequestError, OverloadedError
from svc_common.tasks import cancel

log = logging.getLogger(__name__)

NUM_PROCESSES = 2  # one may be busy with an expensive grammar
WAIT_TIMEOUT_S = 1.8  # for a free process. The sum of this and CHECK_TIMEOUT_S is below 5 s, the limit for an answer
CHECK_TIMEOUT_S = 3.0
GRAMMAR_CPU_S = 0.3  # a worker compiles the grammar again, in a step, so a grammar that takes longer is refused
TOKENIZER_CPU_S = 60
MAX_RUNNING = 256  # checks that run or wait
OWNER_FRACTION = 0.25  # fraction of MAX_RUNNING for one owner
MAX_CACHED = 4096
MAX_ANSWER_BYTES = 64 << 20
BUSY = "too many grammars are being checked on this gateway"
PROCESS = "gateway_svc.request.sandbox.grammar_process"


class SlowGrammarError(InvalidRequestError):
    """The check took too long."""


Result = str | InvalidRequestError  # the grammar's text in the form that workers compile, or its error


class GrammarChecker:
    """Owns the processes, and caches results and errors by digest of model and grammar."""

    def __init__(self) -> None:
        self._pool = SandboxPool(lambda: SandboxProcess(PROCESS, MAX_ANSWER_BYTES), NUM_PROCESSES)
        self._results: OrderedDict[bytes, Result] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[Result]] = {}
        self.num_compiled = 0  # checks that were not answered from earlier results

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that run."""
        return self._pool.pids

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
        await self._pool.close()

    async def _check_once(self, key: bytes, grammar: Grammar, model: ServedModel) -> Result:
        """Check a grammar, or wait for a running check of the same grammar."""
        task = self._running.get(key)
        if task is None:
            owner = current_caller.get().owner
            num_own = sum(task.get_name() == owner for task in self._running.values())
            if len(self._running) >= MAX_RUNNING or (owner and num_own >= OWNER_FRACTION * MAX_RUNNING):
                raise OverloadedError(f"{BUSY}; retry later, or reuse a grammar", retry_after_s=RETRY_S)
            task = self._running[key] = asyncio.create_task(self._check(key, grammar, model), name=owner)
            task.add_done_callback(lambda done: self._settle(key, done))
        return await asyncio.shield(task)  # a client that disconnects must not cancel the check of another client

    def _settle(self, key: bytes, task: asyncio.Task[Result]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # mark as retrieved: all clients may have disconnected

    async def _check(self, key: bytes, grammar: Grammar, model: ServedModel) -> Result:
        self.num_compiled += 1
        try:
            with _errors_of(grammar).raised():
                result: Result = await self._pool.run(partial(_compile, grammar, model), WAIT_TIMEOUT_S)
        except SlowGrammarError as error:
            return error  # not cached: the machine may have been busy
        except InvalidRequestError as error:
            result = error
        self._results[key] = result
        if len(self._results) > MAX_CACHED:
            self._results.popitem(last=False)
        return result


async def _compile(grammar: Grammar, model: ServedModel, process: SandboxProcess) -> str:
    tokenizer = _tokenizer_key(model.info)
    try:
        if not process.has_setup(tokenizer) and (error := await process.set_up(tokenizer, _setup_frame(model))):
            raise _refused(grammar, f"cannot be applied by model {model.name!r}: {error}; leave it unset")
        answer = json.loads(await process.ask(_frame(tokenizer, grammar), CHECK_TIMEOUT_S))
    except TimeoutError:
        raise SlowGrammarError(
            f"{grammar.field} was not compiled within {CHECK_TIMEOUT_S:g} s; simplify it", field=grammar.field
        ) from None
    if answer["error"]:
        raise _located(grammar, f"cannot be used: {answer['error']}", answer.get("place"))
    return str(answer["text"])


def _key(grammar: Grammar, model: ServedModel) -> bytes:
    fields = [schema.field for schema in grammar.schemas]  # errors name them
    content = (_tokenizer_key(model.info), grammar.kind.value, grammar.text, fields)
    return hashlib.sha256(json.dumps(content).encode()).digest()


def _tokenizer_key(info: types.ModelInfo) -> str:
    return f"{info.bundle_digest.hex()} {info.vocab_size} {sorted(info.eos_token_ids)}"


def _frame(tokenizer: str, grammar: Grammar) -> bytes:
    schemas = [schema.text for schema in grammar.schemas]
    content = {"tokenizer": tokenizer, "kind": grammar.kind.value, "text": grammar.text, "schemas": schemas}
    return to_frame({**content, "cpu_s": GRAMMAR_CPU_S})


def _setup_frame(model: ServedModel) -> bytes:
    return to_frame(
        {
            "cpu_s": TOKENIZER_CPU_S,
            "tokenizer": _tokenizer_key(model.info),
            "json": model.text.tokenizer_json.decode(),
            "vocab_size": model.info.vocab_size,
            "eos_token_ids": list(model.info.eos_token_ids),
        }
    )


def _errors_of(grammar: Grammar) -> SandboxErrors:
    return SandboxErrors(
        partial(_refused, grammar),
        busy=BUSY,
        slow=BUSY,  # not raised: a check that takes too long refuses the grammar
        killed="the process that checks grammars was killed twice",
        oversized="becomes too large when it is normalized; make it smaller",
        out_of_cpu_time=f"takes more than {GRAMMAR_CPU_S} s of CPU time to compile; simplify it: fewer alternatives, "
        "smaller repetitions and numbers",
        ended="needs too much memory to compile; make it smaller",
    )


def _refused(grammar: Grammar, words: str) -> InvalidRequestError:
    return InvalidRequestError(f"{grammar.field} {words}", field=grammar.field)


def _located(grammar: Grammar, words: str, place: tuple[int, str] | None) -> InvalidRequestError:
    """The error of the part of a schema that cannot be used. `place`: number of the schema, path in it."""
    if place is None:
        return _refused(grammar, words)
    schema, path = grammar.schemas[place[0]], place[1]
    return InvalidRequestError(f"{schema.field}{path}{schema.owner} {words}", field=f"{schema.field}{path}")
