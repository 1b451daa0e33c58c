"""A hand-driven scheduler for engine tests: the test says which row computes how many tokens in which step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from request_fields.fields import SamplingParams
from request_fields.parameters import Grammar
from step_protocol.columns import U32
from step_protocol.features import LogprobColumns, PooledRows, PromptLogprobs
from step_protocol.messages import NO_RULES, ImageSpan, RowOpen, StepBatch, StepOutput, TokenRules
from step_protocol.types import CarriedInput, Pooling, RowError
from worker_svc.engine.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def seeded(seed: int, temperature: float = 1.0, **overrides: float) -> SamplingParams:
    fields = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | overrides
    return SamplingParams(temperature=temperature, seed=seed, **fields)


def u32(*values: int) -> U32:
    return np.array(values, dtype=np.uint32)


class Score(NamedTuple):
    """The log probabilities at one position: of its token, then of the most likely ones."""

    values: list[float]
    token_ids: list[int]
    rank: int
    extras: tuple[
        float | int, ...
    ] = ()  # raw log probability, kept ids, digest of the logits, as far as the step has them


def scores_of(columns: LogprobColumns) -> list[Score | None]:
    """One entry per token; None for a token without log probabilities."""
    found: list[Score | None] = []
    start = 0
    ranks = iter(columns.ranks.tolist())
    extras = zip(*(column.tolist() for column in columns.extras().values()), strict=True)
    for length in columns.lens.tolist():
        end = start + length
        entries = columns.logprobs[start:end].tolist(), columns.token_ids[start:end].tolist()
        found.append(Score(*entries, next(ranks), next(extras, ())) if length else None)
        start = end
    assert start == len(columns.logprobs) == len(columns.token_ids)
    assert next(ranks, None) is None
    return found


@dataclass
class Row:
    """The driver's state of an open row."""

    tokens: list[int]
    prompt_len: int
    blocks: list[int]
    computed: int
    is_pooled: bool = False

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


