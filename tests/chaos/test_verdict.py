"""The runner's verdict: it counts lost, repeated and changed tokens, and attributes pauses to faults."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from quire_client.types import Delta

from tests.chaos.faults import ACTIONS, Fault, Strike, make_plan
from tests.chaos.parameters import served_parameters
from tests.chaos.report import TOGETHER, Report
from tests.chaos.streams import StreamRecord
from tests.chaos.workload import Answer, Request, make_requests, with_stop_string

EXPECTED = (Answer((1, 2, 3, 4), "abcd", "length"),)


def record(*deltas: tuple[int, tuple[int, ...]], answer: Answer | None = EXPECTED[0], error: str = "") -> StreamRecord:
    """A stream that received (offset, token ids) at 0, 1, 2, ... seconds."""
    stream = StreamRecord(0, Request(0, {"token_ids": [5]}), EXPECTED, token_ids=[[]], error=error)
    for time, (offset, token_ids) in enumerate(deltas):
        stream.take(Delta(0, offset, token_ids, ""), float(time))
    stream.answers = () if answer is None else (answer,)
    stream.ended = float(len(deltas))
    return stream


GOOD = record((0, (1, 2)), (2, (3, 4)))


@pytest.mark.parametrize(
    ("stream", "lost", "repeated", "changed"),
    [
        (GOOD, 0, 0, 0),
        (record((0, (1, 2)), answer=None, error="gone"), 2, 0, 0),
        (record((0, (1, 2)), (3, (4,)), answer=None), 1, 0, 0),
        (record((0, (1, 2)), (1, (2, 3, 4)), answer=None), 0, 1, 0),
        (record((0, (1, 9, 3, 4))), 0, 0, 1),
        (record((0, (1, 2, 3, 4)), answer=Answer((1, 2, 3, 4), "abce", "length")), 0, 0, 1),
        (record((0, (1, 2, 3, 4)), answer=Answer((1, 2, 3, 4), "abcd", "eos")), 0, 0, 1),
        (record((0, (1, 2, 3, 4, 5))), 0, 0, 1),
    ],
)
def test_a_stream_is_judged(stream: StreamRecord, lost: int, repeated: int, changed: int) -> None:
    assert (stream.lost, stream.repeated, stream.changed) == (lost, repeated, changed)
    assert stream.is_bad == (stream is not GOOD)
    assert stream.difference()


def strike(kind: str, action: str, began: float, ended: float) -> Strike:
    return Strike(Fault(kind, action, 0, 1.0, ended - began), f"{kind}-0", began, ended, ended + 0.5)


def report(*strikes: Strike, streams: tuple[StreamRecord, ...] = (GOOD,), problems: tuple[str, ...] = ()) -> Report:
    return Report(streams, strikes, {}, {}, problems, 0.0, {})


def test_a_pause_is_attributed_to_the_fault_at_that_time() -> None:
    kill, flush = strike("worker", "kill", 0.2, 0.4), strike("redis", "flush", 0.5, 0.6)
    assert report(kill).summary()["worker_kill_pause_p99_s"] == 1.0
    both = report(kill, flush)
    assert both.summary()["worker_kill_pause_p99_s"] == 0.0
    assert TOGETHER in both.text()
    assert report(strike("worker", "kill", 5.0, 6.0)).summary()["pause_p99_s"] == 0.0


def test_a_matrix_counts_streams_by_parameter_and_killed_process() -> None:
    stream = record((0, (1, 9, 3, 4)))
    stream.request = Request(0, {"token_ids": [5]}, {"top_p": 0.5, "max_tokens": 9})
    kills = (
        strike("worker", "kill", 0.2, 0.4),
        strike("scheduler", "kill", 8.0, 9.0),
        strike("redis", "flush", 0.2, 0.4),
    )
    rows = [line.split() for line in report(*kills, streams=(GOOD, stream)).parameter_table().splitlines()[1:]]
    none = ["0", "(0)"]
    assert rows == [["token_ids", *none, *none, "2", "(1)", *none], ["top_p", *none, *none, "1", "(1)", *none]]


def test_the_last_line_is_json_with_the_documented_keys() -> None:
    kills = (strike("worker", "kill", 0.2, 0.4), strike("redis", "flush", 0.5, 0.6))
    summary = json.loads(report(*kills).json_line())
    names = ["streams", "kills", "lost", "repeated", "changed", "errors", "pause_p50_s", "pause_p99_s"]
    assert list(summary)[: len(names)] == names
    assert summary["kills"] == {"gateway": 0, "scheduler": 0, "worker": 1, "redis": 0}  # a flush kills no process


def test_a_run_is_good_only_without_bad_streams_and_problems() -> None:
    assert report().is_good
    assert not report(problems=("worker-0 ended with exit code 1",)).is_good
    bad = report(strike("worker", "kill", 0.2, 0.4), streams=(GOOD, record((0, (1, 9, 3, 4)))))
    assert not bad.is_good
    assert "differs from position 1" in bad.text()
    assert "kill of worker-0" in bad.text()


def test_plans_and_requests_are_seeded_and_cover_everything() -> None:
    sizes = {"gateway": 2, "scheduler": 2, "worker": 3, "redis": 1}
    plan = make_plan(3, 64, 5.0, sizes)
    assert plan == make_plan(3, 64, 5.0, sizes)
    assert {(fault.kind, fault.action) for fault in plan} == {(k, action) for k in ACTIONS for action in ACTIONS[k]}
    requests = make_requests(3, 40, 2048)
    assert requests == make_requests(3, 40, 2048)
    assert {request.num_samples for request in requests} == {1, 2, 3}
    names = {parameter.name for parameter in served_parameters()}
    assert names <= {name for request in requests for name in request.options}
    assert {next(iter(request.prompt)) for request in requests} == {"token_ids", "messages", "prompt"}


def test_the_failure_model_lists_every_parameter() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "failure-model.md").read_text()
    matrix = page.partition("<!-- matrix of parameters and kills -->")[2].partition("<!-- end of matrix -->")[0]
    listed = {line.split("`")[1] for line in matrix.splitlines() if line.startswith("| `")}
    assert {parameter.name for parameter in served_parameters()} <= listed


def test_a_stop_string_ends_a_long_answer_in_its_second_half() -> None:
    text = "".join(chr(ord("a") + i % 26) + str(i) for i in range(200))
    whole = (Answer(tuple(range(200)), text, "length"),)
    stopped = with_stop_string(Request(1, {"prompt": "x"}, {"max_tokens": 200}), whole, random.Random(0), 2)
    assert stopped is not None
    assert text.find(stopped.options["stop"][0]) >= 0.4 * len(text)
    assert with_stop_string(Request(1, {}, {"n": 2}), whole, random.Random(0), 2) is None
