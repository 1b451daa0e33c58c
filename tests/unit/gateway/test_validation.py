"""Status code and message of invalid requests: one row per field and limit."""

from __future__ import annotations

import math
import threading
from typing import Any

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request import field_errors, resume, validation
from gateway_svc.request.models import ServedModel, read_bundle
from gateway_svc.request.plan import GenerationPlan, plan_generation
from gateway_svc.request.prompts import readers
from gateway_svc.request.prompts.reader import PromptInput
from gateway_svc.request.prompts.readers import check_prompt_size
from gateway_svc.text.bundle import ModelText
from svc_common.errors import InvalidRequestError
from tests.unit.gateway.fakes import FakeScheduler, TestGateway, make_bundle, make_info, refused
from tests.unit.gateway.rendering import prompt_ids

INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
TOKENS = pb.Prompt(tokens=types.TokenIds(ids=[5, 6, 7]))
SP, ST, OUT, SCHED = types.SamplingParams, types.StopParams, pb.OutputParams, pb.SchedulingParams


def chat(**fields: Any) -> pb.Prompt:
    fields.setdefault("messages", [pb.ChatMessage(role="user", content="x")])
    return pb.Prompt(chat=pb.Chat(**fields))


def continuation(*samples: types.SampleState) -> types.Continuation:
    return types.Continuation(samples=samples)


def ids(count: int) -> pb.Prompt:
    return pb.Prompt(tokens=types.TokenIds(ids=[5] * count))


