"""The models that this gateway serves. The dispatcher chooses the scheduler of a request."""

from __future__ import annotations

from collections.abc import Sequence

from gateway_svc.models import ServedModel
from gateway_svc.scheduler_client import RETRY_AFTER_S, SchedulerClient
from svc_common.errors import InvalidRequestError, NotFoundError, UnavailableError


class ModelDirectory:
    """The models behind this gateway, by name. Schedulers with the same model are replicas. `clients` may change."""

    def __init__(self, clients: Sequence[SchedulerClient]) -> None:
        self.clients = clients

    @property
    def is_ready(self) -> bool:
        """At least one model can take requests now."""
        return any(client.is_ready for client in self.clients)

    def models(self) -> list[tuple[ServedModel, int]]:
        """Every known model, sorted by name, with the number of ready workers of all its replicas."""
        known = self._known()
        return [(model, self._num_workers(name)) for name, (_, model) in sorted(known.items())]

    def find(self, name: str, revision: str = "") -> ServedModel:
        """The model, if it can take requests now. Empty name: the only model. Empty revision: any.

        Raises NotFoundError, InvalidRequestError (several models, none named) or UnavailableError.
        """
        known = self._known()
        resolved = self._resolve(name, known)
        of_revision = self._known(revision)
        if resolved not in of_revision:
            raise UnavailableError(
                f"this gateway serves revision {known[resolved][1].info.revision} of model {resolved!r}, but the "
                f"request began on revision {revision[:200]}, whose tokens may differ; retry on another gateway, or "
                "start the request again",
                retry_after_s=RETRY_AFTER_S,
            )
        client, model = of_revision[resolved]
        if not client.is_ready:
            raise UnavailableError(
                f"the scheduler of model {resolved!r} is not ready ({client.shown_problem}); retry later",
                retry_after_s=RETRY_AFTER_S,
            )
        return model

    def find_text(self, name: str) -> ServedModel:
        """The model, even while its schedulers are disconnected. Raises like `find`."""
        known = self._known()
        return known[self._resolve(name, known)][1]

    def _resolve(self, name: str, known: dict[str, tuple[SchedulerClient, ServedModel]]) -> str:
        have = ", ".join(repr(model) for model in sorted(known))
        if not known:
            problems = "; ".join(client.shown_problem for client in self.clients) or "no scheduler has been found"
            raise UnavailableError(f"no model is ready yet ({problems}); retry later", retry_after_s=RETRY_AFTER_S)
        if not name:
            if len(known) > 1:
                raise InvalidRequestError(
                    f"model is empty, but this gateway serves several models; set it to one of {have}", field="model"
                )
            return next(iter(known))
        if name not in known:
            raise NotFoundError(f"model {name[:200]!r} is not served here; served models: {have}", field="model")
        return name

    def _known(self, revision: str = "") -> dict[str, tuple[SchedulerClient, ServedModel]]:
        """By model name, the replica whose ModelInfo is used: prefer a replica that can run requests, then one that
        accepts longer requests, then the first.
        """
        best: dict[str, tuple[SchedulerClient, ServedModel]] = {}
        for client in self.clients:
            if client.model is None or (revision and client.model.info.revision != revision):
                continue
            have = best.get(client.model.name)
            if have is None or _fitness(client, client.model) > _fitness(*have):
                best[client.model.name] = (client, client.model)
        return best

    def _num_workers(self, name: str) -> int:
        return sum(c.ready_workers for c in self.clients if c.model is not None and c.model.name == name)


def _fitness(client: SchedulerClient, model: ServedModel) -> tuple[bool, bool, int]:
    return client.is_ready, client.ready_workers > 0, model.limits.max_tokens
