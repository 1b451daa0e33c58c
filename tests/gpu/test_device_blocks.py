"""Blocks that leave the pool of a GPU engine and enter another one: the same tokens as computed, and no stale bytes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from prefix_index.hashing import layout_digest
from tests.gpu.driver import DeviceDriver
from tests.gpu.driver import load as load_device
from tests.gpu.test_runner import HEADS_4_2, SMALL, small_prompts
from tests.unit.engine.driver import seeded, u32
from tests.unit.engine.models import make_model
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.pool.block_payload import Filled
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.kv_store.record import Origin, RecordFormat, WantedBlock

load = partial(load_device, kernels="torch", determinism="exact", block_size=4)
DIGESTS = [bytes([number]) * 16 for number in range(1, 9)]
DTYPES = [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), "qwen3", **SMALL, **HEADS_4_2)


def filled_driver(folder, num_steps=9, **settings):
    """A row with four committed blocks and more, of which the last ones have sampled tokens."""
    driver = DeviceDriver(load(folder, **settings))
    driver.open(0, small_prompts([9])[0], seeded(3))
    driver.step({0: 9})
    driver.decode([0], num_steps)
    commit(driver, driver.rows[0].blocks[:4])
    return driver


def commit(driver, blocks, digests=DIGESTS):
    driver.add(commit_blocks=u32(*blocks), commit_digests=digests[: len(blocks)])
    driver.decode([0], 1)


def records_of(runner):
    blocks, info = runner.movable_blocks(), runner.info
    return RecordFormat(layout_digest(info.revision, info.numerics, blocks.layout), blocks)


@pytest.mark.parametrize("settings", DTYPES, ids=lambda settings: settings.get("kv_cache_dtype", settings["dtype"]))
def test_a_row_continues_from_moved_blocks_as_from_computed_ones(folder, settings):
    source, target = filled_driver(folder, **settings), DeviceDriver(load(folder, **settings))
    reads, writes = records_of(source.runner), records_of(target.runner)
    assert reads.layout == writes.layout
    known, theirs = list(source.rows[0].tokens), source.rows[0].blocks[:4]
    mine = [target.free.pop() for _ in theirs]
    filled = []
    with reads.reading(list(zip(theirs, DIGESTS, strict=False))) as reading:
        for number, block in enumerate(theirs):
            record = np.zeros(reads.num_bytes, np.uint8)
            assert reading.pack(DIGESTS[number], Origin(1, block), record)
            wanted = WantedBlock(DIGESTS[number], u32(*known[4 * number : 4 * number + 4]), mine[number])
            filled.append(Filled(mine[number], wanted.tokens, writes.unpack(record.tobytes(), wanted).payload))
    write = writes.blocks.writing(filled)
    assert not target.runner._pool.tensors[0].any(), "the model thread writes"
    write()
    for place, block in zip(mine, theirs, strict=True):
        assert target.runner._pool.tensors[0][:, :, place].equal(source.runner._pool.tensors[0][:, :, block])
    target.open(0, known[:9], seeded(3), output=known[9:], shared=mine)
    target.step({0: len(known) - 16})
    target.decode([0], 6)
    source.decode([0], 7)
    assert target.rows[0].tokens == source.rows[0].tokens
    assert target.errors == source.errors == []


def test_only_the_committed_bytes_are_read(folder):
    driver = filled_driver(folder)
    blocks, (first, second, *_) = driver.runner.movable_blocks(), driver.rows[0].blocks
    tokens, payload = blocks.read(first, DIGESTS[0])
    assert tokens.tolist() == driver.rows[0].tokens[:4]
    assert payload.tobytes() == driver.runner._pool.tensors[0][:, :, first].cpu().numpy().tobytes()
    assert blocks.read(first, DIGESTS[1]) is None
    assert blocks.read(driver.runner.info.num_blocks, DIGESTS[0]) is None, "another worker may ask for any number"
    assert blocks.read(driver.rows[0].blocks[4], DIGESTS[4]) is None
    with blocks.reading([(first, DIGESTS[0]), (second, DIGESTS[1])]) as reader:
        driver.add(copy_src=u32(second), copy_dst=u32(first))
        driver.decode([0], 1)
        commit(driver, [first])
        assert reader.read(first, DIGESTS[0]) is None, "it was overwritten and has the digest again"
        assert reader.read(second, DIGESTS[1]) is not None


def test_a_commit_waits_for_the_step_that_fills_the_block(folder):
    """No scheduler does this. A reader would not wait."""
    driver = filled_driver(folder, num_steps=6)
    runner = driver.runner
    blocks, last = runner.movable_blocks(), driver.rows[0].blocks[3]
    runner._settle_finished = lambda: None  # simulates a device that is slower than its host
    commit(driver, [driver.rows[0].blocks[0]])
    assert len(runner._in_flight) > 1, "the steps behind the block are done"
    commit(driver, [last], [DIGESTS[3]])
    assert len(runner._in_flight) == 1
    assert blocks.read(last, DIGESTS[3])[0].tolist() == driver.rows[0].tokens[12:16]


def test_a_write_is_not_undone_by_a_step_before_it(folder):
    """Tokens of an answered step enter the contents later."""
    driver = filled_driver(folder)
    block, tokens = driver.rows[0].blocks[5 - 1], u32(91, 92, 93, 94)
    blocks = driver.runner.movable_blocks()
    assert driver.runner._in_flight
    blocks.write(block, tokens, np.ones(blocks.payload_bytes, np.uint8))
    list(driver.runner.committed_blocks())
    assert driver.runner._contents.tokens_of(block).tolist() == tokens.tolist()


def test_blocks_of_other_caches_have_other_keys(folder):
    config = EngineConfig(folder, dtype="float32", block_size=4, num_blocks=64)
    runners = [*(load(folder, **settings) for settings in DTYPES), load(folder, block_size=8), ModelRunner(config)]
    layouts = {layout_digest("revision", "numerics", runner.movable_blocks().layout) for runner in runners}
    assert len(layouts) == len(runners)
