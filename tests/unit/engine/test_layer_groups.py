"""How the layers of a model form cache groups, how a pool is divided among them, and what the worker checks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from request_fields.sizes import blocks_of_row
from step_protocol.messages import BadBatchError, RowOpen
from step_protocol.types import CacheGroup
from tests.unit.engine.driver import Driver, u32
from tests.unit.engine.models import make_model
from worker_svc.engine.backend import KVLayout
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.decoder.pool.cache_groups import divide_pool
from worker_svc.engine.decoder.pool.kv_cache import GIB, KVCachePool, LayerGroups
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.engine.rows.group_tables import GroupTables
from worker_svc.engine.rows.open_rows import OpenRows


def gpt_oss(**fields) -> ModelConfig:
    """gpt-oss-20b."""
    config = transformers.GptOssConfig(num_hidden_layers=24, **fields).to_dict()
    return parse_config(config | {"architectures": ["GptOssForCausalLM"]})


def divide(model: ModelConfig, memory: int, **settings) -> LayerGroups | None:
    fields = {"max_num_seqs": 64, "max_num_batched_tokens": 1024} | settings
    return divide_pool(EngineConfig(".", has_groups=True, **fields), model, torch.bfloat16, memory)


def test_a_pool_of_gpt_oss_holds_more_long_sequences():
    model, memory = gpt_oss(), 8 * GIB
    groups = divide(model, memory)
    assert groups.of_layer == (1, 0) * 12
    assert groups.groups[0].num_blocks == 64 * blocks_of_row(128, 16, 2) + 128 + groups.num_blocks // 8
    per_block = KVCachePool.bytes_per_block(model.kv_layouts(), 16, torch.bfloat16)
    assert sum(groups.sizes) * per_block // 2 <= memory
    blocks_of_sequence = 8192 // 16
    assert (memory // per_block // blocks_of_sequence, groups.num_blocks // blocks_of_sequence) == (21, 36)


@pytest.mark.parametrize("memory", [1 << 20, 256 << 20])
def test_a_small_pool_has_one_group(memory):
    assert divide(gpt_oss(), memory) is None


def test_only_layers_with_windows_leave_the_first_group():
    assert divide(gpt_oss(sliding_window=8192), 8 * GIB, max_model_len=8192) is None
    assert divide(gpt_oss(layer_types=["full_attention"] * 24), 8 * GIB) is None
    assert divide(gpt_oss(layer_types=["sliding_attention"] * 24), 8 * GIB) is None  # its one group frees its blocks
    assert divide(gpt_oss(), 0, num_blocks=2000).sizes == (2000, 64 * 13 + 128 + 250)


def test_a_pool_keeps_and_copies_the_blocks_of_each_group():
    layouts = [KVLayout(2, 16, 16), KVLayout(1, 8, 8), KVLayout(2, 16, 16)]
    groups = LayerGroups((0, 1, 1), 5, (CacheGroup(8, 3),))
    pool = KVCachePool(layouts, 5, 4, torch.float32, None, groups)
    assert [len(pool.layer(index)[0]) for index in range(3)] == [5, 3, 3]
    assert pool.num_blocks == 8
    for tensor in pool.tensors:
        tensor.normal_()
    before = [[part.clone() for part in pool.layer(index)] for index in range(3)]
    pool.copy(make_backend("reference", 1, "exact"), np.array([1, 6]), np.array([3, 5]))
    for index, order in enumerate(([0, 1, 2, 1, 4], [1, 1, 2], [1, 1, 2])):
        for part, old in zip(pool.layer(index), before[index], strict=True):
            assert torch.equal(part, old[order])


def opening(*tables) -> RowOpen:
    tokens = u32(*range(3, 20))
    return RowOpen(0, tokens, 17, u32(0, 1), 0, None, 0, group_tables=tuple(u32(*table) for table in tables))


def test_tables_of_groups_are_checked():
    rows = OpenRows(2, 64, 16, 100, 50)
    tables = GroupTables([CacheGroup(8, 10), CacheGroup(4, 6)], rows)
    assert tables.refusal(opening([100, 109], [110, 115])) is None
    assert "has 1 tables, expected 2" in tables.refusal(opening([100]))
    for bad in ([99], [110], [100] * 5):
        assert "group_tables[0]" in tables.refusal(opening(bad, []))
    tables.open(opening([100], [110, 115]))
    rows.is_open[0] = True
    for index, block, is_bad in ((1, 101, False), (2, 112, False), (4, 113, True), (3, 104, True), (0, 7, False)):
        failed: dict[int, str] = {}
        changes = u32(0, 1), u32(index, 0), u32(block, 100)  # row 1 is closed
        left = tables.change_tables(changes, rows.is_open, failed.__setitem__)
        assert list(failed) == [0] * is_bad  # beyond the table, behind a gap
        assert left[2].tolist() == ([7, 100] if block == 7 else [100])
    assert tables.lens[:, 0].tolist() == [2, 3]
    assert tables.slots(np.array([0]), np.array([17])).tolist() == [[1617], [1841]]
    row = np.array([0])
    assert tables.are_bad(row, row, np.array([33]), row).tolist() == [True]


def test_a_runner_refuses_what_contradicts_its_groups(tmp_path):
    folder = make_model(tmp_path, "gemma3")
    settings = {"num_blocks": 80, "max_num_seqs": 2, "max_num_batched_tokens": 32, "threads": 1, "max_model_len": 256}
    runner = ModelRunner(EngineConfig(folder, "float32", has_groups=True, **settings))
    (group,) = runner.info.groups
    assert runner.info.num_all_blocks == 80 + group.num_blocks
    first, second = runner.movable_blocks(), runner.movable_blocks().others[0]
    assert (first.num_blocks, second.num_blocks, second.payload_bytes) == (80, group.num_blocks, group.block_bytes)
    assert ("window 24", []) in first.layout
    driver = Driver(runner)
    driver.open(0, list(range(3, 13)))
    driver.step({0: 10})
    assert "group_tables has 0 tables, expected 1" in driver.errors[0].message
    driver.add(copy_src=u32(1), copy_dst=u32(80))
    with pytest.raises(BadBatchError, match="different cache groups"):
        driver.step({})
