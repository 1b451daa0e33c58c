"""Which weights computed which tokens, as a gateway notes it."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from quire.internal.v1 import scheduler_pb2 as pb
from quire.v1 import inference_pb2
from quire.v1 import types_pb2 as types

from gateway_svc.answer import receipts
from gateway_svc.answer.receipts import SampleProof
from gateway_svc.request.validation import Replay, ResumePlan
from gateway_svc.schedulers.scheduler_request import SampleJournal


def weights(version: int, *, keeps_kv: bool = False) -> pb.WeightsChange:
    found = types.WeightVersion(version=version, revision=f"r{version}", weights_digest=f"d{version}")
    return pb.WeightsChange(weights=found, keeps_kv=keeps_kv)


BASE = weights(0)


@pytest.mark.parametrize(
    ("given", "noted", "num_output", "expected"),
    [
        (0, [], 9, []),
        (0, [(0, BASE)], 9, []),
        (0, [(4, weights(1))], 9, [(0, 0, 4), (1, 4, 9)]),
        (0, [(0, weights(1))], 9, [(1, 0, 9)]),
        (3, [(5, weights(1))], 9, [(0, 3, 5), (1, 5, 9)]),
        (3, [(3, weights(2))], 9, [(2, 3, 9)]),
        (0, [(4, weights(1)), (4, weights(2)), (6, weights(2))], 9, [(0, 0, 4), (2, 4, 9)]),
        (0, [(4, weights(1)), (4, BASE)], 9, []),
        (0, [(4, weights(1)), (8, weights(2))], 6, [(0, 0, 4), (1, 4, 6)]),
    ],
)
def test_spans(
    given: int, noted: list[tuple[int, pb.WeightsChange]], num_output: int, expected: list[tuple[int, int, int]]
) -> None:
    """`given`: tokens that the client had; a stop string may cut tokens off, so that fewer are output."""
    journal = SampleJournal(array("I", range(given)))
    for position, change in noted:
        journal.outputs.extend(range(position - len(journal.outputs)))
        journal.note_weights(change, BASE)
    spans = journal.spans(num_output)
    assert [(span.weights.version, span.start, span.end) for span in spans] == expected
    assert all(span.weights.weights_digest == f"d{span.weights.version}" for span in spans)


def test_kept_keys_and_values_are_marked() -> None:
    journal = SampleJournal(array("I", range(4)))
    journal.num_given = 0
    journal.note_weights(weights(1, keeps_kv=True), BASE)
    assert [span.keeps_kv for span in journal.spans(8)] == [False, True]


class NotedSigner:
    """Signs nothing; returns what it would have signed."""

    def sign(self, payload: dict[str, Any], answer: Any) -> Any:
        return payload


@pytest.mark.parametrize(
    ("replay", "num_computed", "num_claimed"),
    [(None, 0, None), (None, 1, 12), (Replay((5,), (None,)), 1, 0), (Replay((5,), (None,)), 0, 0)],
)
def test_a_receipt_says_which_output_the_client_gave(
    monkeypatch: pytest.MonkeyPatch, replay: Replay | None, num_computed: int, num_claimed: int | None
) -> None:
    """The client, or the record, has 12 tokens. None: there is no receipt."""
    monkeypatch.setattr(receipts, "_facts", lambda plan: {})
    given = array("I", range(12))
    plan: Any = SimpleNamespace(
        resume=ResumePlan((given,), (False,), (0.0,), replay=replay), prompt=SimpleNamespace(ids=array("I", [1]))
    )
    signer: Any = NotedSigner()
    proof = SampleProof(signer, plan, 0)
    proof.token_ids.extend([*given, *range(num_computed)])
    proof.digests.extend(range(num_computed))
    signed: Any = proof.receipt(inference_pb2.Finished(reason=types.FINISH_REASON_LENGTH))
    assert (signed["num_claimed_tokens"] if signed else None) == num_claimed
    assert not signed or signed["first_digest"] == 12
