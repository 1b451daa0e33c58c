"""Open requests and the schedulers that run them. Schedulers with the same model are replicas.

                 +--- refused: try the next replica ------------+
                 v                                              |
    submit --> placed on a replica --accepted--> runs there ----+--> finished, or released by its handler
       |         ^                                 |
       |         |    stream broken or silent, or its scheduler has no worker while another replica has one
       |         |                                 |
       |         +---- a replica is ready <--------+--> waits at most `patience_s` for a replica
       +-- none is ready --------------------------+

A request that moves carries its output as a Continuation. Messages from its old scheduler are ignored.

The replica for a request is a pure function of the replicas' loads and cached prefixes (`choose_replica`):

    cost = load per ready worker + ALPHA * prompt tokens to compute

The replica with the lowest cost is chosen. Costs within TIE_TOKENS of the lowest count as equal, because loads are as
old as the last heartbeat. Among equal replicas, a rendezvous hash of the prompt's first block decides. So requests with
a common prefix go to the same replica, and the loss of a replica moves only that replica's prompts. Affinity never
chooses a replica that costs more than TIE_TOKENS above the lowest cost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.v1 import types_pb2 as types
from xxhash import xxh3_64_intdigest

from gateway_svc.schedulers.scheduler_client import RETRY_AFTER_S, SchedulerClient, problems_of
from gateway_svc.schedulers.scheduler_request import SchedulerRequest
from svc_common.errors import AlreadyExistsError, OverloadedError, ServiceError, UnavailableError

log = logging.getLogger(__name__)

RESUBMIT_DELAY_S = 0.2
MOVE_AFTER_S = 0.5  # a replica without workers for this long loses its requests to other replicas
# New requests that wait for a scheduler. The limit keeps room for the other models of this gateway.
MAX_HELD = 1024
MAX_HELD_BYTES = 64 << 20

ELSEWHERE = (UnavailableError, OverloadedError)  # another replica may accept the request
# Refusals that end by themselves: a restarted scheduler waits for its workers and for the end of our old stream.
PASSING = (*ELSEWHERE, AlreadyExistsError)


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints for choosing a replica."""

    affinity: bytes = b""  # identifies the start of the prompt
    cached_tokens: Mapping[int, int] = field(default_factory=dict)  # by scheduler_epoch


@dataclass(slots=True, eq=False)
class RequestPlacement:
    """The scheduler (`client`) of an open request; None while the request waits for a scheduler."""

    model: str
    revision: str
    hints: Hints
    client: SchedulerClient | None = None
    refusals: dict[SchedulerClient, ServiceError] = field(default_factory=dict)
    patience: asyncio.TimerHandle | None = None
    retry: asyncio.TimerHandle | None = None

    def stop_timers(self) -> None:
        for timer in (self.patience, self.retry):
            if timer is not None:
                timer.cancel()
        self.patience = self.retry = None


