"""The program that compute-sanitizer checks: every kernel once on small inputs, then steps of a tiny model.

It launches everything eagerly, because CUDA graphs need memory of torch's cache. A wrong result is an error too.
`--few`: attention with its work lists, and the sampler, alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import torch
import triton

from bench.gpu.checks.case import verify
from bench.gpu.dry_run import take_steps
from bench.gpu.model import FEW_EXPERTS, SETTINGS, SMOKE_SETTINGS, make_checkpoint
from bench.gpu.report import Report
from bench.gpu.self_checks import FORMATS, checks_of, launches, make_setup
from bench.gpu.stand_ins import install_stand_ins
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.runner import DeviceRunner
from worker_svc.engine.gpu.start.compilation import compile_first

FEW = ("attention", "greedy", "noise", "filtered")
KINDS = [
    {"determinism": "best_effort"},
    {"determinism": "exact"},
    {"determinism": "best_effort", "kv_cache_dtype": "fp8", "quantize": "fp8"},
]


def main() -> None:
    install_stand_ins()
    interprets = bool(triton.knobs.runtime.interpret)
    report = Report(is_smoke=True)
    report.device = torch.device("cpu" if interprets else "cuda")
    report.dtype = torch.float32 if interprets else torch.bfloat16
    with tempfile.TemporaryDirectory() as scratch:
        report.scratch = Path(scratch)
        if "--few" in sys.argv:
            for fields in KINDS[: 1 if "--short" in sys.argv else 2]:
                check_kernels(report, fields["determinism"], FEW)
            return
        folder = make_checkpoint(report)
        for fields in KINDS[: 1 if "--short" in sys.argv else None]:
            check_kernels(report, fields["determinism"])
            config = EngineConfig(folder, **(SETTINGS | SMOKE_SETTINGS | {"cuda_graphs": "off"} | fields))
            with torch.inference_mode():
                take_steps(DeviceRunner(config))
            print(f"{fields}: steps done", flush=True)


def check_kernels(report: Report, determinism: str, names: Collection[str] = ()) -> None:
    """The start-up checks of a tiny model, with every kind of quantized weights, and of one with experts. `names`: of
    checks; none: all of them."""
    for fields in ({"formats": FORMATS}, {"model": FEW_EXPERTS}):
        setup = make_setup(report, {"dtype": report.dtype, "determinism": determinism} | fields)
        if not names:
            compile_first(launches(setup), setup.group)
        for name, cases in checks_of(setup):
            for case in cases if not names or name in names else ():
                verify(case, is_exact=setup.is_exact)
    print(f"{determinism}: checks done", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    main()
