"""Settings: flags over environment over defaults, and a bad value names itself."""

import pytest

from svc_common.config import address, in_range, make_parser, parse, size_bytes


def make() -> object:
    parser = make_parser("test", "A service.")
    parser.add_argument("--max-waiting", type=in_range(int, 1, 10), default=5)
    parser.add_argument("--scheduler", type=address, action="append", default=[])
    parser.add_argument("--redis", default=None)
    return parser


def test_flags_win_over_environment_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(make(), []).max_waiting == 5
    monkeypatch.setenv("QUIRE_MAX_WAITING", "7")
    assert parse(make(), []).max_waiting == 7
    assert parse(make(), ["--max-waiting", "9"]).max_waiting == 9


def test_a_list_on_the_command_line_replaces_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_bad_environment_value_stops_the_start_with_its_name(
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
