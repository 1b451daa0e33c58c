"""Grammars and thinking budgets of rows: which token ids may follow a row's output. llguidance matches; this module
keeps the matchers.

    open      the grammar is compiled in a thread, or taken from the cache, and the row's output so far is replayed
    start     before a step's forward pass: a thread consumes new tokens and computes the masks while the pass runs
    result    after the pass: the masks, and the rows whose grammar failed

The state of a row is a function of its grammar and its output, so a row that is opened again with the same output
continues in the same state.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from request_fields.parameters import Grammar
from step_protocol.columns import EMPTY, I64, U32, Bools
from step_protocol.features import ThinkingBudget
from step_protocol.messages import RowOpen
from step_protocol.types import RowError, RowErrorCode
from worker_svc.engine.kernels.machine import available_cores
from worker_svc.engine.row_part import SomeRows

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from grammars.compiler import GrammarCompiler


MAX_COMPILED = 256  # grammars in the cache
COMPILE_THREADS = 2
PREPARE_AFTER_S = 10.0  # reading a large tokenizer takes seconds and hundreds of MB
MAX_MASK_THREADS = 8


class UnusableGrammarError(ValueError):
    """The row's grammar cannot be compiled or applied here; the message says why."""


def compiled_grammars(model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> CompiledGrammars | None:
    """The grammars of a model folder; None if it has no tokenizer."""
    has_tokenizer = (model_dir / "tokenizer.json").is_file()
    return CompiledGrammars(model_dir, vocab_size, eos_token_ids) if has_tokenizer else None


class CompiledGrammars:
    """Compiles each grammar once, in a thread, for the tokenizer of a model folder. Compile errors are also cached."""

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = model_dir / "tokenizer.json"
        self._vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._compiled: OrderedDict[object, Future[LLMatcher]] = OrderedDict()
        # Without this, the first step with a grammar would wait for it; during the start it would delay the worker.
        timer = threading.Timer(PREPARE_AFTER_S, self._threads.submit, (self._make_compiler,))
        timer.daemon = True
        timer.start()

    def get(self, grammar: Grammar) -> Future[LLMatcher]:
        """A matcher at the start of the output, to be copied; or UnusableGrammarError. Only one thread may call it."""
        found = self._compiled.get(grammar.key)
        if found is not None:
            self._compiled.move_to_end(grammar.key)
            return found
        future = self._compiled[grammar.key] = self._threads.submit(self._compile, grammar)
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return future

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            return self._make_compiler().compile(grammar.kind, grammar.text)
        except BaseException as error:  # a panic of llguidance is not an Exception
            raise UnusableGrammarError(f"the grammar cannot be used: {error}") from error

    def _make_compiler(self) -> GrammarCompiler:
        """The compiler, made once. Every call raises UnsupportedTokenizerError if the tokenizer is not supported."""
        from grammars.compiler import GrammarCompiler

        with self._lock:
            if self._compiler is None:
                text = self._tokenizer.read_text(encoding="utf-8")
                self._compiler = GrammarCompiler(text, self._vocab_size, sorted(self.eos_token_ids))
            return self._compiler


@dataclass(slots=True)
class _RowGrammar:
    """The grammar of an open row, or its thinking budget, or both. A thread may still be passing the newest `consumed`
    tokens to `matcher`."""

    compiled: Future[LLMatcher] | None
    prompt_len: int
    eos_token_ids: frozenset[int]
    thinking: ThinkingBudget | None = None
    matcher: LLMatcher | None = None
    consumed: U32 = field(default_factory=lambda: EMPTY)  # output tokens
    is_ended: bool = False  # by EOS; steps that were sent before the scheduler received EOS may follow

    def asks_at(self, position: int) -> bool:
        """Whether the token at this sequence position may be constrained."""
        return self.compiled is not None or (
            self.thinking is not None and position - self.prompt_len in self.thinking.positions
        )

    def advance(self, token_ids: list[int]) -> LLMatcher:
        """Returns the matcher after it consumed these tokens. Raises UnusableGrammarError."""
        if self.matcher is None:
            if self.compiled is None:
                raise UnusableGrammarError("the row has none")
            self.matcher = self.compiled.result().deep_copy()
        for token_id in token_ids:
            if not self.is_ended and not self.matcher.consume_token(token_id):
                raise UnusableGrammarError(f"the output does not match the grammar: {_error_of(self.matcher)}")
            self.is_ended = self.is_ended or token_id in self.eos_token_ids
        return self.matcher


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of P of the S rows of logits of a step."""

    lines: I64  # [P] indices into the logits; ascending
    is_banned: Bools  # [P, vocab]
    failures: dict[int, str]  # line -> why its grammar failed
    forced: dict[int, int] = field(default_factory=dict)  # line -> the only token that its thinking budget allows

    def errors(self, rows: I64) -> list[RowError]:
        """The errors of failed rows; `rows` [S] are the rows of the logits."""
        return [RowError(int(rows[line]), text, RowErrorCode.GRAMMAR) for line, text in self.failures.items()]


class _MaskWork(NamedTuple):
    """The masks of one row: after its output and after each of its drafts."""

    row: int
    state: _RowGrammar
    new: list[int]  # output tokens that the matcher lacks
    drafts: list[int]


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """Masks that a thread computes."""

    future: Future[RowMasks]

    def result(self) -> RowMasks:
        """Waits for the masks."""
        return self.future.result()


class RowGrammars(SomeRows[_RowGrammar]):
    """The grammars of the open rows of one engine. One thread at a time may call it."""

    def __init__(self, compiled: CompiledGrammars, tokens: U32, vocab_size: int) -> None:
        """`tokens` [max_num_seqs, width] are the token histories of all rows; the row table writes them."""
        super().__init__()
        self._compiled, self.eos_token_ids = compiled, compiled.eos_token_ids
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._executor: LLExecutor | None = None  # made for the first mask

    def _state_of(self, item: RowOpen) -> _RowGrammar | None:
        if item.grammar is None and item.thinking is None:
            return None
        compiled = None if item.grammar is None else self._compiled.get(item.grammar)
        return _RowGrammar(compiled, item.prompt_len, self._compiled.eos_token_ids, item.thinking)

    def refusal(self, item: RowOpen) -> str | None:
        """The error in the ids of a thinking budget; None if they are valid."""
        found = item.thinking
        if found is None:
            return None
        highest = int(max(ids.max(initial=0) for ids in (found.start_ids, found.end_ids, found.last_ids)))
        is_known = highest < self._vocab_size
        return None if is_known else f"a thinking budget has id {highest}; ids must be below {self._vocab_size}"

    def has_any(self, rows: I64, positions: I64) -> bool:
        """Whether any of these rows may be constrained at its position."""
        return bool(self.in_use and self._asking(rows, positions))

    def _asking(self, rows: I64, positions: I64) -> list[int]:
        """Indices of the rows that may be constrained at these positions."""
        pairs = enumerate(zip(rows.tolist(), positions.tolist(), strict=True))
        return [i for i, (row, at) in pairs if (state := self.in_use.get(row)) is not None and state.asks_at(at)]

    def num_valid(self, row: int, num_tokens: int, drafts: list[int]) -> int:
        """How many of these tokens may follow the known tokens of the row, without an end of the output."""
        if row not in self.in_use or self.in_use[row].compiled is None:
            return len(drafts)
        state, new = self._take_new(row, num_tokens)
        try:
            matcher = state.advance(new)
        except BaseException:  # a panic of llguidance is not an Exception; `start` reports it
            return 0
        count = next((i for i, id_ in enumerate(drafts) if id_ in state.eos_token_ids), len(drafts))
        return 0 if state.is_ended or matcher.is_error() else matcher.validate_tokens(drafts[:count])

    def start(self, rows: I64, positions: I64) -> PendingMasks | None:
        """Starts to compute the masks for the tokens at these sequence positions, which follow the known tokens of the
        rows; None if none is constrained. A row with drafts occurs once for each of them, with ascending positions."""
        asking = self._asking(rows, positions) if self.in_use else []
        forced = {i: id_ for i in asking if (id_ := self._forced(int(rows[i]), int(positions[i]))) is not None}
        lines = [i for i in asking if self.in_use[int(rows[i])].compiled is not None]
        if not lines and not forced:
            return None
        work: list[_MaskWork] = []
        for i in lines:
            row, position = int(rows[i]), int(positions[i])
            if work and work[-1].row == row:
                work[-1].drafts.append(int(self._tokens[row, position - 1]))
            else:
                work.append(_MaskWork(row, *self._take_new(row, position), []))
        return PendingMasks(self._thread.submit(self._compute, np.array(lines, np.int64), work, forced))

    def _forced(self, row: int, position: int) -> int | None:
        state = self.in_use[row]
        output = self._tokens[row, state.prompt_len : position]
        return None if state.thinking is None else state.thinking.forced_id(output)

    def _take_new(self, row: int, position: int) -> tuple[_RowGrammar, list[int]]:
        """The row's grammar, and the output tokens that its matcher lacks: all, if the row's history was replaced."""
        state = self.in_use[row]
        output = self._tokens[row, state.prompt_len : position]
        if not np.array_equal(output[: len(state.consumed)], state.consumed):
            state = self.in_use[row] = _RowGrammar(
                state.compiled, state.prompt_len, state.eos_token_ids, state.thinking
            )
        new = output[len(state.consumed) :].tolist()
        state.consumed = output.copy()
        return state, new

    def _compute(self, lines: I64, work: list[_MaskWork], forced: dict[int, int]) -> RowMasks:
        failures: dict[int, str] = {}
        matchers: list[tuple[LLMatcher, int]] = []
        masks = np.full((len(lines), -(-self._vocab_size // 32)), -1, np.int32)
        i = 0
        for item in work:
            try:
                matchers.append((item.state.advance(item.new), i))
            except BaseException as error:  # a panic of llguidance is not an Exception; only this row fails
                failures[int(lines[i])] = str(error)
            i += 1 + len(item.drafts)
        self._fill(masks, matchers)
        self._fill_drafts(masks, work)
        for matcher, i in matchers:
            if matcher.is_error():
                failures[int(lines[i])] = f"the grammar failed: {_error_of(matcher)}"
        bits = np.unpackbits((~masks).view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        is_banned = bits.view(np.bool_)
        for i, line in enumerate(lines.tolist()):
            if line in forced and (line in failures or is_banned[i, forced[line]]):
                del forced[line]  # the grammar allows no end of reasoning here
        return RowMasks(lines, is_banned, failures, forced)

    def _fill_drafts(self, masks: npt.NDArray[np.int32], work: list[_MaskWork]) -> None:
        """Writes the masks behind the drafts of each row, and takes its matcher back to before them."""
        end = 0
        for item in work:
            end += 1 + len(item.drafts)
            matcher, num_consumed = item.state.matcher, 0
            if not item.drafts or matcher is None or matcher.is_error():
                continue
            for mask, draft in zip(masks[end - len(item.drafts) : end], item.drafts, strict=True):
                if not matcher.try_consume_tokens([draft]):
                    break  # a draft that the grammar forbids is not what is sampled
                num_consumed += 1
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            matcher.rollback(num_consumed)

    def _fill(self, masks: npt.NDArray[np.int32], matchers: list[tuple[LLMatcher, int]]) -> None:
        """Writes one mask per matcher, in several threads. llguidance releases the interpreter lock, and reports a
        failure as the matcher's error."""
        from llguidance import LLExecutor

        if len(matchers) == 1:
            matcher, i = matchers[0]
            matcher.unsafe_compute_mask_ptr(masks[i].ctypes.data, masks[i].nbytes)
        elif matchers:
            self._executor = self._executor or LLExecutor(min(available_cores(), MAX_MASK_THREADS))
            self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks[0].nbytes, len(masks))


def _error_of(matcher: LLMatcher) -> str:
    from grammars.compiler import error_of  # imported late, because llguidance may not be installed

    return error_of(matcher)
