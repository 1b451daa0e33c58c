"""--attention flash3, with a stand-in that has the signatures and checks of flash-attn 3."""

from __future__ import annotations

import inspect
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.gpu import fake_flash3
from tests.gpu.builders import DEVICE, AttentionCase, relative_error
from tests.gpu.driver import DeviceDriver, load
from tests.gpu.fake_graphs import FakeRecorder
from tests.gpu.test_graphs import run as run_in_graphs
from tests.gpu.test_runner import HEADS_4_2, SMALL, run_forced, run_mixed, worst_error
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.test_engine_models import check_against
from worker_svc.engine.backend import AttentionShape, BackendUnavailableError, HeadShape
from worker_svc.engine.gpu import check, loading
from worker_svc.engine.gpu import compute as compute_module
from worker_svc.engine.gpu.attention.flash3 import MODULE, Flash3Attention
from worker_svc.engine.gpu.attention.paged import LayerCache
from worker_svc.engine.gpu.kernels import attention
from worker_svc.engine.gpu.start import attention_choice as choice
from worker_svc.engine.gpu.start.setup import Setup
from worker_svc.engine.gpu.step.step_buffer import Bucket, HostStep, StepColumns

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Parameters in hopper/flash_attn_interface.py of flash-attn at commit 01afd16.
SIGNATURES = {
    "flash_attn_with_kvcache": (
        "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
        "cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal "
        "window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
        "return_softmax_lse"
    ),
    "get_scheduler_metadata": (
        "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype headdim_v "
        "cu_seqlens_q cu_seqlens_k_new cache_leftpad page_size max_seqlen_k_new causal window_size attention_chunk "
        "has_softcap num_splits pack_gqa sm_margin"
    ),
}
MIXED = [(40, 1), (0, 21), (31, 1), (17, 13), (0, 1), (5, 2)]  # (tokens in the pool, queries)
DECODE = [(40, 1), (0, 1), (31, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", **SMALL, **HEADS_4_2)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, fake_flash3)


def test_the_stand_in_has_the_signatures_of_the_library():
    for name, parameters in SIGNATURES.items():
        assert list(inspect.signature(getattr(fake_flash3, name)).parameters) == parameters.split()


def step_columns(case, rows, *, has_lengths=True):
    """The step of a case. Without lengths on the host, as while a graph is recorded."""
    bucket = Bucket(len(case.q), len(case.queries.rows), 0, all(n == 1 for _, n in rows), is_filtered=False)
    starts, contexts = (column.cpu().long().numpy() for column in (case.queries.starts, case.queries.contexts))
    host = HostStep(starts[: len(rows) + 1], contexts[: len(rows)]) if has_lengths else None
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    return StepColumns(bucket, case.num_rows, case.queries, *[none] * 8, host=host)


def compute(made, case, columns):
    """The attention of `made`, over a cache with scales for queries."""
    scales = None if case.scales is None else torch.cat((case.scales, torch.full_like(case.scales[:1], 0.25)))
    out = torch.full_like(case.q, torch.nan)
    made.begin(columns)
    made.attend(case.q, LayerCache(*case.cache, scales), columns, case.attention, out)
    return out


def error_of(made, case, rows, **options):
    out = compute(made, case, step_columns(case, rows, **options))
    expected = attention.reference(case.q, case.cache, case.queries, len(rows), case.attention, case.scales)
    end = int(case.queries.starts[len(rows)])
    return relative_error(out[:end], expected[:end])


@pytest.mark.parametrize("rows", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("has_lengths", [True, False], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("shape", "block_size"), [(HeadShape(4, 2, 16), 16), (HeadShape(7, 1, 32), 1), (HeadShape(2, 2, 64), 96)]
)
def test_one_call_computes_any_step(shape, block_size, has_lengths, rows):
    case = AttentionCase.make(shape, rows, dtype=torch.float32, block_size=block_size)
    made = Flash3Attention(fake_flash3, [case.attention], block_size, torch.float32)
    assert error_of(made, case, rows, has_lengths=has_lengths) < 2e-6


def test_padding_rows_have_no_queries_and_no_keys():
    case = AttentionCase.make(HeadShape(4, 2, 16), DECODE, dtype=torch.float32, block_size=16, padding=3)
    rows, last = len(DECODE), int(case.queries.starts[len(DECODE)])
    case.queries.starts[rows:] = last  # StepBuffer pads them so
    case.queries.contexts[rows:] = 0
    made = Flash3Attention(fake_flash3, [case.attention], 16, torch.float32)
    assert error_of(made, case, DECODE, has_lengths=False) < 2e-6


def test_each_layer_has_its_window_scale_and_soft_cap():
    """Keys before the window are NaN."""
    heads = HeadShape(4, 2, 16)
    shapes = [AttentionShape(heads, 0.3, 2.0, 17), AttentionShape(heads, 0.3, 2.0), AttentionShape(heads, 0.5, None, 9)]
    made = Flash3Attention(fake_flash3, shapes, 16, torch.float32)
    for shape in shapes:
        case = AttentionCase.make(heads, MIXED, dtype=torch.float32, block_size=16, layer=shape)
        assert error_of(made, case, MIXED) < 2e-6


def test_fp8_keys_values_and_queries():
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.125]], device=DEVICE)
    case = AttentionCase.make(HeadShape(4, 2, 16), MIXED, dtype=torch.float16, block_size=16, scales=scales)
    made = Flash3Attention(fake_flash3, [case.attention], 16, torch.float8_e4m3fn)
    assert 1e-3 < error_of(made, case, MIXED) < 0.06


