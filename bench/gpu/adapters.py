"""LoRA adapters: logits against transformers with merged weights, rows without adapter, and the cost of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bench.gpu.logits import reference_logits, run_ours
from bench.gpu.model import Rows, load, model_of, time_decode, write_checkpoint
from bench.gpu.report import Report, relative_error
from bench.lora import linears_of, make_adapter
from bench.workloads import Model
from worker_svc.engine.gpu.runner import DeviceRunner

NUM_ADAPTERS = 8
RANK = 16
SETTINGS = {"max_adapters": NUM_ADAPTERS, "max_adapter_rank": RANK}
NUM_LAYERS = 4  # layers of the model whose logits are compared: each layer has the same kernels


def adapters(report: Report) -> None:
    """The logits, then the tokens of exact mode, then the cost."""
    model = model_of(report) | {"num_hidden_layers": 2 if report.is_smoke else NUM_LAYERS}
    folder = write_checkpoint(report, report.scratch / "adapters" / "model", model)
    paths = make_adapters(report, model)
    _compare_logits(report, model, folder, paths[0])
    _compare_tokens(report, folder, paths)
    _time(report, folder, paths)


def make_adapters(report: Report, model: Model) -> list[Path]:
    """Adapters that change the outputs of a layer by about their size."""
    spread = (model["hidden_size"] * RANK) ** -0.25
    root = report.scratch / "adapters"
    return [make_adapter(root / str(seed), model, RANK, seed, spread=spread) for seed in range(NUM_ADAPTERS)]


def place(runner: DeviceRunner, paths: list[Path]) -> list[bytes]:
    """Their digests, all of them resident."""
    store = runner.adapters
    if store is None:
        raise RuntimeError("the engine was loaded without adapters: a bug in this section")
    digests = [store.load(path.name, path).digest for path in paths]
    for digest in digests:
        store.swap(digest, kept=digests)
    return digests


def in_turn(digests: list[bytes], count: int) -> list[dict[str, Any]]:
    """Fields of rows that use these adapters in turn."""
    return [{"adapter": digests[row % len(digests)]} for row in range(count)]


def merged(report: Report, folder: Path, adapter: Path) -> Path:
    """The checkpoint with an adapter in its weights, in float32."""
    target = folder.parent / "merged"
    if (target / "config.json").exists():  # written last
        return target
    weights, matrices = load_file(folder / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for name in linears_of(config):
        a, b = (matrices[f"base_model.model.{name}.lora_{side}.weight"].to(report.dtype).float() for side in "AB")
        weights[f"{name}.weight"] = weights[f"{name}.weight"].float() + b @ a
    target.mkdir()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


def _compare_logits(report: Report, model: Model, folder: Path, adapter: Path) -> None:
    """Rows with and without the adapter in the same steps, against transformers. Its error in the engine's dtype is the
    noise level."""
    rng = np.random.default_rng(0)
    lengths = [3, 20, 9, 33] if report.is_smoke else [1, 255, 700, 300]
    prompts = [rng.integers(3, model["vocab_size"], n).tolist() for n in lengths]
    settings = {"cuda_graphs": "off"} | ({} if report.is_smoke else {"num_blocks": 64})
    runner = load(folder, report, **SETTINGS, **settings)
    seen, tokens = run_ours(runner, prompts, in_turn([*place(runner, [adapter]), b""], len(prompts)))
    del runner
    report.release()
    for kind, source in enumerate((merged(report, folder, adapter), folder)):
        rows = range(kind, len(prompts), 2)
        wanted, noisy = (
            reference_logits(source, dtype, [tokens[row] for row in rows], report)
            for dtype in (torch.float32, report.dtype)
        )
        for number, row in enumerate(rows):
            positions = sorted(position for r, position in seen if r == row)
            ours = torch.stack([seen[row, position] for position in positions])
            index = torch.tensor(positions, device=report.device) - 1
            error, noise = (relative_error(x, wanted[number][index]) for x in (ours, noisy[number][index]))
            ok = error < 1e-4 if report.is_smoke else error <= 1.5 * noise + 0.005 and error < 0.08
            name = f"logits of row {row}, {'base model' if kind else 'adapter'}"
            report.row("adapters", name, ok=ok, note=f"error {error:.4f}, of transformers {noise:.4f}")


def _compare_tokens(report: Report, folder: Path, paths: list[Path]) -> None:
    """In exact mode rows have the same tokens alone as beside rows of other adapters."""
    runner = load(folder, report, determinism="exact", cuda_graphs="lazy", **SETTINGS)
    digests = [*place(runner, paths), b""]
    rng = np.random.default_rng(1)
    count, length = (8, 12) if report.is_smoke else (64, 40)
    prompts = [rng.integers(3, runner.info.vocab_size, length).tolist() for _ in range(count)]
    together = _tokens(runner, prompts, digests)
    for row in (1,) if report.is_smoke else (0, 1, 8, 26, 63):
        alone = _tokens(runner, prompts[row : row + 1], [digests[row % len(digests)]])
        same = [step[0] for step in alone] == [step[row] for step in together]
        report.row("adapters", f"row {row} alone = among {len(prompts)}, exact", ok=same)
    del runner
    report.release()


def _tokens(runner: DeviceRunner, prompts: list[list[int]], digests: list[bytes]) -> list[list[int]]:
    """Tokens of each row, by step."""
    rows = Rows(runner, prompts, room=16, fields=in_turn(digests, len(prompts)))
    found = []
    for counts in ({i: len(prompt) for i, prompt in enumerate(prompts)}, *[dict.fromkeys(range(len(prompts)), 1)] * 4):
        output = rows.launch(counts).result()
        if output.errors:
            raise RuntimeError(str(output.errors[0]))
        found.append(output.token_ids.tolist())
    return found


def _time(report: Report, folder: Path, paths: list[Path]) -> None:
    """Decode steps of the few layers whose rows use 8 adapters in turn, as a ratio to the same steps without."""
    runner = load(folder, report, cuda_graphs="lazy", **SETTINGS)
    digests = place(runner, paths)
    for num_rows, context in [(3, 30)] if report.is_smoke else [(1, 512), (8, 512), (64, 512), (256, 512)]:
        plain, adapted = (
            time_decode(runner, report, num_rows, context, in_turn(each, num_rows)) for each in ([b""], digests)
        )
        if plain is None or adapted is None:
            continue
        note = f"{plain / adapted:.2f} of the speed without adapters ({plain:.3f} ms)"
        report.row("adapters", f"B {num_rows} ctx {context}, rank {RANK}", ms=adapted, note=note)
        report.figures[f"adapters_ratio_b{num_rows}"] = plain / adapted
