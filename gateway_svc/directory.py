"""Which scheduler serves which model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gateway_svc.models import ServedModel
from gateway_svc.scheduler_client import RETRY_AFTER_S, SchedulerClient
from svc_common.errors import InvalidRequestError, NotFoundError, UnavailableError

log = logging.getLogger(__name__)


class ModelDirectory:
    """The models behind this gateway, by name. Of several schedulers with one model, the first that is up serves."""

    def __init__(self, clients: Sequence[SchedulerClient]) -> None:
        self.clients = list(clients)
        self._warned: set[tuple[str, str]] = set()

    @property
    def is_ready(self) -> bool:
        """At least one model can be asked for now."""
        return any(client.is_ready for client in self.clients)

    def models(self) -> list[tuple[ServedModel, int]]:
        """Every known model with its number of ready workers, in order of names."""
        serving = self._serving()
        return [(model, serving[name].ready_workers) for name, model in sorted(self._known(serving).items())]

    def find(self, name: str) -> tuple[SchedulerClient, ServedModel]:
        """The scheduler to ask for a model; empty name: the only model.

        Raises NotFoundError, InvalidRequestError (several models, none named) or UnavailableError.
        """
        serving = self._serving()
        client = serving[self._resolve(name, serving)]
        if client.model is None or not client.is_ready:
            raise client.unavailable()
        return client, client.model

    def find_text(self, name: str) -> ServedModel:
        """The model, also while its scheduler is away. Raises like `find`."""
        serving = self._serving()
        return self._known(serving)[self._resolve(name, serving)]

    def _resolve(self, name: str, serving: dict[str, SchedulerClient]) -> str:
        have = ", ".join(repr(known) for known in sorted(serving))
        if not serving:
            problems = "; ".join(f"{client.address}: {client.problem}" for client in self.clients)
            raise UnavailableError(f"no model is ready yet ({problems}); try again", retry_after_s=RETRY_AFTER_S)
        if not name:
            if len(serving) > 1:
                raise InvalidRequestError(f"model is empty; this gateway serves several: {have}", field="model")
            return next(iter(serving))
        if name not in serving:
            raise NotFoundError(f"model {name[:200]!r} is not served here; there is {have}", field="model")
        return name

    def _serving(self) -> dict[str, SchedulerClient]:
        """The scheduler in charge of each known model."""
        serving: dict[str, SchedulerClient] = {}
        for client in self.clients:
            if client.model is None:
                continue
            first = serving.setdefault(client.model.name, client)
            if first is not client:
                self._warn_once(client.model.name, client)
                if client.is_ready and not first.is_ready:
                    serving[client.model.name] = client
        return serving

    def _warn_once(self, name: str, client: SchedulerClient) -> None:
        if (name, client.address) not in self._warned:
            self._warned.add((name, client.address))
            log.warning(
                "scheduler %s also serves model %r; it is used while the first one is away", client.address, name
            )

    @staticmethod
    def _known(serving: dict[str, SchedulerClient]) -> dict[str, ServedModel]:
        return {name: client.model for name, client in serving.items() if client.model is not None}
