"""The numbers of `quire compare`, and its files."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import quire_cli as cli
from hypothesis import given
from hypothesis import strategies as st
from quire_analysis.compare import read_requests
from quire_analysis.differences import kl_at_least, scores_of
from quire_analysis.explain import gumbel_noise
from quire_client.errors import InvalidRequest
from quire_client.types import TokenLogprob, TopLogprob

from worker_svc.engine.sampling import noise

WEIGHTS = st.lists(st.floats(0.001, 1.0), min_size=8, max_size=8)


def entry_of(weights: list[float], num_top: int) -> tuple[TokenLogprob, list[float]]:
    """An entry with the most likely tokens of a distribution over 8, and all log probabilities."""
    logs = [math.log(weight / sum(weights)) for weight in weights]
    ids = sorted(range(8), key=lambda token: -logs[token])
    top = tuple(TopLogprob(token, logs[token]) for token in ids[:num_top])
    return TokenLogprob(3, logs[3], 1, top=top), logs


@given(WEIGHTS, WEIGHTS, st.integers(0, 8), st.integers(0, 8))
def test_the_bound_is_never_above_the_divergence(p: list[float], q: list[float], top_p: int, top_q: int) -> None:
    ours, logs = entry_of(p, top_p)
    theirs, other = entry_of(q, top_q)
    exact = math.fsum(math.exp(a) * (a - b) for a, b in zip(logs, other, strict=True))
    bound = kl_at_least(ours, theirs)
    assert 0 <= bound <= exact + 1e-6
    if min(top_p, top_q) == 8:
        assert bound == pytest.approx(exact, abs=1e-6)
    assert kl_at_least(ours, ours) == 0


def test_scores_of_equal_answers_have_no_variance() -> None:
    found = scores_of([(1, 1), (2, 2), (0, 0)], [(1, 3), (2, 1), (0, 0)])
    assert (found["win_rate_same_noise"], found["win_rate_variance_same_noise"], found["gain_same_noise"]) == (
        0.5,
        0,
        0,
    )
    assert (found["win_rate_other_noise"], found["gain_other_noise"]) == (0.5, pytest.approx(1 / 3))
    assert found["win_rate_variance_other_noise"] == pytest.approx(0.25 / 3)
    assert scores_of([(1, 2)], [(1, 2)])["win_rate_variance_same_noise"] is None


def test_both_forms_of_a_line_are_read(tmp_path: Path) -> None:
    body = {"model": "x", "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 3, "stream": True}
    lines = [{"custom_id": "one", "body": body}, {"request": {"prompt": [1, 2], "seed": 3}, "expected": "b"}]
    file = tmp_path / "lines"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    first, second = read_requests(file)
    assert (first.name, first.options, list(first.input)) == ("one", {"max_tokens": 3}, ["messages"])
    assert (second.name, second.input, second.options) == ("3", {"prompt": [1, 2]}, {"seed": 3})
    assert second.line["expected"] == "b"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1: Expecting property name"),
        ("[]", 'line 1: must be an object with "request"'),
        ('{"request": {"prompt": "a", "max_token": 3}}', "did you mean max_tokens"),
        ('{"request": {"prompt": "a", "top_k": -1}}', "top_k=-1 is not a valid value"),
        ('{"request": {"prompt": "a", "session_id": "s"}}', "session_id is set; send the whole prompt"),
        ('{"body": {"prompt": "a", "response_format": {}}}', "unknown option response_format"),
        ('{"request": {"seed": 1}}', "give exactly one of prompt, token_ids and messages"),
        ("\n", "has no requests"),
        ("[" * 100_000, "maximum recursion depth"),
    ],
    ids=lambda value: value[:40],
)
def test_a_line_that_is_no_request_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    file = tmp_path / "lines"
    file.write_text(line)
    with pytest.raises(InvalidRequest) as found:
        read_requests(file)
    assert words in str(found.value)
    assert cli.main(["compare", "a", "b", "--requests", str(file), "-o", str(tmp_path / "report")]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


def test_a_rule_that_cannot_be_loaded_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, rule = tmp_path / "lines", tmp_path / "rule.py"
    file.write_text('{"request": {"prompt": "a"}}')
    rule.write_text("def other(): ...")
    flags = "--requests", str(file), "-o", str(tmp_path / "report"), "--score", str(rule)
    assert cli.main(["compare", "a", "b", *flags]) == 2
    assert "has no function score(line, text)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "output", "words"),
    [
        ("none", "r", "No such file"),
        ("lines", "no/r", "does not exist"),
        ("lines", "r", "no gateway answers"),
    ],
)
def test_a_comparison_that_cannot_begin_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, output: str, words: str
) -> None:
    """Exit code 1 means that answers differ; a missing folder is found before anything is computed."""
    (tmp_path / "lines").write_text('{"request": {"prompt": "a"}}')
    flags = "--requests", str(tmp_path / file), "-o", str(tmp_path / output), "--target", "127.0.0.1:1"
    assert cli.main(["compare", "a", "b", *flags]) == 2
    assert words in capsys.readouterr().err


def test_the_noise_is_that_of_the_engine() -> None:
    rng = random.Random(3)
    for _ in range(300):
        seed, position, sample, token = (rng.randrange(1 << bits) for bits in (64, 20, 6, 18))
        expected = noise.gumbel_noise(seed, position, sample, np.array([token], np.uint32))[0]
        assert gumbel_noise(seed, position, sample, token) == float(expected)
