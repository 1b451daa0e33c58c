"""The encoder input of a Submit: what the scheduler accepts, and what it refuses by field."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from quire.internal.v1 import encoder_pb2, scheduler_pb2
from quire.v1 import types_pb2

from scheduler_svc.gateways.submits import SubmitReader
from svc_common.errors import InvalidRequestError
from tests.unit.gateway.fakes import make_info

ENCODER = types_pb2.EncoderInfo(max_tokens=40, max_decoder_tokens=20, decoder_start_ids=[3])


def reader(**changes: object) -> SubmitReader:
    return SubmitReader(make_info(**{"encoder": ENCODER} | changes))


def submit(num_tokens: int = 20, first: int = 7, salt: str = "") -> scheduler_pb2.Submit:
    """An encoder input in blocks of 16, and one decoder token."""
    padded = -(-num_tokens // 16) * 16
    prompt = np.array([first] * num_tokens + [0] * (padded - num_tokens) + [3], np.uint32)
    return scheduler_pb2.Submit(
        request_id="r",
        prompt_token_ids=prompt.tobytes(),
        sampling=types_pb2.SamplingParams(seed=1),
        stop=types_pb2.StopParams(max_tokens=10),
        encoder=encoder_pb2.EncoderInput(num_tokens=num_tokens),
        cache_salt=salt,
    )


def test_the_root_depends_on_the_whole_input_and_on_the_salt() -> None:
    last = submit()
    prompt = np.frombuffer(last.prompt_token_ids, np.uint32).copy()
    prompt[19] = 8
    last.prompt_token_ids = prompt.tobytes()
    groups = [reader().group(one, owner=1) for one in (submit(), submit(), last, submit(19), submit(salt="a"))]
    keys = [group.root_key for group in groups]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4
    assert [group.features.num_head_tokens for group in groups] == [32] * 5
    assert [group.options.encoder.num_tokens for group in groups] == [20, 20, 20, 19, 20], "the worker gets the input"


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        (lambda s: s.ClearField("encoder"), "encoder", "has no encoder input, but model 'demo' has an encoder"),
        (lambda s: setattr(s.encoder, "num_tokens", 0), "encoder.num_tokens", "is 0; must be from 1 to 40"),
        (lambda s: setattr(s.encoder, "num_tokens", 41), "encoder.num_tokens", "is 41; must be from 1 to 40"),
        (lambda s: setattr(s.encoder, "num_tokens", 33), "encoder.num_tokens", "to 48 less than the prompt of 33"),
        (lambda s: setattr(s.stop, "max_tokens", 20), "stop.max_tokens", "ask for at most 19"),
    ],
)
def test_bad_encoder_inputs_are_refused(
    change: Callable[[scheduler_pb2.Submit], object], field: str, message: str
) -> None:
    bad = submit()
    change(bad)
    with pytest.raises(InvalidRequestError, match=message) as found:
        reader().group(bad, owner=1)
    assert found.value.field == field


def test_models_without_an_encoder_refuse_encoder_inputs() -> None:
    with pytest.raises(InvalidRequestError, match="has an encoder input, but model 'demo' has no encoder"):
        reader(encoder=None).group(submit(), owner=1)


def test_models_of_speech_refuse_requests_without_audio() -> None:
    speech = types_pb2.EncoderInfo(max_tokens=40, max_decoder_tokens=20, audio=types_pb2.AudioInfo(max_samples=9))
    with pytest.raises(InvalidRequestError, match="takes audio, but the request has none"):
        reader(encoder=speech).group(submit(), owner=1)
