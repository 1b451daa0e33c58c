"""The whole model: its checkpoint, its engine, and times of its steps."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file

from bench.gpu.report import Report
from bench.gpu.toolchain import use_peers
from bench.workloads import COMMON, QWEN3_06B, Model, weight_shapes
from request_fields.fields import SamplingParams
from step_protocol.messages import RowOpen, StepBatch
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.kernels import launch
from worker_svc.engine.gpu.runner import DeviceRunner

GREEDY = SamplingParams(0.0, 0, 1.0, 0.0, 0)
SETTINGS: dict[str, Any] = {
    "backend": "cuda", "dtype": "auto", "block_size": 256, "max_num_seqs": 256, "max_num_batched_tokens": 8192,
    "max_model_len": 4608, "determinism": "best_effort",
}  # fmt: skip
SMOKE_SETTINGS: dict[str, Any] = {
    "block_size": 16, "num_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 256,
}  # fmt: skip
NANO_SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 16_384, "max_model_len": 4096}
LONGEST = 163_840  # tokens; Qwen3's own limit is 40,960, but the time of a step does not depend on it
LONG_SETTINGS: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_model_len": 132_096,
    "cuda_graph_tokens": 0,
    "cuda_graphs": "lazy",
}
NUM_DRAFTS = 3  # per row
VERIFY_SIZES = [(1, 512), (8, 512), (32, 512), (1, 32_768)]  # rows, context
EXPERTS: Model = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
FEW_EXPERTS: Model = EXPERTS | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "fp8 weights": {"quantize": "fp8"},
    "fp8 weights exact": {"quantize": "fp8", "determinism": "exact"},
    "flash-attn 2": {"attention": "flash"},
    "flash-attn 3": {"attention": "flash3"},
    "drafts": {"speculate": "suffix", "max_drafts": NUM_DRAFTS},
}
EXACT_SETTINGS: dict[str, Any] = {"determinism": "exact", "cuda_graphs": "lazy", "max_model_len": 33_280}
EXACT_SIZES = [(1, 512), (256, 512), (1, 4096), (1, 32_768), (32, 512), (256, 4096)]
Runner = TypeVar("Runner", bound=DeviceRunner)
TARGET_B1_MS = 1.0
LONG_CONTEXTS = [(1, 32_768), (8, 32_768), (1, 131_072), (8, 131_072), (32, 32_768)]
TINY: Model = QWEN3_06B | {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 64, "vocab_size": 199, "max_position_embeddings": 4096,
}  # fmt: skip


def model_of(report: Report) -> Model:
    return TINY if report.is_smoke else QWEN3_06B | {"max_position_embeddings": LONGEST}


def make_checkpoint(report: Report) -> Path:
    """The folder of the model of all sections."""
    return write_checkpoint(report, report.scratch / "checkpoint", model_of(report))


def write_checkpoint(report: Report, folder: Path, model: Model) -> Path:
    """A checkpoint with random weights, unless it exists. Linear layers have unit gain, norms are around 1, and q/k
    norms are large, which makes attention peaked so that an error in it shows."""
    if (folder / "config.json").exists():  # written last
        return folder
    generator = torch.Generator(device=report.device).manual_seed(0)
    tensors = {}
    for name, shape in weight_shapes(model).items():
        weight = torch.empty(shape, device=report.device)
        if name.endswith(("q_norm", "k_norm")):
            weight.uniform_(1.0, 2.0, generator=generator)
        elif len(shape) == 1:
            weight.uniform_(0.5, 1.5, generator=generator)
        else:
            weight.normal_(0.0, shape[-1] ** -0.5, generator=generator)
        tensors[f"model.{name}.weight"] = weight.to(report.dtype).cpu()
    dtype = str(report.dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(COMMON | model | {"dtype": dtype, "torch_dtype": dtype}))
    return folder


def load(folder: Path, report: Report, make: type[Runner] = DeviceRunner, **settings: Any) -> Runner:
    fields = SETTINGS | settings | (SMOKE_SETTINGS if report.is_smoke else {})
    config = EngineConfig(folder, **fields)
    try:
        return make(config)
    except BackendUnavailableError as error:
        if "CUDA graph" not in str(error):
            raise
        report.row("load", "CUDA graphs", ok=False, note=str(error)[:300])
    report.figures["has_no_graphs"] = True
    report.release()
    return make(replace(config, cuda_graphs="off"))  # the other sections are still useful


class Rows:
    """Rows with their own blocks, stepped by hand."""

    def __init__(
        self,
        runner: DeviceRunner,
        prompts: list[list[int]],
        room: int,
        computed: int | Sequence[int] = 0,
        sampling: SamplingParams = GREEDY,
        fields: Sequence[dict[str, Any]] = (),
    ) -> None:
        """`room`: tokens of a row after its prompt. `computed`: tokens of each row that count as computed. `fields`: of
        each row's RowOpen, for rows that do more than generate."""
        self.runner = runner
        self.prompts = prompts
        self.size = runner.info.block_size
        counts = np.array([-(-(len(prompt) + room) // self.size) for prompt in prompts])
        if counts.sum() > runner.info.num_blocks:
            raise RuntimeError(f"the rows need {counts.sum()} blocks, the pool has {runner.info.num_blocks}")
        self._ends = np.cumsum(counts)
        self._firsts = self._ends - counts
        self.computed = np.full(len(prompts), computed, np.int64)
        self.step_id = 0
        opens = [self._open(i, sampling) for i in range(len(prompts))]
        self._opens = [replace(each, **more) for each, more in zip_longest(opens, fields, fillvalue={})]
        self._samples = np.array([each.pooling is None for each in self._opens])
        runner.reset_rows()

    def _open(self, i: int, sampling: SamplingParams) -> RowOpen:
        ids = np.array(self.prompts[i], np.uint32)
        table = np.arange(self._firsts[i], self._ends[i]).astype(np.uint32)
        return RowOpen(i, ids, len(ids), table, int(self.computed[i]), sampling, 0)

    def verify(self, num_drafts: int):
        """Launches a step that computes so many drafts of each row. Positions count the most that is possible."""
        self.step_id += 1
        rows, ends = np.arange(len(self.prompts)), self.computed + num_drafts
        ones = np.ones(len(rows), np.uint32)
        batch = StepBatch(
            self.step_id, rows.astype(np.uint32), ones, self.computed.astype(np.uint32), ones > 0,
            (self._firsts * self.size + ends).astype(np.uint32), opens=self._opens,
            max_query_lens=ones * np.uint32(1 + num_drafts),
        )  # fmt: skip
        self._opens = []
        self.computed = ends + 1
        return self.runner.launch(batch)

    def launch(self, counts: dict[int, int]):
        """Launches a step with the given number of tokens per row."""
        self.step_id += 1
        rows = np.array(list(counts), np.int64)
        lens = np.array(list(counts.values()), np.int64)
        contexts = self.computed[rows]
        positions = np.concatenate([np.arange(c, c + n) for c, n in zip(contexts, lens, strict=True)])
        slots = np.repeat(self._firsts[rows], lens) * self.size + positions
        batch = StepBatch(
            self.step_id, rows.astype(np.uint32), lens.astype(np.uint32), contexts.astype(np.uint32),
            self._samples[rows] & (contexts + lens >= np.array([len(self.prompts[row]) for row in rows])),
            slots.astype(np.uint32),
            opens=self._opens,
        )  # fmt: skip
        self._opens = []
        self.computed[rows] += lens
        return self.runner.launch(batch)


def check_graphs(report: Report, section: str, runner: DeviceRunner) -> None:
    """A row that fails if a step that may have a graph got none."""
    compute = runner._compute
    plain = [bucket for bucket in compute.buckets() if bucket.is_decode and not bucket.is_filtered]
    found, expected = compute.num_graphs, len(compute.buckets())
    ok = None if report.is_smoke else found == expected
    note = f"{found} of {expected}, {len(plain)} sizes of decode steps; {runner.info.num_blocks} blocks"
    report.row(section, "CUDA graphs", ok=ok, note=note)
    report.figures["num_graphs"], report.figures["num_graphs_expected"] = found, expected


def decode_steps(report: Report) -> None:
    """Times of decode graphs, launched ahead as in service, and a comparison of their tokens with eager steps."""
    folder = make_checkpoint(report)
    started = time.perf_counter()
    runner = load(folder, report)
    report.row("decode_steps", "load, with graphs", ms=1e3 * (time.perf_counter() - started))
    check_graphs(report, "decode_steps", runner)
    report.figures["num_blocks"] = runner.info.num_blocks
    sizes = [(1, 512), (256, 512), (256, 4096), (32, 4096), (32, 512), (1, 4096), (8, 512), (64, 512)]
    for num_rows, context in [(3, 30)] if report.is_smoke else sizes:
        ms = time_decode(runner, report, num_rows, context)
        if ms is None:
            continue
        ok = ms <= TARGET_B1_MS if (num_rows, context) == (1, 512) else None
        report.row("decode_steps", f"B {num_rows} ctx {context}", ok=ok, ms=ms, note=f"{num_rows / ms * 1e3:.0f} tok/s")
        report.figures[f"step_ms_b{num_rows}_ctx{context}"] = ms
    with runner._compute.eager():
        eager = decode_tokens(runner, report)
    # cuBLAS may use another workspace in graphs, so two almost equal logits may change places.
    same = sum(a == b for one, other in zip(eager, decode_tokens(runner, report), strict=True)
               for a, b in zip(one, other, strict=True))  # fmt: skip
    count = sum(map(len, eager))
    report.row("decode_steps", "tokens of graphs = of eager steps", ok=same >= 0.9 * count, note=f"{same} of {count}")


def other_settings(report: Report) -> None:
    """Decode steps of engines with other settings, relative to the section decode_steps. `--attention flash` and its
    like run if the library is installed, or was built by part 5."""
    use_peers(report.scratch)
    for name, settings in OTHER_SETTINGS.items():
        try:
            runner = load(make_checkpoint(report), report, cuda_graphs="lazy", **settings)
        except BackendUnavailableError as error:  # a library is missing, or this GPU cannot serve it
            report.row("other_settings", name, note=str(error)[:200])
            continue
        time_beside_default(report, runner, "other_settings", name)
        del runner
        report.release()


def time_beside_default(report: Report, runner: DeviceRunner, section: str, name: str) -> None:
    """Decode steps of few and many rows, relative to the section decode_steps."""
    for num_rows, context in [(3, 30)] if report.is_smoke else [(1, 512), (256, 512)]:
        ms = time_decode(runner, report, num_rows, context)
        if ms is None:
            continue
        plain = report.figures.get(f"step_ms_b{num_rows}_ctx{context}")
        note = f"{ms / plain:.2f} of the default's time" if plain else ""
        report.row(section, f"{name}: B {num_rows} ctx {context}", ms=ms, note=note)
        report.figures[f"{name.replace(' ', '_')}_ms_b{num_rows}_ctx{context}"] = ms
    if runner.draft_counts is None:
        return
    for num_rows, context in [(3, 30)] if report.is_smoke else VERIFY_SIZES:
        ms = time_decode(runner, report, num_rows, context, num_drafts=NUM_DRAFTS)
        if ms is not None:
            report.row(section, f"{name}: B {num_rows} ctx {context}, {NUM_DRAFTS} drafts per row", ms=ms)
            report.figures[f"verify_ms_b{num_rows}_ctx{context}"] = ms


def without_early_starts(report: Report) -> None:
    """Decode steps whose kernels start after their predecessor has ended."""
    os.environ[launch.DISABLE] = "1"  # it is read at the first launch of a process, which runs only this section
    runner = load(make_checkpoint(report), report, cuda_graphs="lazy")
    for num_rows, context in [(3, 30)] if report.is_smoke else [(1, 512), (256, 512)]:
        ms = time_decode(runner, report, num_rows, context)
        early = report.figures.get(f"step_ms_b{num_rows}_ctx{context}")
        note = f"with early starts {early:.3f} ms" if early else ""
        report.row("without_early_starts", f"B {num_rows} ctx {context}", ms=ms, note=note)
        report.figures[f"without_early_starts_ms_b{num_rows}_ctx{context}"] = ms


def long_contexts(report: Report) -> None:
    """Decode steps after 32k and 131k tokens, and prompts of these lengths."""
    runner = load(make_checkpoint(report), report, **LONG_SETTINGS)
    for num_rows, context in [(2, 60)] if report.is_smoke else LONG_CONTEXTS:
        ms = time_decode(runner, report, num_rows, context)
        if ms is None:
            continue
        report.row("long_contexts", f"B {num_rows} ctx {context}", ms=ms, note=f"{num_rows / ms * 1e3:.0f} tok/s")
        report.figures[f"step_ms_b{num_rows}_ctx{context}"] = ms
    for length in [100] if report.is_smoke else [32_768, 131_072]:
        ms = time_prompt(runner, length)
        report.row("long_contexts", f"prompt of {length} tokens", ms=ms, note=f"{length / ms * 1e3:.0f} tok/s")
        report.figures[f"prompt_ms_{length}"] = ms


def time_prompt(runner: DeviceRunner, length: int) -> float:
    """Milliseconds for a prompt alone, in the largest chunks, two steps in flight. The second of two runs."""
    chunk = runner.info.max_num_batched_tokens
    ids = np.random.default_rng(0).integers(3, runner.info.vocab_size, length).tolist()
    seconds = 0.0
    for _ in range(2):
        rows = Rows(runner, [ids], room=8)
        started, pending = time.perf_counter(), deque()
        for first in range(0, length, chunk):
            pending.append(rows.launch({0: min(chunk, length - first)}))
            if len(pending) == 2:
                pending.popleft().result()
        while pending:
            pending.popleft().result()
        seconds = time.perf_counter() - started
    return seconds * 1e3


def mixed_steps(report: Report) -> None:
    """Steps with decode rows and a chunk of a prompt: with graphs recorded on first use, and without graphs."""
    sizes = [(2, 20)] if report.is_smoke else [(255, 128), (255, 512), (64, 1024), (64, 2048), (0, 4096)]
    folder = make_checkpoint(report)
    for when in ("lazy", "off"):
        started = time.perf_counter()
        runner = load(folder, report, cuda_graphs=when)
        note = f"{runner._compute.num_graphs} graphs, {runner.info.num_blocks} blocks"
        report.row("mixed_steps", f"load, graphs {when}", ms=1e3 * (time.perf_counter() - started), note=note)
        for num_rows, chunk in sizes:
            ms = time_mixed(runner, report, num_rows, chunk)
            report.row("mixed_steps", f"{when}: {num_rows} rows and a chunk of {chunk}", ms=ms)
            report.figures[f"mixed_ms_{when}_{num_rows}_{chunk}"] = ms
        del runner
        report.release()


def time_mixed(runner: DeviceRunner, report: Report, num_rows: int, chunk: int) -> float:
    """Milliseconds per step, two in flight. The last row computes the same chunk repeatedly, because block contents do
    not affect the time."""
    steps = 2 if report.is_smoke else 12
    context = (30 if report.is_smoke else 500) if num_rows else 0
    rng = np.random.default_rng(0)
    lengths = [context + 1] * num_rows + [context + chunk + 1]
    prompts = [rng.integers(3, runner.info.vocab_size, n).tolist() for n in lengths]
    rows = Rows(runner, prompts, room=steps + 8, computed=context)
    counts = dict.fromkeys(range(num_rows), 1) | {num_rows: chunk}
    before, started = None, 0.0
    for i in range(steps + 2):
        if i == 2:  # the first steps compile and record lazy graphs
            before.result()
            before, started = None, time.perf_counter()
        rows.computed[num_rows] = context
        following = rows.launch(counts)
        if before is not None and (errors := before.result().errors):
            raise RuntimeError(str(errors[0]))
        before = following
    before.result()
    return (time.perf_counter() - started) / steps * 1e3


def exact_cost(report: Report) -> None:
    """Exact mode: its cost, and a check that the tokens of a row do not depend on other rows."""
    runner = load(make_checkpoint(report), report, **EXACT_SETTINGS)
    alone, crowded = ([], [])
    prompts = _prompts(runner, report)
    for chosen, found, chunk in ((prompts[:1], alone, 10**6), (prompts, crowded, 33)):
        rows = Rows(runner, chosen, room=32)
        while rows.computed[0] < len(chosen[0]):
            left = {i: min(chunk, len(p) - int(rows.computed[i])) for i, p in enumerate(chosen)}
            output = rows.launch({i: n for i, n in left.items() if n > 0}).result()
            found += output.token_ids[output.rows == 0].tolist()
        for _ in range(20):
            output = rows.launch(dict.fromkeys(range(len(chosen)), 1)).result()
            found += output.token_ids[output.rows == 0].tolist()
    report.row("exact_cost", f"tokens alone = among {len(prompts)}, in chunks", ok=alone == crowded)
    for num_rows, context in [(3, 30)] if report.is_smoke else EXACT_SIZES:
        ms = time_decode(runner, report, num_rows, context)
        if ms is None:
            continue
        fast = report.figures.get(f"step_ms_b{num_rows}_ctx{context}")
        report.row("exact_cost", f"B {num_rows} ctx {context}", ms=ms, note=f"{ms / fast:.2f} of fast" if fast else "")
        report.figures[f"exact_step_ms_b{num_rows}_ctx{context}"] = ms


def _prompts(runner: DeviceRunner, report: Report) -> list[list[int]]:
    rng = np.random.default_rng(1)
    count, length = (3, 40) if report.is_smoke else (64, 120)
    return [rng.integers(3, runner.info.vocab_size, length).tolist() for _ in range(count)]


def decode_tokens(runner: DeviceRunner, report: Report) -> list[list[int]]:
    prompts = _prompts(runner, report)[:7]
    rows = Rows(runner, prompts, room=32)
    rows.launch({i: len(prompt) for i, prompt in enumerate(prompts)}).result()
    return [rows.launch(dict.fromkeys(range(len(prompts)), 1)).result().token_ids.tolist() for _ in range(8)]


def time_decode(
    runner: DeviceRunner,
    report: Report,
    num_rows: int,
    context: int,
    fields: Sequence[dict[str, Any]] = (),
    num_drafts: int = 0,
) -> float | None:
    """Milliseconds per step, two in flight; None if the pool is too small. Block contents do not affect the time."""
    steps = 3 if report.is_smoke else 40
    room = (steps + 8) * (1 + num_drafts)
    rng = np.random.default_rng(0)
    if num_rows * -(-(context + room) // runner.info.block_size) > runner.info.num_blocks:
        report.row(report.section, f"B {num_rows} ctx {context}", note="skipped: the pool is too small")
        return None
    prompts = [rng.integers(3, runner.info.vocab_size, context).tolist() for _ in range(num_rows)]
    rows = Rows(runner, prompts, room=room, computed=context - 1, fields=fields)
    counts = dict.fromkeys(range(num_rows), 1)
    launch_step = partial(rows.verify, num_drafts) if num_drafts else partial(rows.launch, counts)
    for _ in range(4):
        if errors := launch_step().result().errors:
            raise RuntimeError(str(errors[0]))
    started = time.perf_counter()
    before = launch_step()
    for _ in range(steps - 1):
        following = launch_step()
        before.result()
        before = following
    before.result()
    return (time.perf_counter() - started) / steps * 1e3
