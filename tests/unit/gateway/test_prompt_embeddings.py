"""Prompt embeddings at the gateway: what is read, what is refused, and what schedulers get."""

from __future__ import annotations

import base64
import json
import math
import pickle
import struct
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import inference_pb2 as pb
from quire_client import PromptEmbeddings
from quire_client.errors import InvalidRequest
from quire_client.requests.generate import generate_request

from gateway_svc.http.openai.bodies import completion_generation
from gateway_svc.request import validation
from gateway_svc.request.models import ServedModel
from gateway_svc.request.plan import GenerationPlan, plan_generation
from gateway_svc.request.prompts.embeddings import EmbeddingsReader, read_embeddings
from gateway_svc.request.prompts.reader import FORMATS, PIECE_BYTES, is_finite
from gateway_svc.request.prompts.readers import check_prompt_size, check_tokenize
from gateway_svc.schedulers.submitter import chain_of
from gateway_svc.schedulers.wire import submit_from_plan
from gateway_svc.text.bundle import ModelText
from prefix_index.hashing import FIRST_CONTENT_ID
from scheduler_svc.core.features.inputs import Inputs
from scheduler_svc.gateways.submits import SubmitReader
from svc_common.errors import ContextLengthError, InvalidRequestError
from tests.unit.gateway.fakes import make_info

HIDDEN = 8
MODEL = ServedModel(make_info(hidden_size=HIDDEN), ModelText(None))


def rows(length: int = 20, seed: int = 0) -> torch.Tensor:
    return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(seed))


def saved(*tensors: torch.Tensor) -> bytes:
    return safetensors.torch.save({f"t{i}": tensor for i, tensor in enumerate(tensors)})


def plan(data: bytes, model: ServedModel = MODEL, **fields: Any) -> GenerationPlan:
    """The checks of the servicer before it submits a request."""
    request = pb.GenerateRequest(prompt=pb.Prompt(embeddings=data), **fields)
    validation.check_generate(request)
    check_prompt_size(request, model)
    return plan_generation(request, model, read_embeddings(data, model), request_id="r", drawn_seed=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_scheduler_accepts_what_the_gateway_sends(dtype: torch.dtype) -> None:
    values = rows().to(dtype)
    submit = submit_from_plan(plan(saved(values)), request_id="r")
    group = SubmitReader(MODEL.info).group(submit, owner=0)
    inputs = group.features.find(Inputs)
    assert inputs is not None
    (carried,) = inputs.items
    assert (carried.start, carried.length, list(carried.shape)) == (0, 20, [20, HIDDEN])
    assert carried.data == bytes(values.view(torch.uint8).numpy())
    assert group.prompt.min() >= FIRST_CONTENT_ID


def test_digests_of_prefixes_depend_on_the_values_and_their_type() -> None:
    """The first block of 16 positions: equal for equal embeddings, also in a longer prompt only if all are equal."""
    changed = rows()
    changed[19, 0] += 1
    chains = [chain_of(plan(saved(one))) for one in (rows(), changed, rows().half(), rows(21))]
    assert chain_of(plan(saved(rows()))) == chains[0]
    assert len({chain[0] for chain in chains}) == len(chains)


BAD = [
    (b"", "prompt.embeddings is empty; send a file in the safetensors format"),
    (b"\x80\x04 no tensor", "prompt.embeddings is not in the safetensors format: Error while deserializing"),
    (pickle.dumps([1.0] * 100), "is not in the safetensors format"),
    (saved(rows())[:-1], "is not in the safetensors format"),
    (saved(rows(), rows()), "has 2 tensors; must have one, of shape [positions, hidden_size]"),
    (safetensors.torch.save({}), "has 0 tensors"),
    (saved(torch.zeros(HIDDEN)), "has shape [8]; must have two dimensions"),
    (saved(torch.zeros(1, 20, HIDDEN)), "has shape [1, 20, 8]; must have two dimensions"),
    (saved(torch.zeros(0, HIDDEN)), "has no rows; a prompt needs at least 1 position"),
    (saved(torch.zeros(20, 9)), "has rows of 9 values; must be 8, the hidden_size of model 'demo'"),
    (saved(rows().double()), "has dtype F64; must be one of F32, BF16, F16"),
    (saved(torch.zeros(20, HIDDEN, dtype=torch.int32)), "has dtype I32; must be one of"),
    (saved(rows() / 0), "contains NaN or infinity; all values must be finite"),
    (saved(torch.full((20, HIDDEN), math.nan).bfloat16()), "contains NaN or infinity"),
]


@pytest.mark.parametrize(("data", "words"), BAD, ids=range(len(BAD)))
def test_bad_embeddings_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan(data)
    assert words in caught.value.message
    assert caught.value.field == "prompt.embeddings"


def test_too_many_positions_are_refused() -> None:
    with pytest.raises(ContextLengthError, match="has 256 tokens; max_model_len is 256"):
        plan(saved(rows(256)))
    with pytest.raises(ContextLengthError, match="bytes of 256 positions of 8 float32 values: shorten the prompt"):
        EmbeddingsReader().check_size(pb.GenerateRequest(prompt=pb.Prompt(embeddings=bytes(1 << 20))), MODEL)


def test_a_model_that_takes_tokens_only_refuses_embeddings() -> None:
    with pytest.raises(InvalidRequestError, match="the workers of model 'demo' take tokens only"):
        plan(saved(rows()), ServedModel(make_info(), ModelText(None)))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"output": pb.OutputParams(prompt_logprobs=0)}, "output.prompt_logprobs"),
    ],
)
def test_fields_that_need_prompt_tokens_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match="has positions without a token; leave the field unset") as caught:
        plan(saved(rows()), **fields)
    assert caught.value.field == field