STATE = types.SampleState
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"request_id": "has space"}, "request_id", "'has space'"),
    ({"request_id": "x" * 65}, "request_id", "64 characters"),
    ({"prompt": pb.Prompt()}, "prompt", "not set"),
    ({"prompt": pb.Prompt(text="")}, "prompt.text", "is empty"),
    ({"prompt": ids(0)}, "prompt.tokens.ids", "is empty"),
    ({"prompt": pb.Prompt(tokens=types.TokenIds(ids=[5, 500]))}, "prompt", "500 at position 1; vocab_size is 500"),
    ({"prompt": pb.Prompt(chat=pb.Chat())}, "prompt.chat.messages", "is empty"),
    ({"prompt": chat(messages=[pb.ChatMessage(role="robot")])}, "prompt.chat.messages[0].role", "'robot'"),
    (
        {"prompt": chat(messages=[pb.ChatMessage(role="robot")] * 10_001)},
        "prompt.chat.messages",
        "10001 messages; at most 10000",
    ),
    ({"prompt": chat(template_kwargs_json="{")}, "prompt.chat.template_kwargs_json", "not JSON"),
    ({"prompt": chat(template_kwargs_json="[]")}, "prompt.chat.template_kwargs_json", "must be an object"),
    ({"prompt": chat(template_kwargs_json='"\\ud800"')}, "prompt.chat.template_kwargs_json", "not JSON"),
    ({"prompt": chat(template_kwargs_json="[" * 50_000)}, "prompt.chat.template_kwargs_json", "not JSON"),
    ({"prompt": chat(tools_json="[" * 2_000_000)}, "prompt.chat", "2000019 bytes"),
    ({"prompt": chat(template_kwargs_json='{"tools": 1}')}, "prompt.chat", "'tools' is set by the server"),
    ({"prompt": chat(tools_json="{}")}, "prompt.chat.tools_json", "must be an array"),
    ({"prompt": ids(257)}, "prompt", "257 tokens; max_model_len is 256"),
    ({"prompt": ids(256)}, "prompt", "256 tokens; max_model_len is 256"),
    ({"prompt": pb.Prompt(text="x" * 2_000_000)}, "prompt.text", "bytes"),
    ({"prompt": pb.Prompt(text="word " * 500)}, "prompt", "shorten the prompt"),
    ({"sampling": SP(temperature=math.nan)}, "sampling.temperature", "is nan; must be a number from 0 to 2"),
    ({"sampling": SP(temperature=-0.1)}, "sampling.temperature", "is -0.1"),
    ({"sampling": SP(temperature=2.1)}, "sampling.temperature", "is 2.1"),
    ({"sampling": SP(temperature=math.inf)}, "sampling.temperature", "is inf"),
    ({"sampling": SP(top_p=0)}, "sampling.top_p", "above 0"),
    ({"sampling": SP(top_p=1.5)}, "sampling.top_p", "is 1.5"),
    ({"sampling": SP(top_p=math.nan)}, "sampling.top_p", "is nan"),
    ({"sampling": SP(min_p=-1)}, "sampling.min_p", "is -1"),
    ({"sampling": SP(top_a=1.5)}, "sampling.top_a", "is 1.5"),
    ({"sampling": SP(min_p=math.nan)}, "sampling.min_p", "is nan"),
    ({"sampling": SP(n=0)}, "sampling.n", "at least 1"),
    ({"sampling": SP(n=9)}, "sampling.n", "at most 8"),
    ({"sampling": SP(repetition_penalty=0)}, "sampling.repetition_penalty", "is 0; must be a number from 0.01 to 100"),
    ({"sampling": SP(repetition_penalty=math.nan)}, "sampling.repetition_penalty", "is nan"),
    ({"sampling": SP(frequency_penalty=2.1)}, "sampling.frequency_penalty", "is 2.1; must be a number from -2 to 2"),
    ({"sampling": SP(presence_penalty=-2.1)}, "sampling.presence_penalty", "is -2.1"),
    ({"sampling": SP(logit_bias={5: 100.5})}, "sampling.logit_bias[5]", "is 100.5; must be a number from -100 to 100"),
    ({"sampling": SP(logit_bias={5: math.nan})}, "sampling.logit_bias[5]", "is nan"),
    ({"sampling": SP(logit_bias={500: 1})}, "sampling.logit_bias", "contains 500; ids must be below vocab_size 500"),
    ({"sampling": SP(logit_bias=dict.fromkeys(range(1025), 1))}, "sampling.logit_bias", "1025 ids; at most 1024"),
    ({"sampling": SP(allowed_token_ids=[3, 500])}, "sampling.allowed_token_ids", "contains 500"),
    ({"sampling": SP(allowed_token_ids=[3] * 65537)}, "sampling.allowed_token_ids", "65537 ids; at most 65536"),
    ({"sampling": SP(banned_token_ids=[500])}, "sampling.banned_token_ids", "contains 500"),
    ({"sampling": SP(banned_token_ids=[3] * 1025)}, "sampling.banned_token_ids", "1025 ids; at most 1024"),
    ({"sampling": SP(banned_token_ids=range(500))}, "sampling.banned_token_ids", "ban all 500 ids"),
    (
        {"sampling": SP(allowed_token_ids=[3, 4, 4], banned_token_ids=[4, 3])},
        "sampling.allowed_token_ids",
        "allows 2 ids, but .* ban all of them",
    ),
    (
        {"sampling": SP(allowed_token_ids=[7]), "stop": ST(min_tokens=1, stop_token_ids=[7])},
        "sampling.allowed_token_ids",
        "min_tokens",
    ),
    ({"sampling": SP(bad_words=["a", ""])}, "sampling.bad_words[1]", "is empty"),
    ({"sampling": SP(bad_words=["a"] * 129)}, "sampling.bad_words", "129 strings; at most 128"),
    ({"sampling": SP(bad_words=["a" * 129])}, "sampling.bad_words[0]", "129 characters; at most 128"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "is 0; must be at least 1"),
    ({"truncate_prompt_tokens": 257, "prompt": ids(300)}, "prompt", "257 tokens; max_model_len is 256"),
    (
        {"truncate_prompt_tokens": 1, "prompt": pb.Prompt(text="x" * (5 << 20))},
        "prompt",
        "with truncate_prompt_tokens at most 4194304 are allowed",
    ),
    ({"stop": ST(max_tokens=254)}, "stop.max_tokens", "length 3, so the sum is 257, .* 256: ask for at most 253"),
    ({"stop": ST(max_tokens=4, min_tokens=5)}, "stop.min_tokens", "is 5; must be at most stop.max_tokens, 4"),
    ({"stop": ST(min_tokens=254)}, "stop.min_tokens", "is 254; must be at most stop.max_tokens, 253"),
    ({"stop": ST(max_tokens=0, min_tokens=1)}, "stop.min_tokens", "is 1; must be at most stop.max_tokens, 0"),
    ({"stop": ST(stop=["a", ""])}, "stop.stop[1]", "is empty"),
    ({"stop": ST(stop=["a"] * 17)}, "stop.stop", "17 strings; at most 16"),
    ({"stop": ST(stop=["a" * 257])}, "stop.stop[0]", "257 characters; at most 256"),
    ({"stop": ST(stop_token_ids=[500])}, "stop.stop_token_ids", "vocab_size is 500"),
    ({"stop": ST(stop_token_ids=[1] * 257)}, "stop.stop_token_ids", "at most 256"),
    ({"scheduling": SCHED(priority=1001)}, "scheduling.priority", "is 1001"),
    ({"scheduling": SCHED(priority=-1001)}, "scheduling.priority", "is -1001"),
    ({"scheduling": SCHED(cache_salt="é" * 65)}, "scheduling.cache_salt", "130 bytes; at most 128"),
    ({"scheduling": SCHED(determinism=2)}, "scheduling.determinism", "EXACT.*BEST_EFFORT"),
    ({"scheduling": SCHED(determinism=9)}, "scheduling.determinism", "is 9"),  # type: ignore[arg-type]
    ({"continuation": continuation(STATE(index=1))}, "continuation.samples[0].index", "sampling.n is 1"),
    ({"continuation": continuation(STATE(), STATE())}, "continuation.samples", "2 entries; sampling.n is 1"),
    (
        {"continuation": continuation(STATE(), STATE()), "sampling": SP(n=2)},
        "continuation.samples[1].index",
        "earlier entry",
    ),
    (
        {"continuation": continuation(STATE(output_token_ids=[500])), "sampling": SP(seed=1)},
        "continuation.samples[0].output_token_ids",
        "vocab_size is 500",
    ),
    (
        {"continuation": continuation(STATE(output_token_ids=[5, 5])), "stop": ST(max_tokens=1)},
        "continuation.samples[0].output_token_ids",
        "2 ids; max_tokens is 1",
    ),
    ({"continuation": continuation(STATE(output_token_ids=[5]))}, "sampling.seed", "Accepted"),
    ({"sampling": SP(beam_width=7)}, "sampling.beam_width", "must be at most 6, three quarters of a worker's rows"),
    ({"sampling": SP(beam_width=65)}, "sampling.beam_width", "from 0 to 64"),
    ({"sampling": SP(beam_width=2, n=3)}, "sampling.n", "at most sampling.beam_width, 2"),
    ({"sampling": SP(beam_width=2, temperature=0)}, "sampling.temperature", "is 0, and sampling.beam_width is 2"),
    ({"sampling": SP(beam_width=2, regex="a")}, "sampling.regex", "is set, and sampling.beam_width is 2"),
    ({"sampling": SP(beam_width=2), "stop": ST(stop=["x"])}, "stop.stop", "unset one"),
    ({"sampling": SP(beam_width=2), "stop": ST(max_tokens=0)}, "stop.max_tokens", "at least 1 with"),
    ({"sampling": SP(beam_width=1, length_penalty=1)}, "sampling.length_penalty", "beam_width of at least 2"),
    ({"sampling": SP(early_stopping=2)}, "sampling.early_stopping", "beam_width of at least 2"),
    ({"sampling": SP(beam_width=2, length_penalty=11)}, "sampling.length_penalty", "from -10 to 10"),
    ({"sampling": SP(best_of=0)}, "sampling.best_of", "is 0; must be from 1 to 20"),
    ({"sampling": SP(best_of=21)}, "sampling.best_of", "is 21; must be from 1 to 20"),
    ({"sampling": SP(best_of=9)}, "sampling.best_of", "is 9; a worker of this model runs at most 8 samples at once"),
    ({"sampling": SP(best_of=2, n=3)}, "sampling.best_of", "is 2; must be at least sampling.n, 3"),
    ({"sampling": SP(best_of=3, beam_width=3)}, "sampling.best_of", "is 3, and sampling.beam_width is 3"),
    (
        {"sampling": SP(best_of=3), "continuation": continuation(STATE(output_token_ids=[5]))},
        "sampling.seed",
        "Accepted",
    ),
    (
        {"sampling": SP(best_of=3), "continuation": continuation(STATE(index=1))},
        "continuation.samples[0].index",
        "is 1; sampling.n is 1",
    ),
    ({"sampling": SP(regex="a", json_object=True)}, "sampling.regex", "together with json_object; set only one"),
    ({"sampling": SP(regex="")}, "sampling.regex", "is empty; leave it unset"),
    ({"sampling": SP(regex="a" * (1 << 17) + "a")}, "sampling.regex", "131073 bytes; at most 131072"),
    ({"sampling": SP(choice=["a"] * 1025)}, "sampling.choice", "1025 strings; at most 1024"),
    ({"sampling": SP(choice=["a", ""])}, "sampling.choice[1]", "is empty"),
    ({"sampling": SP(choice=["a" * 1024] * 129)}, "sampling.choice", "132096 bytes; at most 131072"),
    ({"output": OUT(logprobs=129)}, "output.logprobs", "is 129; must be from 0 to 128"),
    ({"output": OUT(prompt_logprobs=129)}, "output.prompt_logprobs", "is 129; must be from 0 to 128"),
    (
        {"continuation": continuation(STATE(cumulative_logprob=float("nan")))},
        "continuation.samples[0].cumulative_logprob",
        "is nan; must be a finite number",
    ),
    (
        {"continuation": types.Continuation(num_prompt_logprobs=257), "prompt": ids(256), "stop": ST(max_tokens=0)},
        "continuation.num_prompt_logprobs",
        "is 257; must be at most 256, the length of the prompt",
    ),
]
GOOD: list[dict[str, Any]] = [
    {"request_id": "A-z.0_9:" * 8},
    {"sampling": SP(temperature=0, top_p=1, top_k=0, min_p=0, n=8, seed=2**64 - 1)},
    {"sampling": SP(temperature=2, min_p=1, top_k=2**32 - 1, top_p=1e-6)},
    {"sampling": SP(repetition_penalty=1, frequency_penalty=0, presence_penalty=0, beam_width=0)},
    {"sampling": SP(repetition_penalty=100, frequency_penalty=-2, presence_penalty=2, logit_bias={499: 100, 0: -100})},
    {"sampling": SP(allowed_token_ids=[0, 499], banned_token_ids=[0], bad_words=["x" * 128] * 128)},
    {"sampling": SP(banned_token_ids=range(499))},
    {"sampling": SP(beam_width=6, n=6, length_penalty=-10, early_stopping=3)},
    {"sampling": SP(beam_width=1, temperature=1)},
    {"sampling": SP(n=8, best_of=8, beam_width=0)},
    {"sampling": SP(best_of=8, temperature=0), "stop": ST(max_tokens=0)},
    {"truncate_prompt_tokens": 3, "prompt": ids(100_000)},
    {"truncate_prompt_tokens": 2**32 - 1},
    {"stop": ST(min_tokens=0, max_tokens=253, stop=["a" * 256] * 16, stop_token_ids=[499])},
    {"stop": ST(max_tokens=0), "prompt": ids(256)},
    {"stop": ST(min_tokens=253)},
    {"stop": ST(min_tokens=7, max_tokens=7, stop_token_ids=[499])},
    {"scheduling": SCHED(priority=-1000, cache_salt="s" * 128, determinism=1)},
    {"continuation": continuation(STATE(output_token_ids=[5])), "sampling": SP(temperature=0)},
    {"output": OUT(logprobs=0, prompt_logprobs=128)},
    {"prompt": pb.Prompt(text="Hello")},
    {"prompt": chat(template_kwargs_json='{"a": 1}', tools_json="[]")},
]


