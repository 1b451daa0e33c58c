"""Benchmark of the GPU engine on one device: correctness, speed, fraction of the device's limits. Needs no network.

    bench/gpu/pack                # first, on a machine with a network: stubs and small wheels
    bench/gpu/start 1             # compile, check results, measure the engine as it is
    bench/gpu/start 2             # the goals: decode steps, 256 requests in-process and through gRPC
    bench/gpu/start 3             # exact mode, fp8, mixed steps, long contexts
    bench/gpu/start 4             # Qwen3's sampling through gRPC, other caches, experts, int4, adapters
    bench/gpu/start 5             # flash-attn, nano-vllm and vLLM, if they are there or can be built
    bench/gpu/start               # all sections that are not measured yet, within the budget
    bench/gpu/start sanitize      # compute-sanitizer over all kernels
    bench/gpu/start report        # the results so far
    bench/gpu/start --smoke       # tiny sizes on a CPU with Triton's interpreter

Each command takes at most --budget seconds and continues from the results of the earlier ones, which --state keeps.
Each section runs in its own process with a time limit. A section that fails, hangs or dies is reported, and the next
one runs. Rows are printed when measured; gpu.json and gpu.md in $OUT (or --out) are updated after every row. SIGTERM
ends the run with what was measured so far. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMOKE_SLOWER = 5  # time limits of the interpreter relative to a GPU
CHOICES = ("all", "1", "2", "3", "4", "5", "sanitize", "report")
END_S = 15.0  # part of the budget for ending the last section and for the summary
# Without this file's folder, whose modules would hide others of the same name.
sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place or ".").resolve() != ROOT / "bench/gpu")]

from bench.gpu.stand_ins import install_stand_ins  # noqa: E402
from bench.gpu.toolchain import VENDOR, prepare_toolchain  # noqa: E402


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=CHOICES)
    parser.add_argument("--only", default="", help="sections by name, comma separated")
    parser.add_argument("--again", action="store_true", help="also sections that were measured before")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds of this command (default 540)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder for the results")
    state = ROOT / ".cache/gpu-bench"
    parser.add_argument("--state", type=Path, default=state, help="folder for results, checkpoints, compiled kernels")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    return parser


def main() -> None:
    started = time.monotonic()
    args = make_parser().parse_args()
    signal.signal(signal.SIGTERM, _stop)
    if args.what == "report":
        show(args.state)
        return
    with tempfile.TemporaryDirectory() as temporary:
        if args.smoke:
            args.state = Path(temporary)
            os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        else:
            os.environ.setdefault("TRITON_CACHE_DIR", str(args.state / "triton"))
            print(f"C compiler: {prepare_toolchain()}", flush=True)
            unpack_kernels(args.state)
        if missing := install_stand_ins():
            print(f"missing packages, replaced for the engine's sections: {', '.join(missing)}", flush=True)
        if args.what == "sanitize":
            from bench.gpu import sanitize

            sys.exit(sanitize.run(args.out, args.budget - (time.monotonic() - started)))
        sys.exit(1 if measure(args, started) else 0)


def measure(args: argparse.Namespace, started: float) -> list[str]:
    """Runs the sections; returns the failed rows."""
    from bench.gpu.parts import chosen_sections
    from bench.gpu.report import Report  # torch: after the environment is set
    from bench.gpu.sections import run_all  # imports torch and triton, no more: CUDA must not start before the fork

    report = Report(is_smoke=args.smoke, scratch=args.state)
    report.started, report.out = started, args.out
    report.restore(args.state / "gpu.json")
    if not (args.state / "triton").exists():  # on another machine than before
        report.done = [name for name in report.done if name != "compile"]
    before = report.seconds

    def save() -> None:
        report.seconds = round(before + time.monotonic() - started, 1)
        report.write(args.out, "gpu")
        report.write(args.state, "gpu")

    try:
        part = int(args.what) if args.what.isdigit() else None
        done, cuts = ((), ()) if args.again else (report.done, report.cuts)
        sections = chosen_sections(part, args.only, done=done, cuts=cuts)
    except ValueError as error:
        sys.exit(str(error))
    if args.smoke:
        sections = [replace(section, limit_s=SMOKE_SLOWER * section.limit_s) for section in sections]
    try:
        run_all(sections, report, args.budget - END_S - (time.monotonic() - started), save)
    except Stopped:
        print("\nstopped by SIGTERM: the results so far are written", flush=True)
    save()
    finish(report)
    return report.failed


def unpack_kernels(state: Path, vendor: Path = VENDOR) -> None:
    """Kernels that `pack --kernels` compiled are used on a machine that has none. Those for another Triton are not
    found in the cache, and so are compiled as usual."""
    packed = vendor / "kernels.tar.xz"
    if packed.exists() and not (state / "triton").exists():
        with tarfile.open(packed) as file:
            file.extractall(state, filter="data")


def show(state: Path) -> None:
    """Prints failed rows and all figures."""
    from bench.gpu.report import Report

    report = Report(is_smoke=False)
    report.restore(state / "gpu.json")
    if not report.rows:
        sys.exit(f"{state} has no results; run bench/gpu/start 1, or name another folder with --state")
    finish(report)


def finish(report: Any) -> None:
    """Prints failed rows and all figures."""
    for failed in report.failed:
        print(f"FAIL {failed}")
    print(json.dumps(report.summary()))


class Stopped(BaseException):
    """SIGTERM."""


def _stop(number: int, frame: object) -> None:
    raise Stopped


if __name__ == "__main__":
    main()
