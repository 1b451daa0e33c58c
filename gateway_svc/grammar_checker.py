"""Checks the grammars of requests before they are submitted, in processes that are killed when they exceed a limit.

A checked grammar compiles on every worker of the model within the same limits, so it cannot delay other requests there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import signal
import subprocess
import sys
from collections import OrderedDict
from contextlib import suppress
from typing import Any

from quire.v1 import types_pb2 as types

from gateway_svc.grammar_frames import GRAMMAR_CPU_S, read_frame, to_frame
from gateway_svc.models import ServedModel
from request_fields.grammar import Grammar
from svc_common.errors import InvalidRequestError, OverloadedError, QuireError
from svc_common.tasks import cancel

log = logging.getLogger(__name__)

NUM_PROCESSES = 2  # one may be busy with an expensive grammar
WAIT_TIMEOUT_S = 1.8  # for a free process. The sum of this and CHECK_TIMEOUT_S is below 5 s, the limit for an answer
CHECK_TIMEOUT_S = 3.0
TOKENIZER_TIMEOUT_S = 120.0
MAX_RUNNING = 256  # checks that run or wait
MAX_CACHED = 4096
MAX_TOKENIZERS = 8  # a process that has more is replaced
RETRY_S = 1.0
PROCESS = "gateway_svc.grammar_process"


class ProcessEndedError(Exception):
    """The process died or was killed during a request; `returncode` is negative for a signal."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"the process ended with status {returncode}")
        self.returncode = returncode

    @property
    def is_killed(self) -> bool:
        """Whether another process killed it."""
        return self.returncode in (-signal.SIGKILL, -signal.SIGTERM)


class SlowGrammarError(InvalidRequestError):
    """The check took too long."""


class GrammarProcess:
    """One process and its tokenizers. The first message starts the process.

    Threads read its pipes, because asyncio would fork, and a process with gRPC threads must not fork.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._known: set[str] = set()
        self._is_busy = False

    @property
    def pid(self) -> int | None:
        """Process id; None while the process does not run."""
        return None if self._process is None else self._process.pid

    def knows(self, tokenizer: str) -> bool:
        """Whether the process has this tokenizer."""
        return tokenizer in self._known

    async def add_tokenizer(self, key: str, request: dict[str, Any]) -> str:
        """Give the process a tokenizer. Returns the error or "". Raises ProcessEndedError or TimeoutError."""
        if len(self._known) >= MAX_TOKENIZERS:
            self.kill()
        answer = await self.ask({"tokenizer": key, **request}, TOKENIZER_TIMEOUT_S)
        if not answer["error"]:
            self._known.add(key)
        return str(answer["error"])

    async def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one message and return its answer. After the time limit, the process is killed.

        Raises ProcessEndedError or TimeoutError.
        """
        is_answered = False
        try:
            async with asyncio.timeout(timeout_s):
                answer = await asyncio.to_thread(self._exchange, request)
            is_answered = True
            return answer
        finally:
            if not is_answered:
                self.kill()

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None:
            command = [sys.executable, "-m", PROCESS]
            process = self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._is_busy = True
        try:
            return exchange(process, request)
        except (OSError, ValueError) as error:
            process.kill()
            returncode = process.wait()  # its own status if it ended before the kill
            close_pipes(process)
            raise ProcessEndedError(returncode) from error
        finally:
            self._is_busy = False

    def kill(self) -> None:
        """End the process, if it runs."""
        process, self._process, self._known = self._process, None, set()
        if process is None:
            return
        process.kill()
        process.wait()  # returns at once after SIGKILL
        if not self._is_busy:  # else the thread that reads the pipes closes them
            close_pipes(process)


