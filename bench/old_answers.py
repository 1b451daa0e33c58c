#!/usr/bin/env python
"""Old answers as drafts, on the CPU worker's engine alone: equal, edited and foreign ones of 2,000 tokens.

python bench/old_answers.py
python bench/old_answers.py --model DIR --tokens 300 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from quire_client.demo import demo_model_dir

from bench.machine import describe
from request_fields.fields import SamplingParams
from step_protocol.messages import RowOpen, StepBatch, StepOutput
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.engine.speculation.draft_len import StepTimes

SAMPLING = SamplingParams(1.0, 0, 1.0, 0.0, 7)
PROMPT = np.arange(3, 35, dtype=np.uint32)


class NoTimes(StepTimes):
    """Each step computes as many drafts as acceptance allows: nothing takes time."""

    def observe(self, num_tokens: int, seconds: float) -> None: ...

    def is_stale(self, num_rows: int) -> bool:
        return False

    def of_rows(self, num_rows: int) -> float:
        return float("inf")

    def token_cost(self, num_rows: int) -> float:
        return 0.0


def decode(runner: ModelRunner, num_tokens: int, old_answer: list[int]) -> tuple[list[int], float]:
    """The output of the prompt, as the scheduler asks for it, and the tokens per second after the prompt."""
    one, table = np.ones(1, np.uint32), np.arange(runner.info.max_model_len // runner.info.block_size, dtype=np.uint32)
    runner.reset_rows()
    opened = RowOpen(0, PROMPT, len(PROMPT), table, 0, SAMPLING, 0, draft_token_ids=np.array(old_answer, np.uint32))
    slots, sampled = np.arange(len(PROMPT), dtype=np.uint32), np.ones(1, np.bool_)
    step = StepBatch(1, one * 0, one * len(PROMPT), one * 0, sampled, slots, opens=[opened])
    output = runner.execute(step)
    found, wanted, started = output.token_ids.tolist(), 0, time.perf_counter()
    while len(found) < num_tokens:
        start = len(PROMPT) + len(found) - 1
        step = StepBatch(step.step_id + 1, one * 0, one, one * start, sampled, one * (start + wanted))
        if wanted:
            step.max_query_lens = one * (1 + wanted)
        output = runner.execute(step)
        wanted = 0 if output.draft_lens is None else int(output.draft_lens[0])
        found += output.token_ids.tolist()
    return found, (len(found) - 1) / (time.perf_counter() - started)


def edited(answer: list[int], share: float, length: int, vocab_size: int) -> list[int]:
    """An answer of which this share was replaced, inserted or removed, in turn, in pieces of `length` tokens."""
    rng, output = random.Random(1), list(answer)
    for nth in range(round(share * len(answer) / length)):
        start, new = rng.randrange(len(output) - length), [rng.randrange(vocab_size) for _ in range(length)]
        output[start : start + length * (nth % 3 != 1)] = new * (nth % 3 != 2)
    return output


def measure_old_answers(runner: ModelRunner, num_tokens: int, repeats: int) -> dict[str, Any]:
    """One sampled answer with an old one and without, in turns: how many times fewer steps, if further tokens of a step
    take no time; the speed; and the processor time, which other processes disturb less.
    """
    execute, num_steps, figures = runner.execute, 0, dict[str, Any]()

    def counting(batch: StepBatch) -> StepOutput:
        nonlocal num_steps
        num_steps += 1
        return execute(batch)

    def run(old: list[int], times: StepTimes) -> np.ndarray:
        """Steps, tokens per second, processor seconds."""
        if runner._drafts is not None:
            runner._drafts._times = times
        before, started = num_steps, time.process_time()
        found, speed = decode(runner, num_tokens, old)
        if whole and found[:num_tokens] != whole:
            raise RuntimeError("the output with an old answer differs")
        whole[:] = found[:num_tokens]
        return np.array([num_steps - before, speed, time.process_time() - started])

    runner.execute = counting  # type: ignore[method-assign]
    whole: list[int] = []
    times = StepTimes()
    run([], times)
    vocab_size = runner.info.vocab_size
    olds = {"equal": whole[:], "foreign": [random.Random(2).randrange(vocab_size) for _ in whole]}
    olds["backwards"] = whole[::-1]
    for share in (0.01, 0.03, 0.1):
        olds |= {f"{share:.0%} in pieces of {size}": edited(whole, share, size, vocab_size) for size in (1, 10)}
    for name, old in olds.items():
        steps = float(run([], times)[0] / run(old, NoTimes())[0])
        pairs = [run(old, times) / run([], times) for _ in range(repeats)]
        _, speed, processor_s = np.median(pairs, axis=0).tolist()
        figures[name] = {"steps": round(steps, 2), "speed": round(speed, 2), "processor_s": round(processor_s, 3)}
        print(name, figures[name], flush=True)
    return figures


def main() -> None:
    """Measure old answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=demo_model_dir())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    length = len(PROMPT) + args.tokens + 64
    config = EngineConfig(args.model, args.dtype, num_blocks=length // 16 + 8, max_num_seqs=4, max_model_len=length)
    figures = measure_old_answers(ModelRunner(config), args.tokens, args.repeats)
    print(json.dumps({**describe(), "old_answers": figures}))


if __name__ == "__main__":
    main()
