"""What steps compute besides tokens, on the whole model: embeddings, logits of ids, prompt embeddings, beams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.model import Rows, load, make_checkpoint
from bench.gpu.report import Report, relative_error
from prefix_index.content_ids import content_ids, input_digest
from step_protocol.messages import CarriedInput, Pooling, PoolingKind, PoolingTask, StepOutput
from worker_svc.engine.gpu.runner import DeviceRunner

MEAN, LAST = (Pooling(PoolingTask.VECTOR, kind) for kind in (PoolingKind.MEAN, PoolingKind.LAST))
ANSWERS = Pooling(PoolingTask.LOGITS, token_ids=np.array([5, 198, 0], np.uint32))
TOP = 8  # candidates of a beam
DECODED = 6  # steps after a prompt
LOGPROB_ERROR = 1e-5


def extras(report: Report) -> None:
    """In exact mode, so that rows of the same text have equal bits."""
    folder = make_checkpoint(report)
    runner = load(folder, report, determinism="exact", cuda_graphs="lazy")
    prompt = np.random.default_rng(2).integers(3, runner.info.vocab_size, 40 if report.is_smoke else 900).tolist()
    pooled = _pooled(runner, prompt)
    _check_means(report, pooled)
    _check_beams(report, runner, prompt)
    _check_inputs(report, runner, prompt)
    del runner
    report.release()
    _compare(report, folder, prompt, pooled)


def _steps(runner: DeviceRunner, prompts: list[list[int]], fields: list[dict[str, Any]], chunks: list[dict[int, int]]):
    """The outputs of steps with these numbers of tokens per row."""
    rows, found = Rows(runner, prompts, room=DECODED + 2, fields=fields), []
    for counts in chunks:
        found.append(rows.launch(counts).result())
        if found[-1].errors:
            raise RuntimeError(str(found[-1].errors[0]))
    return found


def _pooled(runner: DeviceRunner, prompt: list[int]) -> dict[int, np.ndarray]:
    """Numbers of rows: a mean, the same in chunks, the last token, logits; row 4 generates beside them."""
    count, first = len(prompt), len(prompt) // 3
    fields = [{"pooling": pooling} for pooling in (MEAN, MEAN, LAST, ANSWERS)] + [{}]
    outputs = _steps(
        runner, [prompt] * 4 + [prompt[:7]], fields,
        [{1: first, 4: 7}, {4: 1, 2: count}, {0: count, 4: 1}, {1: count - first, 3: count}],
    )  # fmt: skip
    found: dict[int, np.ndarray] = {}
    for output in outputs:
        if output.pooled is not None:
            parts = np.split(output.pooled.values, np.cumsum(output.pooled.lens)[:-1])
            found |= zip(output.pooled.rows.tolist(), parts, strict=True)
    return found


def _check_means(report: Report, pooled: dict[int, np.ndarray]) -> None:
    ok = pooled[0].tobytes() == pooled[1].tobytes()
    report.row("extras", "mean of a prompt = in chunks, bits", ok=ok, note=f"{len(pooled[0])} numbers")


def _check_beams(report: Report, runner: DeviceRunner, prompt: list[int]) -> None:
    """The candidates of a beam are the most likely tokens of a row with logprobs."""
    (output,) = _steps(runner, [prompt], [{"num_candidates": TOP}], [{0: len(prompt)}])
    (plain,) = _steps(runner, [prompt], [{"logprobs": TOP}], [{0: len(prompt)}])
    error = np.abs(output.candidates.logprobs - plain.logprobs.logprobs[1:]).max()
    same = np.array_equal(output.candidates.token_ids, plain.logprobs.token_ids[1:])
    ok = same and error < LOGPROB_ERROR
    report.row("extras", "candidates of a beam = logprobs of a row", ok=bool(ok), note=f"error {error:.1e}")


def _check_inputs(report: Report, runner: DeviceRunner, prompt: list[int]) -> None:
    """The embeddings of the prompt's tokens, as inputs, give the bits of the tokens."""
    start, count = 3, len(prompt) // 2
    table = runner._compute._model._embedding
    rows = table.index_select(0, torch.tensor(prompt[start : start + count], device=table.device)).cpu()
    dtype, data = str(rows.dtype).removeprefix("torch."), bytes(rows.contiguous().view(torch.uint8).numpy())
    item = CarriedInput(
        "embeddings", input_digest("embeddings", dtype, tuple(rows.shape), data), start, count, dtype,
        tuple(rows.shape), data,
    )  # fmt: skip
    ids = np.array(prompt, np.uint32)
    ids[start : start + count] = np.frombuffer(content_ids(item.digest, count), "<u4")
    chunks = [{0: start + 1}, {0: len(prompt) - start - 1}] + [{0: 1}] * DECODED
    outputs: list[list[StepOutput]] = []
    for given, inputs in ((prompt, ()), (ids.tolist(), (item,))):
        outputs.append(_steps(runner, [given], [{"logprobs": 1, "inputs": inputs}], chunks))
    found = [[(o.token_ids.tolist(), o.logprobs.logprobs.tolist()) for o in run[1:]] for run in outputs]
    report.row("extras", "embeddings of tokens = tokens, bits", ok=found[0] == found[1], note=f"{count} positions")


def _compare(report: Report, folder: Path, prompt: list[int], pooled: dict[int, np.ndarray]) -> None:
    """Vectors and logits against transformers in float32. Its error in the model's dtype is the noise level."""
    right, own = (_theirs(folder, dtype, prompt, report) for dtype in (torch.float32, report.dtype))
    for row, name in ((0, "mean"), (2, "last token"), (3, "logits of ids")):
        error = relative_error(torch.from_numpy(pooled[row]), right[row])
        noise = relative_error(own[row], right[row])
        ok = error < 1e-4 if report.is_smoke else error <= 1.5 * noise + 0.005
        report.row("extras", f"{name} against transformers", ok=ok, note=f"error {error:.4f}, its own {noise:.4f}")


def _theirs(folder: Path, dtype: torch.dtype, prompt: list[int], report: Report) -> dict[int, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(report.device).eval()
    with torch.no_grad():
        states = model.model(torch.tensor([prompt], device=report.device)).last_hidden_state[0]
        logits = model.lm_head(states[-1:])[0][ANSWERS.token_ids.astype(np.int64)]
    found = {0: states.float().mean(0), 2: states[-1].float(), 3: logits.float()}
    del model
    report.release()
    return {row: values.cpu() for row, values in found.items()}