@pytest.fixture(scope="module")
def model(bundle: bytes) -> ServedModel:
    info = make_info(bundle)
    return ServedModel(info, read_bundle(bundle, info.bundle_digest))


def plan(fields: dict[str, Any], model: ServedModel) -> GenerationPlan:
    """The checks of the servicer before it submits a request."""
    request = pb.GenerateRequest(**{"prompt": TOKENS, **fields})
    validation.check_request_id(request.request_id)
    validation.check_generate(request, validation.RequestLimits(max_logprobs=1 << 32))
    check_prompt_size(request, model)
    return plan_generation(
        request, model, PromptInput(prompt_ids(request.prompt, model)), request_id="r", drawn_seed=99
    )


@pytest.mark.parametrize(("fields", "field", "words"), BAD, ids=[f"{row[1]}-{i}" for i, row in enumerate(BAD)])
def test_a_bad_value_is_refused_with_field_and_limit(
    model: ServedModel, fields: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        plan(fields, model)
    assert caught.value.field == field
    assert caught.value.message.startswith(field)


@pytest.mark.parametrize("fields", GOOD, ids=range(len(GOOD)))
def test_values_at_the_limits_pass(model: ServedModel, fields: dict[str, Any]) -> None:
    plan(fields, model)


def test_a_truncated_prompt_keeps_its_last_tokens(model: ServedModel) -> None:
    assert plan({"truncate_prompt_tokens": 2}, model).prompt.ids.tolist() == [6, 7]
    assert plan({"truncate_prompt_tokens": 3}, model).prompt.ids.tolist() == [5, 6, 7]
    assert plan({"truncate_prompt_tokens": 9}, model).prompt.ids.tolist() == [5, 6, 7]


def test_bad_words_are_tokenized_with_and_without_a_leading_space(model: ServedModel) -> None:
    tokenizer = model.require_tokenizer("")
    words = plan({"sampling": SP(bad_words=["Hello", "  Hello", " "])}, model).sampling.bad_words_ids
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in words]
    assert texts == ["Hello", " Hello", " ", "  "]


