"""Checks receipts by computing their answers again: `python -m worker_svc.receipts.verify`, which `quire verify` runs.

The known output is computed like a prompt, and then every position is sampled again, many at a time: each has its own
row, whose tokens are the prompt and the output before it. So the rows have the penalties, grammar and noise of the
original request, and a position costs one token of a decode step. docs/receipts.md explains the verdicts.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from quire.internal.v1 import worker_pb2
from quire.v1 import types_pb2 as types

from request_fields.receipts import Receipt, ReceiptError, parse_receipt, public_key_bytes
from step_protocol.columns import U32, u32_to_bytes
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.proto import batch_from_proto
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.config import EngineConfig
from worker_svc.receipts.claims import Span, Texts, check_form, check_ids, open_points, parameters_of, spans_of

CONFIRMED, REFUTED, INVALID, UNDECIDED = range(4)  # exit codes
SEVERITY = (CONFIRMED, UNDECIDED, INVALID, REFUTED)  # the last one among several receipts is the exit code
WORDS = {CONFIRMED: "confirmed", REFUTED: "refuted", INVALID: "invalid", UNDECIDED: "undecided"}
MAX_ROWS = 64  # positions that a step samples
MAX_STEP_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class ReceiptVerdict:
    """The result of a check. `code` is the exit code."""

    code: int
    reason: str

    def to_json(self, receipt: Receipt | None) -> str:
        facts = {} if receipt is None else {"key": receipt.key_id, "request_id": receipt.payload.get("request_id")}
        return json.dumps({"verdict": WORDS[self.code], "reason": self.reason, **facts})


class Undecidable(Exception):
    """The answer cannot be computed here; the message says why."""


class Verifier:
    """Checks receipts against one model folder. Keeps the loaded model while the receipts have its settings."""

    def __init__(self, model_dir: Path, adapter: Path | None = None, public_key: bytes | None = None) -> None:
        self._model_dir = model_dir
        self._adapter = adapter
        self._public_key = public_key
        self._loaded: tuple[EngineConfig, Any] | None = None

    def verify(self, receipt: Receipt, first: int | None = None, last: int | None = None) -> ReceiptVerdict:
        """Checks signature, statements, model and a slice of the answer, in this order. A check that fails by an
        error of its own refutes nothing. Raises CheckpointError."""
        try:
            receipt.check(self._public_key)
            check_form(receipt)
            return Recomputation(receipt, self._runner(receipt), self._model_dir).verdict(first, last)
        except ReceiptError as error:
            return ReceiptVerdict(REFUTED, str(error))
        except Undecidable as error:
            return ReceiptVerdict(UNDECIDED, str(error))
        except CheckpointError:
            raise
        except Exception as error:
            traceback.print_exc()
            return ReceiptVerdict(UNDECIDED, f"the check failed: {type(error).__name__}: {error}")

    def _runner(self, receipt: Receipt) -> Any:
        """The model with the numeric settings of a receipt, and a pool for its answer. Raises ReceiptError and
        Undecidable."""
        payload, answer = receipt.payload, receipt.answer
        settings = _settings(
            payload, self._model_dir, len(answer.prompt_token_ids) + len(answer.token_ids), self._adapter
        )
        if self._loaded is None or not _serves(self._loaded[0], settings):
            self._loaded = settings, _load(settings)
        runner = self._loaded[1]
        runner.reset_rows()
        if payload["adapter"]:
            by_digest = {entry.digest.hex(): entry.digest for entry in runner.adapters.entries()}
            if payload["adapter"] not in by_digest:
                raise ReceiptError("the adapter is another one: its digest is not that of the receipt")
            runner.adapters.swap(by_digest[payload["adapter"]])
        return runner


class Recomputation:
    """One answer on a loaded model. Raises ReceiptError for a payload that describes no request."""

    def __init__(self, receipt: Receipt, runner: Any, model_dir: Path) -> None:
        self._receipt, self._payload, self._answer = receipt, receipt.payload, receipt.answer
        self._tokens: U32 = np.array([*receipt.answer.prompt_token_ids, *receipt.answer.token_ids], np.uint32)
        self._prompt_len = len(receipt.answer.prompt_token_ids)
        self._runner, self._info, self._model_dir = runner, runner.info, model_dir
        self._spans = spans_of(receipt)
        self._asked = parameters_of(receipt)
        self._row = self._row_open()
        self._step_id = 0

    def verdict(self, first: int | None, last: int | None) -> ReceiptVerdict:
        """The result for the output tokens of a slice that the loaded weights have computed. Raises ReceiptError if it
        is refuted, and Undecidable."""
        num_output = len(self._answer.token_ids)
        if (first or 0) >= num_output:
            return ReceiptVerdict(INVALID, f"--first {first}: the receipt has {num_output} output tokens")
        mine = self._own_spans()
        check_ids(self._receipt, self._asked, self._info)
        points = list(open_points(self._receipt, self._asked, self._info, self._tokenizer))
        if others := {span.revision for span in mine} - {self._info.revision}:
            points.append(f"the folder has other settings: its revision is {self._info.revision}, not {min(others)}")
        places = [place for span in mine for place in range(num_output)[first:last] if span.start <= place < span.end]
        if not places:
            raise Undecidable("these weights computed no output token of the slice")
        self._compute(places)
        if len(places) < num_output:
            points.append(f"{num_output - len(places)} of {num_output} were not computed")
        words = f"output tokens {_ranges(places)} were computed again and are the same"
        return ReceiptVerdict(UNDECIDED if points else CONFIRMED, "; ".join((words, *points)))

    def _own_spans(self) -> list[Span]:
        """The spans that the loaded weights have computed from their own keys and values. Raises ReceiptError for
        other weights, and Undecidable for another arithmetic."""
        info = self._info
        mine = [span for span in self._spans if span.weights_digest == info.weights_digest]
        if not mine:
            known = self._payload["weights_digest"]
            raise ReceiptError(f"the weights are others: their digest is {info.weights_digest}, not {known}")
        if self._payload["numerics"] != info.numerics:
            raise Undecidable(
                f"this machine computes with {info.numerics!r}, the receipt's worker with "
                f"{self._payload['numerics']!r}: bits may differ, so the answer can be checked only on such a machine"
            )
        mine = [span for span in mine if not span.keeps_kv]
        if not mine:
            raise Undecidable("the weights were updated while the row kept its keys and values")
        return mine

    def _compute(self, places: Sequence[int]) -> None:
        """Computes output tokens again. Raises ReceiptError at the first one that the model does not give."""
        self._prefill(self._prompt_len + places[-1])
        for start in range(0, len(places), MAX_ROWS):
            part = places[start : start + MAX_ROWS]
            problem = self._compare(part, self._sample(part))
            if problem is not None:
                raise ReceiptError(problem)

    def _tokenizer(self) -> Texts:
        from grammars.compiler import GrammarCompiler  # needs llguidance, which only some receipts need

        file = self._model_dir / "tokenizer.json"
        if not file.is_file():
            raise ValueError("the model folder has no tokenizer.json")
        return GrammarCompiler(file.read_text("utf-8"), self._info.vocab_size, self._info.eos_token_ids)

    def _compare(self, places: Sequence[int], output: StepOutput) -> str | None:
        if output.errors:
            return f"output token {places[output.errors[0].row - 1]} cannot be computed: {output.errors[0].message}"
        digests, first_digest = output.logprobs.logits_digests, self._first_digest  # type: ignore[union-attr]
        for i, place in enumerate(places):
            known, found = self._answer.token_ids[place], int(output.token_ids[i])
            if known != found:
                return f"output token {place} is {known}, but the model samples {found} there"
            if place >= first_digest and self._answer.logits_digests[place - first_digest] != int(digests[i]):  # type: ignore[index]
                return f"the logits at output token {place} are others: other weights or another arithmetic"
        return None

    @property
    def _first_digest(self) -> int:
        return len(self._answer.token_ids) - len(self._answer.logits_digests)

    def _prefill(self, num_tokens: int) -> None:
        """Computes keys and values of the known tokens in row 0, which owns the first blocks of the pool."""
        opens = self._message(0, self._tokens, range(self._num_blocks(num_tokens)), 0)
        most = self._info.max_num_batched_tokens
        for start in range(0, num_tokens, most):
            end = min(start + most, num_tokens)
            slots = np.arange(start, end)
            output = self._step([0], [end - start], [start], slots, opens=[] if start else [opens], samples=False)
            if output.errors:
                raise Undecidable(f"the prompt cannot be computed: {output.errors[0].message}")

    def _sample(self, places: Sequence[int]) -> StepOutput:
        """Samples the tokens at these output positions in one step. A row shares the blocks before that of its last
        token, and has a copy of the latter, which it may write."""
        size, first_own = self._info.block_size, self._num_blocks(len(self._tokens))
        opens, slots, sources, copies, contexts = [], [], [], [], []
        for i, place in enumerate(places):
            computed = self._prompt_len + place - 1
            block, own = computed // size, first_own + i
            opens.append(self._message(1 + i, self._tokens[: computed + 1], [*range(block), own], computed))
            slots.append(own * size + computed % size)
            sources.append(block)
            copies.append(own)
            contexts.append(computed)
        rows = [1 + i for i in range(len(places))]
        output = self._step(rows, [1] * len(rows), contexts, np.array(slots), opens=opens, copies=(sources, copies))
        self._step([], [], [], np.empty(0, np.int64), closes=rows)
        return output

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // int(self._info.block_size))

    def _step(
        self,
        rows: Sequence[int],
        query_lens: Sequence[int],
        contexts: Sequence[int],
        slots: Any,
        *,
        opens: Sequence[worker_pb2.RowOpen] = (),
        copies: tuple[Sequence[int], Sequence[int]] = ((), ()),
        closes: Sequence[int] = (),
        samples: bool = True,
    ) -> StepOutput:
        self._step_id += 1
        message = worker_pb2.StepBatch(
            step_id=self._step_id,
            rows=_packed(rows),
            query_lens=_packed(query_lens),
            context_lens=_packed(contexts),
            sample_mask=bytes([samples]) * len(rows),
            slot_mapping=_packed(slots),
            opens=opens,
            copy_src=_packed(copies[0]),
            copy_dst=_packed(copies[1]),
            close_rows=_packed(closes),
        )
        batch: StepBatch = batch_from_proto(message)
        output: StepOutput = self._runner.execute(batch)
        return output

    def _message(self, row: int, tokens: U32, table: Sequence[int], num_computed: int) -> worker_pb2.RowOpen:
        message = worker_pb2.RowOpen()
        message.CopyFrom(self._row)
        message.row, message.num_computed_tokens = row, num_computed
        message.token_ids, message.block_table = u32_to_bytes(tokens), _packed(table)
        return message

    def _row_open(self) -> worker_pb2.RowOpen:
        """What all rows have in common: the parameters of the request."""
        sampling, condition = types.SamplingParams(), self._asked.condition
        sampling.CopyFrom(self._asked.sampling)
        sampling.bad_words.clear()
        banned = [token for token in condition.banned_ids(self._info.eos_token_ids) if token < self._info.vocab_size]
        return worker_pb2.RowOpen(
            prompt_len=self._prompt_len,
            sampling=sampling,
            sample_index=self._payload["sample"],
            banned_ids=_packed(banned),
            banned_before=condition.min_tokens,
            bad_words_ids=[types.TokenIds(ids=ids) for ids in self._asked.bad_words_ids],
            logprobs=0,
            adapter=bytes.fromhex(self._payload["adapter"]),
        )


def _ranges(places: Sequence[int]) -> str:
    """`0 to 16`, or `0 to 3, 9 to 16`; the places ascend."""
    starts = [place for i, place in enumerate(places) if not i or places[i - 1] != place - 1]
    ends = [place for i, place in enumerate(places) if i == len(places) - 1 or places[i + 1] != place + 1]
    return ", ".join(f"{start} to {end}" for start, end in zip(starts, ends, strict=True))


def _packed(values: Any) -> bytes:
    return u32_to_bytes(np.asarray(values, np.uint32))


def _settings(payload: Mapping[str, Any], model_dir: Path, num_tokens: int, adapter: Path | None) -> EngineConfig:
    if payload.get("determinism") != "exact":
        raise Undecidable("the workers ran best_effort: their tokens depend on the batch and cannot be checked")
    if payload.get("adapter") and adapter is None:
        raise Undecidable("the answer was computed with an adapter; give its folder by --adapter")
    try:
        size = int(payload["block_size"])
        return EngineConfig(
            model_dir,
            payload["dtype"],
            block_size=size,
            num_blocks=-(-num_tokens // size) + MAX_ROWS,
            max_num_seqs=MAX_ROWS + 1,
            max_num_batched_tokens=MAX_STEP_TOKENS,
            max_model_len=payload["max_model_len"],
            backend=payload["numerics"].partition(",")[0].partition("/")[0],
            quantize=payload["quantization"] or None,
            kv_cache_dtype=payload["kv_cache_dtype"] or "auto",
            adapters=() if adapter is None else (("checked", adapter),),
            max_adapters=0 if adapter is None else 1,
        )
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise ReceiptError(f"the payload describes no model: {type(error).__name__}: {error}") from None


def _serves(loaded: EngineConfig, asked: EngineConfig) -> bool:
    """Whether a loaded model has the settings that an answer needs, and a pool that is large enough."""
    return replace(asked, num_blocks=loaded.num_blocks) == loaded and (loaded.num_blocks or 0) >= (
        asked.num_blocks or 0
    )


def _load(settings: EngineConfig) -> Any:
    from worker_svc.engine.model_runner import ModelRunner

    if settings.backend == "cuda":
        raise Undecidable("receipts of CUDA workers cannot be checked")
    try:
        return ModelRunner(settings)
    except CheckpointError:
        raise
    except (ValueError, BackendUnavailableError) as error:
        raise Undecidable(f"the model of the receipt cannot be loaded here: {error}") from None


def receipts_of(text: str) -> Iterator[str]:
    """The receipts of a file: one per line, or one alone."""
    lines = [line for line in text.splitlines() if line.strip()]
    return iter(lines or [""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="quire verify", description="Checks receipts by computing their answers again."
    )
    parser.add_argument("receipt", type=Path, help="file with a receipt per line; -: stdin")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--adapter", type=Path, help="folder of the adapter, if the answer has one")
    parser.add_argument("--public-key", type=Path, help="PEM file of the key that must have signed")
    parser.add_argument("--first", type=int, help="first output position to check (default 0)")
    parser.add_argument("--last", type=int, help="output position after the last one to check (default: all)")
    args = parser.parse_args(argv)
    if (args.first or 0) < 0 or (args.last is not None and args.last <= (args.first or 0)):
        parser.error(f"--first {args.first or 0} --last {args.last}: the slice is empty; positions count from 0")
    worst = CONFIRMED
    try:
        text = sys.stdin.read() if str(args.receipt) == "-" else args.receipt.read_text("utf-8")
        public_key = None if args.public_key is None else public_key_bytes(args.public_key.read_bytes())
        verifier = Verifier(args.model, args.adapter, public_key)
        for line in receipts_of(text):
            verdict, receipt = _verdict_of(line, verifier, args)
            print(verdict.to_json(receipt), flush=True)
            worst = max(worst, verdict.code, key=SEVERITY.index)
    except (OSError, UnicodeDecodeError, ReceiptError, CheckpointError) as error:
        print(f"quire verify: {error}", file=sys.stderr)
        return INVALID
    return worst


def _verdict_of(line: str, verifier: Verifier, args: argparse.Namespace) -> tuple[ReceiptVerdict, Receipt | None]:
    try:
        receipt = parse_receipt(line)
    except ReceiptError as error:
        return ReceiptVerdict(INVALID, str(error)), None
    return verifier.verify(receipt, args.first, args.last), receipt


if __name__ == "__main__":
    sys.exit(main())
