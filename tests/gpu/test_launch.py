"""Kernels that start early wait for their predecessor before they touch anything that a kernel of a step writes."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from bench.gpu.aot import early_arguments
from tests.gpu.builders import DEVICE
from worker_svc.engine.gpu import kernels
from worker_svc.engine.gpu.kernels import launch

OF_LAYERS = {
    "norm_kernel", "linear_kernel", "quantize_rows_kernel", "rope_store_kernel",
    "paged_attention_kernel", "gated_activation_kernel", "activation_kernel", "soft_cap_kernel",
    "int4_linear_kernel", "widen_kernel", "route_kernel", "count_kernel", "group_kernel",
    "expert_linear_kernel",
    "add_experts_kernel", "shrink_kernel", "expand_kernel",
}  # fmt: skip
OF_SAMPLER = {
    "banned_kernel", "chunk_top_kernel", "chunk_weight_kernel", "limits_kernel", "collect_kernel", "select_kernel",
    "chunk_scores_kernel", "pick_kernel",
}  # fmt: skip
FIRST = {"deltas_kernel", "prepare_kernel"}  # the first kernels of a step
WAIT = "if PDL:\n    after_predecessor()"


def functions():
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        source = Path(importlib.import_module(module.name).__file__).read_text()
        yield from (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))


KERNELS = {node.name: node for node in functions() if node.name.endswith("_kernel")}
DEPENDENT = {name for name, node in KERNELS.items() if "PDL" in [arg.arg for arg in node.args.args]}


def names_in(nodes):
    return {
        ast.unparse(part) for node in nodes for part in ast.walk(node) if isinstance(part, ast.Attribute | ast.Name)
    }


def test_kernels_of_layers_and_sampler_are_dependent_and_the_first_of_a_step_are_not():
    assert OF_LAYERS | OF_SAMPLER | {"work_list_kernel"} <= DEPENDENT
    assert KERNELS.keys() - DEPENDENT >= FIRST


@pytest.mark.parametrize("name", sorted(DEPENDENT))
def test_nothing_but_weights_is_read_before_the_wait(name):
    statements = KERNELS[name].body
    before = statements[: [ast.unparse(node) for node in statements].index(WAIT)]
    assert not any(isinstance(part, ast.Return) for node in before for part in ast.walk(node))
    used = names_in(before)
    assert not any(used & {"tl.store", "tl.atomic_add"})
    assert {use for use in used if use.endswith("_ptr")} <= {"weight_ptr", "bias_ptr", "q_norm_ptr", "k_norm_ptr"}


def test_kernels_are_launched_as_they_are_written():
    """A kernel that waits is launched with `dependent()`, another one without it: then it would not wait."""
    launches = {}
    for node in functions():
        for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
            if isinstance(call.func, ast.Subscript) and ast.unparse(call.func.value) in KERNELS:
                is_dependent = any(ast.unparse(word.value) == "dependent()" for word in call.keywords if not word.arg)
                launches.setdefault(ast.unparse(call.func.value), set()).add(is_dependent)
    assert launches == {name: {name in DEPENDENT} for name in KERNELS}


@pytest.fixture
def available(monkeypatch):
    """Whether kernels are dependent on a GPU of the given architecture."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)

    def on(architecture: int, backend: str = "cuda") -> bool:
        monkeypatch.setattr(launch, "target", lambda: GPUTarget(backend, architecture, 32))
        launch._is_available.cache_clear()
        return launch.dependent() == {"PDL": True, "launch_pdl": True}

    yield on
    launch._is_available.cache_clear()


def test_hopper_and_newer_gpus_start_kernels_early(available):
    assert [available(architecture) for architecture in (80, 89, 90, 100)] == [False, False, True, True]
    assert not available(942, "hip")
    assert launch.dependent() == {"PDL": False}


def test_the_environment_turns_it_off(available, monkeypatch):
    monkeypatch.setenv(launch.DISABLE, "1")
    assert not available(90)
    monkeypatch.setenv(launch.DISABLE, "0")
    assert available(90)


