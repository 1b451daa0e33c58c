#!/usr/bin/env python
"""How often drafts are right on the demo model, by proposer and kind of text.

    python scripts/train_demo.py --draft --out DIR --steps 1500      # the draft model: a fifth of the size
    python bench/acceptance.py [--draft DIR]

Answers are as long as the learnt ones. For each kind the share of right first drafts (`right`) and the mean number of
tokens of a step (`tokens`), each greedy and at temperature 1. `greedy drafts`: the draft model proposes its most likely
tokens; `drafts with noise`: it samples with the noise of the row; `draft`: what was right more often. The figures do
not depend on the machine. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from quire_client.demo import demo_model_dir
from tokenizers import Tokenizer

from bench.speculation import GREEDY, decode_prompts
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.engine.speculation.draft_len import StepTimes
from worker_svc.engine.speculation.draft_model import DraftModel

MAX_DRAFTS = 4
NUM_PAIRS = 12
CODE = """def area(width, height):
    return width * height


def volume(width, height, depth):
    return area(width, height) * depth


def area(width, height):
    return"""


class NoTimes(StepTimes):
    """Each step computes as many drafts as acceptance allows: nothing takes time."""

    def observe(self, num_tokens: int, seconds: float) -> None: ...

    def is_stale(self, num_rows: int) -> bool:
        return False

    def of_rows(self, num_rows: int) -> float:
        return float("inf")

    def token_cost(self, num_rows: int) -> float:
        return 0.0


def make_prompts(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Texts by kind, each with one as long as its answer. The demo model answers questions that it has learnt, and
    continues all others somehow.
    """
    content = json.loads((folder / "pairs.json").read_text())
    wordings = content["wordings"]
    pairs = [pair for pair in content["pairs"] if "about" in pair and len(pair["answer"]) > 100][:NUM_PAIRS]
    asked = [(wordings[pair["kind"]][0].format(pair["about"]), pair["answer"]) for pair in pairs]

    def chat(*turns: str) -> str:
        roles = ("user", "assistant") * len(turns)
        told = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, turns, strict=False))
        return told + "<|im_start|>assistant\n"

    return {
        "first turn": [(chat(question), answer) for question, answer in asked],
        "repetition": [(chat(question, answer, question), answer) for question, answer in asked],
        "second turn edits the first": [(chat(q, a, q[0].lower() + q[1:].rstrip("?")), a) for q, a in asked],
        "quoting": [(chat(f"Quote: {answer}", f"Quote: {answer[: len(answer) // 3]}"), answer) for _, answer in asked],
        "code": [(CODE, CODE)],
    }


def measure(runner: ModelRunner, prompts: list[tuple[np.ndarray, int]], temperature: float) -> dict[str, float]:
    counts, drafts = runner.draft_counts, runner._drafts
    if counts is None or drafts is None:
        raise RuntimeError("the runner has no drafts")
    counts.drafted[:] = counts.accepted[:] = 0
    num_steps, execute = 0, runner.execute

    def counting(batch: Any) -> Any:
        nonlocal num_steps
        num_steps += not batch.opens
        return execute(batch)

    runner.execute = counting  # type: ignore[method-assign]
    num_tokens = 0
    for seed, (prompt, count) in enumerate(prompts):
        sampling = replace(GREEDY, temperature=temperature, seed=seed)
        num_tokens += len(decode_prompts(runner, [prompt], count, sampling)[0][0])
    runner.execute = execute  # type: ignore[method-assign]
    right = counts.accepted[0] / max(1, counts.drafted[0])
    return {"right": round(float(right), 2), "tokens": round(num_tokens / num_steps, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, help="folder of the draft model; unset: suffix only")
    draft = parser.parse_args().draft
    folder, figures = demo_model_dir(), dict[str, Any]()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    for name in ("suffix",) if draft is None else ("suffix", "draft", "drafts with noise", "greedy drafts"):
        speculate = "suffix" if name == "suffix" else f"draft:{draft}"
        config = EngineConfig(folder, num_blocks=128, max_num_seqs=1, speculate=speculate, max_drafts=MAX_DRAFTS)
        runner = ModelRunner(config)
        if runner._drafts is not None:
            runner._drafts._times = NoTimes()
            proposer = runner._drafts._proposer
            if isinstance(proposer, DraftModel):
                proposer._sampler.kind.is_greedy = {"draft": None, "greedy drafts": True, "drafts with noise": False}[
                    name
                ]
        for kind, texts in make_prompts(folder).items():
            prompts = [(np.array(ids(text), np.uint32), len(ids(answer))) for text, answer in texts]
            for temperature in (0.0, 1.0):
                key = f"{name}, {kind}, T={temperature:g}"
                figures[key] = measure(runner, prompts, temperature)
                print(f"{key}: {figures[key]}", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
