"""The start-up checks pass on every kernel, and find one wrong element or a row that depends on the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from bench.gpu.checks import adapters, experts, layers, sampling, steps, weights
from bench.gpu.checks.attention import MAX_ROWS, MAX_TOKENS, attention_cases
from bench.gpu.checks.case import Case, CheckError, Setup, verify
from bench.gpu.self_checks import CHECKS
from tests.gpu.builders import DEVICE
from tests.gpu.ranks import Meeting, Rank
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.gpu.attention.paged import TritonAttention
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.kernels import activation, attention, norm, prepare, record, rope_store, route
from worker_svc.engine.gpu.kernels.linears import (
    expert_linear,
    int4_linear,
    int8_linear,
    linear,
    low_rank,
    scaled_linear,
)
from worker_svc.engine.gpu.kernels.sampler import banned, candidates, process, sample

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 72, "intermediate_size": 40, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 97,
    "max_position_embeddings": 700, "mlp_bias": True,
}  # fmt: skip
EXACT = Setup(
    parse_config(CONFIG), 97, torch.float32, 16, 700, DEVICE, Group(), "exact", has_scaled_cache=False,
    formats=frozenset({"fp8", "int4", "int8"}), max_adapter_rank=64,
)  # fmt: skip
MOE = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
EXPERTS = replace(EXACT, model=parse_config(MOE))
SCORED_MOE = CONFIG | {
    "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 9, "num_experts_per_tok": 3, "n_group": 3,
    "topk_group": 2, "n_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 0,
}  # fmt: skip
SCORED = replace(EXACT, model=parse_config(SCORED_MOE))
GPT_OSS = replace(EXACT, model=parse_config(CONFIG | {
    "architectures": ["GptOssForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 150,
    "num_hidden_layers": 2, "hidden_act": "silu",
}))  # fmt: skip
GATED = replace(EXACT, model=parse_config(MOE | {
    "architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 40,
}))  # fmt: skip
FP8 = replace(EXACT, dtype=torch.float16, determinism="best_effort", has_scaled_cache=True)


def paged_attention_cases(setup):
    windows = [shape.window for shape in setup.attention_shapes]
    made = TritonAttention(
        setup.model.heads, setup.determinism, windows=windows, max_rows=MAX_ROWS, max_tokens=MAX_TOKENS,
        num_layers=1, dtype=setup.dtype, device=DEVICE,
    )  # fmt: skip
    return attention_cases(made, "paged_attention", setup)


ALL_CASES = [*CHECKS, paged_attention_cases]


def check(cases, setup):
    for case in cases(setup):
        verify(case, is_exact=setup.is_exact)


@pytest.mark.parametrize("cases", ALL_CASES)
@pytest.mark.parametrize("setup", [EXACT, FP8], ids=["exact", "fp8"])
def test_correct_kernels_pass(cases, setup):
    check(cases, setup)


@pytest.mark.parametrize("determinism", ["exact", pytest.param("best_effort", marks=pytest.mark.deep)])
@pytest.mark.parametrize("setup", [EXPERTS, SCORED, GATED, GPT_OSS], ids=["softmax", "scored", "gated", "biased"])
def test_correct_kernels_of_experts_pass(setup, determinism):
    assert list(experts.expert_cases(setup))
    check(experts.expert_cases, replace(setup, determinism=determinism))


GEMMA2 = replace(EXACT, model=parse_config(CONFIG | {
    "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 2, "sliding_window": 150, "hidden_activation": "gelu",
    "attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0, "query_pre_attn_scalar": 30,
}))  # fmt: skip


@pytest.mark.parametrize("determinism", ["exact", "best_effort"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_window_that_is_one_token_too_wide_fails(plant_mutant, determinism):
    plant_mutant(attention, "query_position[:, None] - window", "query_position[:, None] - window - 1")
    with pytest.raises(CheckError, match=r"paged_attention is wrong .*window 150, soft cap 5.0"):
        check(paged_attention_cases, replace(GEMMA2, determinism=determinism))


def names(faults):
    """Test ids: the check and the place of the fault."""
    return [f"{cases.__name__}-{old}" for cases, *_, old, _ in faults]


ONE_WRONG_ELEMENT = [
    (layers.linear_cases, EXACT, linear, "total.to(out", "tl.where((row == 64) & (column == 3), 0.0, total).to(out"),
    (
        layers.norm_cases, EXACT, norm, "to(tl.float32) * weight",
        "to(tl.float32) * tl.where(tl.cumsum(weight * 0 + 1, 0) == 71, 1.0, weight)",
    ),
    (
        layers.activation_cases, EXACT, activation, "gated_of(gate, up, KIND).to(",
        "gated_of(gate, tl.where(column == 39, 1.0, up), KIND).to(",
    ),
    (
        layers.rope_store_cases, EXACT, rope_store, "tl.store(target + left, turned_a,",
        "tl.store(target + left, tl.where((token == 1) & (head == 2) & (column == 5), a, turned_a),",
    ),
    (
        weights.fp8_cases, EXACT, scaled_linear, "round_e4m3(x * inverse[:, None])",
        "round_e4m3(x * tl.where(column == 71, 0.5, inverse[:, None]))",
    ),
    (
        weights.fp8_cases, EXACT, norm, "round_e4m3(groups * inverse[:, None])",
        "round_e4m3(groups * inverse[:, None] * tl.where(tl.arange(0, BLOCK // GROUPS) == 71, 0.5, 1.0)[None, :])",
    ),
    (weights.fp8_cases, FP8, linear, "if BIAS:", "total = tl.where(column == 131, 0.0, total)\n    if BIAS:"),
    (weights.int8_cases, EXACT, int8_linear, "- 12582912.0", "- tl.where(column == 71, 12582911.0, 12582912.0)"),
    (weights.int8_cases, EXACT, linear, "if BIAS:", "total = tl.where(column == 131, 0.0, total)\n    if BIAS:"),
    (weights.int4_cases, EXACT, int4_linear, "if BIAS:", "total = tl.where(column == 79, 0.0, total)\n    if BIAS:"),
    (
        experts.expert_cases, EXPERTS, route, 'left = tl.where(expert == best, float("-inf"), left)',
        'left = tl.where(expert <= best, float("-inf"), left)',
    ),
    (experts.expert_cases, SCORED, expert_linear, "        total += term\n", "        total -= term\n"),
    (paged_attention_cases, GPT_OSS, attention, "sink_ptr + head, is_line", "sink_ptr + 0 * head, is_line"),
    (
        adapters.adapter_cases, EXACT, low_rank, "(y.to(tl.float32) + total)",
        "(y.to(tl.float32) + tl.where(column == 131, 0.0, total))",
    ),
    (steps.deltas_cases, EXACT, record, "index, value,", "index, value + (item == 299),"),
    (steps.prepare_cases, EXACT, prepare, "position = context + token - first", "position = context + token // 4 * 4"),
    (sampling.banned_cases, EXACT, banned, "(id < vocab_size)", "(id < vocab_size - 1)"),
    (sampling.processed_cases, EXACT, process, "(x - frequency * num_output.to(", "(x + frequency * num_output.to("),
    (
        sampling.greedy_cases, EXACT, sample, "tl.store(token_ptr + sample, token)",
        "tl.store(token_ptr + sample, token + (sample == 1).to(tl.int32))",
    ),
    (
        sampling.noise_cases, EXACT, sample, "tl.load(state + SEED_HIGH), tl.load(position_ptr + sample),",
        "tl.load(state + SEED_HIGH), tl.load(position_ptr + sample) + (sample == 1).to(tl.int32),",
    ),
    (
        sampling.filtered_cases, FP8, candidates, "    tl.store(lowest_ptr + sample, lowest)\n\n\nclass",
        "    tl.store(lowest_ptr + sample, lowest + (sample == 1).to(tl.float32) * 1e-6)\n\n\nclass",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("cases", "setup", "module", "old", "new"), ONE_WRONG_ELEMENT, ids=names(ONE_WRONG_ELEMENT))
def test_one_wrong_element_fails(plant_mutant, cases, setup, module, old, new):
    plant_mutant(module, old, new)
    with pytest.raises(CheckError, match=r"is wrong \(.*the largest difference is"):
        check(cases, setup)


FACTOR = "(1 + 1e-6 * tl.num_programs(0))"
ONE_OF_MANY = [
    (layers.linear_cases, linear, "if BIAS:", "total *= 1 + 1e-7 * M\n    if BIAS:"),
    (weights.fp8_cases, linear, "if BIAS:", "total *= 1 + 1e-7 * M\n    if BIAS:"),
    (weights.int4_cases, int4_linear, "if BIAS:", "total *= 1 + 1e-7 * M\n    if BIAS:"),
    (layers.norm_cases, norm, "/ N + eps)", f"/ N * {FACTOR} + eps)"),
    (experts.expert_cases, expert_linear, "total += term *", f"total += {FACTOR} * term *"),
    (adapters.adapter_cases, low_rank, "(y.to(tl.float32) + total)",
     "(y.to(tl.float32) + total * (1 + 1e-7 * num_rows))"),
    (layers.activation_cases, activation, "gated_of(gate, up, KIND).to(", f"(gated_of(gate, up, KIND) * {FACTOR}).to("),
    (layers.rope_store_cases, rope_store, "position * TURNED + column, mask=is_turned, other=0.0)\n    a, b",
     f"position * TURNED + column, mask=is_turned, other=0.0) * {FACTOR}\n    a, b"),
    (steps.prepare_cases, prepare, "tl.where(known < 0, sampled_last, known)",
     "tl.where((known < 0) & (num_rows > 1), sampled_last, known)"),
    (sampling.noise_cases, sample, "tl.store(token_ptr + sample, token)",
     "tl.store(token_ptr + sample, token + (tl.num_programs(0) == 1))"),
    (paged_attention_cases, attention, "result = acc / total[:, None] * value_scale",
     "result = acc / total[:, None] * value_scale * (1 + 1e-6 * tl.load(size_ptr))"),
]  # fmt: skip


@pytest.mark.parametrize(("cases", "module", "old", "new"), ONE_OF_MANY, ids=names(ONE_OF_MANY))
def test_exact_mode_refuses_rows_that_depend_on_their_number(plant_mutant, cases, module, old, new):
    plant_mutant(module, old, new)
    setup = EXPERTS if cases is experts.expert_cases else EXACT
    with pytest.raises(CheckError, match=r"rows \d to \d+ depend on the number of rows: \w+: the largest diff"):
        check(cases, setup)
    check(cases, replace(setup, determinism="best_effort"))


def case_of(run, expected, **tolerances):
    return Case("twice", "[2, 2]", (0, 1, 2), run, {"output": torch.tensor(expected)}, tolerances)


def test_the_error_names_kernel_inputs_and_difference():
    found = torch.tensor([[1.0, 2.0], [3.0, 4.5]])
    case = case_of(lambda first, last: {"output": found[first:last]}, [[1.0, 2.0], [3.0, 4.0]], output=0.01)
    with pytest.raises(CheckError) as caught:
        verify(case, is_exact=True)
    assert str(caught.value) == (
        "twice is wrong ([2, 2]): output: the largest difference is 0.5 at [1, 1] (got 4.5, expected 4, tolerance "
        "0.0754)"
    )


def test_nan_is_never_correct():
    with pytest.raises(CheckError, match=r"is inf at \[0, 1\] \(got nan, expected 2,"):
        verify(case_of(lambda *_: {"output": torch.tensor([[1, torch.nan]])}, [[1.0, 2.0]]), is_exact=False)


def test_ranks_check_their_parts_of_the_vocabulary():
    meeting = Meeting(2)

    def run(rank):
        with meeting.turn:
            check(sampling.filtered_cases, replace(FP8, group=Rank(rank, meeting)))
            check(sampling.greedy_cases, replace(FP8, group=Rank(rank, meeting)))

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(run, range(2)))
