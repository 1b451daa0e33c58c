"""The sections of the benchmark in the order in which they run, the most informative first.

Part 1 compiles, checks results and bits, and measures the engine. Part 2 measures the goals. Part 3 measures other
settings, part 4 other models and uses, part 5 other engines. Speed is measured only with kernels that pass their
checks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bench.gpu.sections import Section


def _speed(name: str, limit_s: float, function: str) -> Section:
    return Section(name, limit_s, function, "right")


PARTS: dict[int, tuple[Section, ...]] = {
    1: (
        Section("compile", 100.0, "bench.gpu.precompile:compile_all"),
        Section("environment", 15.0, "bench.gpu.machine:environment"),
        Section("ceilings", 15.0, "bench.gpu.kernels:ceilings"),
        Section("self_checks", 45.0, "bench.gpu.self_checks:self_checks"),
        Section("first_answer", 30.0, "bench.gpu.serving:first_answer"),
        Section("exact_bits", 25.0, "bench.gpu.exact_bits:exact_bits"),
        _speed("baseline", 75.0, "bench.gpu.serving:baseline"),
        _speed("decode_attention", 30.0, "bench.gpu.kernels:decode_attention"),
        _speed("prefill_attention", 25.0, "bench.gpu.kernels:prefill_attention"),
        Section("logits", 60.0, "bench.gpu.logits:logits"),
        Section("checks_without_early_starts", 45.0, "bench.gpu.self_checks:without_early_starts", "wrong"),
        Section("wrong_kernels", 120.0, "bench.gpu.sanitize:few_kernels", "wrong"),
    ),
    2: (
        _speed("decode_steps", 60.0, "bench.gpu.model:decode_steps"),
        _speed("in_process", 140.0, "bench.gpu.serving:in_process"),
        _speed("through_grpc", 120.0, "bench.gpu.serving:through_grpc"),
        Section("races", 120.0, "bench.gpu.sanitize:few_kernels"),
    ),
    3: (
        _speed("other_settings", 60.0, "bench.gpu.model:other_settings"),
        _speed("without_early_starts", 25.0, "bench.gpu.model:without_early_starts"),
        _speed("exact_cost", 60.0, "bench.gpu.model:exact_cost"),
        _speed("in_process_exact", 80.0, "bench.gpu.serving:in_process_exact"),
        _speed("in_process_fp8", 60.0, "bench.gpu.serving:in_process_fp8"),
        _speed("mixed_steps", 50.0, "bench.gpu.model:mixed_steps"),
        _speed("long_contexts", 45.0, "bench.gpu.model:long_contexts"),
    ),
    4: (
        _speed("filtered_through_grpc", 110.0, "bench.gpu.serving:filtered_through_grpc"),
        _speed("other_caches", 35.0, "bench.gpu.kernels:other_caches"),
        Section("blocks", 45.0, "bench.gpu.blocks:blocks"),
        _speed("experts", 60.0, "bench.gpu.other_models:experts"),
        _speed("int4_weights", 50.0, "bench.gpu.other_models:int4_weights"),
        _speed("adapters", 60.0, "bench.gpu.adapters:adapters"),
    ),
    5: (
        Section("peers", 170.0, "bench.gpu.peers:build"),
        _speed("nano_vllm", 80.0, "bench.gpu.peers:nano_vllm_workload"),
        _speed("vllm", 130.0, "bench.gpu.peers:vllm_workload"),
        _speed("ranks", 90.0, "bench.gpu.other_models:ranks"),
    ),
}
SECTIONS = [section for part in PARTS.values() for section in part]


NEEDED = ("compile", "ceilings")  # by every part: fractions of limits, and time
MOST_CUTS = 2


def chosen_sections(
    part: int | None, only: str, *, done: Collection[str] = (), cuts: Sequence[str] = ()
) -> list[Section]:
    """The requested sections by name, or those of a part that are not done. Those that ran out of time come last, and
    not a third time. Raises ValueError for an unknown name."""
    names = set(filter(None, only.split(",")))
    if unknown := names - {section.name for section in SECTIONS}:
        known = ", ".join(section.name for section in SECTIONS)
        raise ValueError(f"--only: unknown section {', '.join(sorted(unknown))}; known are {known}")
    if names:
        return [section for section in SECTIONS if section.name in names]
    chosen = [section for section in SECTIONS if part is None or section in PARTS[part] or section.name in NEEDED]
    left_out = {*done, *(name for name in cuts if cuts.count(name) >= MOST_CUTS)}
    left = [section for section in chosen if section.name not in left_out]
    return sorted(left, key=lambda section: section.name in cuts and section.name not in NEEDED)
