"""Every transcript in this folder still prints what it printed."""

from pathlib import Path

import pytest

from tests.scenarios.runner import replay

FILES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    printed = replay(path)
    if request.config.getoption("--rewrite"):
        path.write_text(printed)
    assert printed == path.read_text()
