"""Fixtures of the engine tests."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def rewrite_config():
    """Changes fields of a checkpoint's config.json (or another JSON file); None removes one."""

    def rewrite(folder, name="config.json", **fields):
        path = folder / name
        config = json.loads(path.read_text()) if path.exists() else {}
        config |= fields
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return rewrite
