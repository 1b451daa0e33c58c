"""Steps as deltas: bad rows, bad batches, forks, copies, commits, late results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from step_protocol.messages import BadBatchError, RowOpen, StepBatch, TokenRules
from step_protocol.types import RowErrorCode
from tests.unit.engine.banned import SAMPLINGS, check_banned_ids
from tests.unit.engine.driver import GREEDY, Driver, seeded, u32
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.processor_cases import f32
from tests.unit.engine.test_engine_models import check_against, load, prompts

TRUE, FALSE = np.array([True]), np.array([False])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", max_position_embeddings=128)


@pytest.fixture(scope="module")
def shared_runner(folder):
    return load(folder, num_blocks=16)


@pytest.fixture
def runner(shared_runner):
    """A runner without open rows; the pool keeps the content of earlier tests."""
    shared_runner.reset_rows()
    shared_runner._backend.__dict__.pop("sample", None)
    return shared_runner


def opening(row=0, tokens=range(3, 13), blocks=(0,), sampling=GREEDY, **fields):
    tokens = np.array(tokens, np.uint32)
    values = {"prompt_len": len(tokens), "num_computed_tokens": 0, "sample_index": 0} | fields
    return RowOpen(row=row, token_ids=tokens, block_table=u32(*blocks), sampling=sampling, **values)


def batch(rows=(0,), query_lens=(10,), context_lens=(0,), slots=None, mask=None, **columns):
    count = sum(query_lens)
    return StepBatch(
        step_id=1,
        rows=u32(*rows),
        query_lens=u32(*query_lens),
        context_lens=u32(*context_lens),
        sample_mask=np.array(mask if mask is not None else [True] * len(rows), np.bool_),
        slot_mapping=u32(*(range(count) if slots is None else slots)),
        **columns,
    )


BAD_OPENS = {
    "row": ({"row": 8}, "max_num_seqs 8"), "token id": ({"tokens": [3, 211]}, "vocabulary size 211"),
    "too long": ({"tokens": range(3, 132)}, "max_model_len 128"), "empty": ({"tokens": []}, "0 tokens"),
    "prompt_len": ({"prompt_len": 11}, "prompt_len 11"),
    "computed": ({"num_computed_tokens": 11}, "num_computed_tokens 11"),
    "block": ({"blocks": (16,)}, "pool of 16 blocks"), "blocks": ({"blocks": (0,) * 9}, "at most 8"),
    "fork": ({"tokens": [], "fork_of_row": 5, "prompt_len": 3}, "fork_of_row 5 is not open"),
    "temperature": ({"sampling": seeded(0, float("nan"))}, "temperature"),
    "negative temperature": ({"sampling": seeded(0, -1.0)}, "temperature"),
    "top_p": ({"sampling": seeded(0, top_p=0.0)}, "top_p"), "top_k": ({"sampling": seeded(0, top_k=-1)}, "top_k"),
    "min_p": ({"sampling": seeded(0, min_p=1.5)}, "min_p"), "seed": ({"sampling": seeded(2**64)}, "seed"),
    "banned id": ({"banned_ids": u32(211), "banned_before": 1}, "id 211, which is not below the vocabulary size 211"),
    "allowed id": ({"rules": TokenRules(allowed_ids=u32(3, 211))}, "allowed_token_ids has id 211"),
    "banned rule": ({"rules": TokenRules(banned_ids=u32(*range(1025)))}, "banned_token_ids has 1025 ids, expected at"),
    "bias id": ({"rules": TokenRules(bias_ids=u32(300), biases=f32(1))}, "logit_bias has id 300"),
    "bias": ({"rules": TokenRules(bias_ids=u32(3), biases=f32(101))}, "outside -100 to 100"),
    "bias NaN": ({"rules": TokenRules(bias_ids=u32(3), biases=f32(float("nan")))}, "outside -100 to 100"),
    "bias without id": ({"rules": TokenRules(biases=f32(1))}, "0 ids and 1 values"),
    "bad word": ({"rules": TokenRules(bad_words=(u32(3, 211),))}, "bad_words has id 211"),
    "empty bad word": ({"rules": TokenRules(bad_words=(u32(),))}, "bad_words has no ids"),
    "bad words": ({"rules": TokenRules(bad_words=(u32(3),) * 257)}, "257 sequences, expected at most 256"),
    "repetition_penalty": ({"sampling": seeded(0, repetition_penalty=0.0)}, "repetition_penalty"),
    "frequency_penalty": ({"sampling": seeded(0, frequency_penalty=-2.5)}, "frequency_penalty"),
    "presence_penalty": ({"sampling": seeded(0, presence_penalty=float("nan"))}, "presence_penalty"),
    "all banned": ({"banned_ids": u32(*range(211)), "banned_before": 1}, "211 ids, expected at most 210"),
    "many banned": ({"banned_ids": u32(*[5] * 513), "banned_before": 1}, "513 ids, expected at most 210"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_OPENS)
def test_bad_open_fails_its_row_only(runner, name):
    fields, message = BAD_OPENS[name]
    bad = opening(**fields)
    good = opening(row=3, blocks=(1,))
    output = runner.execute(batch((bad.row, 3), (10, 10), (0, 0), [*range(10), *range(16, 26)], opens=[bad, good]))
    assert [(e.row, e.code) for e in output.errors] == [(bad.row, RowErrorCode.BAD_INPUT)]
    assert message in output.errors[0].message
    assert output.rows.tolist() == [3]
    assert runner.rows_used() == 1


BAD_ROWS = {
    "not open": ({"rows": (1,)}, "not open"),
    "outside": ({"rows": (100,)}, "max_num_seqs"),
    "twice": ({"rows": (0, 0), "query_lens": (5, 5), "context_lens": (0, 5)}, "twice"),
    "more than rows": ({"rows": (0,) * 9, "query_lens": (1,) * 9, "context_lens": (0,) * 9, "slots": [0] * 9}, "twice"),
    "empty": ({"query_lens": (0,)}, "at least 1"),
    "unknown tokens": ({"context_lens": (1,), "slots": range(1, 11)}, "the row has 10 tokens"),
    "never computed": ({"context_lens": (4,), "query_lens": (6,), "slots": range(4, 10)}, "but 0 tokens are computed"),
    "far beyond": ({"context_lens": (2**32 - 1,), "query_lens": (1,), "slots": (0,)}, "max_model_len"),
    "slot outside": ({"slots": [*range(9), 4096]}, "slot 4096"),
    "slot of another block": ({"slots": [*range(9), 40]}, "slot 40 for position 9, but the row's table has slot 9"),
    "sample in prompt": ({"query_lens": (5,)}, "inside the prompt"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_left_out(runner, name):
    fields, message = BAD_ROWS[name]
    runner.execute(batch(opens=[opening(), opening(row=3, blocks=(1,))], rows=(), query_lens=(), context_lens=()))
    before = runner._pool.tensors[0].clone()
    columns = {"rows": (0,), "query_lens": (10,), "context_lens": (0,)} | fields
    slots = columns.pop("slots", range(sum(columns["query_lens"])))
    joined = {key: (*value, extra) for (key, value), extra in zip(columns.items(), (3, 10, 0), strict=True)}
    output = runner.execute(batch(**joined, slots=[*slots, *range(16, 26)]))
    assert {(e.row, e.code) for e in output.errors} == {(columns["rows"][0], RowErrorCode.BAD_INPUT)}
    assert message in output.errors[0].message
    assert output.rows.tolist() == [3]
    assert torch.equal(runner._pool.tensors[0][:, 0], before[:, 0])
    assert torch.equal(runner._pool.tensors[0][:, 2:], before[:, 2:])


def test_two_rows_that_write_one_slot_do_not_both_run(runner):
    output = runner.execute(batch((0, 1), (10, 10), (0, 0), [*range(10), *range(10)], opens=[opening(0), opening(1)]))
    assert "also written by another row" in output.errors[0].message
    assert output.rows.tolist() == [1]


def test_short_table_is_refused(runner):
    output = runner.execute(batch(query_lens=(20,), opens=[opening(tokens=range(3, 23))]))
    assert "do not fit the 16 slots" in output.errors[0].message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((0, 2, 5), "gap"),
        ((0, 1, 16), "out of range"),
        ((0, 8, 5), "out of range"),
        ((1, 0, 5), "not open"),
        ((99, 0, 5), "out of range"),
    ],
)
def test_bad_table_change_fails_its_row(runner, change, message):
    row, index, block = change
    columns = {"table_rows": u32(row), "table_indices": u32(index), "table_blocks": u32(block)}
    output = runner.execute(batch(opens=[opening()], **columns))
    assert message in output.errors[0].message
    assert output.errors[0].row == row
    assert output.rows.tolist() == ([] if row == 0 else [0])


BAD_BATCHES = {
    "copy_src": {"copy_src": u32(16), "copy_dst": u32(0)},
    "commit_blocks": {"commit_blocks": u32(77), "commit_digests": [bytes(16)]},
}


@pytest.mark.parametrize("field", BAD_BATCHES)
def test_blocks_outside_the_pool_refuse_the_batch(runner, field):
    columns = {
        "rows": u32(0),
        "query_lens": u32(10),
        "context_lens": u32(0),
        "sample_mask": TRUE,
        "slot_mapping": np.arange(10, dtype=np.uint32),
        "opens": [opening()],
    } | BAD_BATCHES[field]
    with pytest.raises(BadBatchError, match=field):
        runner.execute(StepBatch(1, **columns))
    assert runner.rows_used() == 0


def test_too_many_tokens_refuse_the_batch(folder):
    runner = load(folder, num_blocks=16, max_num_batched_tokens=9)
    with pytest.raises(BadBatchError, match="max_num_batched_tokens 9"):
        runner.execute(batch(opens=[opening()]))


def test_nan_fails_its_row_only(folder):
    runner = load(folder)
    embedding = runner._model.parts.embedding.clone()
    embedding[77] = float("nan")
    runner._model.parts = replace(runner._model.parts, embedding=embedding)
    runner._model.fuse(runner._pool)
    driver = Driver(runner)
    first, second = prompts([20, 20])
    driver.open(0, [*first[:10], 77, *first[10:]])
    driver.open(1, second)
    output = driver.step({0: 21, 1: 20})
    assert [(e.row, e.code) for e in output.errors] == [(0, RowErrorCode.NAN)]
    assert output.rows.tolist() == [1]
    driver.errors.clear()
    late = runner.execute(batch((0,), (1,), (21,), driver.slots(driver.rows[0], 21, 22)))
    assert late.errors[0].code is RowErrorCode.BAD_INPUT  # a step that was sent before the failure was known
    driver.close(0)
    driver.open(2, prompts([40], seed=9)[0])  # reuses the poisoned blocks
    driver.step({1: 1, 2: 40})
    assert driver.errors == []
    check_against(load_reference(folder), driver, [1, 2])


def test_forks_sample_from_their_parent(folder):
    runner = load(folder, num_blocks=32, block_size=4)
    driver = Driver(runner)
    (prompt,) = prompts([10])
    parent = driver.open(0, prompt, seeded(3), sample_index=0)
    children = [RowOpen(row, u32(), 10, u32(*parent.blocks[:2]), 10, seeded(3), row, fork_of_row=0) for row in (1, 2)]
    driver._opens += children
    copies = {1: driver.free.pop(), 2: driver.free.pop()}
    driver.add(fork_rows=u32(1, 2), fork_parents=u32(0, 0))
    output = driver.step({0: 10})
    assert output.rows.tolist() == [0, 1, 2]
    assert driver.errors == []
    first = dict(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True))
    slots = [driver.slots(parent, 10, 11)[0], *(copies[row] * 4 + 2 for row in (1, 2))]
    driver._sampled.clear()
    output = runner.execute(
        StepBatch(
            2,
            rows=u32(0, 1, 2),
            query_lens=u32(1, 1, 1),
            context_lens=u32(10, 10, 10),
            sample_mask=np.array([True] * 3),
            slot_mapping=u32(*slots),
            table_rows=u32(1, 2),
            table_indices=u32(2, 2),
            table_blocks=u32(copies[1], copies[2]),
            copy_src=u32(parent.blocks[2], parent.blocks[2]),
            copy_dst=u32(copies[1], copies[2]),
        )
    )
    assert output.errors == []
    reference = load_reference(folder)
    for row, logits in enumerate(driver._sampled[0]):
        with torch.no_grad():
            expected = reference(torch.tensor([[*prompt, first[row]]])).logits[0, -1]
        assert (logits - expected).abs().max() < 1e-4
    for row in (1, 2):  # the same sample on its own, without a fork
        single = Driver(load(folder, num_blocks=32, block_size=4))
        single.open(0, prompt, seeded(3), sample_index=row)
        single.step({0: 10})
        single.step({0: 1})
        assert single.rows[0].output == [first[row], output.token_ids[row]]


def test_bad_forks_are_reported(runner):
    runner.execute(batch(opens=[opening()]))
    child = RowOpen(1, u32(), 4, u32(0), 4, GREEDY, 1, fork_of_row=0)
    output = runner.execute(
        batch((0,), (1,), (10,), (10,), opens=[child], fork_rows=u32(1, 2, 0, 1, 99), fork_parents=u32(0, 0, 0, 5, 0))
    )
    messages = {error.row: error.message for error in output.errors}
    assert "ends at 11 tokens, but this row has 4" in messages[1]
    assert "not open" in messages[2]
    assert "computes in the step" in messages[0]
    assert "not open" in messages[99]


def test_copy_on_write_keeps_the_original(folder):
    driver = Driver(load(folder, num_blocks=16))
    prompt, tail = prompts([20, 6])
    first = driver.open(0, prompt)
    driver.prefill(0)
    second = driver.open(1, prompt, shared=first.blocks[:1])
    driver.prefill(1)
    block, copy = second.blocks[1], driver.free.pop()
    second.blocks[1] = copy
    driver.add(copy_src=u32(block), copy_dst=u32(copy), table_rows=u32(1), table_indices=u32(1), table_blocks=u32(copy))
    before = driver.runner._pool.tensors[0][:, block].clone()
    driver.decode([1], 8)
    assert torch.equal(driver.runner._pool.tensors[0][:, block], before)
    check_against(load_reference(folder), driver, [1])
    assert len(tail) == 6


def test_committed_blocks_know_their_tokens(folder):
    runner = load(folder, num_blocks=16)
    driver = Driver(runner)
    (prompt,) = prompts([40])
    state = driver.open(0, prompt)
    driver.prefill(0, 24)
    hashes = [bytes([i]) * 16 for i in (1, 2)]
    driver.add(commit_blocks=u32(*state.blocks[:2]), commit_digests=hashes)
    driver.decode([0], 1)
    listed = [
        (int(block), digest, tokens.tolist())
        for ids, digests, rows in runner.committed_blocks()
        for block, digest, tokens in zip(ids, digests, rows, strict=True)
    ]
    assert listed == [(state.blocks[0], hashes[0], prompt[:16]), (state.blocks[1], hashes[1], prompt[16:32])]
    runner.reset_rows()
    assert runner.rows_used() == 0
    assert len(listed) == sum(len(ids) for ids, _, _ in runner.committed_blocks())
    runner.execute(batch((5,), (10,), (0,), range(16 * state.blocks[0], 16 * state.blocks[0] + 10),
                         opens=[opening(row=5, blocks=(state.blocks[0],))]))  # fmt: skip
    assert [ids.tolist() for ids, _, _ in runner.committed_blocks()] == [[state.blocks[1]]]
    runner.execute(batch((), (), (), copy_src=u32(0), copy_dst=u32(state.blocks[1])))
    assert list(runner.committed_blocks()) == []


def test_context_fills_up_to_the_last_position(runner):
    tokens = np.arange(128) % 200 + 3
    output = runner.execute(batch(query_lens=(128,), opens=[opening(tokens=tokens, blocks=range(8))]))
    assert (output.rows.tolist(), output.errors) == ([0], [])
    output = runner.execute(batch(query_lens=(1,), context_lens=(128,), slots=(0,)))
    assert "max_model_len 128" in output.errors[0].message


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_banned_ids_are_not_sampled_before_their_position(backend, tmp_path):
    driver = Driver(load(make_model(tmp_path, "qwen3"), backend=backend))
    for sampling in SAMPLINGS.values():
        check_banned_ids(driver, sampling)
