"""Headless Chromium for tests of the console: Debian's packages `chromium` and `chromium-driver`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
from selenium import webdriver
from selenium.webdriver.remote.webdriver import WebDriver

T = TypeVar("T")

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--lang=en")


def find_browser() -> tuple[str, str] | None:
    """The paths of Chromium and its driver; None if one of them is missing."""
    browser, driver = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
    return None if browser is None or driver is None else (browser, driver)


def needs_browser() -> pytest.MarkDecorator:
    """Skips a test on machines without a browser."""
    return pytest.mark.skipif(
        find_browser() is None, reason="no browser: apt-get install chromium chromium-driver, to test the console"
    )


@contextmanager
def open_browser(*flags: str, is_dark: bool = False, width: int = 1440, height: int = 900) -> Iterator[WebDriver]:
    """A browser with a log of its console. `flags` are Chromium's."""
    found = find_browser()
    assert found is not None
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for flag in (*FLAGS, *flags):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(found[1]))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
    finally:
        driver.quit()


def wait_for(what: str, read: Callable[[], T], deadline_s: float = 20.0) -> T:
    """The first true result of `read`. Raises TimeoutError."""
    deadline = time.monotonic() + deadline_s
    while not (found := read()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {deadline_s} s")
        time.sleep(0.05)
    return found
