"""A worker that lies: the real service with `--executor sim`, whose messages to the scheduler are mutated.

    python -m tests.hostile.hostile_worker SEED FRACTION --listen ... (flags of quire-worker)

A fraction of the answers of each method is mutated, from the lease to the outputs of steps. The other answers are
valid, so that the scheduler goes on and the next mutation reaches code behind the first checks.
"""

from __future__ import annotations

import sys
from typing import Any

from svc_common.calls import ErrorInterceptor, Handler
from tests.hostile.mutations import Mutator
from worker_svc import registration, service


class Mutations:
    """Mutates the responses of all methods."""

    def __init__(self, mutator: Mutator, fraction: float) -> None:
        self._mutator = mutator
        self._fraction = fraction
        self._wrap = ErrorInterceptor._wrap

    def wrap(self, interceptor: ErrorInterceptor, handler: Handler, method: str) -> Any:
        wrapped: Any = self._wrap(interceptor, handler, method)
        return wrapped._replace(response_serializer=self._serialize) if "WorkerService" in method else wrapped

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
    mutations = Mutations(Mutator(seed), float(fraction))
    ErrorInterceptor._wrap = lambda *args: mutations.wrap(*args)  # type: ignore[method-assign]
    for name in ("FIRST_PAUSE_S", "MAX_PAUSE_S", "REFUSED_PAUSE_S"):
        setattr(registration, name, 0.02)  # it registers again at once
    service.main(flags)


if __name__ == "__main__":
    main()
