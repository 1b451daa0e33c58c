"""Benchmark of the GPU engine on one device: correctness, speed, fraction of the device's limits. Needs no network.

    bench/gpu/pack                       # first, on a machine with a network: stubs and small wheels
    bench/gpu/start --part 1             # kernels and model: errors, bandwidth, step times
    bench/gpu/start --part 2             # the 256-request workload, in-process and through gRPC
    bench/gpu/start                      # both, within the budget
    bench/gpu/start --smoke              # tiny sizes on a CPU with Triton's interpreter

Each section runs in its own process with a time limit. A section that fails, hangs or dies is reported, and the next
one runs. Sections that do not fit into --budget seconds are skipped and reported. Rows are printed when measured, and
gpu-part1.json and gpu-part1.md in $OUT (or --out) are updated after every row. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMOKE_SLOWER = 5  # time limits of the interpreter relative to a GPU
sys.path.insert(0, str(ROOT))

from bench.gpu.toolchain import prepare_toolchain  # noqa: E402


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2))
    parser.add_argument("--only", default="", help="sections by name, comma separated")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds; sections that do not fit are skipped")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder for the results")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    return parser


def main() -> None:
    started = time.monotonic()
    args = make_parser().parse_args()
    if args.smoke:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    else:
        print(f"C compiler: {prepare_toolchain()}", flush=True)
    from bench.gpu.report import Report  # torch and triton: after the environment is set
    from bench.gpu.sections import run_all

    name = f"gpu-part{args.part}" if args.part else "gpu"
    with tempfile.TemporaryDirectory() as scratch:
        report = Report(is_smoke=args.smoke, scratch=Path(scratch))

        def save() -> None:
            report.seconds = round(time.monotonic() - started, 1)
            report.write(args.out, name)

        sections = chosen_sections(args.part, args.only)
        if args.smoke:
            sections = [replace(section, limit_s=SMOKE_SLOWER * section.limit_s) for section in sections]
        run_all(sections, report, args.budget - (time.monotonic() - started), save)
    print(json.dumps(report.summary()))
    sys.exit(1 if report.failed else 0)


def chosen_sections(part: int | None, only: str) -> list:
    """The requested sections, the most informative first."""
    from bench.gpu import kernels, model, serving
    from bench.gpu.sections import Section

    first = [
        Section("environment", 15.0, kernels.environment),
        Section("ceilings", 15.0, kernels.ceilings),
    ]
    parts = {
        1: [
            Section("logits", 110.0, model.logits),
            Section("decode_steps", 70.0, model.decode_steps),
            Section("small_kernels", 35.0, kernels.small_kernels),
            Section("decode_attention", 60.0, kernels.decode_attention),
            Section("prefill_attention", 40.0, kernels.prefill_attention),
            Section("invariance", 25.0, kernels.invariance),
            Section("exact_cost", 45.0, model.exact_cost),
            Section("mixed_steps", 60.0, model.mixed_steps),
            Section("other_caches", 40.0, kernels.other_caches),
            Section("tile_sweep", 30.0, kernels.tile_sweep),
        ],
        2: [
            Section("in_process", 130.0, serving.in_process),
            Section("through_grpc", 240.0, serving.through_grpc),
            Section("in_process_fp8", 90.0, serving.in_process_fp8),
        ],
    }
    sections = first + [section for number, found in parts.items() if part in (None, number) for section in found]
    names = set(filter(None, only.split(",")))
    if unknown := names - {section.name for section in sections}:
        sys.exit(
            f"--only: unknown section {', '.join(sorted(unknown))}; known are {', '.join(s.name for s in sections)}"
        )
    return [section for section in sections if not names or section.name in names]


if __name__ == "__main__":
    main()
