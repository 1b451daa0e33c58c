"""Audio prompts at the gateway: what schedulers get, and what is refused."""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request import validation
from gateway_svc.request.models import ServedModel
from gateway_svc.request.plan import GenerationPlan, plan_generation
from gateway_svc.request.prompts.audio import prompt_of, unchanged_samples
from gateway_svc.request.prompts.reader import PromptInput
from gateway_svc.request.prompts.readers import check_prompt_size
from gateway_svc.schedulers.submitter import chain_of
from gateway_svc.schedulers.wire import submit_from_plan
from gateway_svc.text.bundle import ModelText
from prefix_index.hashing import FIRST_CONTENT_ID, extend_digests, root_digest
from scheduler_svc.gateways.submits import SubmitReader
from scheduler_svc.workers.wire import root_salt
from svc_common.errors import ContextLengthError, InvalidRequestError
from tests.processes.encoder_models import tone, wav
from tests.unit.gateway.fakes import make_info

POSITIONS, RATE = 10, 16_000
SPEECH = types.AudioInfo(
    sampling_rate=RATE,
    max_samples=RATE,
    language_ids={"en": 20, "de": 21},
    task_ids={"transcribe": 22, "translate": 23},
    no_timestamps_id=24,
)
ENCODER = types.EncoderInfo(
    max_tokens=POSITIONS,
    max_decoder_tokens=30,
    decoder_start_ids=[3],
    suppress_ids=[9],
    begin_suppress_ids=[8],
    audio=SPEECH,
)


def model(encoder: types.EncoderInfo = ENCODER) -> ServedModel:
    return ServedModel(make_info(hidden_size=0, encoder=encoder), ModelText(None))


def read_audio(audio: pb.Audio, served: ServedModel) -> PromptInput:
    """The prompt of audio that needs no decoder."""
    samples = unchanged_samples(audio, served.info.encoder.audio)
    if samples is None:
        raise InvalidRequestError("needs a decoder", field="prompt.audio.data")
    return prompt_of(samples, served)


def plan(audio: pb.Audio, served: ServedModel | None = None, **fields: object) -> GenerationPlan:
    """The checks of the servicer before it submits a request."""
    served = served or model()
    request = pb.GenerateRequest(prompt=pb.Prompt(audio=audio), **fields)  # type: ignore[arg-type]
    validation.check_generate(request)
    check_prompt_size(request, served)
    return plan_generation(request, served, read_audio(audio, served), request_id="r", drawn_seed=1)


@pytest.mark.parametrize("is_float", [True, False])
def test_a_scheduler_accepts_what_the_gateway_sends(is_float: bool) -> None:
    found = plan(pb.Audio(data=wav(tone(0, 0.5), is_float=is_float), language="de"))
    submit = submit_from_plan(found, request_id="r")
    group = SubmitReader(found.model.info).group(submit, owner=1)
    size = found.model.info.block_size
    end = -(-POSITIONS // size) * size
    assert group.features.num_head_tokens == end
    assert (group.prompt[:POSITIONS] >= FIRST_CONTENT_ID).all()
    assert group.prompt[POSITIONS:].tolist() == [0] * (end - POSITIONS) + [3, 21, 22, 24]
    assert group.stop.max_tokens == 26
    assert list(submit.encoder.banned_ids) == [9]
    (carried,) = submit.inputs
    assert len(carried.data) == RATE // 2 * (4 if is_float else 2)
    digests: list[bytes] = []
    root = root_digest(root_salt(found.model.info), size, group.root_key)
    extend_digests(digests, root, group.prompt, size, group.features.block_keys(size))
    assert digests
    assert chain_of(found) == digests


def test_the_model_detects_a_language_that_is_not_given() -> None:
    submit = submit_from_plan(plan(pb.Audio(data=wav(tone(0, 0.5)), task="translate")), request_id="r")
    allowed = {entry.position: list(entry.ids) for entry in submit.encoder.allowed}
    assert allowed == {0: [20, 21], 1: [23], 2: [24]}
    assert (submit.encoder.first_banned_at, list(submit.encoder.first_banned_ids)) == (3, [8])


def test_text_models_force_their_first_and_last_token() -> None:
    encoder = types.EncoderInfo(
        max_tokens=20, max_decoder_tokens=30, decoder_start_ids=[3], forced_bos_token_id=5, forced_eos_token_id=2
    )
    served = model(encoder)
    request = pb.GenerateRequest(
        prompt=pb.Prompt(tokens=types.TokenIds(ids=[7] * 20)), stop=types.StopParams(max_tokens=9)
    )
    found = plan_generation(request, served, PromptInput([7] * 20), request_id="r", drawn_seed=1)
    message = submit_from_plan(found, request_id="r").encoder
    assert {entry.position: list(entry.ids) for entry in message.allowed} == {0: [5], 8: [2]}
    with pytest.raises(ContextLengthError, match=r"prompt has 21 tokens; the encoder of model .* takes at most 20"):
        plan_generation(request, served, PromptInput([7] * 21), request_id="r", drawn_seed=1)
    request.stop.max_tokens = 30
    with pytest.raises(ContextLengthError, match="ask for at most 29"):
        plan_generation(request, served, PromptInput([7]), request_id="r", drawn_seed=1)


def test_the_same_audio_gives_the_same_ids_and_other_audio_others() -> None:
    first, again, other = (plan(pb.Audio(data=wav(tone(seed, 0.3)), language="en")) for seed in (1, 1, 2))
    assert first.prompt.ids == again.prompt.ids
    assert not set(first.prompt.ids) & set(other.prompt.ids)


def test_a_wav_file_from_a_pipe_has_no_size() -> None:
    data = wav(tone(0, 0.2))
    start = data.index(b"data")
    streamed = data[: start + 4] + struct.pack("<I", 0xFFFFFFFF) + data[start + 8 :]
    assert plan(pb.Audio(data=streamed)).prompt.ids == plan(pb.Audio(data=data)).prompt.ids


@given(st.binary(max_size=200), st.integers(0, 60))
def test_damaged_files_are_refused_or_read(noise: bytes, at: int) -> None:
    data = wav(np.zeros(50, np.float32))
    damaged = data[:at] + noise + data[at + len(noise) :]
    with suppress(InvalidRequestError):  # any other error would fail the request with INTERNAL
        assert len(read_audio(pb.Audio(data=damaged), model()).ids) == POSITIONS


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        (pb.Audio(data=wav(tone(0, 0.1), rate=8000)), "needs a decoder"),
        (pb.Audio(data=wav(tone(0, 0.1), channels=2)), "needs a decoder"),
        (pb.Audio(data=b"RIFF"), "needs a decoder"),
        (pb.Audio(data=wav(tone(0, 1.5))), r"has 1\.5 s; .* at most 1 s at once: send it in parts"),
        (pb.Audio(data=wav(np.zeros(0, np.float32))), "has 0 bytes"),
        (pb.Audio(data=bytes(5), format=pb.AUDIO_FORMAT_PCM_F32), "has 5 bytes of float32 samples"),
        (pb.Audio(data=bytes(200_000), format=pb.AUDIO_FORMAT_PCM_F32), "has 200000 bytes; at most 64000"),
        (pb.Audio(data=b"x", language="fr"), "knows de, en"),
    ],
)
def test_bad_audio_is_refused(audio: pb.Audio, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        plan(audio)


def test_models_without_audio_refuse_it() -> None:
    served = ServedModel(make_info(), ModelText(None))
    with pytest.raises(InvalidRequestError, match="takes no audio; send text or token ids"):
        plan(pb.Audio(data=wav(tone(0, 0.1))), served)
