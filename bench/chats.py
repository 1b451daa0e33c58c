#!/usr/bin/env python
"""The cost of one chat in the gateway before it is submitted: the template in its own process, and the tokenizer.

    python bench/chats.py [--repeats 30]

Per chat: CPU time of the event loop's thread, CPU time of the process that renders, and the time from start to end.
Each is the lowest mean of 100 chats, so that other programs on the machine matter less.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import psutil
import uvloop
from quire.v1 import inference_pb2 as pb

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gateway_svc.request.models import ServedModel, read_bundle
from gateway_svc.request.prompts.readers import PromptReaders
from gateway_svc.request.sandbox.template_renderer import TemplateRenderer
from gateway_svc.request.threads import Threads
from tests.unit.gateway.fakes import make_bundle, make_info
from tests.unit.gateway.test_chat import QWEN3
from tests.unit.gateway.tokenizer_kinds import bundle_files, byte_level

SIZES = ((1, 8), (8, 30), (40, 100))  # messages, and words of each
NUM_CHATS = 100


def make_prompt(num_messages: int, num_words: int) -> pb.Prompt:
    """A chat with alternating roles."""
    roles = ("user", "assistant")
    messages = [pb.ChatMessage(role=roles[i % 2], content="hello world " * num_words) for i in range(num_messages)]
    return pb.Prompt(chat=pb.Chat(messages=messages))


def child_s() -> float:
    """CPU time of the child processes that run."""
    times = [child.cpu_times() for child in psutil.Process().children()]
    return sum(time.user + time.system for time in times)


async def measure(repeats: int) -> None:
    """Print one line per size."""
    bundle = make_bundle(bundle_files(byte_level(), {"bos_token": "<s>"}, chat_template=QWEN3))
    info = make_info(bundle, max_model_len=1 << 20)
    model = ServedModel(info, read_bundle(bundle, info.bundle_digest))
    templates = TemplateRenderer()
    threads = Threads()
    reader = PromptReaders(threads, templates)
    for size in SIZES:
        prompt = make_prompt(*size)
        await reader.token_ids(prompt, model)
        loop_us, wall_us, child_at = [], [], child_s()
        for _ in range(repeats):
            cpu, wall = time.thread_time(), time.perf_counter()
            for _ in range(NUM_CHATS):
                await reader.token_ids(prompt, model)
            loop_us.append((time.thread_time() - cpu) / NUM_CHATS * 1e6)
            wall_us.append((time.perf_counter() - wall) / NUM_CHATS * 1e6)
        child_us = (child_s() - child_at) / repeats / NUM_CHATS * 1e6
        print(
            f"{size[0]} messages, {prompt.ByteSize()} bytes: event loop {min(loop_us):.0f} us, "
            f"child {child_us:.0f} us (mean), from start to end {min(wall_us):.0f} us"
        )
    threads.close()
    await templates.close()


def main() -> None:
    """Parse the flags and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(parser.parse_args().repeats))


if __name__ == "__main__":
    main()
