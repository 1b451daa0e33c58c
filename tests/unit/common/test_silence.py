"""When a silent peer counts as lost, and when this process was the one that was stopped."""

from __future__ import annotations

import asyncio
import time

from svc_common.tasks import SilenceWatch, wait_for_peer


def test_a_peer_is_silent_after_the_timeout() -> None:
    watch = SilenceWatch(10.0, now=100.0)
    assert not watch.is_silent(109.9)
    assert watch.is_silent(110.0)
    watch.on_message(108.0)
    assert watch.deadline == 118.0
    assert not watch.is_silent(117.9)


def test_the_pause_ends_at_the_deadline_or_at_its_limit() -> None:
    watch = SilenceWatch(10.0, now=0.0)
    assert watch.pause_s(4.0) == 6.0
    assert watch.pause_s(4.0, at_most_s=1.0) == 1.0
    assert watch.pause_s(12.0) == 0.0


def test_silence_counts_from_the_wake_up_if_this_process_was_stopped() -> None:
    watch = SilenceWatch(10.0, now=0.0)
    assert watch.pause_s(0.0, at_most_s=5.0) == 5.0
    assert watch.on_wake(30.0)
    assert not watch.is_silent(30.0)
    assert watch.deadline == 40.0


async def test_time_in_which_this_process_was_stopped_is_not_the_peers() -> None:
    loop, answer = asyncio.get_running_loop(), asyncio.Event()
    waiting = asyncio.ensure_future(wait_for_peer(asyncio.ensure_future(answer.wait()), timeout_s=0.3))
    await asyncio.sleep(0)
    time.sleep(0.9)  # noqa: ASYNC251 -- as SIGSTOP would
    loop.call_later(0.1, answer.set)
    assert await waiting


async def test_a_peer_that_does_not_answer_is_waited_for_no_longer_than_the_timeout() -> None:
    never = asyncio.get_running_loop().create_future()
    assert not await wait_for_peer(never, timeout_s=0.05)
