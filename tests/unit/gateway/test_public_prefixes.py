"""Public prefixes: tenants share the full blocks of a configured prefix and none after it, in gateway and scheduler."""

from __future__ import annotations

import logging
from array import array
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.callers.caller import tenant_salt
from gateway_svc.flags import make_parser
from gateway_svc.request.models import ServedModel
from gateway_svc.request.plan import GenerationPlan, plan_generation
from gateway_svc.request.prompts.reader import PromptInput
from gateway_svc.request.public_prefixes import num_public_tokens, public_prefixes
from gateway_svc.schedulers.submitter import chain_of
from gateway_svc.schedulers.wire import submit_from_plan
from gateway_svc.text.bundle import ModelText, Tokenizer
from prefix_index.hashing import extend_digests, root_digest
from scheduler_svc.core.prompt_digests import PromptDigests
from scheduler_svc.gateways.submits import SubmitReader
from scheduler_svc.workers.wire import root_salt
from svc_common import config
from svc_common.config import SettingError
from tests.unit.gateway.fakes import ADAPTER_DIGEST, make_info
from tests.unit.gateway.tokenizer_kinds import bundle_files, byte_level

SIZE = 2  # tokens per block
TOKENS = st.lists(st.sampled_from([5, 5, 5, 6]), max_size=11)
PREFIXES = st.lists(TOKENS, min_size=1, max_size=3)
# Tenant, own salt, prefix with which the prompt begins, tokens of it, other tokens.
REQUESTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["", "", "own"]), st.integers(0, 2), st.integers(0, 11), TOKENS),
    min_size=2,
    max_size=6,
)
MODEL = ServedModel(make_info(block_size=SIZE), ModelText(None))


def planned(prompt: list[int], model: ServedModel, tenant: str, own: str) -> GenerationPlan:
    request = pb.GenerateRequest(scheduling={"cache_salt": own})
    salt = tenant_salt(tenant, own)
    return plan_generation(request, model, PromptInput(prompt), request_id="r", drawn_seed=1, cache_salt=salt)


def digests_of(plan: GenerationPlan, memo: PromptDigests) -> list[bytes]:
    """The digests of a prompt, which gateway, queue and rows of the scheduler compute on their own."""
    info = plan.model.info
    group = SubmitReader(info).group(submit_from_plan(plan, request_id="r"), owner=0)
    keys, found = group.features.block_keys(SIZE), list[list[bytes]]([[], []])
    memo.extend(found[0], group.prompt, group.root_key, SIZE, keys)
    extend_digests(found[1], root_digest(root_salt(info), SIZE, group.root_key), group.prompt, SIZE, keys)
    assert found == [chain_of(plan)] * 2
    return found[0]


def in_common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(PREFIXES, REQUESTS)
def test_tenants_share_the_full_blocks_of_a_prefix_and_no_other(
    prefixes: list[list[int]], requests: list[tuple[str, str, int, int, list[int]]]
) -> None:
    model = replace(MODEL, public_prefixes=tuple(array("I", ids) for ids in prefixes))
    memo, sent = PromptDigests(root_salt(model.info)), []
    for tenant, own, which, length, others in requests:
        prompt = prefixes[which % len(prefixes)][:length] + others or [7]
        num_public = 0 if own else max(in_common(prompt, prefix) for prefix in prefixes) // SIZE
        sent.append((tenant, own, prompt, num_public, digests_of(planned(prompt, model, tenant, own), memo)))
    for (*owner, prompt, num_public, found), (*other_owner, other_prompt, other_public, other) in combinations(sent, 2):
        num_equal = in_common(prompt, other_prompt) // SIZE
        shared = num_equal if owner == other_owner else min(num_equal, num_public, other_public)
        assert [a == b for a, b in zip(found, other, strict=False)][:num_equal] == [
            i < shared for i in range(num_equal)
        ]
        assert not set(found[shared:]) & set(other[shared:])


@pytest.mark.parametrize(
    ("info", "salt", "expected"),
    [
        ({}, tenant_salt("a", ""), 7),
        ({}, "", 0),  # tenants are not isolated
        ({"encoder": types.EncoderInfo(max_tokens=40, max_decoder_tokens=20, decoder_start_ids=[3])},
            tenant_salt("a", ""), 0),
    ],
)  # fmt: skip
def test_only_prompts_of_decoders_with_isolated_tenants_have_a_public_prefix(
    info: dict[str, Any], salt: str, expected: int
) -> None:
    model = replace(MODEL, info=make_info(block_size=SIZE, **info), public_prefixes=(array("I", [5] * 7),))
    request = pb.GenerateRequest()
    prompt = PromptInput([5] * 9)
    plan = plan_generation(request, model, prompt, request_id="r", drawn_seed=1, cache_salt=salt)
    assert submit_from_plan(plan, request_id="r").num_public_tokens == expected


def test_requests_with_an_adapter_share_a_prefix_with_requests_of_the_same_adapter_only() -> None:
    model = replace(MODEL, public_prefixes=(array("I", [5] * 6),))
    adapted = replace(model, adapter=types.AdapterInfo(name="x", digest=ADAPTER_DIGEST))
    memo = PromptDigests(root_salt(model.info))
    of = [digests_of(planned([5] * 9, one, tenant, ""), memo) for one in (model, adapted) for tenant in "ab"]
    assert [of[0][:3] == of[1][:3], of[2][:3] == of[3][:3]] == [True, True]
    assert len(set().union(*of)) == 2 * (3 + 2)


@pytest.mark.parametrize("length", [0, 1, 6, 7, 40, 1000])
def test_the_number_of_tokens_in_common(length: int) -> None:
    rng = np.random.default_rng(length)
    prefix = array("I", rng.integers(0, 9, 40).tolist())
    prompt = prefix[:length] + array("I", [9] * 3)
    assert num_public_tokens(prompt, (array("I", [10]), prefix, prefix[:3])) == min(length, 40)
    assert num_public_tokens(prompt[:5], (prefix,)) == min(length, 5)
    assert num_public_tokens(prompt, ()) == 0


async def test_texts_of_the_flag_become_tokens_of_their_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, text in (("long", "You are a bot."), ("short", "You")):
        (tmp_path / name).write_text(text)
    words = [word for name in ("long", "short") for word in ("--public-prefix", f"demo={tmp_path / name}")]
    found = public_prefixes(config.parse(make_parser(), ["--scheduler", "a:1", *words]))
    tokenizer = Tokenizer.from_files(bundle_files(byte_level()))
    ids = await found.ids_of(make_info(), tokenizer)
    assert [list(one) for one in ids] == [
        tokenizer.encode(text, add_special_tokens=False) for text in ("You are a bot.", "You")
    ]
    assert await found.ids_of(make_info(model="other"), tokenizer) == ()
    with caplog.at_level(logging.WARNING):
        assert await found.ids_of(make_info(), None) == ()
    assert "no effect" in caplog.text


@pytest.mark.parametrize("value", ["demo", "=file", "demo=", "demo=/does/not/exist"])
def test_a_wrong_flag_is_refused(value: str) -> None:
    args = config.parse(make_parser(), ["--scheduler", "a:1", "--public-prefix", value])
    with pytest.raises(SettingError, match="--public-prefix"):
        public_prefixes(args)
