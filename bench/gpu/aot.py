"""Compiles the large kernels for a GPU without one and reports registers, spills, shared memory, waits and occupancy.

    python -m bench.gpu.aot            # a table, then one line of JSON; exit 1 if a bound is exceeded
    python -m bench.gpu.aot --attention --arch 80    # attention only, for sm_80

It finds errors of shape and type that the interpreter accepts. Run it without TRITON_INTERPRET. `waits` are the
numbers of groups of asynchronous loads that may be outstanding where the loops over keys wait: 0 means that a loop
waits for the loads that it has just issued. `early` are the pointer arguments through which a kernel reads before it
waits for its predecessor (kernels/launch.py), in an architecture with programmatic dependent launch.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.gpu.weight_variants import Variant, linear_variant, weight_variants
from worker_svc.engine.backend import HeadShape
from worker_svc.engine.gpu.attention.tiles import DECODE_TILES, EXACT_TILES, PREFILL_TILES, Processors, for_heads
from worker_svc.engine.gpu.kernels import (
    activation,
    attention,
    drafts,
    norm,
    rope_store,
)
from worker_svc.engine.gpu.kernels.launch import FIRST_ARCHITECTURE
from worker_svc.engine.gpu.kernels.linears import linear
from worker_svc.engine.gpu.kernels.sampler import banned, candidates, filters, process, sample


@dataclass(frozen=True, slots=True)
class Architecture:
    """A compute capability and its limits."""

    number: int  # 90 is sm_90
    processors: Processors
    max_shared_bytes: int  # limit for one program
    max_spills: int  # instructions outside of loops over keys or weights, which cost little


ARCHITECTURES = {
    arch.number: arch
    for arch in (
        Architecture(80, Processors(108, 65536, 164 << 10, 2048), 163 << 10, 96),
        Architecture(89, Processors(128, 65536, 100 << 10, 1536), 99 << 10, 96),
        Architecture(90, Processors(132, 65536, 228 << 10, 2048), 227 << 10, 96),
        Architecture(100, Processors(148, 65536, 228 << 10, 2048), 227 << 10, 96),
        Architecture(120, Processors(170, 65536, 100 << 10, 1536), 99 << 10, 96),
    )
}
HOPPER = ARCHITECTURES[90]
FIRST_WITH_FP8 = 89
MAX_REGISTERS = 255
MAX_LOOP_SPILLS = 2
SPILL = re.compile(r"\b(?:LDL|STL)\b")
WINDOW: dict[str, Any] = {"WINDOW": True, "CAPPED": False}  # layers with a sliding window
# Attention by model: heads, type of the cache, tokens of a block, launches, and what differs from plain layers
ATTENTION: tuple[tuple[str, HeadShape, str, int, tuple[str, ...], str, dict[str, Any]], ...] = (
    ("0.6b", HeadShape(16, 8, 128), "bf16", 256, ("decode", "prefill", "exact"), "", {}),
    ("mistral", HeadShape(32, 8, 128), "bf16", 64, ("prefill",), " window", WINDOW),
    ("gemma2", HeadShape(16, 8, 256), "bf16", 64, ("decode",), " window cap", WINDOW | {"CAPPED": True}),
    ("gpt-oss", HeadShape(64, 8, 64), "bf16", 64, ("decode", "prefill", "exact"), " window sinks",
     WINDOW | {"SINKS": True}),
    ("dim 96", HeadShape(32, 8, 96), "bf16", 256, ("prefill",), "", {}),
    ("0.6b fp8", HeadShape(16, 8, 128), "fp8e4nv", 256, ("decode", "prefill"), "", {}),
)  # fmt: skip
WITHOUT_STORE = ("mistral", "gemma2")  # it is compiled as for 0.6b
TILES = {"decode": DECODE_TILES, "prefill": PREFILL_TILES, "exact": EXACT_TILES}


@dataclass(frozen=True, slots=True)
class Report:
    """Resources of a compiled variant."""

    name: str
    registers: int
    spill_instructions: int
    shared_bytes: int
    loop_spills: int = 0  # spills in innermost loops
    fences: int = 0  # fences for the whole GPU: attention has one, where a split is announced
    merge_loads: tuple[int, int] | None = None  # asynchronous and other loads in the loop that merges splits
    mma: dict[str, int] = field(default_factory=dict)
    waits: tuple[int, ...] = ()  # waits in loops that multiply and load asynchronously
    programs: int = 0  # number that runs at once on a processor
    early: tuple[str, ...] | None = None  # arguments read before the wait for the predecessor; None: no wait
    seconds: float = 0.0

    def is_within(self, arch: Architecture) -> bool:
        """Whether a program of it can run on this architecture, without many spills."""
        return (
            self.spill_instructions <= arch.max_spills
            and self.loop_spills <= MAX_LOOP_SPILLS
            and self.shared_bytes <= arch.max_shared_bytes
            and self.registers <= MAX_REGISTERS
        )


def variants(processors: Processors = HOPPER.processors) -> Iterator[Variant]:
    """The kernels that compute most, each in a few configurations that a worker launches; bench/gpu/dry_run.py compiles
    the small ones."""
    t, i, f = "*bf16", "*i32", "*fp32"
    for name, kind in (("", "rms"), (" layer", "layer")):
        constants = {"N": 1024, "BLOCK": 1024, "ADD": True, "KIND": norm.KINDS[kind]} | NOT_ROUNDED
        yield Variant(f"norm{name}", norm.norm_kernel, f"{t} {t} {t} {t} {t} {t} fp32", constants, 2)
    constants = {"BLOCK": activation.BLOCK, "KIND": activation.GATED.index("relu2")}
    yield Variant("relu2", activation.gated_activation_kernel, f"{t} {t} i32", constants)
    yield linear_variant("linear bias=False", (t, t), t, linear.TILE)
    for _, tile in linear.TILES:
        if (tile.rows, tile.columns) in LINEAR_TILES:
            yield linear_variant(f"linear {tile.rows}x{tile.columns}", (t, t), t, tile)
    yield from weight_variants(t)
    yield Variant("output_positions", drafts.output_positions_kernel, f"{i} {i} {i} {i} i32 {i} i32", {"BLOCK": 128})
    constants = {"MOST": 8, "HISTORY": drafts.HISTORY}
    yield Variant("accept", drafts.accept_kernel, f"{i} {i} {i} {i} {i} {i} {i} {i} i32 {i} {i} i32", constants, 1)
    constants |= {
        "MOST_PADDED": 8, "LEAST_MATCH": drafts.LEAST_MATCH, "MOST_MATCH": drafts.MOST_MATCH,
        "POSITION_BITS": drafts.POSITION_BITS, "BLOCK": drafts.BLOCK,
    }  # fmt: skip
    yield Variant("suffix", drafts.suffix_kernel, f"{i} {i} {i} i32 {i} {i}", constants)
    for model, shape, kv_dtype, page, uses, suffix, masks in ATTENTION:
        if model not in WITHOUT_STORE:
            yield _store_variant(model, shape, kv_dtype)
        for use in uses:
            yield _attention_variant(f"attention {model} {use}", use, shape, kv_dtype, page, suffix, masks, processors)
    yield from _sampling_variants(t, i, f)


NOT_ROUNDED = {"GROUPS": 0, "NUM_GROUPS": 0, "SMALLEST": 0.0}  # to fp8
LINEAR_TILES = ((128, 128), (64, 32), (16, 16))


def _heads(shape: HeadShape) -> dict[str, int]:
    return {"HQ": shape.num_q_heads, "HKV": shape.num_kv_heads, "D": shape.head_dim}


def _store_variant(model: str, shape: HeadShape, kv_dtype: str) -> Variant:
    t, kv, i, f = "*bf16", f"*{kv_dtype}", "*i32", "*fp32"
    return Variant(
        f"rope_store {model} norm=True", rope_store.rope_store_kernel,
        f"{t} {t} {t} {f} {f} {i} {i} {t} {kv} {kv} {f} {f} fp32",
        _heads(shape) | {
            "HEADS": triton.next_power_of_2(shape.num_q_heads + 2 * shape.num_kv_heads),
            "HALVES": triton.next_power_of_2(shape.head_dim) // 2, "TURNED": shape.head_dim // 2, "NORM": 1,
            "WIDE": False, "SCALED": kv_dtype != "bf16", "INTERLEAVED": False, "SCALES_Q": False,
        },
    )  # fmt: skip


def _attention_variant(
    name: str, use: str, shape: HeadShape, kv_dtype: str, page: int, suffix: str, masks: dict[str, Any],
    processors: Processors,
) -> Variant:  # fmt: skip
    t, kv, i, f = "*bf16", f"*{kv_dtype}", "*i32", "*fp32"
    tiles = for_heads(TILES[use], shape, 2, processors.shared_bytes)
    constants = _heads(shape) | {"SINKS": False, "WINDOW": False, "CAPPED": False} | masks | {
        "PAGE": page, "GROUP": attention.group_lines(shape), "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n, "BLOCK_D": triton.next_power_of_2(shape.head_dim), "MIN_SPLIT": tiles.min_split,
        "FIXED": tiles.fixed_split, "ONE_LOOP": tiles.one_loop, "SCALED": kv_dtype != "bf16",
    }  # fmt: skip
    types = f"{t} {kv} {kv} {f} {i} i32 {i} {i} {i} {i} {i} {i} {t} {f} {f} {i} {f} fp32 i32 i32 fp32"
    kernel = attention.paged_attention_kernel
    return Variant(f"{name} page {page}{suffix}", kernel, types, constants, tiles.num_warps, tiles.num_stages)


def _sampling_variants(t: str, i: str, f: str) -> Iterator[Variant]:
    source = f"{t} i32 i32 {i} i32 {i}"
    chunk = {"CHUNK": candidates.CHUNK}
    lines = {"CHUNKS": triton.next_power_of_2(triton.cdiv(151_936, candidates.CHUNK))}
    yield Variant("chunk_top", filters.chunk_top_kernel, f"{source} {f} i32", chunk)
    yield Variant("chunk_weight", filters.chunk_weight_kernel, f"{source} {f} *i64 i32", chunk | lines)
    yield Variant("limits", filters.limits_kernel, f"{i} i32 {i} {f} *i64 {f} {f} {i} *i64 i32 i32", lines, 1)
    room = {"ROOM": candidates.MAX_CANDIDATES}
    yield Variant("collect", candidates.collect_kernel, f"{source} {f} {f} {i} {f} i32", room | chunk)
    yield Variant("select", candidates.select_kernel, f"{source} {f} {f} {f} {i} *i64 {f} i32", room)
    yield Variant("banned", banned.banned_kernel, f"{source} {i} i32 i32", {"BLOCK": banned.BLOCK}, 2)
    constants: dict[str, Any] = {"CHUNK": process.CHUNK, "DRAFTS": True}
    types = f"{source} {f} {i} {f} {i} {i} {i} i32"
    yield Variant("process drafts=True", process.process_kernel, types, constants)
    constants = {
        "RECENT": process.RECENT, "WORDS_AT_ONCE": process.WORDS_AT_ONCE, "BLOCK": process.BLOCK, "DRAFTS": True,
    }  # fmt: skip
    types = f"{f} i32 {i} {i} {i} {i} {i} {i} i32 {i} {i} {i}"
    yield Variant("bad_words drafts=True", process.bad_words_kernel, types, constants, 1)
    constants = {"RECENT": process.RECENT, "BLOCK": process.ROWS_AT_ONCE}
    yield Variant("record_tokens", process.record_tokens_kernel, f"{i} {i} {i} {i} {i} i32 i32 i32", constants)
    chunks = triton.next_power_of_2(triton.cdiv(151_936, sample.CHUNK))
    for is_filtered in (False, True):
        chosen: dict[str, Any] = {"FILTER": is_filtered, "CHUNK": sample.CHUNK}
        types = f"{source} {i} {f} {f} {i} i32 i32"
        yield Variant(f"scores filter={is_filtered}", sample.chunk_scores_kernel, types, chosen)
        last = chosen | {"ERROR": sample.APPROXIMATION_ERROR, "CHUNKS": chunks, "IS_PART": is_filtered}
        name = f"pick filter={is_filtered} part={is_filtered}"
        yield Variant(name, sample.pick_kernel, f"{types} {i} {i} *i64", last)
    yield Variant("read_keys", sample.read_keys_kernel, f"*i64 {i} i32 {i} {i} {i} i32", {"BLOCK": sample.KEYS})


def compile_variant(variant: Variant, arch: Architecture = HOPPER) -> Report:
    """Compiles one variant. Raises errors of the compiler."""
    started = time.perf_counter()
    types = iter(variant.types.split())
    names = variant.kernel.arg_names
    constants = variant.constants
    is_dependent = "PDL" in names and arch.number >= FIRST_ARCHITECTURE
    if "PDL" in names:
        constants = constants | {"PDL": is_dependent}
    signature = {name: "constexpr" if name in constants else next(types) for name in names}
    aligned = [["tt.divisibility", 16]]
    attrs = {
        (n,): aligned for n, name in enumerate(names) if signature[name].startswith("*") or name in variant.divisible
    }
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "launch_pdl": is_dependent}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch.number, 32), options=options)
    usage, sass = _disassemble(compiled.asm["cubin"])
    found = re.search(r"REG:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no register count: {usage[:200]}")
    registers, shared = int(found[1]), int(compiled.metadata.shared)
    bodies = [[text for _, text in body] for body in innermost_loops(sass)]
    copies = [body for body in bodies if not any("MMA" in text for text in body) and any("LDGSTS" in t for t in body)]
    return Report(
        name=variant.name,
        registers=registers,
        spill_instructions=len(SPILL.findall(sass)),
        shared_bytes=shared,
        loop_spills=sum(bool(SPILL.search(text)) for body in bodies for text in body),
        fences=len(re.findall(r"\bMEMBAR\.\w+(?:\.\w+)*\.GPU", sass)),
        merge_loads=next((_loads(body) for body in copies), None),
        mma={kind: len(re.findall(rf"\b{kind}", sass)) for kind in ("HGMMA", "QGMMA", "HMMA", "LDGSTS")},
        waits=loop_waits(sass),
        programs=arch.processors.programs_per_processor(registers, shared, variant.num_warps),
        early=early_arguments(compiled.asm["ptx"], [name for name in names if name not in constants])
        if is_dependent
        else None,
        seconds=round(time.perf_counter() - started, 2),
    )


def _loads(body: list[str]) -> tuple[int, int]:
    """Asynchronous and other loads from global memory."""
    return sum("LDGSTS" in text for text in body), sum("LDG." in text for text in body)


def loop_waits(sass: str) -> tuple[int, ...]:
    """For each innermost loop with matrix products and asynchronous loads: the groups of loads that may be outstanding
    after its first wait. The groups are committed in order, so 0 waits for the newest ones."""
    waits = []
    for body in innermost_loops(sass):
        texts = [text for _, text in body]
        outstanding = [found[1] for text in texts if (found := re.search(r"\bDEPBAR\.LE SB\d+, (0x[0-9a-f]+)", text))]
        if outstanding and any("MMA" in text for text in texts) and any("LDGSTS" in text for text in texts):
            waits.append(int(outstanding[0], 16))
    return tuple(waits)


def innermost_loops(sass: str) -> Iterator[list[tuple[int, str]]]:
    """The instructions, with their addresses, of each loop without another loop."""
    code = [(int(place, 16), text) for place, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", sass)]
    jumps = ((place, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)) for place, text in code)
    loops = [(int(found[1], 16), place) for place, found in jumps if found and int(found[1], 16) < place]
    for first, last in loops:
        if not any(first <= other[0] and other[1] <= last for other in loops if other != (first, last)):
            yield [(place, text) for place, text in code if first <= place <= last]


def early_arguments(ptx: str, names: list[str]) -> tuple[str, ...]:
    """The arguments through which the kernel reads memory before it waits for its predecessor.

    Raises ValueError if it never waits, writes before that, or waits in a branch. `names` are the run-time arguments.
    """
    before, wait, after = ptx[ptx.index("\n{\n") :].partition("griddepcontrol.wait")
    if not wait or "griddepcontrol.launch_dependents" not in after:
        raise ValueError("a kernel with PDL does not call after_predecessor")
    if re.search(r"\bbra\b|\$L__BB\d|\b(?:st|red|atom)\.global|\bcp\.async(?!\.bulk\.prefetch)", before):
        raise ValueError("a kernel with PDL branches or writes before after_predecessor")
    sources: dict[str, set[str]] = {}  # the arguments that each register was computed from
    read: set[str] = set()
    for line in re.split(r"[;\n]", before):
        registers = re.findall(r"%[a-z]+\d+", line)
        found = {names[int(number)] for number in re.findall(r"_param_(\d+)\]", line)}
        found = found.union(*(sources.get(register, set()) for register in registers))
        is_read = "ld.global" in line or ".prefetch." in line
        if is_read:
            read |= set().union(*(sources[register] for register in re.findall(r"\[ ?(%rd\d+)", line)))
        if registers and not is_read:
            sources[registers[0]] = found
    return tuple(sorted(name for name in read if name.endswith("_ptr")))  # not offsets


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Resource usage and instructions."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    return usage, sass


def main() -> None:
    """Prints the table; exits with 1 if a kernel exceeds a bound."""
    args = _arguments()
    arch = ARCHITECTURES[args.arch]
    reports, failed = [], []
    print(f"triton {triton.__version__}, sm_{args.arch}")
    for variant in chosen_variants(arch, is_attention_only=args.attention):
        report = compile_variant(variant, arch)
        reports.append(report)
        verdict = "" if report.is_within(arch) else "  EXCEEDS A BOUND"
        failed += [] if report.is_within(arch) else [report.name]
        print(
            f"{report.name:32s} {report.registers:4d} registers {report.spill_instructions:4d} spills "
            f"({report.loop_spills} in loops) {report.fences} fences merge {report.merge_loads} "
            f"{report.shared_bytes:7d} B shared {report.programs:2d} programs waits {report.waits} "
            f"{report.mma}{verdict}",
            flush=True,
        )
    print(
        json.dumps({"triton": triton.__version__, "failed": failed, "kernels": [asdict(report) for report in reports]})
    )
    sys.exit(1 if failed else 0)


def chosen_variants(arch: Architecture, *, is_attention_only: bool = False) -> Iterator[Variant]:
    """The variants that this architecture can run, or those of attention."""
    for variant in variants(arch.processors):
        if "fp8" in variant.name and arch.number < FIRST_WITH_FP8:
            continue
        if not is_attention_only or variant.kernel is attention.paged_attention_kernel:
            yield variant


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", action="store_true", help="attention only")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, default=90, help="90 is sm_90 (default)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
