"""A worker that lies: the real service with `--executor sim`, whose messages to the scheduler are mutated.

    python -m tests.hostile.hostile_worker SEED FRACTION --listen ... (flags of quire-worker)

A fraction of the answers of each method is mutated, from the lease to the outputs of steps. The other answers are
valid, so that the scheduler goes on and the next mutation reaches code behind the first checks.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from svc_common.security.trust import Callers, Trust
from tests.hostile.mutations import Mutator
from worker_svc import registration, service


class MutatingInterceptor(grpc.aio.ServerInterceptor):
    """Mutates the responses of all methods."""

    def __init__(self, mutator: Mutator, fraction: float) -> None:
        self._mutator = mutator
        self._fraction = fraction

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or "WorkerService" not in details.method:
            return handler
        return handler._replace(response_serializer=self._serialize)

    def _serialize(self, message: Any) -> bytes:
        rng = self._mutator.rng
        if rng.random() >= self._fraction:
            return bytes(message.SerializeToString())
        if rng.random() < 0.1:
            return self._mutator.damage(message.SerializeToString())
        self._mutator.fields_only(message)
        return bytes(message.SerializeToString())


def main() -> None:
    seed, fraction, *flags = sys.argv[1:]
    mutating = MutatingInterceptor(Mutator(seed), float(fraction))
    interceptors = Trust.interceptors

    def with_mutations(trust: Trust, callers: Callers) -> list[grpc.aio.ServerInterceptor]:
        return [*interceptors(trust, callers), mutating]

    Trust.interceptors = with_mutations  # type: ignore[method-assign]
    for name in ("FIRST_PAUSE_S", "MAX_PAUSE_S", "REFUSED_PAUSE_S"):
        setattr(registration, name, 0.02)  # it registers again at once
    service.main(flags)


if __name__ == "__main__":
    main()