def test_versions_that_plan_in_each_call():
    older = ModuleType(MODULE)
    older.flash_attn_with_kvcache = fake_flash3.flash_attn_with_kvcache
    case = AttentionCase.make(HeadShape(4, 2, 16), MIXED, dtype=torch.float32, block_size=16)
    assert error_of(Flash3Attention(older, [case.attention], 16, torch.float32), case, MIXED) < 2e-6


def test_flash3_matches_transformers(folder, installed):
    driver = DeviceDriver(load(folder, attention="flash3"))
    assert driver.runner.info.backend == "cuda/flash3"
    assert driver.runner.info.numerics.startswith("cuda/flash3, ")
    with torch.inference_mode():
        driver.runner._compute.warm_up(8)  # no rows are open, as on a GPU before the pool is sized
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the library is a stand-in, and so are the graphs")
def test_graphs_serve_other_lengths(folder, installed, monkeypatch):
    recorder = FakeRecorder()
    monkeypatch.setattr(compute_module, "MIN_MIXED", 16)
    monkeypatch.setattr(loading, "make_recorder", lambda device: recorder)
    plain, _ = run_in_graphs(load(folder, attention="flash3", cuda_graphs="off"))
    replayed, _ = run_in_graphs(load(folder, attention="flash3", cuda_graphs="lazy", cuda_graph_tokens=24))
    assert replayed == plain
    assert recorder.num_replays >= 3  # mixed steps and decode steps


def test_errors_of_an_fp8_cache(folder, installed):
    drivers = [
        DeviceDriver(load(folder, dtype="float16", attention=name, kv_cache_dtype=cache))
        for name, cache in (("triton", "auto"), ("flash3", "fp8"))
    ]
    for driver in drivers:
        run_forced(driver)
    assert worst_error(drivers[1], drivers[0]) < 0.06


def setup_of(device, *, has_scaled_cache=False, has_sinks=False):
    config = SimpleNamespace(kernels="auto", speculate=None)
    return SimpleNamespace(config=config, device=device, has_scaled_cache=has_scaled_cache, has_sinks=has_sinks)


def test_auto_prefers_flash3_on_hopper_unless_the_cache_is_fp8(monkeypatch):
    chosen = []
    for capability in ((8, 0), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        for has_scaled_cache in (False, True):
            setup = setup_of(torch.device("cuda"), has_scaled_cache=has_scaled_cache)
            chosen.append(choice.preferred_library(setup))
    assert chosen == ["flash", "flash", "flash3", None, None, None]
    assert choice.preferred_library(setup_of(torch.device("cuda"), has_sinks=True)) is None
    assert choice.preferred_library(setup_of(torch.device("cpu"))) is None


def test_a_model_with_sinks_is_refused_by_name(tmp_path, installed):
    folder = make_model(tmp_path, "gpt_oss")
    with pytest.raises(
        BackendUnavailableError, match="flash3 has no sinks, which this model needs; use --attention tri"
    ):
        load(folder, attention="flash3", determinism="best_effort")


def test_auto_uses_flash3_that_passes_its_check(folder, installed, monkeypatch):
    monkeypatch.setattr(choice, "preferred_library", lambda setup: "flash3")
    assert load(folder, attention="auto").info.backend == "cuda/flash3"


def one_key_short(q, k_cache, v_cache, *, cache_seqlens, scheduler_metadata, **rest):
    lens = (cache_seqlens - 1).clamp_min(1)
    return fake_flash3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, **rest)


def without_page_table(q, k_cache, v_cache, *, block_table):
    raise AssertionError("not reached")


@pytest.mark.parametrize(("broken", "message"), [
    (one_key_short, "the largest difference is"),
    pytest.param(without_page_table, "cache_seqlens", marks=pytest.mark.deep),
])  # fmt: skip
def test_flash3_is_checked_at_start_up(folder, monkeypatch, caplog, broken, message):
    broken_package = ModuleType(MODULE)
    vars(broken_package).update(vars(fake_flash3), flash_attn_with_kvcache=broken)
    monkeypatch.setitem(sys.modules, MODULE, broken_package)
    monkeypatch.setattr(Setup, "is_compiled", True)
    monkeypatch.setattr(check, "PROMPTS", (5, 1, 20, 9))
    monkeypatch.setattr(choice, "preferred_library", lambda setup: "flash3")
    assert load(folder, attention="auto").info.backend == "cuda/triton"
    assert "attention triton is used instead: attention failed" in caplog.text
    assert message in caplog.text


def test_flash3_needs_its_package(folder, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(BackendUnavailableError, match="flash-attn 3 cannot be imported"):
        load(folder, attention="flash3")
    monkeypatch.setattr(choice, "preferred_library", lambda setup: "flash3")
    with caplog.at_level(logging.INFO):
        assert load(folder, attention="auto").info.backend == "cuda/triton"
    assert [record.levelname for record in caplog.records if "auto uses triton" in record.message] == ["INFO"]
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))
    with pytest.raises(BackendUnavailableError, match="has no flash_attn_with_kvcache"):
        load(folder, attention="flash3")