def test_embeddings_cannot_be_tokenized() -> None:
    with pytest.raises(InvalidRequestError, match="embeddings has no tokens"):
        check_tokenize(pb.TokenizeRequest(prompt=pb.Prompt(embeddings=saved(rows()))))


# -- finite values -----------------------------------------------------------------------------------------------------

LETTERS = {"float32": "f", "float16": "e"}


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.sampled_from(sorted(FORMATS)))
def test_numbers_are_finite_if_struct_says_so(bits: list[int], dtype: str) -> None:
    size = FORMATS[dtype][0]
    numbers = [word >> (32 - 8 * size) for word in bits]
    data = b"".join(number.to_bytes(size, "little") for number in numbers)
    if dtype == "bfloat16":
        values = [struct.unpack("<f", (number << 16).to_bytes(4, "little"))[0] for number in numbers]
    else:
        values = struct.unpack(f"<{len(numbers)}{LETTERS[dtype]}", data)
    assert is_finite(data, dtype) == all(map(math.isfinite, values))


@pytest.mark.parametrize("position", [0, PIECE_BYTES // 4 - 1, PIECE_BYTES // 4, 3 * PIECE_BYTES // 4 + 5])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_bad_number_is_found_anywhere(position: int, value: float) -> None:
    values = np.full(PIECE_BYTES + 3, -3.4e38, np.float32)
    assert is_finite(values.tobytes(), "float32")
    values[position] = value
    assert not is_finite(values.tobytes(), "float32")


# -- clients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_sdk_writes_what_the_gateway_reads(dtype: Any) -> None:
    values = rows().numpy().astype(dtype)
    request = generate_request(PromptEmbeddings.of(values), None, None, {})
    (carried,) = read_embeddings(request.prompt.embeddings, MODEL).inputs
    assert carried.data == values.tobytes()
    assert torch.equal(safetensors.torch.load(request.prompt.embeddings)["prompt"], torch.from_numpy(values))


@pytest.mark.parametrize("values", [np.zeros((2, 3)), np.zeros(3, np.float32), np.zeros((4, 4), np.float32)[:, ::2]])
def test_the_sdk_refuses_other_arrays(values: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a contiguous little-endian array of float32 or float16"):
        PromptEmbeddings.of(values)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "demo", **fields}).encode()


def test_http_prompts_come_after_embeddings() -> None:
    texts = [base64.b64encode(data).decode() for data in (b"one", b"two")]
    one = completion_generation(body(prompt_embeds=texts[0])).requests
    assert [request.prompt for request in one] == [pb.Prompt(embeddings=b"one")]
    both = completion_generation(body(prompt_embeds=texts, prompt=["a", [5]])).requests
    assert [request.prompt.WhichOneof("kind") for request in both] == ["embeddings", "embeddings", "text", "tokens"]
    assert [request.prompt.embeddings for request in both[:2]] == [b"one", b"two"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_embeds": "%%"}, "prompt_embeds is not base64"),
        ({"prompt_embeds": []}, "prompt_embeds must be a base64 string or a list"),
        ({"prompt_embeds": 7}, "prompt_embeds must be a base64 string or a list"),
        ({"prompt_embeds": [7]}, "prompt_embeds is 7; must be a string"),
        ({"prompt_embeds": "YQ==", "echo": True}, "echo is true, but prompt_embeds have no text"),
        ({"prompt_embeds": ["YQ=="] * 1000, "prompt": ["a"] * 25}, "have 1025 prompts; at most 1024"),
    ],
)
def test_bad_http_embeddings_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion_generation(body(**fields))
    assert words in caught.value.message