def test_bad_words_need_a_tokenizer(model: ServedModel) -> None:
    with pytest.raises(InvalidRequestError, match="has no tokenizer"):
        plan({"sampling": SP(bad_words=["a"])}, ServedModel(model.info, ModelText(None)))


def test_the_ids_of_a_continuation_are_limited_together(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MAX_CONTINUATION_IDS", 5)
    sample = [5, 5, 5]
    fields = {"sampling": SP(n=2, seed=1), "continuation": continuation(STATE(output_token_ids=sample))}
    assert [len(output) for output in plan(fields, model).resume.outputs] == [3, 0]
    fields["continuation"].samples.add(index=1, output_token_ids=sample)
    with pytest.raises(InvalidRequestError, match="6 output_token_ids together; at most 5"):
        plan(fields, model)


def test_a_pool_smaller_than_the_model_length_is_the_limit(bundle: bytes, model: ServedModel) -> None:
    small = ServedModel(make_info(bundle, max_num_blocks=4), model.text)
    with pytest.raises(InvalidRequestError, match=r"KV pool .* is 65: ask for at most 62"):
        plan({"stop": ST(max_tokens=63)}, small)
    assert plan({}, small).sampling.stop.max_tokens == 62
    in_window = ServedModel(make_info(bundle, max_num_blocks=4, attention_window=49), model.text)
    assert plan({"stop": ST(max_tokens=63)}, in_window).sampling.stop.max_tokens == 63


def test_defaults_come_from_request_then_model_then_protocol(bundle: bytes) -> None:
    info = make_info(bundle, default_sampling=SP(temperature=0.5, top_k=20, top_p=0.7, seed=3, n=2))
    sampling = plan({"sampling": SP(top_k=5)}, ServedModel(info, ModelText(None))).sampling.params
    assert (sampling.temperature, sampling.top_k, round(sampling.top_p, 3), sampling.min_p) == (0.5, 5, 0.7, 0)
    assert (sampling.seed, sampling.n) == (99, 1)


def test_an_explicit_zero_is_not_replaced_by_a_default(bundle: bytes) -> None:
    model = ServedModel(make_info(bundle, default_sampling=SP(temperature=0.5, top_k=20)), ModelText(None))
    sampling = plan({"sampling": SP(temperature=0, top_k=0, seed=0)}, model).sampling.params
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0, 0, 0)


