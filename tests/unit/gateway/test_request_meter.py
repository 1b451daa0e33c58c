"""The measurements of one request."""

from __future__ import annotations

import asyncio
import logging

import pytest
from quire.v1 import types_pb2 as types

from gateway_svc.answer.open_streams import GatewayMetrics, ModelTimes, RequestMeter
from svc_common.errors import UnavailableError


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_tokens_that_arrive_together_share_the_time(clock: Clock) -> None:
    times = ModelTimes()
    meter = RequestMeter("r", "m", times, clock)
    meter.on_accepted(7, resumes=False)
    meter.on_tokens(0, 2, 10.5)
    meter.on_tokens(1, 1, 10.6)
    meter.on_tokens(0, 4, 10.9)
    clock.now = 12.0
    meter.on_finished(types.FINISH_REASON_EOS)
    meter.end()
    assert (sum(times.ttft.counts), times.ttft.total) == (1, pytest.approx(0.5))
    assert (sum(times.itl.counts), times.itl.total) == (4, pytest.approx(0.4))
    assert times.e2e.total == pytest.approx(2.0)
    assert times.per_token.total == pytest.approx(0.4 / 5)  # five of the seven tokens are not the first of a sample
    assert (times.prompt_tokens, times.output_tokens, times.num_resumed) == (7, 7, 0)
    assert times.ends == {"eos": 1}


async def test_every_request_ends_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gateway_svc.answer.open_streams")
    metrics = GatewayMetrics()

    async def serve(request_id: str, reason: types.FinishReason.ValueType | None, error: BaseException | None) -> None:
        with metrics.request(request_id, "m") as meter:
            if reason is not None:
                meter.on_finished(reason)
            if error is not None:
                raise error

    await serve("a", types.FINISH_REASON_LENGTH, None)
    with pytest.raises(UnavailableError):
        await serve("b", None, UnavailableError("away"))
    with pytest.raises(asyncio.CancelledError):
        await serve("c", types.FINISH_REASON_STOP, asyncio.CancelledError())
    with pytest.raises(GeneratorExit):
        await serve("d", None, GeneratorExit())
    assert metrics.models["m"].ends == {"length": 1, "failed": 1, "cancelled": 2}
    assert [(record.__dict__["request_id"], record.__dict__["reason"]) for record in caplog.records] == [
        ("a", "length"),
        ("b", "failed"),
        ("c", "cancelled"),
        ("d", "cancelled"),
    ]