@triton.jit
def early_part_kernel(offset_ptr, size_ptr, K, N, most_bytes, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    offset, size = launch.early_part(K, N, most_bytes, BLOCK_N, WIDTH)
    at = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 128 + tl.arange(0, 128)
    tl.store(offset_ptr + at, offset)
    tl.store(size_ptr + at, size)


@pytest.mark.parametrize("most_bytes", [0, 1000, 1 << 20])
def test_each_program_reads_a_part_of_its_own_rows_early(most_bytes):
    size, rows, width = 40, 300, 2
    offsets = torch.zeros(2, 3, 4, 32, dtype=torch.int64, device=DEVICE)
    sizes = torch.zeros_like(offsets, dtype=torch.int32)
    early_part_kernel[(3, 2)](offsets, sizes, size, rows, most_bytes, BLOCK_N=128, WIDTH=width)
    assert not sizes[1].any()  # programs for other rows of the input
    assert (offsets == offsets[..., :1]).all()  # the lanes of a warp agree
    assert (sizes == sizes[..., :1]).all()
    for program, count in enumerate((128, 128, 44)):
        begin, length = program * 128 * size * width, min(count * size * width, most_bytes)
        parts = list(zip(offsets[0, program, :, 0].tolist(), sizes[0, program, :, 0].tolist(), strict=True))
        assert [offset - begin for offset, _ in parts] == [part * parts[0][1] for part in range(4)]
        assert all(offset % 16 == part % 16 == 0 for offset, part in parts)
        assert length - 64 < sum(part for _, part in parts) <= length


def test_early_reads_are_a_part_of_the_cache_and_aligned(available):
    weight = torch.zeros(64, 32)
    assert available(90)
    assert launch.early_bytes(weight, 48) == (16 << 20) // 48
    assert launch.early_bytes(weight, 1) == 2 << 20
    assert launch.early_bytes(weight.view(-1)[1:], 48) == 0
    assert not available(80)
    assert launch.early_bytes(weight, 48) == 0


PTX = """.visible .entry k(
	.param .u64 k_param_0,
	.param .u64 k_param_1
)
{{
	ld.param.b64 	%rd9, [k_param_{number}];
	add.s64 	%rd1, %rd9, 1024;
	{early}
	@%p1 ld.global.v4.b32 {{ %r1, %r2 }}, [ %rd1 + 0 ];
	griddepcontrol.wait; // dummy %r10
	{trigger}; // dummy %r11
	st.global.b32 [ %rd3 + 0 ], {{ %r1 }};
}}
"""
TRIGGER = "griddepcontrol.launch_dependents"


@pytest.mark.parametrize(("number", "found"), [(0, "x_ptr"), (1, "weight_ptr")])
def test_reads_before_the_wait_are_traced_to_their_argument(number, found):
    assert early_arguments(PTX.format(number=number, early="", trigger=TRIGGER), ["x_ptr", "weight_ptr"]) == (found,)


def test_reads_into_the_cache_are_traced():
    early = "@p cp.async.bulk.prefetch.L2.global [%rd1], %r1;"
    text = PTX.format(number=1, early=early, trigger=TRIGGER).replace("ld.global", "nop")
    assert early_arguments(text, ["x_ptr", "weight_ptr"]) == ("weight_ptr",)


@pytest.mark.parametrize(("early", "trigger"), [
    ("st.global.b32 [ %rd1 + 0 ], { %r1 };", TRIGGER), ("atom.global.gpu.add.u32 %r1, [ %rd1 + 0 ], 1;", TRIGGER),
    ("cp.async.cg.shared.global [ %r0 + 0 ], [ %rd1 + 0 ], 0x10;", TRIGGER), ("@%p1 bra $L__BB0_2;", TRIGGER),
    ("$L__BB0_1:", TRIGGER), ("", "nop"),
])  # fmt: skip
def test_code_that_writes_branches_or_gives_no_signal_is_refused(early, trigger):
    with pytest.raises(ValueError, match="a kernel with PDL"):
        early_arguments(PTX.format(number=0, early=early, trigger=trigger), ["x", "weight"])
