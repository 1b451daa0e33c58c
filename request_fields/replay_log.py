"""Entries of a replay log, one JSON object per turn of an agent's run; docs/replay.md has the format.

The SDK and the gateway's HTTP API make them. Messages of protobuf come in as arguments; nothing here does I/O.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

FORMAT = 1
REVISION_MARKS = re.compile("(?=[~+@])")  # in front of the digests that gateways add to the revision of a model
Value = Mapping[str, Any]


def turn_entry(request: Value, info: Any, accepted: Any, samples: Sequence[Value]) -> dict[str, Any]:
    """The entry of an answer. `request`: a GenerateRequest as JSON; `info`: its ModelInfo; `accepted`: its Accepted."""
    own, *others = REVISION_MARKS.split(accepted.revision)
    added = {other[0]: other for other in others}
    sampling = {**request.get("sampling", {}), "seed": str(accepted.seed)}
    return {
        "quire_replay": FORMAT,
        "model": {
            "weights": info.weights_digest + added.get("@", ""),
            "adapter": added.get("+", ""),
            "template": info.bundle_digest.hex() + added.get("~", ""),
            "numerics": info.numerics,
            "build": info.build,
            "configuration": own,
        },
        "request": {"model": accepted.model, **request, "request_id": accepted.request_id, "sampling": sampling},
        "tool_results": _tool_results(request),
        "prompt_digest": accepted.prompt_digest.hex(),
        "samples": list(samples),
    }


def sample_entry(text: str, reasoning: str, tool_calls: Sequence[Value], reason: str, finished: Any) -> dict[str, Any]:
    """The answer of one sample. `tool_calls`: id, name and arguments of each; `finished`: its Finished."""
    proof = json.loads(json.loads(finished.receipt)["payload"]) if finished.receipt else {}
    return {
        "text": text,
        "reasoning": reasoning,
        "tool_calls": list(tool_calls),
        "finish_reason": reason,
        "token_digest": f"{finished.output_digest:016x}",
        # A receipt covers the logits of all tokens if the stream did not break.
        **({"logits_digest": proof["logits_digests"]} if proof.get("first_digest") == 0 else {}),
    }


def _tool_results(request: Value) -> list[list[str]]:
    """Id and digest of each tool message of a chat, in order."""
    messages = request.get("prompt", {}).get("chat", {}).get("messages", ())
    return [[one.get("tool_call_id", ""), _digest_of(one)] for one in messages if one["role"] == "tool"]


def _digest_of(message: Value) -> str:
    content = json.dumps([message.get("content", ""), message.get("parts", [])])
    return hashlib.sha256(content.encode()).hexdigest()[:32]