@pytest.mark.parametrize("fields", [{"prompt": pb.Prompt(text="x")}, {"prompt": chat()}, {"stop": ST(stop=["x"])}])
def test_a_model_without_tokenizer_accepts_ids_only(fields: dict[str, Any]) -> None:
    model = ServedModel(make_info(), ModelText(None))
    assert not plan({}, model).output.wants_text
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        plan(fields, model)


def test_the_error_of_a_chat_template_is_quoted() -> None:
    files = {"chat_template.jinja": b"{{ raise_exception('roles must alternate') }}"}
    bundle = make_bundle()
    full = types.ModelBundle.FromString(bundle)
    data = make_bundle({**{file.name: file.data for file in full.files}, **files})
    info = make_info(data)
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        plan({"prompt": chat()}, ServedModel(info, read_bundle(data, info.bundle_digest)))


@pytest.mark.parametrize(
    "fields", [{"sampling": SP(top_p=2)}, {"media": [b"png"]}, {"prompt": ids(300)}], ids=["bad", "new", "long"]
)
async def test_refused_requests_reach_no_scheduler_and_affect_no_other_request(
    gateway: TestGateway, scheduler: FakeScheduler, fields: dict[str, Any]
) -> None:
    error = await refused(gateway.generate(**fields))
    assert error.code() in (INVALID, UNIMPLEMENTED)
    assert scheduler.submits == []
    scheduler.play([9])
    assert (await gateway.collect()).ids() == [9]


