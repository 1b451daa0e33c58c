"""The threads that convert large inputs. Small inputs are converted on the event loop, which takes less time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from svc_common.errors import OverloadedError

P = ParamSpec("P")
T = TypeVar("T")

INLINE_BYTES = 1024  # tokenizing this much text takes less than a millisecond
LARGE_BYTES = 64 << 10  # tokenizing this much takes longer than a small input should wait
RETRY_FULL_S = 1.0


class Lane:
    """Threads for one kind of work, which never waits for the other kind. `is_call`: tokenizer calls.

    Large inputs have threads of their own, half as many, so that small ones overtake them.
    """

    def __init__(self, num_threads: int, name: str, *, is_call: bool) -> None:
        self.is_call = is_call
        self._small = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._large = ThreadPoolExecutor(max(1, num_threads // 2), thread_name_prefix=f"{name}-large")

    async def run(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function directly if its input is small (`size` in bytes), else in a thread."""
        if size <= INLINE_BYTES:
            return function(*args, **kwargs)
        executor = self._small if size <= LARGE_BYTES else self._large
        return await asyncio.get_running_loop().run_in_executor(executor, partial(function, *args, **kwargs))

    def close(self) -> None:
        """Stop the threads."""
        for executor in (self._small, self._large):
            executor.shutdown(wait=False, cancel_futures=True)


class Threads:
    """Owns the threads. The tokenizer releases the GIL.

    Tokenizer calls, which only count or convert tokens, have separate threads and at most `max_call_bytes` of input in
    progress, so that they never delay the prompt of a generation.
    """

    def __init__(self, max_call_bytes: int = 16 << 20) -> None:
        num_cores = os.cpu_count() or 2
        self.requests = Lane(min(8, max(2, num_cores)), "tokenize", is_call=False)
        self.calls = Lane(min(4, max(1, num_cores // 4)), "tokenize-call", is_call=True)
        self.max_call_bytes = max_call_bytes
        self._num_call_bytes = 0

    @contextmanager
    def counted_call(self, size: int) -> Iterator[Lane]:
        """The threads of a call, whose input counts while the block runs. Small inputs are not counted.

        Raises OverloadedError if the input of all calls would be too large.
        """
        if size <= INLINE_BYTES:
            yield self.calls
            return
        if self._num_call_bytes and self._num_call_bytes + size > self.max_call_bytes:
            raise OverloadedError(
                f"tokenizer calls in progress hold {self._num_call_bytes} bytes and this one has {size}; "
                f"the limit is {self.max_call_bytes} (--max-tokenize-bytes); retry later",
                retry_after_s=RETRY_FULL_S,
            )
        self._num_call_bytes += size
        try:
            yield self.calls
        finally:
            self._num_call_bytes -= size

    async def run_call(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in the threads of calls. Raises OverloadedError as `counted_call`."""
        with self.counted_call(size) as lane:
            return await lane.run(size, function, *args, **kwargs)

    def close(self) -> None:
        """Stop the threads."""
        for lane in (self.requests, self.calls):
            lane.close()