class Dispatcher:
    """Owns every open request of this gateway: assigns it to a scheduler, and moves it when that scheduler is lost.

    `clients` may change while the gateway runs.
    """

    def __init__(
        self, clients: Sequence[SchedulerClient], *, patience_s: float, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._clients = clients
        self._patience_s = patience_s
        self._on_change = on_change
        self._open: dict[SchedulerRequest, RequestPlacement] = {}
        self._held: dict[SchedulerRequest, int] = {}  # bytes of each new request that waits for a scheduler
        self.num_moves = 0  # number of times that an open request left its scheduler
        self._idle_since: dict[SchedulerClient, float] = {}  # attached schedulers without workers
        for client in self._clients:
            client.events = self

    @property
    def num_open(self) -> int:
        return len(self._open)

    def has_choice(self, info: types.ModelInfo) -> bool:
        """More than one replica can take a request for this model now."""
        return len(self._serving(info.model, info.revision)) > 1

    # -- called by handlers -------------------------------------------------------------------------------------------

    def submit(self, request: SchedulerRequest, info: types.ModelInfo, hints: Hints) -> None:
        """Send a request to a replica of its model, or keep it until one is ready. The request's `wait` methods report
        the outcome.

        Raises UnavailableError if no replica is ready and too many requests wait for one.
        """
        placement = RequestPlacement(info.model, info.revision, hints)
        if not self._place(request, placement):
            self._hold(request, placement)
        self._open[request] = placement
        request.attach(self)

    def cancel(self, request: SchedulerRequest, sample_index: int | None, reason: types.FinishReason.ValueType) -> bool:
        """Send a cancel to the request's scheduler. False if no scheduler has the request: no answer will come."""
        placement = self._open.get(request)
        return (
            placement is not None
            and placement.client is not None
            and placement.client.stream.cancel(request, sample_index, reason)
        )

    def release(self, request: SchedulerRequest) -> None:
        """The handler has ended: cancel the running samples and deliver nothing more."""
        placement = self._open.pop(request, None)
        if placement is None:
            return
        self._held.pop(request, None)
        placement.stop_timers()
        if placement.client is not None:
            placement.client.stream.withdraw(request)

    def close(self) -> None:
        """End every request, because the gateway stops."""
        for request in list(self._open):
            self.release(request)
            request.fail(
                UnavailableError("this gateway is shutting down; retry on another gateway", retry_after_s=RETRY_AFTER_S)
            )

    # -- called by scheduler clients ----------------------------------------------------------------------------------

    def on_changed(self, client: SchedulerClient) -> None:
        self._record_idle(client)
        for request, placement in list(self._open.items()):
            if placement.client is None and client.serves(placement.model, placement.revision):
                placement.refusals.clear()
                self._place(request, placement)
            elif placement.client is None and self._has_other_revision(placement):
                words = f"model {placement.model!r} is now served with another revision; start the request again"
                self._fail(request, UnavailableError(words, retry_after_s=RETRY_AFTER_S))
        self._on_change()

    def on_lost(self, client: SchedulerClient, requests: list[SchedulerRequest]) -> None:
        for request in requests:
            self._take_back(request)

    def on_refused(self, client: SchedulerClient, request: SchedulerRequest, error: ServiceError) -> None:
        placement = self._open.get(request)
        if placement is None:
            return
        placement.client = None
        placement.refusals[client] = error
        if isinstance(error, ELSEWHERE) and self._place(request, placement):
            return
        may_wait = request.is_resumed or not client.serves(placement.model, placement.revision)
        if not may_wait or not isinstance(error, PASSING):
            self._fail(request, min(placement.refusals.values(), key=_refusal_order))
            return
        self._wait(request, placement)
        delay = max(RESUBMIT_DELAY_S, error.retry_after_s or 0.0)
        placement.retry = asyncio.get_running_loop().call_later(delay, self._try_again, request)

    def on_accepted(self, request: SchedulerRequest) -> None:
        placement = self._open.get(request)
        if placement is not None:
            placement.stop_timers()
            placement.refusals.clear()
        request.on_accepted()

    def on_finished(self, request: SchedulerRequest) -> None:
        self.release(request)

    # -- placing ------------------------------------------------------------------------------------------------------

    def _serving(self, model: str, revision: str) -> list[SchedulerClient]:
        return [client for client in self._clients if client.serves(model, revision)]

    def _place(self, request: SchedulerRequest, placement: RequestPlacement) -> bool:
        """Send the request to the best replica that has not refused it. False if there is none."""
        clients = self._serving(placement.model, placement.revision)
        if placement.refusals:
            clients = [client for client in clients if client not in placement.refusals]
        if len(clients) > 1:
            clients = [client for client in clients if client.can_hold(request)] or clients
        if not clients:
            return False
        self._held.pop(request, None)
        placement.client = clients[0] if len(clients) == 1 else _choose(clients, request, placement.hints)
        placement.client.stream.submit(request)
        if request.is_resumed:
            log.debug("request %s resumes at scheduler %s", request.request_id, placement.client.address)
        return True

    def _take_back(self, request: SchedulerRequest) -> None:
        """The request has lost its scheduler: place it on another scheduler, or wait for one."""
        placement = self._open.get(request)
        if placement is None:
            return
        placement.client = None
        self.num_moves += 1
        placement.refusals.clear()
        request.on_detached()
        if request.is_over:
            self.release(request)
        elif not self._place(request, placement):
            self._wait(request, placement)

    def _try_again(self, request: SchedulerRequest) -> None:
        placement = self._open.get(request)
        if placement is None or placement.client is not None:
            return
        placement.refusals.clear()
        if request.is_over:
            self.release(request)
        else:
            self._place(request, placement)

    def _hold(self, request: SchedulerRequest, placement: RequestPlacement) -> None:
        """Keep a new request until a replica is ready. Raises UnavailableError if there is no room."""
        num_bytes = sum(self._held.values()) + request.num_bytes
        if len(self._held) >= MAX_HELD or num_bytes > MAX_HELD_BYTES:
            raise UnavailableError(
                f"no scheduler of model {placement.model!r} is ready ({self._problems()}), and {len(self._held)} "
                "requests wait for one; retry later",
                retry_after_s=RETRY_AFTER_S,
            )
        self._held[request] = request.num_bytes
        self._wait(request, placement)

    def _wait(self, request: SchedulerRequest, placement: RequestPlacement) -> None:
        if placement.patience is None:
            loop = asyncio.get_running_loop()
            placement.patience = loop.call_later(self._patience_s, self._give_up, request)

    def _give_up(self, request: SchedulerRequest) -> None:
        lost, then = ("the request lost its scheduler, and ", "resume with a continuation")
        if not request.is_resumed:
            lost, then = "", "retry later"
        words = (
            f"{lost}no scheduler of model {self._open[request].model!r} accepted it within {self._patience_s:g} s "
            f"({self._problems()}); {then}"
        )
        self._fail(request, UnavailableError(words, retry_after_s=RETRY_AFTER_S))

    def _has_other_revision(self, placement: RequestPlacement) -> bool:
        """The schedulers of its model serve another revision, and none is away that may come back with its own."""
        infos = [client.info if client.is_connected else None for client in self._clients]
        served = {info.revision for info in infos if info is not None and info.model == placement.model}
        return bool(served) and placement.revision not in served and None not in infos

    def _fail(self, request: SchedulerRequest, error: ServiceError) -> None:
        self.release(request)
        request.fail(error)

    def _problems(self) -> str:
        return problems_of(self._clients) or "all schedulers refused it"

    # -- replicas without workers -------------------------------------------------------------------------------------

    def _record_idle(self, client: SchedulerClient) -> None:
        """Record since when a scheduler has no workers. After MOVE_AFTER_S, its requests move to other replicas."""
        if not client.is_connected or client.ready_workers:
            self._idle_since.pop(client, None)
            if client.ready_workers:
                self._move_from_idle()
        elif client not in self._idle_since:
            loop = asyncio.get_running_loop()
            self._idle_since[client] = loop.time()
            loop.call_later(MOVE_AFTER_S, self._watch_idle, client, self._idle_since[client])

    def _watch_idle(self, client: SchedulerClient, since: float) -> None:
        """Check repeatedly while the scheduler has no workers: it still gets requests that other replicas refuse."""
        if self._idle_since.get(client) == since:
            self._move_from_idle()
            asyncio.get_running_loop().call_later(MOVE_AFTER_S, self._watch_idle, client, since)

    def _move_from_idle(self) -> None:
        now = asyncio.get_running_loop().time()
        for client, since in self._idle_since.items():
            if now - since >= MOVE_AFTER_S and (movable := self._movable(client)):
                log.info("scheduler %s has no worker; moving %d requests", client.address, len(movable))
                for request in movable:
                    client.stream.withdraw(request)
                    self._take_back(request)

    def _movable(self, client: SchedulerClient) -> list[SchedulerRequest]:
        """Requests of this scheduler that a replica with workers can take."""
        movable = []
        for request in client.stream.requests():
            placement = self._open.get(request)
            if placement is not None and not request.is_over:
                others = self._serving(placement.model, placement.revision)
                if any(other.ready_workers for other in others):
                    movable.append(request)
        return movable


def _choose(clients: Sequence[SchedulerClient], request: SchedulerRequest, hints: Hints) -> SchedulerClient:
    hits = hints.cached_tokens
    replicas = [Replica(c.address, c.load_tokens, c.ready_workers, hits.get(c.scheduler_epoch, 0)) for c in clients]
    return clients[choose_replica(replicas, request.num_prompt_tokens, hints.affinity)]


def _refusal_order(error: ServiceError) -> tuple[bool, float]:
    """Sort key; the client gets the lowest refusal. Overloaded sorts before unavailable, then the shortest delay."""
    return not isinstance(error, OverloadedError), error.retry_after_s or float("inf")


# Weight of an uncached token: it needs computation and space in the pool. Placement on workers uses the same weight.
ALPHA = 3.0
TIE_TOKENS = 256.0


@dataclass(frozen=True, slots=True)
class Replica:
    """One scheduler that could take the request."""

    name: str  # its address, which is the same after a restart
    load_tokens: int  # its waiting tokens, including requests that we have sent since its last heartbeat
    ready_workers: int
    cached_tokens: int = 0  # tokens of this prompt in its caches, according to the prefix index


def choose_replica(replicas: Sequence[Replica], num_prompt_tokens: int, affinity: bytes) -> int:
    """Index of the replica for a prompt. A replica without workers is chosen only if no replica has workers.

    `affinity` identifies the start of the prompt. Raises ValueError for an empty list.
    """
    if not replicas:
        raise ValueError("no replica to choose from")
    costs = [_cost(replica, num_prompt_tokens) for replica in replicas]
    has_workers = any(replica.ready_workers for replica in replicas)
    able = [i for i, replica in enumerate(replicas) if replica.ready_workers or not has_workers]
    limit = min(costs[i] for i in able) + TIE_TOKENS
    return max((i for i in able if costs[i] <= limit), key=lambda i: _rank(replicas[i].name, affinity))


def _cost(replica: Replica, num_prompt_tokens: int) -> float:
    uncached = max(0, num_prompt_tokens - replica.cached_tokens)
    return replica.load_tokens / max(1, replica.ready_workers) + ALPHA * uncached


def _rank(name: str, affinity: bytes) -> int:
    return xxh3_64_intdigest(affinity + b"|" + name.encode())
