"""Fixtures of the engine tests."""

from __future__ import annotations

import json
import os

import pytest

# Threads that wait for each other sleep: on a busy machine spinning takes the core that the other one needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture
def rewrite_config():
    """Changes fields of a checkpoint's config.json (or another JSON file); None removes one."""

    def rewrite(folder, name="config.json", **fields):
        path = folder / name
        config = json.loads(path.read_text()) if path.exists() else {}
        config |= fields
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return rewrite
