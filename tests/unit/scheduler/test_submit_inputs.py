"""The inputs of a Submit, as far as the core depends on them; test_engine_inputs.py has the checks of workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from quire.internal.v1 import inputs_pb2, scheduler_pb2, worker_pb2
from quire.v1 import types_pb2

from scheduler_svc.core.features.inputs import Inputs
from scheduler_svc.core.messages import RowAssignment
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
    submit = submit_with(first, second)
    submit.draft_token_ids = b"\5\0\0\0" * 9
    group = reader().group(submit, owner=0)
    assert group.features.num_bytes == len(first.data) + len(second.data) + 36
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
        ({"start": 18}, "inputs[0] has start 18 and length 5; its positions must be"),
        ({"length": 0}, "inputs[0] has start 2 and length 0; its positions must be"),
        ({"length": 2**32 - 1}, "in the prompt of 20 positions"),
    ],
)
def test_a_bad_input_is_refused(change: dict[str, Any], words: str) -> None:
    submit = submit_with(random_embeddings(5, HIDDEN, start=2))
    for name, value in change.items():
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


def test_an_image_needs_a_model_that_takes_images_and_a_shape() -> None:
    submit = submit_with(random_embeddings(5, HIDDEN, start=2))
    submit.inputs[0].kind = inputs_pb2.INPUT_KIND_IMAGE
    assert "takes no image" in refusal(submit).message
    del submit.inputs[0].shape[:]
    assert "takes no image" in refusal(submit, images=types_pb2.ImageInfo(merge_size=2)).message
