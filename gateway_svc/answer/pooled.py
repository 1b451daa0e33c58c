"""The answers of Embed and Score.

Each input is a request of its own to the schedulers. All are sent at once, so inputs of one call share the steps of the
workers. Each survives the loss of its worker or scheduler like a generation: it is computed again.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import mul

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request.pooling import PoolingPlan
from gateway_svc.schedulers.submitter import Submission
from svc_common.errors import AbortedError, ServiceError
from svc_common.tasks import cancel

MAX_OPEN = 256  # inputs of one call that are sent at the same time


async def pooled_numbers(submissions: Sequence[Submission]) -> list[array[float]]:
    """The numbers of all inputs, in order. Raises the first failure and cancels the others."""
    gate = asyncio.Semaphore(MAX_OPEN)

    async def run(submission: Submission) -> array[float]:
        async with gate:
            submission.send()
            return await _numbers_of(submission)

    tasks = [asyncio.create_task(run(submission)) for submission in submissions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for submission in submissions:
            submission.request.release()
        await cancel(*tasks)


async def _numbers_of(submission: Submission) -> array[float]:
    request = submission.request
    await request.wait_accepted()
    while request.samples[0].finish is None:
        await request.wait()
    finish = request.samples[0].finish
    if finish.reason == types.FINISH_REASON_ABORTED:
        raise AbortedError(finish.message or "the request was aborted")
    if request.pooled is None:
        raise ServiceError(finish.message or "internal error: the scheduler ended the request without numbers")
    return request.pooled


def add_embeddings(response: pb.EmbedResponse, plan: PoolingPlan, numbers: Sequence[array[float]]) -> None:
    """Add the vectors of an Embed, which takes time if they are many."""
    for values, item in zip(numbers, plan.inputs, strict=True):
        response.embeddings.add(values=ACTIVATIONS[plan.activation](values), prompt_tokens=len(item.ids))


def scores_of(
    plan: PoolingPlan, numbers: Sequence[array[float]], facts: types.PoolingInfo
) -> tuple[list[float], list[int]]:
    """The scores of the pairs, and their prompt tokens. Takes time if the pairs are many."""
    sizes = [len(item.ids) for item in plan.inputs]
    if not plan.pairs:
        return [_score(values, facts) for values in numbers], sizes
    cosines = [sum(map(mul, numbers[query], numbers[document])) for query, document in plan.pairs]
    return cosines, [sizes[query] + sizes[document] for query, document in plan.pairs]


def _score(values: Sequence[float], facts: types.PoolingInfo) -> float:
    """The output of the head, or the logit of yes minus that of no; as a probability if the model says so."""
    value = values[0] - (values[1] if len(values) > 1 else 0.0)
    return _sigmoid(value) if facts.has_sigmoid else value


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))


def _softmax(values: Sequence[float]) -> list[float]:
    largest = max(values)
    powers = [math.exp(value - largest) for value in values]
    total = sum(powers)
    return [power / total for power in powers]


ACTIVATIONS: Mapping[str, Callable[[Sequence[float]], Sequence[float]]] = {
    "": lambda values: values,
    "sigmoid": lambda values: list(map(_sigmoid, values)),
    "softmax": _softmax,
}
