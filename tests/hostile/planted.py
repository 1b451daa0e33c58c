"""A scheduler with one planted weakness, to show that the attacks find it.

python -m tests.hostile.planted PLANT --listen ... (flags of quire-scheduler)
"""

from __future__ import annotations

import resource
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

from scheduler_svc import service
from scheduler_svc.gateways import streams as gateway_links
from scheduler_svc.servicer import CALLERS, SERVICE_NAME
from svc_common import calls
from svc_common.security import trust

MAX_MEMORY = 2 << 30  # a plant must not exhaust the memory of the test machine
STALL_S = 3.0


def open_method() -> None:
    """One method has no role: any caller may abort requests."""
    check = trust.Trust.check

    def skip_one(self: Any, context: Any, authorization: str, callers: Any) -> None:
        if callers is not CALLERS[f"{SERVICE_NAME}/AbortRequests"]:
            check(self, context, authorization, callers)

    trust.Trust.check = skip_one  # type: ignore[method-assign]


def ended_task() -> None:
    """The task of the step loop packs numbers of requests into 16 bits: a larger one ends the task and the process."""

    def submit(self: Any, request: Any, attached: Any) -> None:
        numbers = [request.handle, request.deadline_ms, request.logprobs, request.prompt_logprobs]
        self._step_loop._post(lambda: array("H", numbers))

    gateway_links.Gateways._submit = submit  # type: ignore[method-assign]


def no_limit() -> None:
    """The fields of a message are not counted before it is decoded."""
    calls.check_field_count = lambda *args: None  # type: ignore[assignment]


def allocation() -> None:
    """Memory is allocated by the value of a field."""
    take = gateway_links.Gateways._take_request

    def take_padded(self: Any, request: Any, attached: Any) -> None:
        submit = request.submit
        padding = b"\1" * max(submit.handle, submit.deadline_ms, submit.logprobs, submit.prompt_logprobs)
        take(self, request, attached)
        del padding

    gateway_links.Gateways._take_request = take_padded  # type: ignore[method-assign]


def leak() -> None:
    """Each refused call leaves 512 KiB."""
    kept: list[bytearray] = []
    end = calls.ErrorInterceptor._end

    async def end_and_keep(self: Any, *args: Any) -> Any:
        kept.append(bytearray(b"\1" * 524_288))
        return await end(self, *args)

    calls.ErrorInterceptor._end = end_and_keep  # type: ignore[method-assign]


def unhandled() -> None:
    """A value that the code does not expect raises KeyError."""
    known = dict.fromkeys(range(6))
    take = gateway_links.Gateways._take_request

    def take_known(self: Any, request: Any, attached: Any) -> None:
        known[request.cancel.reason]
        take(self, request, attached)

    gateway_links.Gateways._take_request = take_known  # type: ignore[method-assign]


def stall() -> None:
    """A long text blocks the event loop, on which all calls run."""
    take = gateway_links.Gateways._take_request
    pauses = [STALL_S]

    def take_slowly(self: Any, request: Any, attached: Any) -> None:
        if request.ByteSize() > 5_000 and pauses:
            time.sleep(pauses.pop())
        take(self, request, attached)

    gateway_links.Gateways._take_request = take_slowly  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    plant.__name__: plant for plant in (open_method, ended_task, no_limit, allocation, leak, unhandled, stall)
}


def main() -> None:
    name, *flags = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    if name != "none":
        PLANTS[name]()
    service.main(flags)


if __name__ == "__main__":
    main()