def exchange(process: subprocess.Popen[bytes], request: dict[str, Any]) -> dict[str, Any]:
    """Send one message and read its answer. Raises OSError or ValueError if the process ends before it answers."""
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise ValueError("the process has no pipes")
    stdin.write(to_frame(request))
    stdin.flush()
    answer = read_frame(stdout)
    if answer is None:
        raise ValueError("the process has ended")
    return answer


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes of a process that has ended."""
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # data that the process did not read
            if pipe is not None:
                pipe.close()


Result = str | InvalidRequestError  # the grammar's text in the form that workers compile, or its error


class GrammarChecker:
    """Owns the processes, and caches results and errors by digest of model and grammar."""

    def __init__(self) -> None:
        self._processes = [GrammarProcess() for _ in range(NUM_PROCESSES)]
        self._free: asyncio.LifoQueue[GrammarProcess] = asyncio.LifoQueue()
        for process in self._processes:
            self._free.put_nowait(process)
        self._results: OrderedDict[bytes, Result] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[Result]] = {}
        self.num_compiled = 0  # checks that were not answered from earlier results

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that run."""
        return [process.pid for process in self._processes if process.pid is not None]

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
            raise InvalidRequestError(result.message, field=grammar.field)
        return Grammar(grammar.kind, result, grammar.field)

    async def close(self) -> None:
        """End the processes."""
        await cancel(*self._running.values())
        for process in self._processes:
            process.kill()

    async def _check_once(self, key: bytes, grammar: Grammar, model: ServedModel) -> Result:
        """Check a grammar, or wait for a running check of the same grammar."""
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= MAX_RUNNING:
                raise _overloaded()
            task = self._running[key] = asyncio.create_task(self._check(key, grammar, model))
            task.add_done_callback(lambda done: self._settle(key, done))
        return await asyncio.shield(task)  # a client that disconnects must not cancel the check of another client

    def _settle(self, key: bytes, task: asyncio.Task[Result]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # mark as retrieved: all clients may have disconnected

    async def _check(self, key: bytes, grammar: Grammar, model: ServedModel) -> Result:
        process = await self._take_process()
        try:
            self.num_compiled += 1
            result: Result = await self._compile(process, grammar, model)
        except SlowGrammarError as error:
            return error  # not cached: the machine may have been busy
        except InvalidRequestError as error:
            result = error
        finally:
            self._free.put_nowait(process)
        self._results[key] = result
        if len(self._results) > MAX_CACHED:
            self._results.popitem(last=False)
        return result

    async def _take_process(self) -> GrammarProcess:
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                return await self._free.get()
        except TimeoutError:
            raise _overloaded() from None

    async def _compile(self, process: GrammarProcess, grammar: Grammar, model: ServedModel) -> str:
        try:
            return await self._ask(process, grammar, model)
        except ProcessEndedError as error:
            if not error.is_killed:
                raise _error_of_end(grammar, error) from None
            log.warning("a process that compiles grammars was killed; the check is repeated in a new process")
        try:
            return await self._ask(process, grammar, model)
        except ProcessEndedError as error:
            raise _error_of_end(grammar, error) from None

    async def _ask(self, process: GrammarProcess, grammar: Grammar, model: ServedModel) -> str:
        tokenizer = _tokenizer_key(model.info)
        request = {"tokenizer": tokenizer, "kind": grammar.kind.value, "text": grammar.text}
        try:
            if not process.knows(tokenizer) and (error := await process.add_tokenizer(tokenizer, _tokenizer_of(model))):
                raise _refused(grammar, f"cannot be applied by model {model.name!r}: {error}; leave it unset")
            answer = await process.ask(request, CHECK_TIMEOUT_S)
        except TimeoutError:
            raise SlowGrammarError(
                f"{grammar.field} was not compiled within {CHECK_TIMEOUT_S:g} s; simplify it", field=grammar.field
            ) from None
        if answer["error"]:
            raise _refused(grammar, f"cannot be used: {answer['error']}")
        return str(answer["text"])


def _key(grammar: Grammar, model: ServedModel) -> bytes:
    content = (_tokenizer_key(model.info), grammar.kind.value, grammar.text)
    return hashlib.sha256(json.dumps(content).encode()).digest()


def _tokenizer_key(info: types.ModelInfo) -> str:
    return f"{info.bundle_digest.hex()} {info.vocab_size} {sorted(info.eos_token_ids)}"


def _tokenizer_of(model: ServedModel) -> dict[str, Any]:
    return {
        "json": model.text.tokenizer_json.decode(),
        "vocab_size": model.info.vocab_size,
        "eos_token_ids": list(model.info.eos_token_ids),
    }


def _error_of_end(grammar: Grammar, error: ProcessEndedError) -> QuireError:
    if error.returncode == -signal.SIGPROF:
        return _refused(
            grammar,
            f"takes more than {GRAMMAR_CPU_S} s of CPU time to compile; simplify it: fewer alternatives, smaller "
            "repetitions and numbers",
        )
    if error.is_killed:
        return OverloadedError("the process that checks grammars was killed twice; retry later", retry_after_s=RETRY_S)
    log.warning("a process that compiles grammars ended with status %d", error.returncode)
    return _refused(grammar, "needs too much memory to compile; make it smaller")


def _refused(grammar: Grammar, words: str) -> InvalidRequestError:
    return InvalidRequestError(f"{grammar.field} {words}", field=grammar.field)


def _overloaded() -> OverloadedError:
    return OverloadedError(
        "too many grammars are being checked on this gateway; retry later, or reuse a grammar", retry_after_s=RETRY_S
    )
