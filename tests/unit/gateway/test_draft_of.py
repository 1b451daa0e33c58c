"""Records that draft_of names: what a new request and one that continues get if the record cannot be read."""

from __future__ import annotations

from typing import Any, cast

import pytest
from quire.v1 import inference_pb2 as pb

from gateway_svc.pipeline.old_answers import OldAnswerReader
from gateway_svc.records.store import RecordStore
from svc_common.errors import NotConfiguredError, NotFoundError, RecordsUnavailableError, ServiceError


class Records:
    """A record store whose records cannot be read."""

    def __init__(self, error: ServiceError | None) -> None:
        self._error = error

    async def load(self, record_id: str) -> None:
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, NotFoundError),
        (NotConfiguredError("no records"), NotConfiguredError),
        (RecordsUnavailableError("Redis does not answer"), RecordsUnavailableError),
    ],
)
async def test_a_record_that_cannot_be_read_stops_only_new_requests(
    error: ServiceError | None, expected: type[ServiceError]
) -> None:
    """A request that continues has tokens that its client must not lose for the sake of drafts."""
    answers = OldAnswerReader(cast(Any, None), lambda: cast(RecordStore, Records(error)))
    request = pb.GenerateRequest(draft_of="old")
    with pytest.raises(expected):
        await answers.read(request, cast(Any, None), "")
    request.continuation.samples.add(output_token_ids=[5])
    assert await answers.read(request, cast(Any, None), "") == b""
