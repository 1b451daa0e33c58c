"""Runs the inputs of one Embed or Score: each is a request of its own to the schedulers.

All are sent at once, so inputs of one call share the steps of the workers. Each survives the loss of its worker or
scheduler like a generation: it is computed again.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence

from quire.internal.v1 import pooling_pb2
from quire.internal.v1 import scheduler_pb2 as internal
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.callers.caller import current_caller
from gateway_svc.columns import u32_to_bytes
from gateway_svc.pooling.inputs import PooledInput
from gateway_svc.schedulers.scheduler_request import SchedulerRequest
from svc_common.errors import AbortedError, QuireError
from svc_common.tasks import cancel

MAX_OPEN = 256  # inputs of one call that are sent at the same time

Submit = Callable[[SchedulerRequest], None]


def scheduler_requests(
    inputs: Sequence[PooledInput],
    pooling: pooling_pb2.Pooling,
    scheduling: pb.SchedulingParams,
    *,
    scoped_id: str,
    cache_salt: str,
    deadline: float | None,
) -> list[SchedulerRequest]:
    """One request per input. With several inputs, the ids have a number."""
    requests = []
    for i, item in enumerate(inputs):
        submit = internal.Submit(
            request_id=scoped_id if len(inputs) == 1 else f"{scoped_id}#{i}",
            prompt_token_ids=u32_to_bytes(item.ids),
            sampling=types.SamplingParams(seed=0),
            stop=types.StopParams(max_tokens=0),
            priority=scheduling.priority,
            cache_salt=cache_salt,
            tenant_id=current_caller.get().owner or scheduling.tenant_id,
            pooling=pooling,
        )
        submit.pooling.second_text = item.second_text
        requests.append(SchedulerRequest(submit, [array("I")], [False], deadline=deadline))
    return requests


async def pooled_numbers(requests: Sequence[SchedulerRequest], submit: Submit) -> list[array[float]]:
    """The numbers of all requests, in order. Raises the first failure and cancels the others."""
    gate = asyncio.Semaphore(MAX_OPEN)

    async def run(request: SchedulerRequest) -> array[float]:
        async with gate:
            if not request.is_over:
                submit(request)
            return await _numbers_of(request)

    tasks = [asyncio.create_task(run(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for request in requests:
            request.release()
        await cancel(*tasks)


async def _numbers_of(request: SchedulerRequest) -> array[float]:
    await request.wait_accepted()
    while request.samples[0].finish is None:
        await request.wait()
    finish = request.samples[0].finish
    if finish.reason == types.FINISH_REASON_ABORTED:
        raise AbortedError(finish.message or "the request was aborted")
    if request.pooled is None:
        raise QuireError(finish.message or "internal error: the scheduler ended the request without numbers")
    return request.pooled
