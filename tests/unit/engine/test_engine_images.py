"""Models with images against transformers: chunks, prefix hits and resumed rows beside rows of text."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from request_fields.fields import StopCondition
from scheduler_svc.core.features.inputs import Inputs
from scheduler_svc.core.sequence import Features
from step_protocol.columns import u32_to_bytes
from step_protocol.features import ImageSteps, ImageWork
from step_protocol.messages import ImageSpan, RowOpen
from tests.carried import to_proto
from tests.speculating import GivenDrafts, NoTimes, System
from tests.unit.engine.driver import GREEDY, Driver, u32
from tests.unit.engine.test_engine_recurrent import take
from tests.unit.engine.vision_models import (
    TOWERS,
    Picture,
    Scene,
    load_vision_reference,
    make_image,
    make_vision_model,
    scene,
)
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner

NONE = scene(37, seed=1)
ONE = scene(5, (3, 5), 9, seed=2)
TWO = scene(3, (2, 9), 2, (6, 4), 12, seed=3)
SCENES = {0: NONE, 1: ONE, 2: TWO}


@pytest.fixture(scope="module", params=TOWERS)
def folder(request, tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("model"), request.param)


def load(folder, **settings):
    fields = {"num_blocks": 64, "block_size": 8, "max_num_seqs": 8, "threads": 1} | settings
    return ModelRunner(EngineConfig(folder, **fields))


def open_row(driver, row, found, **options):
    driver.open(row, found.prompt, inputs=found.inputs, images=found.spans, **options)


def prefill(driver, row, chunk, num_blocks):
    """Computes a prompt. If the model has states, slot i keeps the one after `num_blocks[i]` blocks."""
    state, ends = driver.rows[row], [8 * count for count in num_blocks]
    for start in range(0, len(state.tokens), chunk):
        count = min(chunk, len(state.tokens) - start)
        taken = [(row, end, slot) for slot, end in enumerate(ends) if start < end <= start + count]
        if driver.runner.info.num_snapshots and taken:
            take(driver, *taken)
        driver.step({row: count})


def hit(driver, blocks, slot):
    """Options of a row whose first tokens are in these blocks, with their state in this slot."""
    return {"shared": blocks, "snapshot": slot if driver.runner.info.num_snapshots else None}


def check(reference, driver, scenes):
    """Every sampled row of logits, and every token, against one pass of transformers over the whole sequence."""
    assert driver.errors == []
    for row, found in scenes.items():
        output = driver.rows[row].output
        expected = found.logits(reference, output)
        for index, token in enumerate(output):
            position = len(found.tokens) + index
            if (row, position) in driver.logits:
                assert (driver.logits[row, position] - expected[position - 1]).abs().max() < 1e-4
            assert token == int(expected[position - 1].argmax())


def run_scenes(driver):
    for row, found in SCENES.items():
        open_row(driver, row, found)
    driver.step({0: 20, 1: 12, 2: 7})
    driver.step({0: 17, 2: 16, 1: 1})
    driver.step({0: 1, 1: 18, 2: 30})
    driver.step({2: len(TWO.tokens) - 53, 0: 1, 1: 1})
    driver.decode([2, 0, 1], 5)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_none_one_and_two_images_in_one_batch_match_transformers(folder, backend):
    driver = Driver(load(folder, backend=backend))
    run_scenes(driver)
    check(load_vision_reference(folder), driver, SCENES)
    assert (driver.runner.images.num_encoded, driver.runner.images.num_hits) == (3, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_batch_threads_and_chunks(folder, dtype):
    driver = Driver(load(folder, dtype=dtype))
    run_scenes(driver)
    alone = Driver(load(folder, dtype=dtype, threads=2))
    alone.runner._model._fused = None  # operation by operation
    for row, found in SCENES.items():
        open_row(alone, row, found)
        alone.prefill(row)
        alone.decode([row], len(driver.rows[row].output) - 1)
        assert alone.rows[row].tokens == driver.rows[row].tokens
    assert all(torch.equal(alone.logits[key], logits) for key, logits in driver.logits.items())


def test_hits_inside_an_image_and_the_same_image_later(folder):
    reference, driver = load_vision_reference(folder), Driver(load(folder))
    hits = (1, 3, len(TWO.tokens) // 8)  # in the first image, after it, at the end
    open_row(driver, 0, TWO)
    prefill(driver, 0, 11, hits)
    driver.decode([0], 2)
    blocks = driver.rows[0].blocks
    for row, num_shared in enumerate(hits, 1):
        open_row(driver, row, TWO, **hit(driver, blocks[:num_shared], row - 1))
        driver.prefill(row, 9)
    again = scene(3, TWO.pictures[0].pixels, 2, TWO.pictures[1].pixels, 12, (2, 2), 4, seed=3)
    assert again.prompt[: len(TWO.prompt)] == TWO.prompt
    open_row(driver, 4, again, **hit(driver, blocks[: hits[-1]], 2))
    driver.prefill(4)
    other = scene(1, TWO.pictures[1].pixels, 30, seed=8)
    open_row(driver, 5, other)
    driver.prefill(5)
    driver.decode([4, 1, 0, 3, 5, 2], 3)
    check(reference, driver, {0: TWO, 1: TWO, 2: TWO, 3: TWO, 4: again, 5: other})
    assert (driver.runner.images.num_encoded, driver.runner.images.num_hits) == (3, 3)


def test_a_state_after_another_image_is_refused(tmp_path):
    """Two images of one size at one place: the placeholders are equal, the content ids of snapshots are not."""
    driver = Driver(load(make_vision_model(tmp_path, "qwen3_5")))
    open_row(driver, 0, ONE)
    prefill(driver, 0, 9, [2, 3])  # in the image, and after it
    other = Scene(ONE.tokens, (Picture(ONE.pictures[0].start, make_image(6, 10, 77)),))
    blocks = driver.rows[0].blocks
    for row, slot in ((1, 0), (2, 1)):
        open_row(driver, row, other, shared=blocks[: slot + 2], snapshot=slot)
    driver.step({0: 1})
    assert [(error.row, error.message) for error in driver.errors] == [
        (1, "snapshot 0 is not of the first 16 tokens of the row"),
        (2, "snapshot 1 is not of the first 24 tokens of the row"),
    ]


def check_deepstack_after_the_last_layers(folder, driver):
    """A prompt that ends with an image samples from one of its tokens."""
    ends = scene(5, (3, 5), seed=2)
    for row, found in ((0, ends), (1, ONE)):
        open_row(driver, row, found)
    driver.step({0: 8, 1: 13})
    driver.step({0: len(ends.tokens) - 8, 1: len(ONE.tokens) - 13})
    driver.decode([0, 1], 2)
    check(load_vision_reference(folder), driver, {0: ends, 1: ONE})


def test_the_cache_keeps_the_images_used_last(folder):
    driver = Driver(load(folder, image_cache_memory=1))
    encoder = driver.runner.images
    for row, found in ((0, ONE), (1, TWO), (2, ONE)):
        open_row(driver, row, found)
        driver.prefill(row, 10)
    assert (encoder.num_encoded, encoder.num_hits) == (4, 0)
    large = Driver(load(folder, image_cache_memory=1 << 20))
    for row in range(3):
        open_row(large, row, ONE)
        large.prefill(row, 10)
    assert (large.runner.images.num_encoded, large.runner.images.num_hits) == (1, 2)
    assert large.rows[2].tokens == driver.rows[2].tokens


def test_work_in_slices_gives_the_same_bits(folder):
    driver = Driver(load(folder))
    open_row(driver, 0, ONE)
    driver.prefill(0)
    whole = Driver(load(folder))
    open_row(whole, 0, ONE)
    start = ONE.spans[0].start
    whole.add(parts=(ImageSteps((ImageWork(0, start, 1, 30),)),))
    whole.step({0: start})
    for done in (11, 29, 30):
        whole.add(parts=(ImageSteps((ImageWork(0, start, done, 30), ImageWork(5, 0, 1, 1))),))  # row 5 is not open
        whole.step({})
    assert whole.runner.images.num_encoded == 1
    whole.prefill(0)
    assert whole.errors == []
    assert torch.equal(whole.logits[0, len(ONE.tokens)], driver.logits[0, len(ONE.tokens)])
    assert whole.runner.images.num_encoded == 1


def test_bad_images_fail_their_row_only(folder):
    driver = Driver(load(folder))
    open_row(driver, 7, ONE)
    (carried,) = ONE.inputs
    opened = RowOpen(
        0, u32(*ONE.prompt), len(ONE.prompt), u32(*range(20)), 0, GREEDY, 0, inputs=(carried,), images=ONE.spans
    )
    bad = {
        "has 5 x 10 patches": replace(opened, inputs=(replace(carried, shape=(5, 10, 108)),)),
        "bytes of data": replace(opened, inputs=(replace(carried, data=carried.data[:-1]),)),
        r"shape \[6, 10, 107\]": replace(opened, inputs=(replace(carried, shape=(6, 10, 107)),)),
        "is not one of the images": replace(opened, images=(ImageSpan(ONE.spans[0].start, 5, 3),)),
        "must follow the one before it": replace(opened, images=(*ONE.spans, *ONE.spans)),
        "not the content ids": replace(opened, inputs=(replace(carried, digest=bytes(16)),)),
        "no input has this position": replace(opened, inputs=()),
    }
    driver.add(opens=[*driver._opens, *(replace(item, row=row) for row, item in enumerate(bad.values()))])
    driver.step({7: len(ONE.prompt)})
    driver.decode([7], 2)
    messages = {error.row: error.message for error in driver.errors}
    for row, words in enumerate(bad):
        with pytest.raises(ValueError, match=words):
            raise ValueError(messages[row])
    assert len(driver.rows[7].output) == 3


def test_a_model_without_a_tower_refuses_images(tmp_path):
    from tests.unit.engine.models import make_model

    driver = Driver(load(make_model(tmp_path)))
    open_row(driver, 0, ONE)
    open_row(driver, 1, NONE)
    driver.step({1: 5})
    assert [error.message for error in driver.errors] == ["the row has images, but this worker's model takes none"]


def add_scene(system, found, seed):
    spans = u32_to_bytes(u32(*(value for span in found.spans for value in (span.start, span.height, span.width))))
    items, work = [to_proto(item) for item in found.inputs], [(span.start, 9) for span in found.spans]
    features = Features(Inputs(items, sum(len(item.data) for item in items), work))
    options = {"images": spans}
    system.add(found.prompt, StopCondition(20, ignore_eos=True), features=features, options=options, seed=seed)


def test_drafts_change_no_answer_to_images(folder):
    """Right and wrong drafts behind prompts with and without images, in chunks, with hits and preemption."""
    room = {"num_blocks": 24, "max_num_batched_tokens": 24, "max_model_len": 120, "dtype": "float32"}
    runner = load(folder, **room, speculate="suffix", max_drafts=3)
    expected = {}
    runner._drafts._proposer = GivenDrafts(runner._rows, expected, 0.7)
    runner._drafts._times = NoTimes()
    plain, drafted = System(load(folder, **room)), System(runner)
    for seed, found in product((1, 2), SCENES.values()):
        add_scene(plain, found, seed)
        add_scene(drafted, found, seed)
    answers = [answer.token_ids for answer in plain.run().values()]
    expected |= dict(zip([u32(*found.prompt).tobytes() for found in SCENES.values()], answers, strict=False))
    assert [answer.token_ids for answer in drafted.run().values()] == answers
    assert 0 < runner.draft_counts.accepted.sum() < runner.draft_counts.drafted.sum()
