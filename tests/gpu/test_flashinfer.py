"""--attention flashinfer, with a stand-in that has the signatures and checks of FlashInfer's wrappers."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest
import torch

from bench.gpu.checks.references import packed_blocks
from tests.gpu import fake_flashinfer
from tests.gpu.builders import DEVICE, AttentionCase, ints
from tests.gpu.driver import DeviceDriver, load
from tests.gpu.fake_graphs import FakeRecorder
from tests.gpu.test_flash3 import DECODE, MIXED, error_of
from tests.gpu.test_graphs import run as run_in_graphs
from tests.gpu.test_runner import HEADS_4_2, SMALL, run_forced, run_mixed, worst_error
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.test_engine_models import check_against
from worker_svc.engine.backend import AttentionShape, BackendUnavailableError, HeadShape
from worker_svc.engine.gpu import check, compute, loading
from worker_svc.engine.gpu.attention.flashinfer import DECODE as DECODE_WRAPPER
from worker_svc.engine.gpu.attention.flashinfer import PREFILL, FlashInferAttention, workspace_bytes
from worker_svc.engine.gpu.kernels import pack_tables
from worker_svc.engine.gpu.start.setup import Setup

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Parameters of the methods in flashinfer-python 0.7.2, in order, without self. `plan` of the decode wrapper passes its
# keyword arguments on to a private method, whose parameters these are.
SIGNATURES = {
    (DECODE_WRAPPER, "__init__"): (
        "float_workspace_buffer kv_layout use_cuda_graph use_tensor_cores paged_kv_indptr_buffer "
        "paged_kv_indices_buffer paged_kv_last_page_len_buffer backend jit_args"
    ),
    (DECODE_WRAPPER, "plan"): (
        "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size pos_encoding_mode window_left "
        "window_right logits_soft_cap q_data_type kv_data_type o_data_type data_type sm_scale rope_scale rope_theta "
        "non_blocking block_tables seq_lens fixed_split_size disable_split_kv q_len_per_req is_causal"
    ),
    (DECODE_WRAPPER, "run"): (
        "q paged_kv_cache args q_scale k_scale v_scale out lse return_lse enable_pdl window_left sinks q_len_per_req "
        "skip_softmax_threshold_scale_factor kv_cache_sf"
    ),
    (DECODE_WRAPPER, "reset_workspace_buffer"): "float_workspace_buffer int_workspace_buffer",
    (PREFILL, "__init__"): (
        "float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf "
        "paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs variant_owns_mask"
    ),
    (PREFILL, "plan"): (
        "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk "
        "page_size head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction sm_scale "
        "window_left logits_soft_cap rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking "
        "prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr seq_lens seq_lens_q "
        "block_tables max_token_per_sequence max_sequence_kv fixed_split_size disable_split_kv"
    ),
    (PREFILL, "run"): (
        "q paged_kv_cache args q_scale k_scale v_scale out lse return_lse lse_base lse_layout enable_pdl window_left "
        "sinks kv_cache_sf skip_softmax_threshold_scale_factor use_fp16_softmax uses_spcompress"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", **SMALL, **HEADS_4_2)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)


def test_the_stand_in_has_the_signatures_of_the_library():
    for (wrapper, method), parameters in SIGNATURES.items():
        found = inspect.signature(getattr(getattr(fake_flashinfer, wrapper), method)).parameters
        assert list(found) == ["self", *parameters.split()]


def make(case, *, shapes=None, dtype=torch.float32, kv_dtype=None):
    return FlashInferAttention(
        fake_flashinfer, shapes or [case.attention], block_size=case.cache[0].shape[1], max_rows=8, max_tokens=64,
        max_model_len=200, dtype=dtype, kv_dtype=kv_dtype or dtype, device=DEVICE,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("shape", "block_size"), [(HeadShape(4, 2, 16), 16), (HeadShape(7, 1, 32), 1), (HeadShape(2, 2, 64), 96)]
)
def test_mixed_and_decode_steps(shape, block_size, padding, rows):
    case = AttentionCase.make(shape, rows, dtype=torch.float32, block_size=block_size, padding=padding)
    for pool in case.cache:
        pool.nan_to_num_(0.0)  # padding rows see block 0
    case.queries.starts[len(rows) :] = case.queries.starts[len(rows)].item()  # as StepBuffer pads them
    assert error_of(make(case), case, rows) < 2e-6


def test_each_layer_has_its_window_scale_and_soft_cap():
    heads = HeadShape(4, 2, 16)
    shapes = [AttentionShape(heads, 0.3, 2.0, 17), AttentionShape(heads, 0.3, 2.0), AttentionShape(heads, 0.5, None, 9)]
    for shape in shapes:
        case = AttentionCase.make(heads, MIXED, dtype=torch.float32, block_size=16, layer=shape)
        assert error_of(make(case, shapes=shapes), case, MIXED) < 2e-6


def test_an_fp8_cache_with_a_scale_per_head():
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.125]], device=DEVICE)
    case = AttentionCase.make(HeadShape(4, 2, 16), MIXED, dtype=torch.float16, block_size=16, scales=scales)
    made = make(case, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn)
    assert error_of(made, case, MIXED) < 2e-3


def test_blocks_are_packed_without_gaps():
    case = AttentionCase.make(HeadShape(2, 1, 16), MIXED, dtype=torch.float32, block_size=4, padding=2)
    out = ints(*[-1] * 60)
    pack_tables.pack_tables(case.queries, case.num_rows, out, 5, 4)
    expected = packed_blocks(case.queries, len(MIXED), 4)
    assert out.tolist() == expected + [0] * 5 + [-1] * (55 - len(expected))


@pytest.mark.parametrize(("old", "new"), [
    ("row < batch_row, num_blocks", "row <= batch_row, num_blocks"),
    ("(num_keys + PAGE - 1) // PAGE", "num_keys // PAGE"),
    ("tl.load(row_ptr + batch_row)", "batch_row"),
])  # fmt: skip
def test_mutants_of_packing_are_caught(plant_mutant, old, new):
    plant_mutant(pack_tables, old, new)
    case = AttentionCase.make(HeadShape(2, 1, 16), MIXED, dtype=torch.float32, block_size=4)
    out = ints(*[-1] * 60)
    pack_tables.pack_tables(case.queries, case.num_rows, out, 0, 4)
    expected = packed_blocks(case.queries, len(MIXED), 4)
    assert out[: len(expected)].tolist() != expected


def test_flashinfer_matches_transformers(folder, installed):
    driver = DeviceDriver(load(folder, attention="flashinfer"))
    assert driver.runner.info.backend == "cuda/flashinfer"
    with torch.inference_mode():
        driver.runner._compute.warm_up(8)  # no rows are open, as on a GPU before the pool is sized
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the library is a stand-in, and so are the graphs")
def test_graphs_follow_the_plan_of_each_step(folder, installed, monkeypatch):
    recorder = FakeRecorder()
    monkeypatch.setattr(compute, "MIN_MIXED", 16)
    monkeypatch.setattr(loading, "make_recorder", lambda device: recorder)
    plain, _ = run_in_graphs(load(folder, attention="flashinfer", cuda_graphs="off"))
    before = fake_flashinfer.calls["plans"]
    engine = load(folder, attention="flashinfer", cuda_graphs="lazy", cuda_graph_tokens=24)
    at_start = fake_flashinfer.calls["plans"]
    assert at_start > before
    replayed, _ = run_in_graphs(engine)
    assert replayed == plain
    assert recorder.num_replays == 1  # the second decode step; the first one is recorded, others have no graph
    assert fake_flashinfer.calls["plans"] == at_start + 5  # once per step


@pytest.mark.deep
def test_errors_of_an_fp8_cache(folder, installed):
    drivers = [
        DeviceDriver(load(folder, dtype="float16", kv_cache_dtype="fp8", attention=name))
        for name in ("triton", "flashinfer")
    ]
    for driver in drivers:
        run_forced(driver)
    assert worst_error(drivers[1], drivers[0]) < 0.01


def without_tensor_cores(*_, **__):
    raise RuntimeError("Unsupported head dim 24")


def test_flashinfer_is_checked_at_start_up(folder, monkeypatch, caplog):
    broken = ModuleType("flashinfer")
    vars(broken).update(vars(fake_flashinfer), BatchDecodeWithPagedKVCacheWrapper=without_tensor_cores)
    monkeypatch.setitem(sys.modules, "flashinfer", broken)
    monkeypatch.setattr(Setup, "is_compiled", True)
    monkeypatch.setattr(check, "PROMPTS", (5, 1, 20, 9))
    assert load(folder, attention="flashinfer").info.backend == "cuda/triton"
    assert "attention failed in the start-up check: Unsupported head dim 24" in caplog.text


def test_flashinfer_needs_its_package(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(BackendUnavailableError, match="flashinfer cannot be imported"):
        load(folder, attention="flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    with pytest.raises(BackendUnavailableError, match="flashinfer has no BatchDecode"):
        load(folder, attention="flashinfer")


@pytest.mark.parametrize(("heads", "rows", "processors", "mib"), [
    (HeadShape(32, 8, 128), 256, 132, 128),  # the library's recommendation
    (HeadShape(64, 8, 128), 1024, 132, 774),  # tiles of a graph of decode rows
    (HeadShape(64, 4, 128), 256, 132, 267),
    (HeadShape(32, 2, 128), 256, 108, 218),
    (HeadShape(16, 1, 128), 8, 108, 218),  # tiles of a step with prompts
])  # fmt: skip
def test_the_workspace_holds_what_the_library_may_plan(heads, rows, processors, mib):
    assert -(-workspace_bytes(heads, rows, processors) // (1 << 20)) == mib
