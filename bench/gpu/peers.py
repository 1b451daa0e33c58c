"""Other engines on the same checkpoint and workload in the same run, and the libraries that they need.

`bench/gpu/pack --peers` puts their sources into vendor/peers. With nvcc they are compiled for this GPU, in a folder of
the state: a build that runs out of time continues with the objects that it has.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench.gpu import machine
from bench.gpu.model import make_checkpoint
from bench.gpu.report import Report
from bench.gpu.serving import NANO, workload_of
from bench.gpu.toolchain import BUILT, PEERS, VENDOR, use_peers

PLACES = ("/usr/local/cuda/bin",)
MARGIN_S = 5.0
NANO_SETTINGS = {"enforce_eager": False, "max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 16_384}


def build(report: Report, sources: Path = VENDOR / "peers") -> None:
    """Compiles each packed source that is not compiled yet. A package without extensions needs no nvcc."""
    archives = sorted(sources.glob("*.tar.gz"))
    if not archives:
        report.row("peers", "sources", note="none were packed: bench/gpu/pack --peers")
    for archive in archives:
        name = archive.name.removesuffix(".tar.gz")
        started = time.perf_counter()
        note = _build(report, archive, report.scratch / PEERS / name)
        report.row("peers", name, ok=None if note else True, ms=1e3 * (time.perf_counter() - started), note=note)


def _build(report: Report, archive: Path, folder: Path) -> str:
    """Why the package cannot be imported from the folder; empty if it can."""
    if (folder / BUILT).exists():
        return ""
    if not folder.exists():
        folder.mkdir(parents=True)
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    if (source / "csrc").exists():
        nvcc = shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))
        if nvcc is None:
            return "nvcc was not found; it is part of the CUDA toolkit"
        try:
            done = subprocess.run(
                [sys.executable, "setup.py", "build_ext", "--inplace"], cwd=source, env=_environment(nvcc),
                capture_output=True, text=True, timeout=max(min(report.seconds_left(), 600.0) - MARGIN_S, 1.0),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            report.was_cut = True
            return "out of time; the next command continues"
        if done.returncode:
            return f"exit code {done.returncode}: {(done.stderr or done.stdout)[-300:]}"
    (folder / BUILT).write_text(str(source))
    return ""


def _environment(nvcc: str) -> dict[str, str]:
    """For the build systems of flash-attn and torch: this GPU alone, all cores."""
    capability = machine.query(("compute_cap",)).get("compute_cap", "9.0")
    return os.environ | {
        "CUDA_HOME": str(Path(nvcc).parents[1]), "MAX_JOBS": str(len(os.sched_getaffinity(0))), "NVCC_THREADS": "1",
        "TORCH_CUDA_ARCH_LIST": capability, "FLASH_ATTN_CUDA_ARCHS": capability.replace(".", ""),
        "FLASH_ATTENTION_FORCE_BUILD": "TRUE", "FLASH_ATTENTION_DISABLE_BACKWARD": "TRUE",
    }  # fmt: skip


def nano_vllm_workload(report: Report) -> None:
    """nano-vllm's benchmark by nano-vllm itself. The checkpoint has no tokenizer, and no id ends a request."""
    use_peers(report.scratch)
    try:
        engine_module = importlib.import_module("nanovllm.engine.llm_engine")
        nanovllm = importlib.import_module("nanovllm")
    except Exception as error:  # it needs flash-attn, which may not have been built
        report.row("nano_vllm", "nano-vllm", note=f"missing: {str(error)[:120]}")
        return
    tokenizer = SimpleNamespace(eos_token_id=-1, decode=lambda ids, **_: "")
    with mock.patch.object(engine_module, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer)):
        engine = nanovllm.LLM(str(make_checkpoint(report)), **NANO_SETTINGS)
    requests = workload_of(report).requests
    sampling = [
        nanovllm.SamplingParams(temperature=NANO.temperature, max_tokens=request.num_output, ignore_eos=True)
        for request in requests
    ]
    prompts = [list(request.prompt) for request in requests]
    _measure(report, "nano_vllm", "nano-vllm", lambda: engine.generate(prompts, sampling, use_tqdm=False))


def vllm_workload(report: Report) -> None:
    """The workload through vLLM's offline interface."""
    use_peers(report.scratch)
    try:
        vllm = importlib.import_module("vllm")
    except Exception as error:  # a library for another version of torch may raise anything
        report.row("vllm", "vLLM", note=f"missing: {str(error)[:120]}")
        return
    engine: Any = vllm.LLM(
        model=str(make_checkpoint(report)), skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=256,
        max_num_batched_tokens=16_384, gpu_memory_utilization=0.85, enable_prefix_caching=False,
    )  # fmt: skip
    requests = workload_of(report).requests
    prompts = [{"prompt_token_ids": request.prompt} for request in requests]
    sampling = [
        vllm.SamplingParams(
            temperature=NANO.temperature, max_tokens=request.num_output, ignore_eos=True, detokenize=False
        )
        for request in requests
    ]
    _measure(report, "vllm", f"vLLM {vllm.__version__}", lambda: engine.generate(prompts, sampling, use_tqdm=False))


def _measure(report: Report, section: str, name: str, generate: Any) -> None:
    """The best of two runs after one that is not counted, beside ours."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        generate()
        seconds.append(time.perf_counter() - started)
    tok_s = workload_of(report).num_output / min(seconds[1:])
    report.row(section, name, ms=min(seconds[1:]) * 1e3, note=f"{tok_s:.0f} tok/s")
    report.figures[f"{section}_tok_s"] = round(tok_s, 1)
    if ours := report.figures.get("in_process_tok_s"):
        report.row(section, f"ours in-process / {name}", note=f"{ours / tok_s:.2f}")
