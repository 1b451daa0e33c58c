"""The sections of the benchmark in the order in which they run, the most informative first.

Part 1 compiles, checks results, measures the engine as it is committed, and chooses tiles. Part 2 measures the goals
with these tiles. Part 3 measures other settings, part 4 other libraries and models.
"""

from __future__ import annotations

from collections.abc import Collection

from bench.gpu.sections import Section

PARTS: dict[int, tuple[Section, ...]] = {
    1: (
        Section("compile", 100.0, "bench.gpu.precompile:compile_all"),
        Section("environment", 15.0, "bench.gpu.machine:environment"),
        Section("ceilings", 15.0, "bench.gpu.kernels:ceilings"),
        Section("self_checks", 45.0, "bench.gpu.self_checks:self_checks"),
        Section("baseline", 75.0, "bench.gpu.serving:baseline"),
        Section("tile_sweep", 40.0, "bench.gpu.tile_sweep:tile_sweep"),
        Section("decode_attention", 45.0, "bench.gpu.kernels:decode_attention"),
        Section("prefill_attention", 25.0, "bench.gpu.kernels:prefill_attention"),
        Section("small_kernels", 25.0, "bench.gpu.small_kernels:small_kernels"),
        Section("logits", 100.0, "bench.gpu.logits:logits"),
    ),
    2: (
        Section("decode_steps", 60.0, "bench.gpu.model:decode_steps"),
        Section("in_process", 100.0, "bench.gpu.serving:in_process"),
        Section("through_grpc", 120.0, "bench.gpu.serving:through_grpc"),
        Section("filtered_through_grpc", 110.0, "bench.gpu.serving:filtered_through_grpc"),
        Section("profile", 60.0, "bench.gpu.kernel_times:profile"),
    ),
    3: (
        Section("other_settings", 60.0, "bench.gpu.model:other_settings"),
        Section("without_early_starts", 25.0, "bench.gpu.model:without_early_starts"),
        Section("exact_cost", 45.0, "bench.gpu.model:exact_cost"),
        Section("in_process_exact", 80.0, "bench.gpu.serving:in_process_exact"),
        Section("in_process_fp8", 60.0, "bench.gpu.serving:in_process_fp8"),
        Section("mixed_steps", 50.0, "bench.gpu.model:mixed_steps"),
        Section("long_contexts", 40.0, "bench.gpu.model:long_contexts"),
        Section("other_caches", 35.0, "bench.gpu.kernels:other_caches"),
        Section("extras", 45.0, "bench.gpu.extras:extras"),
        Section("invariance", 25.0, "bench.gpu.small_kernels:invariance"),
    ),
    4: (
        Section("libraries", 40.0, "bench.gpu.libraries:libraries"),
        Section("products", 25.0, "bench.gpu.products:products"),
        Section("experts", 60.0, "bench.gpu.other_models:experts"),
        Section("int4_weights", 50.0, "bench.gpu.other_models:int4_weights"),
        Section("adapters", 60.0, "bench.gpu.adapters:adapters"),
        Section("ranks", 90.0, "bench.gpu.other_models:ranks"),
        Section("vllm", 150.0, "bench.gpu.libraries:vllm_workload"),
    ),
}
SECTIONS = [section for part in PARTS.values() for section in part]


NEEDED = ("compile", "ceilings")  # by every part: fractions of limits, and time
UNTUNED = ("tile_sweep", "baseline")  # left out if all sections use the engine's own tiles


def chosen_sections(
    part: int | None, only: str, *, is_baseline: bool = False, done: Collection[str] = ()
) -> list[Section]:
    """The requested sections by name, or those of a part that are not done. Raises ValueError for an unknown name."""
    names = set(filter(None, only.split(",")))
    if unknown := names - {section.name for section in SECTIONS}:
        known = ", ".join(section.name for section in SECTIONS)
        raise ValueError(f"--only: unknown section {', '.join(sorted(unknown))}; known are {known}")
    if names:
        return [section for section in SECTIONS if section.name in names]
    chosen = [section for section in SECTIONS if part is None or section in PARTS[part] or section.name in NEEDED]
    left_out = {*done, *(UNTUNED if is_baseline else ())}
    return [section for section in chosen if section.name not in left_out]
