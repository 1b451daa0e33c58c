"""Images through all services: equal to transformers beside text, in chunks, after a worker was killed."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from quire_client import AsyncClient, Image, InvalidRequest, Message

from tests.processes.ports import free_port
from tests.processes.stack import Stack, is_ready, wait_idle
from tests.processes.vision_model import Parts, VisionReference, make_folder
from tests.unit.engine.vision_models import IMAGE, TOWERS, VISION_END, VISION_START
from tests.unit.gateway.images import bomb, encoded, picture

IN_CI = ("qwen3_vl", "qwen3_5")  # windows and other places of the tower are in tests of the engine
FIRST, SECOND = encoded(picture(70, 50)), encoded(picture(41, 90, seed=1), "JPEG")
THIRD = encoded(picture(70, 50, seed=2))  # has the number of tokens of the first one
CHATS: dict[str, Parts] = {
    "none": (" ".join(f"w{20 + i}" for i in range(40)),),
    "one": ("w20 w21 w22", FIRST, "w23"),
    "two": (SECOND, "w30 w31", FIRST, "w32 w33 w34"),
}
NUM_TOKENS = 150


def message(parts: Parts) -> Message:
    return Message("user", parts=tuple(part if isinstance(part, str) else Image(part) for part in parts))


async def run_chat(client: AsyncClient, parts: Parts, started: asyncio.Semaphore) -> list[int]:
    """The greedy answer to one message. Reports its first token."""
    stream = client.stream_chat([message(parts)], temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    has_tokens = False
    async with stream as deltas:
        async for _ in deltas:
            if not has_tokens:
                started.release()
            has_tokens = True
        return list((await deltas.result()).samples[0].token_ids)


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.deep) for name in TOWERS]
)
async def test_images_equal_transformers_when_a_worker_is_killed(tmp_path: Path, architecture: str) -> None:
    folder = make_folder(tmp_path / "model", architecture)
    reference = VisionReference(folder)
    sizes = (
        "--block-size",
        "8",
        "--num-blocks",
        "96",
        "--max-num-batched-tokens",
        "24",
        "--max-num-seqs",
        "8",
        "--dtype",
        "float32",
    )
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        page = free_port()
        doomed = stack.start_worker(scheduler, folder, *sizes)
        own = ("--metrics-listen", f"127.0.0.1:{page}", "--kv-disk", str(tmp_path / "tier"))
        worker = stack.start_worker(scheduler, folder, *sizes, *own)
        gateway = stack.start_gateway(scheduler, flags=("--max-images", "2", "--max-image-pixels", "1000000"))
        async with await stack.connect(gateway, workers=2) as client:
            started = asyncio.Semaphore(0)
            tasks = [asyncio.create_task(run_chat(client, parts, started)) for parts in CHATS.values()]
            for _ in tasks:
                await asyncio.wait_for(started.acquire(), 60)
            doomed.kill()
            for task, parts in zip(tasks, CHATS.values(), strict=True):
                output = await task
                assert len(output) == NUM_TOKENS
                assert output == reference.greedy_after(output, parts)
            await check_sharing(client, reference, page)
            await check_refusals(client)
            worker.kill()
            worker.start()
            await stack.until(client, lambda schedulers: is_ready(schedulers, worker))
            answer = await client.chat([message(CHATS["two"])], temperature=0, max_tokens=8, ignore_eos=True)
            assert list(answer.token_ids) == reference.greedy_after(list(answer.token_ids), CHATS["two"])
            assert answer.usage.cached_tokens, "the files have blocks and states after images"
            assert num_encoded(page) == 0
            await wait_idle(stack, client)


async def check_sharing(client: AsyncClient, reference: VisionReference, page: int) -> None:
    """The same image in a later turn is cached and not computed again; another image shares nothing from it on, nor
    the state after it, also if their placeholders are the same."""
    await client.chat([message(CHATS["two"])], temperature=0, max_tokens=2)  # its blocks may have been evicted
    encoded_before = num_encoded(page)
    turns: list[Parts] = [CHATS["two"], ("w40 w41",), ("w50",)]
    answer = await client.chat([message(turn) for turn in turns], temperature=0, max_tokens=8, ignore_eos=True)
    assert list(answer.token_ids) == reference.greedy_after(list(answer.token_ids), *turns)
    assert answer.usage.cached_tokens >= len(reference.prompt(CHATS["two"])) // 8 * 8 - 8
    assert num_encoded(page) == encoded_before
    for image in (THIRD, SECOND):
        other: Parts = ("w20 w21 w22", image, "w23")
        answer = await client.chat([message(other)], temperature=0, max_tokens=8, ignore_eos=True)
        assert await client.count_tokens(messages=[message(other)]) == answer.usage.prompt_tokens
        assert list(answer.token_ids) == reference.greedy_after(list(answer.token_ids), other)
        assert answer.usage.cached_tokens == 0
    tokens = [10, 20, 21, 22, VISION_START, IMAGE, VISION_END, 23, 11, 12]
    same = await client.generate(token_ids=tokens, images=[SECOND], temperature=0, max_tokens=8, ignore_eos=True)
    assert same.token_ids == answer.token_ids
    assert num_encoded(page) == encoded_before + 1  # the third one


async def check_refusals(client: AsyncClient) -> None:
    """Bad images are INVALID_ARGUMENT with field and limit."""
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"token_ids": [20, IMAGE, 21]}, "prompt", "has 1 placeholders for images .* and 0 images"),
        ({"token_ids": [20, 21], "images": [FIRST]}, "prompt", "has 0 placeholders .* and 1 images"),
        ({"token_ids": [20, IMAGE], "images": [b"no image"]}, r"images\[0\]", "is not an image"),
        ({"token_ids": [20, IMAGE], "images": [FIRST[:-40]]}, r"images\[0\]", "is damaged"),
        ({"token_ids": [20, IMAGE], "images": [bomb(20000, 20000)]}, r"images\[0\]", "20000 x 20000 pixels; at most"),
        ({"token_ids": [IMAGE] * 3, "images": [FIRST] * 3}, r"images\[2\]", "at most 2 are allowed"),
        ({"messages": [message(("<|image_pad|>", FIRST))]}, "prompt", "has 2 placeholders .* and 1 images"),
        ({"messages": [message((b"", "w20"))]}, r"messages\[0\].parts\[0\].image", "is not an image"),
    ]
    for arguments, field, words in cases:
        with pytest.raises(InvalidRequest, match=f"{field} .*{words}|{words}"):
            await client.generate(**arguments, max_tokens=2)
    text = await client.generate(token_ids=[20, 21], max_tokens=2)
    assert len(text.token_ids) <= 2


def num_encoded(page: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{page}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(r"^quire_worker_images_encoded_total(?:\{.*\})? (\S+)$", text, re.MULTILINE)
    assert found, text
    return float(found[1])
