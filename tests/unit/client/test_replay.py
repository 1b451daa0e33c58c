"""The comparison of replay logs, and the facts of a model in an entry."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire_client.replay import ReplayedTurns, ReplayError, changed_facts, difference, read_log

from request_fields.replay_log import sample_entry, turn_entry

TOOL = {"role": "tool", "tool_call_id": "call_1", "content": "sun"}
REQUEST: dict[str, Any] = {
    "prompt": {"chat": {"messages": [{"role": "user", "content": "a"}, TOOL]}},
    "resumable": True,
}


def entry(revision: str = "r1", **facts: str) -> dict[str, Any]:
    info = types_pb2.ModelInfo(**{"weights_digest": "w", "bundle_digest": b"\1", "numerics": "cpu", **facts})
    accepted = pb.Accepted(request_id="a", seed=2**64 - 1, revision=revision, prompt_digest=b"\2")
    call = {"id": "call_2", "name": "f", "arguments": "{}"}
    sample = sample_entry("some text", "", [call], "eos", SimpleNamespace(receipt="", output_digest=5))
    return turn_entry(REQUEST, info, accepted, [sample])


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("request", "request_id"), "b", None),
        (("tool_results", 0, 1), "x", "tool result of call call_1"),
        (("tool_results", 0, 0), "call_9", None),
        (("tool_results",), [], "tool result of call call_1"),
        (("request", "sampling", "seed"), "7", "request.sampling.seed at character 0"),
        (("request", "resumable"), False, "request.resumable"),
        (("prompt_digest",), "03", "prompt"),
        (("samples", 0, "text"), "some", "samples[0].text at character 4"),
        (("samples", 0, "tool_calls", 0, "arguments"), "{]", "samples[0].tool_calls[0].arguments at character 1"),
        (("samples", 0, "tool_calls"), [], "samples[0].tool_calls[0]"),
        (("samples",), [], "samples[0]"),
        (("samples", 0, "token_digest"), "6", "samples[0].token_digest at character 0"),
        (("samples", 0, "logits_digest"), "6", None),
    ],
)
def test_the_first_difference(path: tuple[Any, ...], value: Any, expected: str | None) -> None:
    old = entry()
    assert difference(old, copy.deepcopy(old)) is None
    new = copy.deepcopy(old)
    place: Any = new
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    found = difference(old, new)
    assert (found and found[0]) == expected
    for one in (old, new):  # the answer differs too, which is the effect and not the cause
        one["samples"].append({"text": str(one is old)})
    later = difference(old, new)
    assert later is not None
    assert later[0].startswith(expected or "samples[1].text")


def test_logits_are_compared_where_both_have_receipts() -> None:
    old, new = entry(), entry()
    old["samples"][0]["logits_digest"], new["samples"][0]["logits_digest"] = "1", "2"
    assert difference(old, new) == ("samples[0].logits_digest at character 0", {})


@pytest.mark.parametrize(
    ("revision", "facts", "causes"),
    [
        ("r1", {}, {}),
        ("r1~t", {}, {"template": "01 -> 01~t"}),
        ("r1+a", {}, {"adapter": " -> +a"}),
        ("r1~t+a@3.r9", {}, {"weights": "w -> w@3.r9", "adapter": " -> +a", "template": "01 -> 01~t"}),
        ("r2", {"weights_digest": "v"}, {"weights": "w -> v", "configuration": "r1 -> r2"}),
        ("r1", {"numerics": "n" * 90, "build": "b"}, {"numerics": f"cpu -> {'n' * 40}", "build": " -> b"}),
    ],
)
def test_facts_that_differ(revision: str, facts: dict[str, str], causes: dict[str, str]) -> None:
    assert changed_facts(entry(), entry(revision, **facts)) == causes


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("tool_results", [1]), ("tool_results", [["call_1"]]), ("samples", [1]), ("samples", [{}]),
        ("samples", [{"tool_calls": [1]}]), ("samples", [{"tool_calls": [{"id": 1}]}]), ("request", {}),
        ("request", {"request_id": "a", "session_id": [1]}), ("model", 1), ("samples", {"a": 1}),
    ],
)  # fmt: skip
def test_a_broken_log_is_an_error_with_its_line(tmp_path: Path, part: str, value: Any) -> None:
    """A traceback would end the command with the exit code of a turn that differs."""
    log = tmp_path / "run.jsonl"
    log.write_text(f"{json.dumps(entry())}\n{json.dumps(entry() | {part: value})}\n")
    with pytest.raises(ReplayError, match=r"run.jsonl:2: .*wrong type"):
        read_log(log)


def test_a_log_that_is_not_utf8_is_an_error_with_its_line(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_bytes(json.dumps(entry()).encode() + b"\n{\xff}\n")
    with pytest.raises(ReplayError, match=r"run.jsonl:2: not a JSON object"):
        read_log(log)


def test_a_turn_is_computed_without_the_record_of_its_drafts() -> None:
    old = entry()
    old["request"]["draft_of"] = "expired"
    assert ReplayedTurns([old]).request_of(old).draft_of == ""