@dataclass
class Driver:
    """Owns the blocks of one runner and keeps every row's tokens, logits and errors."""

    runner: ModelRunner
    rows: dict[int, Row] = field(default_factory=dict)
    logits: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # by (row, sequence position)
    errors: list[RowError] = field(default_factory=list)
    scores: dict[tuple[int, int], Score] = field(default_factory=dict)  # by (row, sequence position)
    pooled: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)  # by row
    step_id: int = 0

    def __post_init__(self) -> None:
        self.block_size = self.runner.info.block_size
        self.free = list(range(self.runner.info.num_blocks))
        self._opens: list[RowOpen] = []
        self._closes: list[int] = []
        self._extra: dict[str, object] = {}
        self._sampled: list[torch.Tensor] = []
        self._record_logits()

    def open(
        self,
        row: int,
        prompt: list[int],
        sampling: SamplingParams = GREEDY,
        *,
        output: tuple[int, ...] | list[int] = (),
        sample_index: int = 0,
        shared: list[int] | None = None,
        banned: tuple[int, ...] = (),
        banned_before: int = 0,
        rules: TokenRules = NO_RULES,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        inputs: tuple[CarriedInput, ...] = (),
        images: tuple[ImageSpan, ...] = (),
        adapter: bytes = b"",
        pooling: Pooling | None = None,
        num_candidates: int = 0,
        snapshot: int | None = None,
        processed: bool = False,
        digests: bool = False,
        num_forced: int = 0,
    ) -> Row:
        """Opens a row in the next step. `shared` are full blocks whose keys and values are already computed, and
        `snapshot` the slot of the state after them."""
        tokens, blocks = [*prompt, *output], list(shared or ())
        state = Row(tokens, len(prompt), blocks, len(blocks) * self.block_size, pooling is not None)
        self._grow(state, len(tokens))
        self._opens.append(
            RowOpen(row, np.array(tokens, np.uint32), len(prompt), np.array(state.blocks, np.uint32), state.computed,
                    sampling, sample_index, banned_ids=u32(*banned), banned_before=banned_before,
                    rules=rules, grammar=grammar, logprobs=logprobs, prompt_logprobs=prompt_logprobs, inputs=inputs,
                    images=images, adapter=adapter, pooling=pooling, num_candidates=num_candidates,
                    snapshot=snapshot, processed_logprobs=processed, logits_digests=digests, num_forced=num_forced)
        )  # fmt: skip
        self.rows[row] = state
        return state

    def fork(self, row: int, parent: int, sampling: SamplingParams, *, sample_index: int, rules: TokenRules) -> Row:
        """Opens another sample of the parent's prompt, which fills its blocks and is computed in the next step."""
        source = self.rows[parent]
        prompt_len = source.prompt_len
        blocks = source.blocks[: prompt_len // self.block_size]
        self._opens.append(
            RowOpen(row, u32(), prompt_len, u32(*blocks), prompt_len, sampling, sample_index, fork_of_row=parent,
                    rules=rules)
        )  # fmt: skip
        self.rows[row] = Row(source.tokens[:prompt_len], prompt_len, list(blocks), prompt_len)
        self.add(fork_rows=u32(row), fork_parents=u32(parent))
        return self.rows[row]

    def close(self, row: int, *, keep_blocks: bool = False) -> Row:
        """Closes a row in the next step; its blocks are freed unless they are kept."""
        state = self.rows.pop(row)
        self._closes.append(row)
        if not keep_blocks:
            self.free.extend(state.blocks)
        return state

    def add(self, **columns: object) -> None:
        """Further columns of the next batch."""
        self._extra |= columns

    def step(self, query_lens: dict[int, int]) -> StepOutput:
        """Computes the given tokens of each row, in this order. A row samples when it reaches its last known token."""
        self.step_id += 1
        batch = self._batch(query_lens)
        self._sampled.clear()
        output = self.runner.execute(batch)
        self._opens, self._closes, self._extra = [], [], {}
        self._apply(output, query_lens)
        return output

    def prefill(self, row: int, chunk: int = 10**6) -> None:
        """Computes the rest of a row's known tokens in chunks."""
        state = self.rows[row]
        end = len(state.tokens)
        while state.computed < end:
            self.step({row: min(chunk, end - state.computed)})

    def decode(self, rows: list[int], steps: int) -> None:
        for _ in range(steps):
            self.step(dict.fromkeys(rows, 1))

    def slots(self, state: Row, start: int, end: int) -> U32:
        size = self.block_size
        return np.array([state.blocks[p // size] * size + p % size for p in range(start, end)], np.uint32)

    def _grow(self, state: Row, num_tokens: int) -> list[int]:
        added = []
        while len(state.blocks) * self.block_size < num_tokens:
            added.append(self.free.pop(0))
            state.blocks.append(added[-1])
        return added

    def _batch(self, query_lens: dict[int, int]) -> StepBatch:
        changes: list[tuple[int, int, int]] = []
        slots = [u32()]
        for row, count in query_lens.items():
            state = self.rows[row]
            known = len(state.blocks)
            added = self._grow(state, state.computed + count)
            changes += [(row, known + i, block) for i, block in enumerate(added)]
            slots.append(self.slots(state, state.computed, state.computed + count))
        states = [self.rows[row] for row in query_lens]
        counts = zip(states, query_lens.values(), strict=True)
        reaches_end = [s.computed + n == len(s.tokens) and not s.is_pooled for s, n in counts]
        columns: dict[str, object] = {
            "rows": u32(*query_lens),
            "query_lens": u32(*query_lens.values()),
            "context_lens": u32(*(s.computed for s in states)),
            "sample_mask": np.array(reaches_end, np.bool_),
            "slot_mapping": np.concatenate(slots),
            "close_rows": u32(*self._closes),
            "opens": self._opens,
            "table_rows": u32(*(c[0] for c in changes)),
            "table_indices": u32(*(c[1] for c in changes)),
            "table_blocks": u32(*(c[2] for c in changes)),
        }
        return StepBatch(self.step_id, **(columns | self._extra))  # type: ignore[arg-type]

    def _apply(self, output: StepOutput, query_lens: dict[int, int]) -> None:
        self.errors.extend(output.errors)
        failed = {error.row for error in output.errors}
        self._record_scores(output)
        if (pooled := output.part(PooledRows)) is not None:
            self.pooled |= pooled.of_row()
        for row, count in query_lens.items():
            if row not in failed:
                self.rows[row].computed += count
        for i, (row, token) in enumerate(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True)):
            if row not in self.rows:
                continue
            if self._sampled:  # replayed graphs record none
                self.logits[row, len(self.rows[row].tokens)] = self._sampled[0][i]
            self.rows[row].tokens.append(token)

    def _record_scores(self, output: StepOutput) -> None:
        """Call this before the sampled tokens are appended: a token's position is its row's number of tokens."""
        found: list[tuple[int, int, Score | None]] = []
        if output.logprobs is not None:
            positions = [len(self.rows[row].tokens) for row in output.rows.tolist()]
            found += zip(output.rows.tolist(), positions, scores_of(output.logprobs), strict=True)
        if (prompt := output.part(PromptLogprobs)) is not None:
            found += zip(prompt.rows.tolist(), prompt.positions.tolist(), scores_of(prompt.columns), strict=True)
        for row, position, score in found:
            if score is not None:
                assert (row, position) not in self.scores, "a position was scored twice"
                self.scores[row, position] = score

    def _record_logits(self) -> None:
        backend = self.runner._backend
        original = type(backend).sample

        def sample(logits: torch.Tensor, columns: object) -> object:
            token_ids, is_bad = original(backend, logits, columns)  # type: ignore[arg-type]
            self._sampled.append(logits[torch.from_numpy(~is_bad)])
            return token_ids, is_bad

        backend.sample = sample  # type: ignore[method-assign,assignment]