# -- size limits of the other RPCs -------------------------------------------------------------------------------------


async def details_of(call: Any) -> str:
    """The message of a call that is refused with INVALID_ARGUMENT."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is INVALID
    return caught.value.details() or ""


@pytest.mark.parametrize(
    ("request_ids", "words"),
    [
        (["mine"] * 10_001, "request_ids has 10001 ids; at most 10000 are allowed"),
        (["mine", "x" * 65], "request_ids[1] is 'xx"),
        (["has space"], "64 characters of"),
        ([""], "request_ids[0] is ''"),
    ],
)
async def test_an_invalid_abort_ends_no_request(
    gateway: TestGateway, scheduler: FakeScheduler, request_ids: list[str], words: str
) -> None:
    call = gateway.generate(request_id="mine")
    await call.read()
    assert words in await details_of(gateway.stub.Abort(pb.AbortRequest(request_ids=request_ids)))
    assert (scheduler.asked_to_abort, scheduler.cancels) == ([], [])


async def test_too_large_texts_and_ids_are_refused_before_they_are_read(
    gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_DETOKENIZE_IDS", 3)
    monkeypatch.setattr(readers, "MAX_TOKENIZE_BYTES", 10)
    ids_call = gateway.stub.Detokenize(pb.DetokenizeRequest(ids=[500] * 4))
    assert "ids has 4 ids; Detokenize accepts at most 3" in await details_of(ids_call)
    prompt = chat(messages=[pb.ChatMessage(role="no such role")])
    text_call = gateway.stub.Tokenize(pb.TokenizeRequest(prompt=prompt))
    assert "Tokenize accepts at most 10: send it in parts" in await details_of(text_call)


async def test_many_ids_are_read_in_a_thread(
    gateway: TestGateway, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    check = field_errors.check_token_ids

    def note(*args: Any) -> None:
        threads.append(threading.current_thread())
        check(*args)

    monkeypatch.setattr(readers, "check_token_ids", note)
    monkeypatch.setattr(resume, "check_token_ids", note)
    scheduler.play([300] * 200)
    await gateway.stub.Detokenize(pb.DetokenizeRequest(ids=[300] * 1000))
    samples = [STATE(index=i, output_token_ids=[300] * 100) for i in range(8)]
    await gateway.collect(sampling=SP(n=8, seed=1), continuation=continuation(*samples))
    assert len(threads) >= 9
    assert threading.main_thread() not in threads
