"""The GPU engine on one device: right, how fast, and how far from what the device can do. One command, no network.

    bench/gpu/pack                       # before, where there is a network: stubs and small wheels
    bench/gpu/start                      # everything; about 10 minutes
    bench/gpu/start --part 1             # kernels and model: errors, bandwidth, step times
    bench/gpu/start --part 2             # the 256-request workload, in-process and through gRPC
    bench/gpu/start --smoke              # the plumbing, on a CPU with Triton's interpreter

A section that fails is told and the next one runs; one that does not fit --budget seconds any more is left out. Rows
are printed as they come. $OUT (or --out) gets gpu.json and gpu.md. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.gpu.toolchain import prepare_toolchain  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2))
    parser.add_argument("--only", default="", help="sections by name, comma separated")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds; what does not fit is left out")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of the results")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    args = parser.parse_args()
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        print(f"C compiler: {prepare_toolchain()}", flush=True)
    from bench.gpu.report import Report  # torch and triton: after the environment is set

    report = Report(is_smoke=args.smoke)
    started = time.monotonic()
    waiting = sections(args)
    while waiting:
        name, cost_s, section = waiting.pop(0)
        left = args.budget - (time.monotonic() - started)
        if cost_s > left:
            report.row(name, "left out", note=f"{left:.0f} s are left, it may take {cost_s:.0f}")
            continue
        run_section(name, section, report)
        report.write(args.out)
        if report.is_device_lost and waiting:
            go_on_elsewhere([name for name, *_ in waiting], args, left, report)
            break
    report.seconds = round(time.monotonic() - started, 1)
    report.write(args.out)
    print(json.dumps(report.summary()))
    sys.exit(1 if report.failed else 0)


def sections(args: argparse.Namespace) -> list[tuple[str, float, Callable]]:
    """(name, longest time in seconds, function) of those asked for, in order."""
    from bench.gpu import kernels, model, serving

    first = [
        ("environment", 5.0, kernels.environment),
        ("ceilings", 10.0, kernels.ceilings),
    ]
    parts = {
        1: [
            ("decode_attention", 60.0, kernels.decode_attention),
            ("prefill_attention", 40.0, kernels.prefill_attention),
            ("small_kernels", 40.0, kernels.small_kernels),
            ("invariance", 40.0, kernels.invariance),
            ("other_caches", 50.0, kernels.other_caches),
            ("logits", 110.0, model.logits),
            ("decode_steps", 90.0, model.decode_steps),
            ("mixed_steps", 90.0, model.mixed_steps),
            ("exact_cost", 60.0, model.exact_cost),
            ("decode_sweep", 60.0, kernels.decode_sweep),
        ],
        2: [
            ("in_process", 120.0, serving.in_process),
            ("through_grpc", 200.0, serving.through_grpc),
            ("in_process_fp8", 90.0, serving.in_process_fp8),
        ],
    }
    chosen = first + [section for part, found in parts.items() if args.part in (None, part) for section in found]
    only = set(filter(None, args.only.split(",")))
    return [section for section in chosen if not only or section[0] in only]


def go_on_elsewhere(names: list[str], args: argparse.Namespace, left: float, report) -> None:
    """After a fault of the device nothing works in this process any more."""
    chosen = ",".join(["ceilings", *(name for name in names if name != "ceilings")])
    command = [sys.executable, __file__, "--only", chosen, "--budget", str(left), "--out", str(args.out / "rest")]
    command += ["--smoke"] if args.smoke else []
    print(f"\n== the device is lost to this process; the rest runs in another, results in {args.out}/rest", flush=True)
    code = subprocess.run(command, check=False).returncode
    report.row("rest", "in another process", ok=code == 0, note=f"exit code {code}")


def run_section(name: str, section: Callable, report) -> None:
    print(f"\n== {name}", flush=True)
    started = time.monotonic()
    try:
        section(report)
    except Exception as error:  # the rest still tells something
        traceback.print_exc()
        report.row(name, "failed", ok=False, note=f"{type(error).__name__}: {str(error)[:200]}")
        report.is_device_lost = "CUDA error" in str(error)
        if report.is_device_lost:
            return
    report.release()
    print(f"   {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
