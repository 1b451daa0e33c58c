"""Checks of the inputs of a Submit. The message of a refusal names the input, its value and the limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from quire.internal.v1 import inputs_pb2, scheduler_pb2, worker_pb2

from request_fields import inputs as limits
from scheduler_svc.core.features.inputs import Inputs
from scheduler_svc.core.messages import RowAssignment
from scheduler_svc.gateways import inputs as checks
from scheduler_svc.gateways.submits import SubmitReader
from scheduler_svc.workers import wire as worker_wire
from svc_common.errors import InvalidRequestError
from tests.carried import random_embeddings, to_proto, with_content_ids
from tests.unit.scheduler.toy_worker import make_info, make_submit
from worker_svc.wire import step_batch_from_proto

HIDDEN = 8
PROMPT = [*range(1, 21)]


def reader(**info: Any) -> SubmitReader:
    return SubmitReader(make_info(**{"max_num_blocks": 40, "max_num_seqs": 8, "hidden_size": HIDDEN} | info))


def submit_with(*items: Any) -> scheduler_pb2.Submit:
    submit = make_submit(1, with_content_ids(PROMPT, *items), max_tokens=9)
    submit.inputs.extend(map(to_proto, items))
    return submit


def refusal(submit: scheduler_pb2.Submit, **info: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        reader(**info).group(submit, owner=0)
    return caught.value


def test_inputs_reach_the_worker_unchanged() -> None:
    first, second = random_embeddings(5, HIDDEN, start=2), random_embeddings(6, HIDDEN, seed=1, start=14)
    group = reader().group(submit_with(first, second), owner=0)
    assert group.features.num_bytes == len(first.data) + len(second.data)
    inputs = group.features.find(Inputs)
    assert inputs is not None
    row = RowAssignment(0, group, 0, group.prompt, 20, np.empty(0, np.uint32), 8, inputs=inputs.after(8))
    message = worker_pb2.StepBatch()
    worker_wire._open_row(row, message)
    batch = step_batch_from_proto(message)
    assert batch.opens[0].inputs == (second,)
    assert batch.opens[0].token_ids.tolist() == with_content_ids(PROMPT, first, second)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": 77}, "inputs[0] has kind 77; this scheduler knows 1"),
        ({"dtype": 9}, "inputs[0] has dtype 9; must be one of 1, 2, 3"),
        ({"shape": [5, 7]}, "inputs[0] has shape [5, 7]; must be [5, 8]"),
        ({"data": b"1234"}, "inputs[0] has 4 bytes of data; its shape and dtype need 160"),
        ({"digest": b"1234"}, "inputs[0] has a digest of 4 bytes; must have 16"),
        ({"digest": b"0" * 16}, "not the content ids of its digest"),
        ({"start": 18}, "inputs[0] has start 18 and length 5; its positions must be"),
        ({"length": 0}, "inputs[0] has start 2 and length 0; its positions must be"),
        ({"length": 2**32 - 1}, "in the prompt of 20 positions"),
    ],
)
def test_a_bad_input_is_refused(change: dict[str, Any], words: str) -> None:
    submit = submit_with(random_embeddings(5, HIDDEN, start=2))
    for name, value in change.items():
        if name == "shape":
            submit.inputs[0].ClearField("shape")
            submit.inputs[0].shape.extend(value)
        else:
            setattr(submit.inputs[0], name, value)
    error = refusal(submit)
    assert words in error.message
    assert error.field == "inputs[0]"


def test_inputs_are_in_order_and_do_not_overlap() -> None:
    first, second = random_embeddings(5, HIDDEN, start=2), random_embeddings(6, HIDDEN, seed=1, start=14)
    submit = submit_with(first, second)
    submit.inputs.reverse()
    assert refusal(submit).field == "inputs[1]"
    reader().group(submit_with(first, random_embeddings(3, HIDDEN, seed=1, start=7)), owner=0)
    overlapping = random_embeddings(3, HIDDEN, seed=1, start=6)
    submit = make_submit(1, with_content_ids(PROMPT, overlapping, first), max_tokens=9)
    submit.inputs.extend(map(to_proto, (first, overlapping)))
    assert "which end at 7" in refusal(submit).message


def test_ids_beyond_the_vocabulary_need_an_input() -> None:
    submit = submit_with(random_embeddings(5, HIDDEN, start=2))
    del submit.inputs[:]
    assert refusal(submit).field == "prompt_token_ids"
    item = random_embeddings(5, HIDDEN, start=2)
    submit = make_submit(1, [*with_content_ids(PROMPT, item)[:-1], 1000], max_tokens=9)
    submit.inputs.append(to_proto(item))
    assert "prompt_token_ids contains 1000" in refusal(submit).message


def test_a_model_that_takes_tokens_only_refuses_inputs() -> None:
    submit = submit_with(random_embeddings(5, HIDDEN))
    assert "the workers of model 'toy' take tokens only" in refusal(submit, hidden_size=0).message


def test_number_and_size_of_inputs_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [random_embeddings(1, HIDDEN, seed=i, start=i) for i in range(3)]
    monkeypatch.setattr(checks, "MAX_INPUT_BYTES", 3 * 32)
    reader().group(submit_with(*items), owner=0)
    monkeypatch.setattr(checks, "MAX_INPUT_BYTES", 3 * 32 - 1)
    assert refusal(submit_with(*items)).message.endswith("have 96 bytes of data; at most 95 are allowed in one request")
    monkeypatch.setattr(checks, "MAX_INPUTS", 2)
    assert "has 3 inputs; at most 2 are allowed" in refusal(submit_with(*items)).message


def test_prompt_logprobs_need_a_token_at_each_position() -> None:
    submit = submit_with(random_embeddings(5, HIDDEN))
    submit.prompt_logprobs = 1
    assert refusal(submit).field == "prompt_logprobs"


def test_every_dtype_of_the_protocol_has_a_size() -> None:
    others = {inputs_pb2.INPUT_DTYPE_UNSPECIFIED, inputs_pb2.INPUT_DTYPE_UINT8}  # of images
    assert set(checks.DTYPE_BYTES) == set(inputs_pb2.InputDtype.values()) - others
    assert len(checks.DTYPE_BYTES) == len(limits.INPUT_DTYPE_BYTES)
