"""The schedulers behind this gateway, and the models that they serve. The dispatcher chooses one for a request."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request.models import ServedModel, model_part
from gateway_svc.schedulers.routes import ModelRoutes, Routable, choose
from gateway_svc.schedulers.scheduler_client import RETRY_AFTER_S, SchedulerClient, SchedulerEvents, problems_of
from svc_common.errors import InvalidRequestError, NotFoundError, ServiceError, UnavailableError
from svc_common.tasks import cancel

log = logging.getLogger(__name__)

PRUNE_INTERVAL_S = 5.0


class SchedulerClients:
    """Owns the clients and their tasks. `all` is one list for the life of the gateway, read by other parts.

    A client whose address is gone stays as long as its stream works: a scheduler that drains may be removed from DNS
    before its requests have ended.
    """

    def __init__(self, make_client: Callable[[str], SchedulerClient]) -> None:
        self.all: list[SchedulerClient] = []
        self.events: SchedulerEvents | None = None  # set before the first `update`
        self._make_client = make_client
        self._addresses: Sequence[str] = ()
        self._tasks: dict[SchedulerClient, asyncio.Task[None]] = {}

    def update(self, addresses: Sequence[str]) -> None:
        """These are the schedulers now: connect to new ones, remove those that are gone and not attached."""
        self._addresses = addresses
        known = {client.address for client in self.all}
        for address in addresses:
            if address not in known:
                self._add(address)
        self._remove_lost()

    async def run(self) -> None:
        """Remove clients that are detached after their address is gone, until cancelled; then end all clients."""
        try:
            while True:
                await asyncio.sleep(PRUNE_INTERVAL_S)
                self._remove_lost()
        finally:
            await cancel(*self._tasks.values())

    def _add(self, address: str) -> None:
        if self.events is None:
            raise RuntimeError("SchedulerClients.events is not set")
        client = self._make_client(address)
        client.events = self.events
        self.all.append(client)
        task = self._tasks[client] = asyncio.create_task(client.run())
        task.add_done_callback(lambda _: self._tasks.pop(client, None))

    def _remove_lost(self) -> None:
        gone = [c for c in self.all if c.address not in self._addresses and not c.is_connected]
        for client in gone:
            log.info("scheduler %s is gone", client.address)
            self.all.remove(client)
            self._tasks[client].cancel()
        if gone and self.events is not None:
            self.events.on_changed(gone[-1])


class ModelDirectory:
    """The models behind this gateway, by name. Schedulers with the same model are replicas. `clients` may change."""

    def __init__(self, clients: Sequence[SchedulerClient], routes: ModelRoutes | None = None) -> None:
        self.clients = clients
        self.routes = routes or ModelRoutes()
        self._used: dict[str, str] = {}  # by model, the revision of its last request
        self.unready: Counter[str] = Counter()  # requests whose model is not ready, by its name; "": it is not known

    @property
    def is_ready(self) -> bool:
        """At least one model can take requests now."""
        return any(client.is_ready for client in self.clients)

    def models(self) -> list[tuple[ServedModel, int]]:
        """Every known model, sorted by name, with the number of ready workers of all its replicas."""
        known = self._known()
        return [(model, self._num_workers(name)) for name, (_, model) in sorted(known.items())]

    def listed(self) -> list[pb.Model]:
        """The models as clients name them. A route is described by its main target."""
        models = [pb.Model(info=model.info, ready_workers=workers) for model, workers in self.models()]
        found = {model.info.model: model for model in models}
        for name in self.routes.rows:
            if self.readiness(main := self._main_target(name)):
                own = found[name] = pb.Model(info=self._text(main).info)
                own.ready_workers, own.info.model = self._num_workers(own.info.model), name
                own.info.ClearField("adapters")
        return [found[name] for name in sorted(found)]

    def routed(self, request: Routable, revision: str = "") -> tuple[str, str]:
        """The route of a request (empty: none), and the name of the model or adapter for it. `revision`: that of a
        stream which continues, on a target of the route or the model of its name. Raises UnavailableError.
        """
        name = request.model
        if self.routes.is_read and not self.routes.rows:
            return "", name
        route = self.routes.rows.get(name)
        if route is None:
            if self.routes.is_read or not name or self.readiness(name):
                return "", name
            words = f"model {name[:200]!r} is not served here, and the routes could not be read yet; retry later"
            raise UnavailableError(words, retry_after_s=RETRY_AFTER_S)
        models = {model: self.readiness(model) for model in sorted(route.targets)}
        for model in (*models, name) if revision else ():
            if self._continues(model, revision):
                return name, model
        for least in (2, 1):
            if found := choose(route, request, [model for model, readiness in models.items() if readiness >= least]):
                return name, found
        words = f"no target of model {name!r} is served now ({', '.join(models)}); retry later"
        raise UnavailableError(words, retry_after_s=RETRY_AFTER_S)

    def readiness(self, name: str) -> int:
        """Whether a model or an adapter takes requests. 0: it is not known, 1: its schedulers are away, 2: it does."""
        served = [(1 + client.is_ready, client.model) for client in self.clients if client.model is not None]
        return max((n for n, m in served if name in {m.name, *(one.name for one in m.info.adapters)}), default=0)

    def _continues(self, name: str, revision: str) -> bool:
        try:
            return bool(self.find(name, revision))
        except ServiceError:
            return False

    def _main_target(self, name: str) -> str:
        """The model that describes a name: of its served targets the one with the largest weight."""
        if name not in self.routes.rows:
            return name
        weights = self.routes.rows[name].targets
        return max(sorted(weights), key=lambda model: (self.readiness(model) > 0, weights[model]))

    def find(self, name: str, revision: str = "", adapter: str = "") -> ServedModel:
        """The model, with the adapter of its own name or of `name`, even while its schedulers are away. Empty name: the
        only model. Empty revision: any. `name` is not that of a route.

        Raises NotFoundError, InvalidRequestError (several models, none named) or UnavailableError.
        """
        known = self._known()
        resolved, adapter = self._names(name, adapter, known)
        of_revision = self._known(model_part(revision)) if revision else known
        client, model = of_revision.get(resolved, known[resolved])
        if not client.is_ready:
            self.unready[resolved] += 1
        if not revision:
            self._used[resolved] = model.info.revision
        if adapter:
            model = self._with_adapter(model, adapter)
        if revision and not model.continues(revision):
            raise UnavailableError(
                f"this gateway serves revision {model.revision} of model {model.name!r}, but the request began on "
                f"revision {revision[:200]}, whose tokens may differ; retry on another gateway, or start the request "
                "again",
                retry_after_s=RETRY_AFTER_S,
            )
        return model

    def find_text(self, name: str) -> ServedModel:
        """The model without its adapter, for a route that of its main target. Raises like `find`."""
        return self._text(self._main_target(name))

    def text_of(self, request: Routable) -> ServedModel:
        """The model that a request will get, without its adapter. Raises like `find`."""
        return self._text(self.routed(request)[1])

    def _text(self, name: str) -> ServedModel:
        known = self._known()
        return known[self._names(name, "", known)[0]][1]

    def schedulers_of(self, name: str) -> list[SchedulerClient]:
        """The schedulers of a model, for operations. Empty name: of the only model. Raises NotFoundError, or
        UnavailableError while one is away.
        """
        model = self._text(name).info.model
        clients = [client for client in self.clients if client.model and client.model.info.model == model]
        lost = [client.address for client in clients if not client.is_connected]
        if lost:
            raise UnavailableError(
                f"not connected to scheduler {', '.join(lost)} of model {model!r}; retry when all are connected",
                retry_after_s=RETRY_AFTER_S,
            )
        return clients

    def _names(self, name: str, adapter: str, known: dict[str, tuple[SchedulerClient, ServedModel]]) -> tuple[str, str]:
        """The names of the model and of the adapter (empty: none). `name` may be that of an adapter."""
        if not adapter and name in known:
            return name, ""
        wanted = adapter or name
        owners = [model for model in sorted(known) if wanted in self._adapters_of(model)] if wanted else []
        if adapter and name and name != adapter:
            return self._resolve(name, known), adapter
        if len(owners) > 1:
            raise InvalidRequestError(
                f"several models have an adapter {wanted[:200]!r}; set model to one of {', '.join(map(repr, owners))}, "
                "and adapter to its name",
                field="model",
            )
        if owners:
            return owners[0], wanted
        return self._resolve("" if name == adapter else name, known), adapter

    def _adapters_of(self, model: str) -> dict[str, types.AdapterInfo]:
        """The adapters of a model by name, of all its replicas."""
        replicas = [client.model for client in self.clients if client.model is not None and client.model.name == model]
        return {adapter.name: adapter for replica in replicas for adapter in replica.info.adapters}

    def _with_adapter(self, model: ServedModel, name: str) -> ServedModel:
        adapters = self._adapters_of(model.name)
        if name not in adapters:
            have = ", ".join(repr(adapter) for adapter in sorted(adapters)) or "none"
            raise NotFoundError(
                f"model {model.name!r} has no adapter {name[:200]!r}; its adapters: {have}",
                field="adapter",
                subject=name,
            )
        return replace(model, adapter=adapters[name])

    def _resolve(self, name: str, known: dict[str, tuple[SchedulerClient, ServedModel]]) -> str:
        if name in known:
            return name
        if not name and len(known) == 1:
            return next(iter(known))
        have = ", ".join(repr(model) for model in sorted(known.keys() | self.routes.rows.keys()))
        self.unready[""] += any(client.model is None for client in self.clients)
        if not known:
            problems = problems_of(self.clients) or "no scheduler has been found"
            raise UnavailableError(f"no model is ready yet ({problems}); retry later", retry_after_s=RETRY_AFTER_S)
        if not name:
            raise InvalidRequestError(
                f"model is empty, but this gateway serves several models; set it to one of {have}", field="model"
            )
        adapters = sorted(adapter for model in known for adapter in self._adapters_of(model))
        of_models = f"; adapters: {', '.join(map(repr, adapters))}" if adapters else ""
        words = f"model {name[:200]!r} is not served here; served models: {have}{of_models}"
        raise NotFoundError(words, field="model", subject=name)

    def _known(self, revision: str = "") -> dict[str, tuple[SchedulerClient, ServedModel]]:
        """By model name, the replica whose ModelInfo is used: prefer a replica that can run requests, then the revision
        of the last request, then a replica that accepts longer requests, then the first.
        """
        best: dict[str, tuple[SchedulerClient, ServedModel]] = {}
        for client in self.clients:
            if client.model is None or (revision and client.model.info.revision != revision):
                continue
            have = best.get(client.model.name)
            if have is None or self._fitness(client, client.model) > self._fitness(*have):
                best[client.model.name] = (client, client.model)
        return best

    def _fitness(self, client: SchedulerClient, model: ServedModel) -> tuple[bool, bool, bool, int]:
        is_used = self._used.get(model.name) == model.info.revision
        return client.is_ready, client.ready_workers > 0, is_used, model.limits.max_tokens

    def _num_workers(self, name: str) -> int:
        return sum(c.ready_workers for c in self.clients if c.model is not None and c.model.name == name)

    def revisions(self, name: str) -> set[str]:
        """The revisions of a model that have workers. More than one: two checkpoints are served as one model."""
        replicas = [c.model for c in self.clients if c.model is not None and c.model.name == name and c.ready_workers]
        return {model.info.revision for model in replicas}
