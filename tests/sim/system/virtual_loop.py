"""An asyncio event loop with virtual time, no threads and no sockets.

When nothing is ready, the clock jumps to the next timer. Several simulated processes share the loop. Every callback
carries its process in its context, which makes SIGSTOP and SIGKILL exact: the callbacks and timers of a frozen process
wait until it is thawed; callbacks of a killed process are dropped.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any

PROCESS: ContextVar[Process | None] = ContextVar("PROCESS", default=None)

RESOLUTION_S = 1e-6
TURN_S = 1e-7  # a turn of the loop takes time, or code that waits with `sleep(0)` would wait forever


class Stalled(AssertionError):
    """Nothing is ready and no timer is set: the run cannot continue."""


class Process:
    """One simulated process in one life. `name` stays the same over restarts."""

    def __init__(self, name: str, loop: VirtualLoop) -> None:
        self.name = name
        self.loop = loop
        self.is_dead = self.is_frozen = False
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)
        self._held: list[asyncio.Handle] = []

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in this process. If it fails while the process lives, the simulation fails."""
        task = self.loop.create_task(work, context=self.context.copy())
        task.add_done_callback(self._record_end)
        return task

    def _record_end(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.is_dead:
            self.loop.fail(error)

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, callback, *args, context=self.context)

    def hold(self, handle: asyncio.Handle) -> None:
        """Keep a callback that is due while the process is frozen."""
        if self.is_frozen and not self.is_dead:
            self._held.append(handle)
        elif not isinstance(handle, asyncio.TimerHandle):
            handle._run()  # a dead process cleans up without visible effect

    def freeze(self) -> None:
        """SIGSTOP."""
        self.is_frozen = True

    def thaw(self, rng: Random) -> None:
        """SIGCONT. Messages that arrived meanwhile run before or after overdue timers, at random."""
        self.is_frozen = False
        held, self._held = self._held, []
        if rng.random() < 0.5:
            held.sort(key=lambda handle: not isinstance(handle, asyncio.TimerHandle) or _is_delivery(handle))
        self.loop.requeue(held)

    def kill(self) -> None:
        """SIGKILL."""
        self.is_dead = True
        self.loop.requeue([handle for handle in self._held if not isinstance(handle, asyncio.TimerHandle)])
        self._held = []
        self.is_frozen = False
        for task in list(self.tasks):
            task.cancel()

    def __repr__(self) -> str:
        return f"<process {self.name}>"


def _is_delivery(handle: asyncio.Handle) -> bool:
    return getattr(handle._callback, "__name__", "") == "deliver"


class VirtualLoop(asyncio.BaseEventLoop):
    """`time()` is virtual seconds from 0."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self.failure: BaseException | None = None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.set_exception_handler(self._on_exception)

    def time(self) -> float:
        return self._now

    def fail(self, error: BaseException) -> None:
        """Report an error. The first one ends the run."""
        if self.failure is None:
            self.failure = error
            self.on_failure(error)

    def requeue(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> Any:
        task = super().create_task(coro, name=name, context=context)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(lambda done: process.tasks.pop(done, None))
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Run a function in the simulated thread, or at once."""
        if executor is not None:
            return executor.run(func, *args)
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        # No timer is due at the current time: code that sleeps for a rounding error would loop forever.
        return super().call_at(max(when, self._now + RESOLUTION_S), callback, *args, context=context)

    def _run_once(self) -> None:
        scheduled, ready = self._scheduled, self._ready
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not ready:
            if not scheduled:
                raise Stalled(f"at {self._now:.3f} s nothing is left to happen")
            self._now = max(self._now, scheduled[0]._when)
        self._now += TURN_S
        while scheduled and scheduled[0]._when <= self._now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is None or not (process.is_frozen or process.is_dead):
                handle._run()
            else:
                process.hold(handle)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: cancelled timers leave the heap when they are due."""

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: Any) -> None:
        pass

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        self._asyncgens.discard(agen)
        if not self.is_closed():
            self.create_task(agen.aclose())

    @staticmethod
    def _on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        process, error = PROCESS.get(), context.get("exception")
        if (process is None or not process.is_dead) and error is not None and isinstance(loop, VirtualLoop):
            loop.fail(error)

    def finish(self) -> None:
        """Cancel all tasks, let them end, and close."""
        for task in asyncio.all_tasks(self):
            task.cancel()
            task._log_destroy_pending = False
        for _ in range(200):
            if not self._ready:
                break
            self._scheduled.clear()
            self.call_soon(self.stop)
            self.run_forever()
        self.close()
