"""Replay logs: reads them, makes the requests of their turns, and finds what differs (docs/replay.md). No network."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from itertools import zip_longest
from os import PathLike
from typing import Any

from google.protobuf import json_format
from quire.v1 import inference_pb2 as pb

from request_fields.replay_log import FORMAT

Entry = dict[str, Any]
KEYS = {"model": dict, "request": dict, "tool_results": list, "prompt_digest": str, "samples": list}
CAUSES = ("weights", "adapter", "template", "numerics", "build", "configuration")
OF_PROMPTS = ("template", "configuration")
MAX_SHOWN = 40  # characters of a value


class ReplayError(ValueError):
    """A log cannot be read, or a turn cannot be computed; the message says why."""


def read_log(path: str | PathLike[str]) -> list[Entry]:
    """The entries of a log. Raises ReplayError, or OSError."""
    entries = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ReplayError(f"{path}:{number}: not a JSON object: {error}") from None
            if not isinstance(entry, dict) or entry.get("quire_replay") != FORMAT:
                raise ReplayError(f"{path}:{number}: not an entry of a replay log of format {FORMAT}")
            for key, kind in KEYS.items():
                if not isinstance(entry.get(key), kind):
                    raise ReplayError(f"{path}:{number}: {key} is missing or has a wrong type")
            if not _has_parts(entry):
                raise ReplayError(f"{path}:{number}: an id, a tool result or a sample is missing or has a wrong type")
            entries.append(entry)
    if not entries:
        raise ReplayError(f"{path}: there is no turn in it")
    return entries


def _has_parts(entry: Entry) -> bool:
    """Whether an entry has the ids, results and calls that a replay reads."""
    request, results = entry["request"], entry["tool_results"]
    try:
        ids = [request["request_id"], request.get("session_id", ""), *(call["id"] for call in _calls(entry))]
    except (KeyError, TypeError):
        return False
    return all(isinstance(one, str) for one in ids) and all(isinstance(one, list) and len(one) == 2 for one in results)


class ReplayedTurns:
    """Makes the requests of a log's turns, in order. A request keeps its id, and so its calls keep theirs; a turn that
    a later one continues as a session gets a new id, because its record would replace the recorded one.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._bases = {entry["request"].get("session_id", "") for entry in entries}
        self._ids: dict[str, str] = {}  # ids in the replay of sessions and of their calls, by those in the log

    def request_of(self, entry: Entry) -> pb.GenerateRequest:
        """The request of a turn. Raises ReplayError if it needs a session that the log does not have."""
        request = pb.GenerateRequest()
        try:
            json_format.ParseDict(entry["request"], request)
        except json_format.ParseError as error:
            raise ReplayError(f"the request cannot be read: {error}") from None
        if request.session_id not in {"", *self._ids}:
            raise ReplayError(f"it continues session {request.session_id!r}, which no turn before it has made")
        request.session_id = self._ids.get(request.session_id, "")
        request.draft_of = ""  # changes no token, and its record may have expired
        for message in request.prompt.chat.messages:
            message.tool_call_id = self._ids.get(message.tool_call_id, message.tool_call_id)
        request.resumable = request.request_id in self._bases
        if request.resumable:
            self._ids[request.request_id] = request.request_id = f"replay-{uuid.uuid4().hex}"
        return request

    def restore(self, old: Entry, new: Entry) -> None:
        """Give the new entry of a turn the recorded ids."""
        if new["request"]["request_id"] != old["request"]["request_id"]:
            for before, after in zip(_calls(old), _calls(new), strict=False):
                self._ids[before["id"]], after["id"] = after["id"], before["id"]
        new["request"] = old["request"]


def _calls(entry: Entry) -> list[dict[str, str]]:
    return [call for sample in entry["samples"] for call in sample["tool_calls"]]


def difference(old: Entry, new: Entry) -> tuple[str, dict[str, str]] | None:
    """The first part of a turn that differs, and the facts of the model that do: causes, with both values."""
    for recorded, found in zip_longest(old["tool_results"], new["tool_results"], fillvalue=("", "")):
        if recorded[1] != found[1]:
            return f"tool result of call {recorded[0] or found[0]}", {}
    asked = {**new["request"], "request_id": old["request"].get("request_id")}
    if path := _first_path(old["request"], asked, "request"):
        return path, {}
    if old["prompt_digest"] != new["prompt_digest"]:
        return "prompt", changed_facts(old, new, OF_PROMPTS)
    path = _first_path(_comparable(old, new), _comparable(new, old), "samples")
    return (path, changed_facts(old, new)) if path else None


def _comparable(entry: Entry, other: Entry) -> list[dict[str, Any]]:
    """The samples of an entry, without what those of the other one do not have."""
    known = {key for sample in other["samples"] for key in sample}
    return [{key: sample[key] for key in sample if key in known} for sample in entry["samples"]]


def changed_facts(old: Entry, new: Entry, names: Sequence[str] = CAUSES) -> dict[str, str]:
    """The facts of the model that differ, also of equal answers."""
    pairs = ((name, str(old["model"].get(name)), str(new["model"].get(name))) for name in names)
    return {name: f"{was[:MAX_SHOWN]} -> {now[:MAX_SHOWN]}" for name, was, now in pairs if was != now}


def _first_path(old: Any, new: Any, path: str) -> str:
    """The path of the first value that differs; empty: all are equal."""
    if old == new:
        return ""
    if isinstance(old, dict) and isinstance(new, dict):
        return next(filter(None, (_first_path(old.get(key), new.get(key), f"{path}.{key}") for key in {**old, **new})))
    if isinstance(old, list) and isinstance(new, list):
        pairs = enumerate(zip_longest(old, new))
        return next(filter(None, (_first_path(*pair, f"{path}[{i}]") for i, pair in pairs)))
    if isinstance(old, str) and isinstance(new, str):
        equal = (i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1])
        return f"{path} at character {next(equal, min(len(old), len(new)))}"
    return path
