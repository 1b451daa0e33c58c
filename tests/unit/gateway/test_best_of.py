"""best_of over real gRPC with a fake scheduler: which samples are sent, in which order, when, and what a client that
resumes gets."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from quire.internal.v1 import logprobs_pb2
from quire.internal.v1 import scheduler_pb2 as internal
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from tests.unit.gateway.fakes import (
    ABORTED,
    LENGTH,
    STOP,
    FakeScheduler,
    Result,
    TestGateway,
    digest_of,
    refused,
    rest,
    u32,
    until,
)
from tests.unit.gateway.tokenizer_kinds import byte_level

TOKENIZER = byte_level()
SP = types.SamplingParams
OUTPUTS = ([20, 21], [30, 31, 32], [40, 41], [50, 51])
LOGPROBS = ([-1.0, -2.0], [-0.5, -0.25, -0.25], [-3.0, -4.0], [-2.5, -0.5])  # sums -3, -1, -7, -3
BEST = [1, 0, 3, 2]  # samples 0 and 3 have equal sums


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def scored(sample: int, ids: Sequence[int], logprobs: Sequence[float], *, offset: int = 0, num_top: int = 0) -> Any:
    """The columns of tokens with these log probabilities; the most likely tokens of token t are t + 1, t + 2, ..."""
    entries = [entry for value in logprobs for entry in (value, *[value / 2] * num_top)]
    return internal.Deltas(
        sample_indices=u32([sample] * len(ids)), offsets=u32(range(offset, offset + len(ids))), token_ids=u32(ids),
        logprobs=logprobs_pb2.LogprobColumns(
            lens=u32([1 + num_top] * len(ids)), logprobs=array("f", entries).tobytes(),
            token_ids=u32([id_ + i for id_ in ids for i in range(1 + num_top)]), ranks=u32([1] * len(ids)),
        ),
    )  # fmt: skip


def send(
    scheduler: FakeScheduler, submit: internal.Submit, sample: int, ids: Sequence[int], logprobs: Sequence[float],
    *, reason: int | None = LENGTH, **options: Any,
) -> None:  # fmt: skip
    """Send tokens of a sample, and its end if there is a `reason`."""
    deltas = scored(sample, ids, logprobs, **options)
    deltas.handles = u32([submit.handle] * len(ids))
    if reason is not None:
        usage = types.Usage(cached_tokens=3)
        deltas.finished.add(handle=submit.handle, sample_index=sample, reason=reason, usage=usage)
    scheduler.say(deltas=deltas)


def play(scheduler: FakeScheduler, num_top: int = 0, reasons: Sequence[int] = (LENGTH,) * 4) -> None:
    """Answer all requests with OUTPUTS, from the position that a Submit has."""

    def on_submit(submit: internal.Submit) -> None:
        have = {state.index: len(state.output_token_ids) for state in submit.continuation.samples}
        for sample in range(submit.sampling.n):
            start = have.get(sample, 0)
            ids, logprobs = OUTPUTS[sample][start:], LOGPROBS[sample][start:]
            send(scheduler, submit, sample, ids, logprobs, offset=start, num_top=num_top, reason=reasons[sample])

    scheduler.on_submit = on_submit


def outputs(result: Result) -> list[list[int]]:
    return [result.ids(index) for index in range(len(result.finished))]


async def test_the_best_samples_are_sent_in_order(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    play(scheduler)
    result = await gateway.collect(sampling=SP(n=3, best_of=4))
    submit = scheduler.submits[0]
    assert (submit.sampling.n, submit.sampling.HasField("best_of"), submit.logprobs) == (4, False, 0)
    assert submit.HasField("logprobs")
    assert result.accepted.n == 3
    assert outputs(result) == [OUTPUTS[sample] for sample in BEST[:3]]
    assert [result.finished[i].cumulative_logprob for i in range(3)] == [-1.0, -3.0, -3.0]
    assert [result.finished[i].output_digest for i in range(3)] == [digest_of(OUTPUTS[s]) for s in BEST[:3]]
    assert not any(chunk.HasField("logprobs") for chunk in result.chunks)
    for index in range(3):
        result.check_offsets(index)
        assert result.text(index)
    usages = [result.finished[i].usage for i in range(3)]
    assert [(usage.output_tokens, usage.discarded_tokens) for usage in usages] == [(3, 2), (2, 0), (2, 0)]
    assert [usage.cached_tokens for usage in usages] == [3, 3, 3]


async def test_nothing_is_sent_before_all_samples_have_ended(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.generate(sampling=SP(best_of=2), request_id="r")
    assert (await call.read()).accepted.n == 1
    submit = scheduler.submits[0]
    send(scheduler, submit, 0, OUTPUTS[0], LOGPROBS[0])
    send(scheduler, submit, 1, OUTPUTS[1][:2], LOGPROBS[1][:2], reason=None)
    request = gateway.clients[0].stream._by_handle[submit.handle]
    await until(lambda: len(request.samples[1].outputs) == 2)
    read = asyncio.ensure_future(call.read())
    await gateway.stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="a")))  # time for an event, if there were one
    assert not read.done()
    send(scheduler, submit, 1, OUTPUTS[1][2:], LOGPROBS[1][2:], offset=2)
    assert list((await read).chunk.token_ids) == OUTPUTS[1]
    assert (await rest(call))[-1].finished.index == 0


async def test_tokens_after_a_stop_string_do_not_count(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    whole, stopped = encode("abc"), encode("ab!cd")
    call = gateway.generate(sampling=SP(n=2, best_of=2 + 1), stop=types.StopParams(stop=["!"]))
    await call.read()
    submit = scheduler.submits[0]
    send(scheduler, submit, 1, stopped, [-0.5, -0.5, -0.5, -50.0, -50.0][: len(stopped)], reason=None)
    await until(lambda: scheduler.cancels)
    assert (scheduler.cancels[0].sample_index, scheduler.cancels[0].reason) == (1, STOP)
    send(scheduler, submit, 0, whole, [-1.0] * len(whole))
    send(scheduler, submit, 2, whole, [-2.0] * len(whole))
    result = Result([pb.GenerateResponse(accepted=pb.Accepted()), *await rest(call)])
    assert [result.text(index) for index in range(2)] == ["ab", "abc"]
    first = result.finished[0]
    assert (first.reason, first.stop, first.cumulative_logprob) == (STOP, "!", -1.5)
    assert (first.usage.output_tokens, first.usage.discarded_tokens) == (3, len(whole))


@pytest.mark.parametrize("reason", [types.FINISH_REASON_ERROR, ABORTED])
async def test_incomplete_samples_come_last(gateway: TestGateway, scheduler: FakeScheduler, reason: int) -> None:
    play(scheduler, reasons=(LENGTH, reason, LENGTH, LENGTH))
    result = await gateway.collect(sampling=SP(n=4 - 1, best_of=4))
    assert outputs(result) == [OUTPUTS[0], OUTPUTS[3], OUTPUTS[2]]


def resumed(*states: types.SampleState, **fields: Any) -> dict[str, Any]:
    sampling = SP(n=2, best_of=4, seed=1)
    return {"sampling": sampling, "request_id": "r", "continuation": types.Continuation(samples=states)} | fields


async def test_other_output_of_the_client_is_refused(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    play(scheduler)
    error = await refused(gateway.generate(**resumed(types.SampleState(index=1, output_token_ids=[99]))))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "output_token_ids of sample 1 are not the beginning of its output" in error.details()
    await until(lambda: not gateway.num_open)


async def test_log_probabilities_of_the_prompt_come_first(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.generate(sampling=SP(best_of=2), output=pb.OutputParams(prompt_logprobs=0))
    await call.read()
    submit = scheduler.submits[0]
    scheduler.say(
        deltas=internal.Deltas(
            prompt_handles=u32([submit.handle] * 2), prompt_positions=u32([1, 2]),
            prompt_logprobs=scored(0, [6, 7], [-1.0, -2.0]).logprobs,
        )
    )  # fmt: skip
    assert list((await call.read()).prompt_logprobs.token_ids) == [6, 7]
    for sample in range(2):
        send(scheduler, submit, sample, OUTPUTS[sample], LOGPROBS[sample])
    assert list((await rest(call))[0].chunk.token_ids) == OUTPUTS[1]
