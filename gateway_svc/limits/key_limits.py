"""Applies the limits of an owner to its requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar

from gateway_svc.limits.buckets import (
    NO_LIMITS,
    STREAM_TTL_S,
    LimitsFile,
    LocalBuckets,
    OwnerLimits,
    RedisBuckets,
    Take,
)
from svc_common.errors import InvalidRequestError, OverloadedError, PermissionDeniedError
from svc_common.tasks import cancel

log = logging.getLogger(__name__)
# Whether the current call was counted as a request when it arrived, and no request was admitted for it yet.
is_prepaid: ContextVar[list[bool]] = ContextVar("is_prepaid")
UNITS = {
    "requests_per_s": "requests per second", "tokens_per_min": "tokens per minute", "max_streams": "open requests",
    "max_rows": "samples and beams of open requests",
}  # fmt: skip


class KeyLimits:
    """Limits of all owners. Without a file there are none."""

    def __init__(self, file: LimitsFile | None = None, buckets: LocalBuckets | RedisBuckets | None = None) -> None:
        self._file = file
        self.names_owners = file is not None  # some owners may be limited
        self._buckets = buckets
        self._open: dict[str, str] = {}  # owner by stream id
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Renew the counts of open streams until `close`."""
        if self._buckets is not None:
            self._keeper = asyncio.create_task(self._keep(self._buckets))

    async def close(self) -> None:
        if self._keeper is not None:
            await cancel(self._keeper)
        if self._buckets is not None:
            await self._buckets.close()

    @property
    def is_on(self) -> bool:
        """Some requests may be limited."""
        return self._buckets is not None

    def of(self, owner: str) -> OwnerLimits:
        return NO_LIMITS if self._file is None else self._file.of(owner)

    def check(self, owner: str, model: str, priority: int) -> None:
        """Raise PermissionDeniedError or InvalidRequestError if the owner may not use this model or priority."""
        limits = self.of(owner)
        if limits.models is not None and model not in limits.models:
            allowed = ", ".join(sorted(limits.models)) or "none"
            raise PermissionDeniedError(f"model {model!r} is not allowed for this owner; allowed: {allowed}")
        if limits.min_priority is not None and priority < limits.min_priority:
            raise InvalidRequestError(
                f"scheduling.priority is {priority}; must be at least {limits.min_priority} for this owner",
                field="scheduling.priority",
            )

    async def begin(self, owner: str) -> None:
        """Count a call of this owner before its request is received, also if it fails. Raises OverloadedError."""
        limits = self.of(owner)
        if self._buckets is not None and limits.requests_per_s is not None:
            await self._take(self._buckets, owner, limits, Take("", 0))
            is_prepaid.set([True])

    def join(self, owner: str, num_requests: int) -> int:
        """Count the next requests of this call as one, that of `begin`. Returns how many may be open at a time."""
        is_prepaid.set([True] * num_requests)
        limits = self.of(owner)
        return min(most for most in (num_requests, limits.max_streams, limits.max_rows) if most is not None)

    async def _take(self, buckets: LocalBuckets | RedisBuckets, owner: str, limits: OwnerLimits, take: Take) -> None:
        verdict = await buckets.take(owner, limits, take)
        if verdict.limit:
            raise OverloadedError(
                f"the limit of this owner is reached ({UNITS[verdict.limit]}: {getattr(limits, verdict.limit):g}); "
                f"retry in {verdict.retry_after_s:.1f} s",
                retry_after_s=verdict.retry_after_s,
                subject=f"owner:{owner}",
            )

    @contextlib.asynccontextmanager
    async def admitted(
        self,
        owner: str,
        stream_id: str,
        num_tokens: int,
        num_used: Callable[[], int],
        *,
        num_rows: int = 1,
        counted_as: str = "",
    ) -> AsyncIterator[None]:
        """Count a request of at most `num_tokens` prompt and output tokens and `num_rows` samples or beams while the
        block runs. `counted_as` has counts of its own, with the owner's limits.

        `num_used` returns the number of used tokens at the end. Raises OverloadedError with a retry delay, or
        InvalidRequestError if the request alone has too many rows.
        """
        limits, owner = self.of(owner), counted_as or owner
        if self._buckets is None or not limits.is_counted:
            yield
            return
        if limits.max_rows is not None and num_rows > limits.max_rows:
            raise InvalidRequestError(
                f"the request has {num_rows} samples or beams; at most {limits.max_rows} may be open for this owner: "
                "lower n, best_of or beam_width",
                field="sampling",
            )
        stream_id = f"{num_rows}:{stream_id}"
        prepaid = is_prepaid.get([])
        take = Take(stream_id, num_tokens, num_requests=0 if prepaid and prepaid.pop() else 1)
        taking = asyncio.ensure_future(self._take(self._buckets, owner, limits, take))
        try:
            await asyncio.shield(taking)
        except asyncio.CancelledError:  # Redis may have counted the stream
            await asyncio.wait({taking})
            if taking.exception() is None:
                await self._buckets.give_back(owner, limits, stream_id, num_tokens)
            raise
        self._open[stream_id] = owner
        try:
            yield
        finally:
            self._open.pop(stream_id, None)
            unused = max(0, num_tokens - num_used())
            # Shielded: a stream is also released when its client disconnects.
            await asyncio.shield(self._buckets.give_back(owner, limits, stream_id, unused))

    async def _keep(self, buckets: LocalBuckets | RedisBuckets) -> None:
        while True:
            await asyncio.sleep(STREAM_TTL_S / 3)
            await buckets.keep([(owner, stream_id) for stream_id, owner in self._open.items()])
