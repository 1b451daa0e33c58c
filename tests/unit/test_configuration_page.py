"""The example of docs/configuration.md works for every service, and its error messages are real."""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import gateway_svc.flags
import scheduler_svc.flags
import scheduler_svc.service
import worker_svc.flags
from svc_common import config

PAGE = (Path(__file__).resolve().parents[2] / "docs/configuration.md").read_text(encoding="utf-8")
EXAMPLE = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0]
ERRORS = re.findall(r"^quire-scheduler: error: .*$", PAGE, re.MULTILINE)

Make = Callable[[], argparse.ArgumentParser]
PARSERS: dict[str, Make] = {
    "gateway": gateway_svc.flags.make_parser,
    "scheduler": scheduler_svc.flags.make_parser,
    "worker": worker_svc.flags.make_parser,
}


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("quire.toml")
    path.write_text(EXAMPLE)
    return path


@pytest.mark.parametrize("service", PARSERS)
def test_the_output_of_print_config_is_an_equivalent_file(
    example: Path, capsys: pytest.CaptureFixture[str], service: str
) -> None:
    needed = ["--scheduler", "localhost:1"] if service == "gateway" else []

    def printed(*flags: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            config.parse(PARSERS[service](), [*flags, "--print-config"])
        return capsys.readouterr().out

    first = printed("--config", str(example), *needed)
    settings = tomllib.loads(first)
    assert settings["log-format"] == "json"
    if service == "scheduler":
        assert "max-waiting = 512  # quire.toml:8\n" in first
    example.write_text(first)
    assert tomllib.loads(printed("--config", str(example))) == settings


def test_the_worker_reads_lists_and_sizes(example: Path) -> None:
    args = config.parse(worker_svc.flags.make_parser(), ["--config", str(example)])
    assert args.kv_cache_memory == 2 << 30
    assert worker_svc.flags.scheduler_addresses(args) == ["scheduler-0:50052", "scheduler-1:50052"]


@pytest.mark.parametrize(
    ("error", "change", "variables", "flags"),
    [
        (ERRORS[0], ("max-waiting = 512", "max-waiting = 0"), {}, []),
        (ERRORS[1], ("max-waiting", "max-wating"), {}, []),
        (ERRORS[2], ("", ""), {"QUIRE_AGING_S": "-1"}, []),
        (ERRORS[3], ("", ""), {}, ["--watermark", "1"]),
    ],
)
def test_errors_of_bad_settings_match_the_page(
    example: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: str,
    change: tuple[str, str],
    variables: dict[str, str],
    flags: list[str],
) -> None:
    example.write_text(EXAMPLE.replace(*change))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        scheduler_svc.service.main(["--config", str(example), *flags])
    assert capsys.readouterr().err.splitlines()[-1] == error
