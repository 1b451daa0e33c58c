"""Settings: flags override environment, file and defaults; an error names the setting, its place and the limits."""

import argparse
import tomllib
from pathlib import Path

import pytest

from svc_common.config import address, in_range, make_parser, parse, size_bytes, without_password
from svc_common.redis.server import bad_url


def make() -> argparse.ArgumentParser:
    parser = make_parser("scheduler", "A service.")
    parser.add_argument("--max-waiting", type=in_range(int, 1, 10), default=5)
    parser.add_argument("--scheduler", type=address, action="append", default=[])
    parser.add_argument("--redis", default=None)
    parser.add_argument("--memory", type=size_bytes, default="1K")
    parser.add_argument("--is-quick", action="store_true")
    parser.add_argument("--api-key", default=None)
    return parser


def test_flags_override_the_environment_which_overrides_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(make(), []).max_waiting == 5
    monkeypatch.setenv("QUIRE_MAX_WAITING", "7")
    assert parse(make(), []).max_waiting == 7
    assert parse(make(), ["--max-waiting", "9"]).max_waiting == 9


def test_a_list_of_flags_replaces_the_list_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_SCHEDULER", "a:1,b:2")
    assert parse(make(), []).scheduler == ["a:1", "b:2"]
    assert parse(make(), ["--scheduler", "c:3"]).scheduler == ["c:3"]
    assert parse(make(), ["--scheduler=c:3", "--scheduler=d:4"]).scheduler == ["c:3", "d:4"]


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("QUIRE_MAX_WAITING", "11", "11 is outside 1 to 10"),
        ("QUIRE_MAX_WAITING", "many", "'many' is not a number"),
        ("QUIRE_SCHEDULER", "nowhere", "'nowhere' is not host:port"),
        ("QUIRE_LOG_FORMAT", "xml", "choose from text, json"),
    ],
)
def test_an_invalid_environment_value_stops_the_start_with_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, complaint: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        parse(make(), [])
    printed = capsys.readouterr().err
    assert name in printed
    assert complaint in printed


@pytest.mark.parametrize(("text", "value"), [("512M", 512 << 20), ("2G", 2 << 30), ("1.5k", 1536), ("7", 7)])
def test_sizes(text: str, value: int) -> None:
    assert size_bytes(text) == value


@pytest.mark.parametrize("text", ["-1M", "1Q", "nan", "1e999"])
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        size_bytes(text)


# -- the file ---------------------------------------------------------------------------------------------------------

FILE = """\
# for every service
max-waiting = 3
is-quick = true

[scheduler]
scheduler = ["a:1", "b:2"]
redis = "redis://user:pass@cache:6379/0"

[worker]
model = "/models/m"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "quire.toml"
    path.write_text(FILE)
    return path


def test_the_environment_overrides_the_file_which_overrides_defaults(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    args = parse(make(), ["--config", str(file)])
    assert (args.max_waiting, args.is_quick, args.memory) == (3, True, 1024)
    assert args.scheduler == ["a:1", "b:2"]
    monkeypatch.setenv("QUIRE_CONFIG", str(file))
    monkeypatch.setenv("QUIRE_MAX_WAITING", "4")
    monkeypatch.setenv("QUIRE_IS_QUICK", "false")
    args = parse(make(), ["--scheduler", "c:3"])
    assert (args.max_waiting, args.is_quick, args.scheduler) == (4, False, ["c:3"])
    assert parse(make(), ["--max-waiting", "5"]).max_waiting == 5


@pytest.mark.parametrize(
    ("was", "now", "complaint"),
    [
        ("max-waiting = 3", "max-waiting = 11", ":2: max-waiting = 11: 11 is outside 1 to 10"),
        ("max-waiting = 3", "max-waiting = true", ":2: max-waiting = true: write 1 to 10"),
        ("max-waiting = 3", "max-wating = 3", ":2: max-wating is not a setting of quire-scheduler; did you mean max-w"),
        (
            "max-waiting = 3",
            "max_waiting = 3",
            ":2: max_waiting is not a setting of quire-scheduler; did you mean max-w",
        ),
        ("is-quick = true", 'is-quick = "often"', ':3: is-quick = "often": use true or false'),
        ('["a:1", "b:2"]', '["a:1", "b"]', """:6: scheduler = ["a:1", "b"]: 'b' is not host:port"""),
        ('"redis://user:pass@cache:6379/0"', "{ url = 1 }", ":7: [redis] is not a service; the tables are [gateway]"),
        ("[worker]", "[wroker]", ":9: [wroker] is not a service; the tables are [gateway], [scheduler], [worker]"),
        ("max-waiting = 3", "config = 3", ":2: config is not a setting"),
        ("[scheduler]", "[scheduler", "--config"),
    ],
)
def test_an_error_in_the_file_names_its_line(
    capsys: pytest.CaptureFixture[str], file: Path, was: str, now: str, complaint: str
) -> None:
    file.write_text(FILE.replace(was, now))
    with pytest.raises(SystemExit, match="2"):
        parse(make(), ["--config", str(file)])
    assert complaint in capsys.readouterr().err.replace("quire.toml:", ":")


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(make(), ["--config", "/nowhere/quire.toml"])
    assert "--config /nowhere/quire.toml: " in capsys.readouterr().err


def test_print_config_shows_sources_and_hides_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "opensesame")
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "debug")
    with pytest.raises(SystemExit, match="0"):
        parse(make(), ["--config", str(file), "--max-waiting", "9", "--print-config"])
    printed = capsys.readouterr().out
    sources = dict(line.split("  # ") for line in printed.splitlines() if "  # " in line)
    assert sources["max-waiting = 9"] == "flag"
    assert sources['log-level = "debug"'] == "environment variable QUIRE_LOG_LEVEL"
    assert sources['scheduler = ["a:1", "b:2"]'] == f"{file}:6"
    assert sources["memory = 1024"] == "default"
    assert tomllib.loads(printed)["redis"] == "redis://***@cache:6379/0"
    assert "opensesame" not in printed
    assert 'api-key = "***"' in printed


@pytest.mark.parametrize("listen", ["off", "", "OFF"])
def test_a_port_can_be_off(monkeypatch: pytest.MonkeyPatch, listen: str) -> None:
    monkeypatch.setenv("QUIRE_METRICS_LISTEN", listen)
    assert parse(make(), []).metrics_listen == "off"
    assert parse(make(), ["--metrics-listen", "127.0.0.1:0"]).metrics_listen == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://cache:6379/0", "redis://cache:6379/0"),
        ("redis://:s3cret@cache:6379/0", "redis://***@cache:6379/0"),
        ("redis://user:s3@cret/s3cret@cache:notaport/0", "redis://***@cache:notaport/0"),
        ("unix:///run/redis.sock?db=0&password=s3cret", "unix:///run/redis.sock?db=0&password=***"),
        ("redis://cache/0?password=s3@cret&db=1", "redis://cache/0?password=***&db=1"),
        ("off", "off"),
    ],
)
def test_no_url_shows_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown
    assert f"--redis {shown!r} is not the URL" in bad_url(url)


def test_print_config_hides_a_password_that_is_a_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(make(), ["--redis", "unix:///run/redis.sock?password=s3cret", "--print-config"])
    assert 'redis = "unix:///run/redis.sock?password=***"  # flag' in capsys.readouterr().out
