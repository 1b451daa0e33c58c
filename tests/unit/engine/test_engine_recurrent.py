"""Recurrent layers: parity with transformers, and states that are a function of their tokens, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prefix_index.hashing import state_id
from step_protocol.features import TakenSnapshots
from step_protocol.messages import NO_RULES, BadBatchError
from tests.gpu.driver import DeviceDriver
from tests.unit.engine.driver import Driver, seeded, u32
from tests.unit.engine.models import RECURRENT, load_reference, make_model
from tests.unit.engine.test_engine_models import check_against, load, prompts
from worker_svc.engine.checkpoint.model_folder import CheckpointError, decoder_config
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.gpu.runner import DeviceRunner
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.engine.recurrent import StatePool
from worker_svc.engine.rows.states import RowStates

EVERY_PART = ("qwen3_5", "lfm2", "falcon_h1", "nemotron_h")  # together; the others differ in names and sizes
BLOCK = 8
NUM_SNAPSHOTS = 3


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in EVERY_PART else pytest.mark.deep) for name in RECURRENT],
)
def model_dir(request, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("recurrent"), request.param)


@pytest.fixture(params=["cpu", "cuda"])
def start(request, model_dir):
    """Makes a driver of an engine; that of GPUs runs in torch on a CPU."""
    on_device = {"backend": "cuda", "kernels": "torch"}

    def make(**settings) -> Driver:
        if request.param == "cpu":
            return Driver(load_small(model_dir, **settings))
        return DeviceDriver(load_small(model_dir, DeviceRunner, **(on_device | settings)))

    return make


def load_small(folder, make=ModelRunner, **settings):
    """A runner with NUM_SNAPSHOTS snapshots."""
    config = parse_config(decoder_config(json.loads((folder / "config.json").read_text())))
    memory = NUM_SNAPSHOTS * StatePool.bytes_per_slot(config.recurrences)
    fields = {"max_num_seqs": 4, "num_blocks": 200, "block_size": BLOCK, "threads": 1, "dtype": "float32"} | settings
    return make(EngineConfig(folder, snapshot_memory=memory, **fields))


def states(runner) -> RowStates:
    return runner._tables.states


def state_of(driver: Driver, row: int) -> bytes:
    return states(driver.runner)._pool.slots[row].numpy().tobytes()


def take(driver: Driver, *taken: tuple[int, int, int]) -> None:
    """Snapshots of the next step: row, position, slot."""
    rows, positions, slots = (u32(*column) for column in zip(*taken, strict=True))
    driver.add(parts=(TakenSnapshots(rows, positions, slots),))


@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", RECURRENT)
def test_mixed_batches_match_transformers(tmp_path, name, backend):
    model_dir = make_model(tmp_path, name)
    driver = Driver(load(model_dir, backend=backend))
    for row, prompt in enumerate(prompts([1, 33, 150, 16])):
        driver.open(row, prompt)
    driver.step({0: 1, 2: 40, 1: 20})
    driver.step({0: 1, 1: 13, 2: 7})
    driver.step({2: 90, 0: 1, 1: 1, 3: 16})
    driver.step({3: 1, 2: 13, 0: 1})
    driver.decode([3, 1, 0, 2], 6)
    assert driver.errors == []
    check_against(load_reference(model_dir), driver, [0, 1, 2, 3])


def alone(start, prompt, num_tokens, sampling, **settings) -> tuple[list[int], dict[int, bytes]]:
    """The tokens of a row that runs alone, and its state after each position that a step ends at: all of them."""
    driver = start(**settings)
    driver.open(0, prompt, sampling)
    found = {}
    while len(driver.rows[0].tokens) < num_tokens:
        driver.step({0: 1})
        found[driver.rows[0].computed] = state_of(driver, 0)
    return driver.rows[0].tokens, found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 12))])
def test_a_state_is_a_function_of_its_tokens(start, seed, dtype):
    """Random chunks, batch mates, threads, preemption and hits from snapshots give the bytes of the undisturbed run."""
    rng = np.random.default_rng(seed)
    prompt, *others = prompts([61, 30, 45], seed=seed)
    end, sampling = 85, seeded(seed)
    tokens, expected = alone(start, prompt, end, sampling, dtype=dtype)
    driver = start(dtype=dtype, threads=1 + seed % 2)
    for row, other in enumerate(others, 1):
        driver.open(row, other, seeded(9 + row))
    driver.open(0, prompt, sampling)
    kept: dict[int, tuple[int, list[int]]] = {}  # slot -> position and blocks of a snapshot
    while len(driver.rows[0].tokens) < end:
        state = driver.rows[0]
        count = int(rng.integers(1, min(20, len(state.tokens) - state.computed) + 1))
        boundary = (state.computed + count) // BLOCK * BLOCK
        if boundary > state.computed and rng.random() < 0.7:
            slot = int(rng.integers(NUM_SNAPSHOTS))
            take(driver, (0, boundary, slot))
            kept[slot] = boundary, state.blocks[: boundary // BLOCK]
        mates = [row for row in (1, 2) if rng.random() < 0.6]
        lens = {row: min(7, len(driver.rows[row].tokens) - driver.rows[row].computed) for row in mates}
        driver.step(dict(sorted(({0: count} | lens).items(), key=lambda item: rng.random())))
        assert state_of(driver, 0) == expected[driver.rows[0].computed]
        if rng.random() < 0.15:  # preempted: computed again, from nothing or from a snapshot
            gone = driver.close(0, keep_blocks=True)
            slot = int(rng.choice(list(kept))) if kept and rng.random() < 0.7 else None
            shared = [] if slot is None else kept[slot][1]
            output = gone.tokens[len(prompt) :]
            driver.open(0, prompt, sampling, output=output, shared=list(shared), snapshot=slot)
    assert driver.errors == []
    assert driver.rows[0].tokens == tokens


def test_samples_and_beams_continue_from_copies(start):
    driver = start()
    (prompt,) = prompts([2 * BLOCK])
    driver.open(0, prompt, seeded(1), num_candidates=3)
    driver.fork(1, 0, seeded(2), sample_index=1, rules=NO_RULES)
    driver.step({0: len(prompt)})
    assert state_of(driver, 1) == state_of(driver, 0)
    driver.decode([0, 1], 3)
    tokens, expected = driver.rows[1].tokens, state_of(driver, 1)
    again = start()
    again.open(0, prompt, seeded(2), output=tokens[len(prompt) : -1])
    again.prefill(0, 5)
    assert state_of(again, 0) == expected


def test_states_at_another_position_are_refused(start):
    driver = start()
    prompt, other = prompts([3 * BLOCK + 1, 3 * BLOCK + 1])
    driver.open(0, prompt)
    take(driver, (0, 2 * BLOCK, 1))
    driver.step({0: 2 * BLOCK + 3})
    blocks = driver.rows[0].blocks[:2]
    driver.open(1, other, shared=blocks, snapshot=1)  # the tokens differ
    driver.open(2, prompt, shared=blocks[:1], snapshot=1)  # the position differs
    driver.open(3, prompt, shared=blocks)  # there is no state
    driver.step({0: 1})
    messages = [error.message for error in driver.errors]
    assert [error.row for error in driver.errors] == [1, 2, 3]
    assert messages[0] == "snapshot 1 is not of the first 16 tokens of the row"
    assert messages[1] == "snapshot 1 is not of the first 8 tokens of the row"
    assert messages[2] == "num_computed_tokens is 16, but the row starts from no snapshot"
    driver.rows[0].computed -= 1
    driver.step({0: 2})
    assert driver.errors[-1].message == "context_len is 19, but the row's state is at another position"
    take(driver, (0, 2 * BLOCK, NUM_SNAPSHOTS))
    with pytest.raises(BadBatchError, match=f"snapshot_slots names slot {NUM_SNAPSHOTS}"):
        driver.step({})


def test_a_reused_row_starts_from_nothing(start):
    driver = start()
    first, second = prompts([20, 13])
    driver.open(0, first)
    driver.prefill(0)
    driver.close(0)
    driver.open(0, second)
    driver.prefill(0, 4)
    fresh = start()
    fresh.open(0, second)
    fresh.prefill(0)
    assert state_of(driver, 0) == state_of(fresh, 0)


def test_snapshots_are_read_and_written_as_bytes(model_dir):
    driver = Driver(load_small(model_dir))
    (prompt,) = prompts([BLOCK + 1])
    driver.open(0, prompt)
    take(driver, (0, BLOCK, 0))
    driver.step({0: BLOCK + 1})
    (snapshots,), found = driver.runner.movable_blocks().others, state_id(u32(*prompt[:BLOCK]), b"")
    words, payload = snapshots.read(0, found[4:])
    assert words.tobytes() == found
    assert snapshots.read(0, b"digest of a tier") is None
    first = driver.runner.info.num_all_blocks
    assert len(states(driver.runner).commit(np.array([3, first, first + 1]), [b"digest of a tier"] * 3)[0]) == 1
    assert snapshots.read(0, b"digest of a tier")[1].tobytes() == payload.tobytes()
    assert snapshots.read(1, b"digest of a tier") is None
    assert snapshots.read(0, state_id(u32(*prompt[: BLOCK - 1]), b"")[4:]) is None
    assert snapshots.read(0, state_id(u32(*prompt[:BLOCK]), b"adapter")[4:]) is None
    driver.add(commit_blocks=u32(driver.rows[0].blocks[0]), commit_digests=[b"digest of a block"[:16]])
    driver.step({0: 1})
    other, last = Driver(load_small(model_dir)), 199
    blocks = other.runner.movable_blocks()
    blocks.write(last, *driver.runner.movable_blocks().read(driver.rows[0].blocks[0], b"digest of a block"[:16]))
    blocks.others[0].write(2, words, payload)
    other.open(0, driver.rows[0].tokens[: BLOCK + 2], shared=[last], snapshot=2)
    other.step({0: 2})
    assert other.errors == []
    assert state_of(other, 0) == state_of(driver, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 4}, "linear_num_key_heads: 4 does not divide the 6 heads"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim: config.json must hold a positive integer, found 0"),
        ({"layer_types": ["linear_attention", "mamba", "full_attention", "full_attention"]}, "layer_types: 'mamba'"),
    ],
)
def test_unknown_configurations_are_refused(tmp_path, changes, message):
    folder = make_model(tmp_path, "qwen3_5")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=message):
        load(folder)
