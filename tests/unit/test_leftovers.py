"""A failed test makes no later test fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import gc, socket

class Connection:
    def __init__(self):
        self.itself = self  # only the garbage collector frees it
        self.socket = socket.socket()

def test_that_fails_before_it_closes_its_connection():
    connection = Connection()
    assert connection is None

def test_that_collects_garbage():
    gc.collect()

def test_that_leaves_a_connection_open():
    Connection()
    gc.collect()
"""


def test_leftovers_of_a_failed_test_are_its_own(tmp_path: Path) -> None:
    """A test that passes otherwise still fails because of its own leftovers."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    plugins = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:asyncio")
    command = [sys.executable, "-m", "pytest", *plugins, "-v", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert "test_that_fails_before_it_closes_its_connection FAILED" in done.stdout
    assert "test_that_collects_garbage PASSED" in done.stdout
    assert "test_that_leaves_a_connection_open FAILED" in done.stdout
