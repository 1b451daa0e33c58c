"""A model of a step's time: bytes and FLOP over the device's measured limits, launches, and the host.

    bench/gpu/start predict       # the rows of the benchmark, for several GPUs

A step's kernels run one after the other, so their times add up. Each takes the larger of its memory and its arithmetic
time, plus a fixed time for its launch, its first loads and its last program. `costs.py` has the constants and their
sources. tests/gpu/test_step_model.py compares bytes with the engine's tensors, and launches with recorded steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bench.gpu.costs import ACHIEVED_BANDWIDTH, ACHIEVED_FLOPS, GPUS, Gpu
from bench.gpu.distribution import distribute
from bench.workloads import QWEN3_06B, Model, nano
from worker_svc.engine.backend import HeadShape
from worker_svc.engine.gpu.kernels import linear

NUMBER_BYTES = 2  # of weights and activations
PRODUCT = "linear.default"
LAYER_LAUNCHES = {
    "norm_kernel": 2, PRODUCT: 4, "rope_store_kernel": 1, "paged_attention_kernel": 1, "gated_activation_kernel": 1,
}  # fmt: skip
STEP_LAUNCHES = {
    "prepare_kernel": 1, "embedding.default": 1, "work_list_kernel": 1, "index_select.default": 2, "norm_kernel": 1,
    PRODUCT: 1, "chunk_scores_kernel": 1, "pick_kernel": 1,
}  # fmt: skip
FILTER_LAUNCHES = (
    "banned_kernel", "chunk_top_kernel", "chunk_weight_kernel", "limits_kernel", "collect_kernel", "select_kernel",
)  # fmt: skip
DRAFT_LAUNCHES = ("output_positions_kernel", "accept_kernel", "suffix_kernel")
MAX_GRAPH_TOKENS = 8192  # larger steps are launched kernel by kernel
NANO_BUDGET = 16_384  # tokens of a step in nano-vllm's benchmark
SAMPLED_STEPS = 24  # decode steps whose distribution is computed; the others are interpolated


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a dense decoder with tied embeddings."""

    hidden: int
    layers: int
    heads: HeadShape
    inner: int
    vocab: int

    @classmethod
    def of(cls, model: Model) -> Shape:
        heads = HeadShape(model["num_attention_heads"], model["num_key_value_heads"], model["head_dim"])
        return cls(
            model["hidden_size"], model["num_hidden_layers"], heads, model["intermediate_size"], model["vocab_size"]
        )

    def of_rank(self, ranks: int) -> Shape:
        """The part of a rank."""
        q_heads, kv_heads = self.heads.num_q_heads // ranks, max(self.heads.num_kv_heads // ranks, 1)
        heads = HeadShape(q_heads, kv_heads, self.heads.head_dim)
        return replace(self, heads=heads, inner=self.inner // ranks, vocab=self.vocab // ranks)

    def layer_linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of a layer's matrices."""
        q_size, kv_size = self.heads.num_q_heads * self.heads.head_dim, self.heads.num_kv_heads * self.heads.head_dim
        return {
            "qkv": (q_size + 2 * kv_size, self.hidden), "o": (self.hidden, q_size),
            "gate_up": (2 * self.inner, self.hidden), "down": (self.hidden, self.inner),
        }  # fmt: skip

    def weight_bytes(self) -> int:
        """Bytes of all matrices that a step reads, of the layers and the head."""
        layer = sum(outputs * inputs for outputs, inputs in self.layer_linears().values())
        return NUMBER_BYTES * (self.layers * layer + self.vocab * self.hidden)

    def token_bytes(self, number_bytes: int = NUMBER_BYTES) -> int:
        """Bytes of a token's keys and values in all layers."""
        return 2 * self.layers * self.heads.num_kv_heads * self.heads.head_dim * number_bytes

    def activation_bytes(self) -> int:
        """Bytes that the kernels of a layer read and write per token, without weights and the KV pool."""
        q_size = self.heads.num_q_heads * self.heads.head_dim
        linears = sum(outputs + inputs for outputs, inputs in self.layer_linears().values())
        norms, rope, activation = 2 * 4 * self.hidden, self.layer_linears()["qkv"][0] + q_size, 3 * self.inner
        return NUMBER_BYTES * (linears + norms + rope + activation + 2 * q_size)


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of a step."""

    contexts: tuple[int, ...]  # tokens in the pool before it
    queries: tuple[int, ...]  # new tokens
    sampling: str = "plain"  # greedy, plain (noise) or filtered (top_k and top_p, with noise)
    cache_bytes: int = NUMBER_BYTES  # of a number in the KV pool
    is_exact: bool = False
    ranks: int = 1
    verifies: bool = False  # the rows decode, and their queries after the first are drafts
    has_int8: bool = False  # weights of linear layers

    @property
    def num_tokens(self) -> int:
        return sum(self.queries)

    @property
    def is_decode(self) -> bool:
        return self.verifies or max(self.queries) == 1

    @property
    def launches_of_drafts(self) -> tuple[str, ...]:
        return DRAFT_LAUNCHES if self.verifies else ()

    def launches_of_weights(self, shape: Shape) -> dict[str, int]:
        """Those that round the inputs of linear layers."""
        return {"int8_rows_kernel": len(shape.layer_linears()) * shape.layers} if self.has_int8 else {}


def launches(shape: Shape, *, is_decode: bool, is_filtered: bool) -> dict[str, int]:
    """Kernels of a step that has a graph, by name. A library computes the products."""
    found = Counter(STEP_LAUNCHES)
    for name, count in LAYER_LAUNCHES.items():
        found[name] += count * shape.layers
    if not is_decode:
        found["paged_attention_kernel"] += shape.layers
        found["work_list_kernel"] += 1
    if is_filtered:
        found.update(FILTER_LAUNCHES)
    return dict(found)


def launch_ms(counts: dict[str, int], gpu: Gpu, *, has_pdl: bool) -> float:
    """Fixed time of these kernels. Those of libraries do not start early."""
    ours = sum(count for name, count in counts.items() if name.endswith("_kernel"))
    others = sum(counts.values()) - ours
    return (ours * (gpu.pdl_launch_us if has_pdl else gpu.launch_us) + others * gpu.launch_us) / 1e3


def step_ms(shape: Shape, step: Step, gpu: Gpu, *, has_pdl: bool = False, overhead: float | None = None) -> float:
    """Milliseconds of a step when steps follow each other closely. `overhead`: of attention, if it is known."""
    found = parts_ms(shape, step, gpu, has_pdl=has_pdl, overhead=overhead)
    count = sum(launches(shape, is_decode=step.is_decode, is_filtered=step.sampling == "filtered").values())
    host = gpu.host_ms + gpu.host_row_us * len(step.queries) / 1e3
    if step.num_tokens > MAX_GRAPH_TOKENS:
        host += count * gpu.eager_us / 1e3
    return max(sum(found.values()), host)


def parts_ms(
    shape: Shape, step: Step, gpu: Gpu, *, has_pdl: bool = False, overhead: float | None = None
) -> dict[str, float]:
    """What the device does in a step, in milliseconds."""
    tokens, samples = step.num_tokens, step.num_tokens if step.verifies else len(step.queries)
    counts = launches(shape, is_decode=step.is_decode, is_filtered=step.sampling == "filtered")
    counts |= dict.fromkeys(step.launches_of_drafts, 1) | step.launches_of_weights(shape)
    multiply = _exact_product_s if step.is_exact else _product_s
    of_layer = _int8_product_s if step.has_int8 else multiply
    linears = sum(of_layer(gpu, tokens, *size) for size in shape.layer_linears().values()) * shape.layers
    passes, operations = gpu.sampler[step.sampling]
    logit_bytes = samples * shape.vocab * NUMBER_BYTES
    numbers_per_s = gpu.processors * gpu.clock_hz * gpu.lanes
    return {
        "linear layers": 1e3 * linears,
        "head": 1e3 * multiply(gpu, samples, shape.vocab, shape.hidden),
        "attention": 1e3 * _attention_s(shape, step, gpu, overhead),
        "attention in series": 1e3 * _serial_s(shape, step, gpu),
        "sums over ranks": (2 * shape.layers * gpu.sum_us / 1e3) if step.ranks > 1 else 0.0,
        "activations": 1e3 * tokens * shape.layers * shape.activation_bytes() / gpu.l2_bandwidth,
        "sampler": 1e3 * max(passes * logit_bytes / gpu.bandwidth, samples * shape.vocab * operations / numbers_per_s),
        "launches": launch_ms(counts, gpu, has_pdl=has_pdl),
        "between steps": gpu.step_gap_us / 1e3,
    }


def _product_s(gpu: Gpu, rows: int, outputs: int, inputs: int) -> float:
    """Seconds of a matrix product: its weights or its arithmetic, in whole tiles of 64 rows. The own layer has few
    rows.
    """
    if rows <= linear.FEW_ROWS and NUMBER_BYTES * outputs * inputs <= linear.FEW_BYTES:
        return _exact_product_s(gpu, rows, outputs, inputs)
    return _shared_s(gpu, rows, outputs, inputs) + gpu.product_us / 1e6


def _shared_s(gpu: Gpu, rows: int, outputs: int, inputs: int) -> float:
    """If all processors share the work evenly."""
    flop = 2 * -(-rows // 64) * 64 * outputs * inputs
    return max(NUMBER_BYTES * outputs * inputs / gpu.bandwidth, flop / gpu.flops)


def _int8_product_s(gpu: Gpu, rows: int, outputs: int, inputs: int) -> float:
    """As `_product_s`: half the bytes, twice the operations per second."""
    return _shared_s(gpu, rows, outputs, inputs) / 2 + gpu.own_product_us / 1e6


def _exact_product_s(gpu: Gpu, rows: int, outputs: int, inputs: int) -> float:
    """Of the own layer: a program reads as fast as the tiles that it has on the way allow."""
    tile = linear.tile_for(rows, outputs)
    on_the_way = NUMBER_BYTES * tile.columns * tile.depth * (tile.num_stages - 1)
    programs = -(-outputs // tile.columns) * -(-rows // tile.rows)
    weight_s = NUMBER_BYTES * outputs * inputs * -(-rows // tile.rows) / (programs * on_the_way / gpu.load_us * 1e6)
    return max(_shared_s(gpu, rows, outputs, inputs), weight_s) + gpu.own_product_us / 1e6


def _serial_s(shape: Shape, step: Step, gpu: Gpu) -> float:
    """Seconds of what no other program does meanwhile, in all layers: the loads before the first keys, and the merge of
    the splits of the longest row."""
    single = _single_rows(step)
    if not single:
        return 0.0
    merged = distribute(single, shape.heads, gpu.counts, is_exact=step.is_exact, **_programs(step)).merged
    us = gpu.chain_us + (gpu.arrive_us + gpu.merge_us * merged if merged else 0.0)
    return us * shape.layers / 1e6


def _single_rows(step: Step) -> list[int]:
    """Keys of the rows whose queries fit a tile."""
    rows = zip(step.contexts, step.queries, strict=True)
    return [context + queries for context, queries in rows if queries == 1 or step.verifies]


def _programs(step: Step) -> dict[str, int]:
    return {"per_processor": 2} if step.is_exact else {}


def _attention_s(shape: Shape, step: Step, gpu: Gpu, overhead: float | None) -> float:
    """Seconds of all layers: keys and values of single queries, arithmetic of prompts."""
    single = _single_rows(step)
    seconds = 0.0
    if single:
        if overhead is None:
            overhead = decode_overhead(single, shape, gpu, step)
        seconds += sum(single) * shape.token_bytes(step.cache_bytes) / gpu.bandwidth * overhead
    pairs = sum(
        queries * context + queries**2 / 2
        for context, queries in zip(step.contexts, step.queries, strict=True)
        if queries > 1 and not step.verifies
    )
    flop = 4 * shape.heads.num_q_heads * shape.heads.head_dim * pairs * shape.layers
    return seconds + flop / (gpu.flops * gpu.prefill_of_matmul)


def decode_overhead(lengths: list[int], shape: Shape, gpu: Gpu, step: Step | None = None) -> float:
    """Time of a layer's attention for rows of these lengths / time to read their keys and values evenly."""
    is_exact = step is not None and step.is_exact
    options = _programs(step) if step is not None else {}
    found = distribute(lengths, shape.heads, gpu.counts, is_exact=is_exact, **options)
    idle = max(found.longest_to_mean / 1.2, 1.0)  # few units leave programs idle, so the others get more bandwidth
    return found.overhead / min(idle, gpu.most_share) / (gpu.exact_of_copy if is_exact else 1.0)


def workload_s(
    shape: Shape, gpu: Gpu, *, sampling: str = "plain", cache_bytes: int = NUMBER_BYTES, has_pdl: bool = False
) -> tuple[float, int]:
    """Seconds of nano-vllm's benchmark (256 requests at once), and its output tokens."""
    requests = nano().requests
    prompts, outputs = [len(request.prompt) for request in requests], [request.num_output for request in requests]
    seconds, computed, overhead = 0.0, [0] * len(prompts), 1.0
    every = max(1, max(outputs) // SAMPLED_STEPS)
    number = 0
    while queries := _next_queries(prompts, outputs, computed):
        step = Step(tuple(computed[i] for i in queries), tuple(queries.values()), sampling, cache_bytes)
        if number % every == 0 and step.is_decode:
            overhead = decode_overhead([context + 1 for context in step.contexts], shape, gpu)
        seconds += step_ms(shape, step, gpu, has_pdl=has_pdl, overhead=overhead) / 1e3
        for i, count in queries.items():
            computed[i] += count
        number += 1
    return seconds, sum(outputs)


def _next_queries(prompts: list[int], outputs: list[int], computed: list[int]) -> dict[int, int]:
    """Tokens of each row in the next step: running rows first, then prompts within the budget."""
    rows = range(len(prompts))
    running = [i for i in rows if prompts[i] <= computed[i] < prompts[i] + outputs[i] - 1]
    chosen, budget = dict.fromkeys(running, 1), NANO_BUDGET - len(running)
    for i in rows:
        if computed[i] < prompts[i] and budget > 0:
            chosen[i] = min(prompts[i] - computed[i], budget)
            budget -= chosen[i]
    return chosen


def predictions(gpu: Gpu, *, has_pdl: bool = False) -> dict[str, float]:
    """The benchmark's figures by name: milliseconds, and tokens per second."""
    shape = Shape.of(QWEN3_06B)
    found = {}
    for rows, context in SIZES:
        step = Step((context - 1,) * rows, (1,) * rows, "greedy")
        found[f"step_ms_b{rows}_ctx{context}"] = step_ms(shape, step, gpu, has_pdl=has_pdl)
    for rows, context in VERIFY_SIZES:
        step = Step((context - 1,) * rows, (1 + NUM_DRAFTS,) * rows, "greedy", verifies=True)
        found[f"verify_ms_b{rows}_ctx{context}"] = step_ms(shape, step, gpu, has_pdl=has_pdl)
    for length in (32_768, 131_072):
        chunks = [Step((first,), (8192,), "greedy") for first in range(0, length, 8192)]
        found[f"prompt_ms_{length}"] = sum(step_ms(shape, step, gpu, has_pdl=has_pdl) for step in chunks)
    for name, fields in WORKLOADS.items():
        seconds, tokens = workload_s(shape, gpu, has_pdl=has_pdl, **fields)
        found[name] = tokens / seconds
    return found


SIZES = [
    (1, 512), (1, 4096), (8, 512), (32, 512), (32, 4096), (64, 512), (256, 512), (256, 4096),
    (1, 32_768), (8, 32_768), (32, 32_768), (1, 131_072), (8, 131_072),
]  # fmt: skip
NUM_DRAFTS = 3  # of each row
VERIFY_SIZES = [(1, 512), (8, 512), (32, 512), (1, 32_768)]
WORKLOADS: dict[str, dict[str, Any]] = {
    "in_process_tok_s": {},
    "in_process_greedy_tok_s": {"sampling": "greedy"},
    "in_process_qwen3_tok_s": {"sampling": "filtered"},
    "in_process_fp8_tok_s": {"cache_bytes": 1},
}


MODELS: dict[str, tuple[Shape, int]] = {
    "0.6B": (Shape.of(QWEN3_06B), 1),
    "8B": (Shape(4096, 36, HeadShape(32, 8, 128), 12_288, 151_936), 1),
    "70B TP4": (Shape(8192, 80, HeadShape(64, 8, 128), 28_672, 128_256), 4),
    "70B TP8": (Shape(8192, 80, HeadShape(64, 8, 128), 28_672, 128_256), 8),
}
CONTEXTS = (512, 4096, 32_768, 131_072)
# What was expected on an H200 before: with merges in series, and exact mode without splits.
FORMER: dict[tuple[str, int, str], str] = {
    ("0.6B", 512, "best_effort"): "1.05 to 1.25", ("0.6B", 512, "exact"): "1.4", ("0.6B", 4096, "exact"): "2.8",
    ("0.6B", 32_768, "best_effort"): "2.9", ("0.6B", 32_768, "exact"): "13 to 14",
    ("0.6B", 131_072, "best_effort"): "6.9", ("8B", 512, "best_effort"): "4.7 to 5.0",
    ("70B TP4", 512, "best_effort"): "12.5 to 13", ("70B TP8", 512, "best_effort"): "8 to 8.5",
    ("70B TP8", 32_768, "best_effort"): "+5.1 of merges", ("70B TP8", 32_768, "exact"): "37 and more",
    ("70B TP8", 131_072, "best_effort"): "+13.7 of merges",
}  # fmt: skip


MODES: dict[str, dict[str, bool]] = {
    "best_effort": {}, "exact": {"is_exact": True}, "exact, int8": {"is_exact": True, "has_int8": True},
}  # fmt: skip


def one_row_ms(model: str, context: int, gpu: Gpu, mode: str) -> dict[str, float]:
    """The parts of a step of one row."""
    shape, ranks = MODELS[model]
    step = Step((context - 1,), (1,), "greedy", ranks=ranks, **MODES[mode])
    return parts_ms(shape.of_rank(ranks), step, gpu, has_pdl=gpu.has_pdl)


def one_row_table(gpu: Gpu) -> list[str]:
    """Lines of a table: milliseconds of a step of one row, with its serial part, beside the former expectation."""
    lines = ["| one row, ms | context | mode | step | attention in series | former |", "|" + " --- |" * 6]
    for (model, context), mode in product(product(MODELS, CONTEXTS), MODES):
        parts = one_row_ms(model, context, gpu, mode)
        former = FORMER.get((model, context, mode), "")
        lines.append(
            f"| {model} | {context:,} | {mode} | {sum(parts.values()):.2f} | {parts['attention in series']:.2f} | "
            f"{former} |"
        )
    return lines


def comparison(figures: dict[str, Any]) -> list[str]:
    """Lines with predicted and measured figures, and predictions with the constants that were measured."""
    gpu = next((gpu for name, gpu in GPUS.items() if name in str(figures.get("device", ""))), None)
    names = [name for name in figures if name.startswith(("step_ms_", "prompt_ms_", "verify_ms_")) or name in WORKLOADS]
    if gpu is None or not names:
        return []
    before = predictions(gpu, has_pdl=gpu.has_pdl)
    after = predictions(calibrated(gpu, figures), has_pdl=gpu.has_pdl)
    lines = [f"{'':28s} {'predicted':>10s} {'calibrated':>10s} {'measured':>10s} {'measured/predicted':>18s}"]
    for name in sorted({*names} & {*before}):
        found = float(figures[name])
        lines.append(f"{name:28s} {before[name]:10.2f} {after[name]:10.2f} {found:10.2f} {found / before[name]:18.2f}")
    return lines


def calibrated(gpu: Gpu, figures: dict[str, Any]) -> Gpu:
    """With the bandwidth, the rate and the times of launches that the same run has measured."""
    fields = {
        name: float(figures[key]) * factor
        for name, key, factor in (
            ("sheet_bandwidth", "copy_gb_s", 1e9 / ACHIEVED_BANDWIDTH),
            ("sheet_flops", "matmul_tflops", 1e12 / ACHIEVED_FLOPS),
            ("launch_us", "launch_us", 1.0),
            ("pdl_launch_us", "pdl_launch_us", 1.0),
        )
        if key in figures
    }
    return replace(gpu, **fields)


def main() -> None:
    """Prints predictions for all GPUs, without and with programmatic dependent launch."""
    columns = {
        f"{name}{' PDL' if has_pdl else ''}": predictions(gpu, has_pdl=has_pdl)
        for name, gpu in GPUS.items()
        for has_pdl in ((False, True) if gpu.has_pdl else (False,))
    }
    print("| | " + " | ".join(columns) + " |")
    print("|" + " --- |" * (len(columns) + 1))
    for name in next(iter(columns.values())):
        cells = [f"{found[name]:,.0f}" if found[name] > 100 else f"{found[name]:.2f}" for found in columns.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("\nH200:\n" + "\n".join(one_row_table(GPUS["H200"])))
    shape, gpu = Shape.of(QWEN3_06B), GPUS["H200"]
    for rows, context in ((1, 512), (256, 1024)):
        parts = parts_ms(shape, Step((context,) * rows, (1,) * rows), gpu)
        print(
            f"\nH200, {rows} rows after {context} tokens: " + ", ".join(f"{n} {ms:.3f} ms" for n, ms in parts.items())
        )


if __name__ == "__main__":
    main()
