"""CallAdmission of calls: which model a caller may use, how much of it, and under which salt its blocks are cached."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace

from quire.v1 import inference_pb2 as pb

from gateway_svc.callers.caller import annotate, current_caller, current_targets, tenant_salt
from gateway_svc.limits.key_limits import KeyLimits
from gateway_svc.request.models import ServedModel
from gateway_svc.request.validation import DEFAULT_LIMITS, RequestLimits
from gateway_svc.schedulers.directory import ModelDirectory


class CallAdmission:
    """Applies the limits of this gateway and of its callers' keys."""

    def __init__(
        self,
        directory: ModelDirectory,
        *,
        requests: RequestLimits = DEFAULT_LIMITS,
        keys: KeyLimits | None = None,
        isolates_tenants: bool = False,
    ) -> None:
        self.requests = requests
        self._directory = directory
        self._keys = keys or KeyLimits()
        self.counts = self._keys.is_on  # some requests count against limits of keys
        self.isolates_tenants = isolates_tenants

    def model(
        self,
        request: pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest,
        revision: str = "",
        adapter: str = "",
        *,
        alias: str | None = None,
    ) -> ServedModel:
        """The model of a request whose fields are checked. Raises ServiceError if the caller may not use it now.

        `alias`: the request has named its model already, and this is the route by which it was chosen (empty: none).
        """
        name, owner = request.model, current_caller.get().owner
        if alias is None:
            alias, name = self._directory.routed(request, revision)
        model = self._directory.find(name, revision, adapter)
        if alias:
            model = replace(model, alias=alias)
            current_targets.get([]).append(model.name)
        annotate(model=model.name)
        if self._keys.names_owners:
            self._keys.check(owner, alias or model.name, request.scheduling.priority)
        return model

    def serves(self, model: str) -> bool:
        return self._directory.readiness(model) > 0

    def counted(
        self, scoped_id: str, num_tokens: int, num_used: Callable[[], int], *, num_rows: int = 1
    ) -> AbstractAsyncContextManager[None]:
        """Count a request of at most `num_tokens` tokens and `num_rows` samples or beams against its key while the
        block runs. `num_used` returns the number of used tokens at the end. Raises OverloadedError with a retry delay.
        """
        caller = current_caller.get()
        return self._keys.admitted(
            caller.owner, scoped_id, num_tokens, num_used, num_rows=num_rows, counted_as=caller.counted_as
        )

    def call(self, num_tokens: int = 0) -> AbstractAsyncContextManager[None]:
        """Count a call that no worker serves against its key. Raises OverloadedError with a retry delay."""
        if not self.counts:
            return nullcontext()
        return self.counted(f"call-{secrets.token_hex(8)}", num_tokens, lambda: num_tokens, num_rows=0)

    def join(self, num_requests: int) -> int:
        """Count the next requests of this call as one. Returns how many of them may be open at a time."""
        return self._keys.join(current_caller.get().owner, num_requests)

    def cache_salt(self, scheduling: pb.SchedulingParams) -> str:
        """A record keeps the salt of the request, so a resumed request gets the same salt again."""
        salt = scheduling.cache_salt
        return tenant_salt(current_caller.get().owner, salt) if self.isolates_tenants else salt
