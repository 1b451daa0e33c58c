#!/usr/bin/env python
"""Takes the pictures of the console in docs/images: a stack with the bundled model, a load of chats, headless Chromium.

.venv/bin/python scripts/console_screenshots.py          # needs chromium and chromium-driver
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire_client import AsyncClient
from quire_client.demo import demo_model_dir
from selenium.webdriver.common.by import By

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.processes.browser import open_browser, wait_for
from tests.processes.ports import free_port
from tests.processes.stack import Stack

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
HEIGHT = 1010
LOAD_S = 20.0  # before a picture, so that the charts have a history
CHATS_AT_ONCE = 15
SYSTEM = "You answer questions about Python's standard library. Be short, and name the module."
QUESTIONS = (
    "What does os.path.join do?",
    "How do I read a JSON file?",
    "What is functools.lru_cache?",
    "How do I sort a list of tuples?",
    "What does itertools.chain return?",
    "What is a context manager?",
    "How do I run a subprocess?",
)
WORKER = ("--num-blocks", "640", "--max-num-seqs", "7", "--model-name", "demo")


async def chat_forever(client: AsyncClient, number: int) -> None:
    """One user: sends a chat, reads the answer, sends the next one."""
    for turn in range(10_000):
        question = QUESTIONS[(number + turn) % len(QUESTIONS)]
        messages: list[Any] = [
            {"role": "system", "content": SYSTEM * (1 + number % 3)},
            {"role": "user", "content": question},
        ]
        request_id, length = f"chat-{number:02d}-{turn:03d}", 150 + 50 * ((3 * number + turn) % 6)
        n = 2 if (number + turn) % 5 == 0 else 1
        async with client.stream(
            messages=messages, request_id=request_id, max_tokens=length, n=n, temperature=0.9, ignore_eos=True
        ) as stream:
            async for _ in stream:
                pass
        await asyncio.sleep(0.05 * (number % 4))


def take(url: str, name: str, *, is_dark: bool) -> None:
    """Ask two questions in the playground and save a picture."""
    with open_browser(is_dark=is_dark, height=HEIGHT) as browser:
        browser.get(f"{url}/console/")
        time.sleep(LOAD_S)
        browser.find_element(By.LINK_TEXT, "Playground").click()
        for _ in range(5):
            browser.find_element(By.ID, "clear").click()
            for question in ("What does os.path.join do?", "And how do I sort by two keys?"):
                browser.find_element(By.ID, "message").send_keys(question)
                browser.find_element(By.ID, "send").click()
                wait_for("the answer", browser.find_element(By.ID, "send").is_enabled, 60.0)
            if ", 0 from" not in browser.find_element(By.ID, "prompt-note").text:
                break
        browser.find_element(By.LINK_TEXT, "Overview").click()
        time.sleep(3)
        for _ in range(200):  # a moment at which both workers run several requests
            if len(browser.find_elements(By.CSS_SELECTOR, ".rows .row")) >= 10:
                break
            time.sleep(0.1)
        browser.save_screenshot(str(IMAGES / name))


async def main() -> None:
    """Start, load, take pictures."""
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder)) as stack:
        address = f"127.0.0.1:{free_port()}"
        scheduler = stack.start_scheduler()
        for _ in range(2):
            stack.start_worker(scheduler, demo_model_dir(), *WORKER)
        gateway = stack.start_gateway(scheduler, flags=(f"--console-listen={address}",))
        async with await stack.connect(gateway, workers=2) as client:
            chats = [asyncio.create_task(chat_forever(client, number)) for number in range(CHATS_AT_ONCE)]
            await asyncio.to_thread(take, f"http://{address}", "console-dark.png", is_dark=True)
            await asyncio.to_thread(take, f"http://{address}", "console-light.png", is_dark=False)
            for chat in chats:
                chat.cancel()
            await asyncio.gather(*chats, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
