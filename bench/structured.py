"""Structured output: the cost of a mask, and of 32 rows with a grammar against 32 rows without.

    python bench/structured.py                 # two to four minutes

Masks: rows walk random ways through a JSON schema over a synthetic byte-level vocabulary of 151,936 tokens. The time of
a mask is llguidance's; the time of a step also has the change of threads, the last tokens and unpacking the bits.

Throughput: 32 rows of the shape of W2 (Qwen3-0.6B), bfloat16, temperature 1, exact mode, the engine alone. Runs with
and without grammars alternate; the ratio compares the best runs, and `cpu_ratio` their processor time, which other
processes disturb less. Prompts are short, so that most of the time is decoding. The last line is one JSON object.
A run that lost much time to other virtual machines is repeated (bench/machine.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # quire-worker sets it too; OpenMP reads it when torch is imported

import numpy as np

from bench.machine import Figures, describe, quiet
from bench.worker import Loop, Running
from bench.workloads import QWEN3_06B, Model, Request, Workload, make_model
from request_fields.fields import SamplingParams
from request_fields.parameters import Grammar, GrammarKind
from step_protocol.messages import RowOpen
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.kernels.machine import available_cores
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.engine.sampling.grammars import RowGrammars, compiled_grammars

EOS = 2
ROWS = 32
TARGET_US, TARGET_RATIO = 100.0, 0.9
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z]{2,12}@[a-z]{2,12}\\.(com|org)$"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "other"]}, "maxItems": 5},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 1000}  # does not end within the benchmark


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--repeats", type=int, default=3, help="runs with and without grammars")
    parser.add_argument("--output-tokens", type=int, default=24, help="per row")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made, vocab_size = make_model(Path(folder) / "model", QWEN3_06B), QWEN3_06B["vocab_size"]
        make_tokenizer(made / "tokenizer.json", vocab_size)
        masks = measure_masks(made, vocab_size, 1000)
        rates = quiet(partial(measure_rates, made, QWEN3_06B, args))
    result = masks | rates | describe()
    print(
        f"{ROWS} rows with a grammar / without: {rates['ratio']:.3f} (target {TARGET_RATIO}); "
        f"by processor time {rates['cpu_ratio']:.3f}"
    )
    print(f"mask: p50 {masks['mask_p50_us']:.0f} us (target {TARGET_US:.0f}), p99 {masks['mask_p99_us']:.0f} us")
    print(f"step of one row: p50 {masks['step_p50_us']:.0f} us")
    print(f"step of {ROWS} rows: p50 {masks['step_of_32_p50_us']:.0f} us")
    print(json.dumps(result))


def make_tokenizer(path: Path, vocab_size: int) -> None:
    """Writes a byte-level BPE tokenizer: all bytes, then words with and without a space, in the style of real ones."""
    rng = random.Random(0)
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    char_of = {byte: chr(byte) for byte in visible}
    char_of |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in char_of)}
    vocab = {token: i for i, token in enumerate(["<bos>", "<unk>", "<eos>", *char_of.values()])}
    merges: list[list[str]] = []
    letters, space = list(string.ascii_letters + string.digits + '",:{}[]._-@/'), char_of[32]
    words = [*letters, *(space + letter for letter in letters)]
    for word in words[len(letters) :]:
        merges.append([space, word[1:]])
        vocab[word] = len(vocab)
    while len(vocab) < vocab_size:
        left, right = rng.choice(words), rng.choice(letters)
        if len(left) < 12 and left + right not in vocab:
            merges.append([left, right])
            vocab[left + right] = len(vocab)
            words.append(left + right)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    special = [{"id": i, "content": token, **flags} for i, token in enumerate(["<bos>", "<unk>", "<eos>"])]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocab, "merges": merges,
    }  # fmt: skip
    path.write_text(
        json.dumps({
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
            "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model,
        })
    )  # fmt: skip


def measure_masks(folder: Path, vocab_size: int, num_masks: int) -> dict[str, float]:
    """Microseconds of llguidance per mask, and per step of 1 and of 32 rows."""
    compiled = compiled_grammars(folder, vocab_size, [EOS])
    assert compiled is not None
    started = time.perf_counter()
    matcher = compiled.get(grammar()).result().deep_copy()
    load_s = time.perf_counter() - started
    rng, mask, spent = np.random.default_rng(0), np.zeros(-(-vocab_size // 32), np.int32), []
    for _ in range(num_masks):
        started = time.perf_counter()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        spent.append(1e6 * (time.perf_counter() - started))
        bits = np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little")
        matcher.consume_token(int(rng.choice(np.flatnonzero(bits))))
    p50, p99 = np.percentile(spent, [50, 99])
    tokens = np.zeros((ROWS, 4096), np.uint32)
    steps = [_walk(RowGrammars(compiled, tokens, vocab_size), tokens, rows, num_masks // 4) for rows in (1, ROWS)]
    return {
        "mask_p50_us": float(p50),
        "mask_p99_us": float(p99),
        "step_p50_us": float(np.median(steps[0])),
        "step_of_32_p50_us": float(np.median(steps[1])),
        "tokenizer_and_first_grammar_s": load_s,
    }


def _walk(table: RowGrammars, tokens: np.ndarray, num_rows: int, steps: int) -> list[float]:
    """Microseconds per step. Every row samples a random allowed token."""
    rng = np.random.default_rng(0)
    rows, none = np.arange(num_rows), np.empty(0, np.uint32)
    for row in rows.tolist():
        table.open(RowOpen(row, none, 1, none, 0, greedy(row), 0, grammar=grammar()))
    spent = []
    for step in range(steps):
        started = time.perf_counter()
        pending = table.start(rows, np.full(num_rows, 1 + step))
        assert pending is not None
        masks = pending.result()
        spent.append(1e6 * (time.perf_counter() - started))
        assert not masks.failures
        for row in rows.tolist():
            tokens[row, 1 + step] = rng.choice(np.flatnonzero(~masks.is_banned[row]))
    return spent[min(10, steps // 2) :]


def grammar() -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PEOPLE))


def greedy(seed: int) -> SamplingParams:
    return replace(SAMPLED, temperature=0.0, seed=seed)


SAMPLED = SamplingParams(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, repetition_penalty=1.0, frequency_penalty=0.0,
    presence_penalty=0.0,
)  # fmt: skip


class ConstrainedLoop(Loop):
    """All rows have a grammar."""

    def _open(self, i: int, state: Running, sampling: SamplingParams) -> RowOpen:
        return replace(super()._open(i, state, sampling), grammar=grammar())


def measure_rates(folder: Path, model: Model, args: argparse.Namespace) -> Figures:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 8192) for _ in range(rng.randint(8, 16))] for _ in range(ROWS)]
    workload = Workload([Request(prompt, args.output_tokens) for prompt in prompts], model, 0)
    runner = ModelRunner(
        EngineConfig(folder, max_num_seqs=ROWS, num_blocks=512, threads=args.threads, max_model_len=512)
    )
    loops = {"free": Loop(runner, workload), "constrained": ConstrainedLoop(runner, workload)}
    spent: dict[str, list[float]] = {name: [] for name in loops}
    used: dict[str, list[float]] = {name: [] for name in loops}
    for repeat in range(args.repeats + 1):
        for name, loop in loops.items():
            before = time.process_time()
            seconds = loop.run(SAMPLED)
            if repeat:  # the first run compiles and faults in memory
                spent[name].append(seconds)
                used[name].append(time.process_time() - before)
    rates = {f"{name}_tok_s": workload.num_output / min(times) for name, times in spent.items()}
    ratios = {"ratio": min(spent["free"]) / min(spent["constrained"])}
    return rates | ratios | {"cpu_ratio": min(used["free"]) / min(used["constrained"])}


if __name__ == "__main__":
    main()
