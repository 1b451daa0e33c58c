"""Old answers that requests name: their tokens, which workers propose as drafts (docs/speculation.md)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, islice

from quire.v1 import inference_pb2 as pb

from gateway_svc.answer.resuming import no_record
from gateway_svc.callers.caller import record_target, scoped
from gateway_svc.records.store import RecordStore
from gateway_svc.request.field_errors import invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.threads import Lane
from gateway_svc.request.validation import check_id
from prefix_index.hashing import token_bytes
from request_fields.fields import DRAFT_FIELDS, MAX_DRAFT_IDS
from svc_common.errors import NotConfiguredError, ServiceError


class OldAnswerReader:
    """Reads old answers. `records` raises NotConfiguredError if this gateway keeps none."""

    def __init__(self, lane: Lane, records: Callable[[], RecordStore]) -> None:
        self._lane, self._records = lane, records

    async def read(self, request: pb.GenerateRequest, model: ServedModel, former_id: str) -> bytes:
        """The token ids of the old answer that a request names, u32[] of at most MAX_DRAFT_IDS; of a request that names
        none, those of the record `former_id`, if it is set and can be read.

        Raises ServiceError, but not for the record of a request that continues: it may have expired, and drafts change
        no token.
        """
        named = [name for name in DRAFT_FIELDS if getattr(request, name)]
        if len(named) > 1:
            raise invalid(named[1], f"is set together with {named[0]}; leave one of them unset")
        if request.draft_token_ids:
            return await self._lane.run(4 * len(request.draft_token_ids), _column, request.draft_token_ids)
        if request.draft_text:
            encode = partial(model.require_tokenizer("draft_text").encode, add_special_tokens=False)
            return _column(await self._lane.run(len(request.draft_text), encode, request.draft_text))
        if request.draft_of:
            check_id("draft_of", request.draft_of)
            record_target(request.draft_of)
            if not request.HasField("continuation"):
                return await self._named(request.draft_of)
            former_id = scoped(request.draft_of)
        try:
            return await self._output_of(former_id) or b"" if former_id else b""
        except ServiceError:
            return b""

    async def _named(self, record_id: str) -> bytes:
        try:
            found = await self._output_of(scoped(record_id))
        except NotConfiguredError:
            words = "draft_of is set, but this deployment keeps no request records (--redis, --record-memory)"
            raise NotConfiguredError(f"{words}; send draft_token_ids", field="draft_of") from None
        if found is None:
            raise no_record(record_id, "draft_of")
        return found

    async def _output_of(self, record_id: str) -> bytes | None:
        """The stored output of all samples, one after another; None if there is no such record."""
        record = await self._records().load(record_id)
        return None if record is None else _column(chain.from_iterable(record.outputs))


def _column(ids: Iterable[int]) -> bytes:
    return token_bytes(array("I", islice(ids, MAX_DRAFT_IDS)))
