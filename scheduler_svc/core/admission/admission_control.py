"""Admission control: refuses workers that differ from the others, and requests that do not fit or would be late."""

from __future__ import annotations

import sys

from request_fields.fields import FieldError
from request_fields.sizes import SizeLimits
from scheduler_svc.core.admission.placement import Placement
from scheduler_svc.core.admission.requests import Requests
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import (
    DuplicateRequestError,
    NeverFitsError,
    NoWorkerError,
    QueueFullError,
    UnreachableDeadlineError,
    WorkerMismatchError,
)
from scheduler_svc.core.messages import Counts, WorkerCapacity
from scheduler_svc.core.policy import (
    Throughput,
    expected_tokens,
    first_token_wait_s,
    is_queue_full,
    late_by_s,
    virtual_arrival,
)
from scheduler_svc.core.sequence import SequenceGroup

RETURNING_FACTOR = 4  # the queue's limits are this much higher for requests that were accepted before
MIN_RETRY_S = 0.1


class AdmissionControl:
    """Raises an error for each worker or request that it refuses. The only state it changes is a count of refusals."""

    def __init__(
        self,
        config: SchedulerConfig,
        requests: Requests,
        placement: Placement,
        throughput: Throughput,
        counts: Counts,
    ) -> None:
        self._config = config
        self._requests = requests
        self._placement = placement
        self._throughput = throughput
        self._counts = counts

    def check_worker(self, capacity: WorkerCapacity) -> None:
        """Raises ValueError for invalid sizes, WorkerMismatchError if they differ from the other workers' sizes."""
        if capacity.max_num_batched_tokens < capacity.max_num_seqs:
            raise ValueError(
                f"worker {capacity.worker_id}: max_num_batched_tokens is {capacity.max_num_batched_tokens}; must be "
                f"at least max_num_seqs {capacity.max_num_seqs}, so that a step has a token for every running sequence"
            )
        first = self._placement.first
        if first is not None and (self._placement.workers or self._requests.groups):
            _check_same("block_size", capacity, first)
            _check_same("max_model_len", capacity, first)
            _check_same("attention_window", capacity, first)

    def check_group(self, group: SequenceGroup, now: float) -> None:
        """Raises a SchedulerError with the reason if the request is refused."""
        if self._requests.is_out_of_patience(now):
            raise NoWorkerError("no worker is connected; retry later or on another scheduler")
        live = self._requests.groups.get(group.request_id)
        if live is not None and not _gives_way(live, group):
            raise DuplicateRequestError(
                f"request_id {group.request_id!r} is in flight; use another request_id or wait until it ends"
            )
        self._check_queue(group)
        if group.features.num_bytes:
            self._check_bytes(group)
        if not len(group.prompt):
            raise NeverFitsError("the prompt is empty; send at least one token", field="prompt")
        self._check_size(group)
        if self._requests.waiting.unschedulable:
            self._check_unschedulable(group)
        if group.timeout_s is not None and not group.takes_over:
            self._check_deadline(group, group.timeout_s, now)

    def _check_queue(self, group: SequenceGroup) -> None:
        """The queue has a limit of sequences and a limit of tokens. Both are higher for a request that was accepted
        before: it must not fail because the queue is full after the loss of a scheduler.
        """
        queue = self._requests.waiting
        num_waiting = queue.num_schedulable
        if not num_waiting:
            return
        factor = RETURNING_FACTOR if group.takes_over else 1
        new = expected_tokens(
            len(group.prompt), group.stop.max_tokens, group.num_sequences, self._throughput.mean_output
        )
        limit = factor * self._config.max_waiting_tokens
        if num_waiting < factor * self._config.max_waiting and queue.expected_tokens + new < limit:
            return  # not full: the shares of tenants do not matter
        slot = self._requests.share.slot_of(group.tenant_id)
        num_tenants = queue.num_tenants_with(slot)
        if is_queue_full(num_waiting, queue.num_of(slot), num_tenants, factor * self._config.max_waiting):
            raise QueueFullError(
                f"the queue is full: {num_waiting} requests are waiting, and the limit is {self._config.max_waiting}; "
                "retry later"
            )
        if is_queue_full(queue.expected_tokens + new, queue.expected_tokens_of(slot) + new, num_tenants, limit):
            raise QueueFullError(
                f"the queue is full: {queue.expected_tokens} tokens are waiting, this request adds {new}, and the "
                f"limit is {self._config.max_waiting_tokens}; retry later"
            )

    def _check_unschedulable(self, group: SequenceGroup) -> None:
        """Requests that no open worker could run wait outside the order of the queue, within the same limits."""
        if self._placement.could_run(group):
            return
        queue, factor = self._requests.waiting, RETURNING_FACTOR if group.takes_over else 1
        mean_output = self._throughput.mean_output
        new = expected_tokens(len(group.prompt), group.stop.max_tokens, group.num_sequences, mean_output)
        num_waiting, num_tokens = len(queue.unschedulable), queue.unschedulable_tokens
        is_full = num_waiting >= factor * self._config.max_waiting
        if is_full or num_tokens + new > factor * self._config.max_waiting_tokens:
            raise QueueFullError(
                f"{num_waiting} requests with {num_tokens} tokens are waiting that no present worker could run, this "
                f"request adds {new} tokens, and the limits are {self._config.max_waiting} requests and "
                f"{self._config.max_waiting_tokens} tokens; retry later or on another scheduler"
            )

    def _check_bytes(self, group: SequenceGroup) -> None:
        """The scheduler keeps inputs and drafts until their request ends, because a worker may fail at any time."""
        held, limit = self._requests.num_bytes, self._config.max_input_bytes
        factor = RETURNING_FACTOR if group.takes_over else 1
        if held + group.features.num_bytes > factor * limit:
            raise QueueFullError(
                f"the inputs and drafts of open requests have {held} bytes, this request adds "
                f"{group.features.num_bytes}, the limit is {limit} (--max-input-bytes of the scheduler); retry later"
            )

    def _check_size(self, group: SequenceGroup) -> None:
        first, has_workers = self._placement.first, bool(self._placement.workers)
        if first is None:
            return
        num_prompt, max_tokens, longest = len(group.prompt), group.stop.max_tokens, self._placement.longest
        if num_prompt + max_tokens > min(first.max_model_len, longest):  # else it fits
            limits = SizeLimits(first.max_model_len, longest if has_workers else sys.maxsize)
            try:
                limits.resolve(num_prompt, max_tokens)
            except FieldError as error:
                raise NeverFitsError(str(error), field=error.field) from None
        if has_workers and group.n > self._placement.max_rows:
            raise NeverFitsError(
                f"sampling.n is {group.n}; must be at most {self._placement.max_rows}, max_num_seqs of the "
                "largest worker",
                field="sampling.n",
            )
        for feature in group.features.items if has_workers else ():
            if feature.part is not None:
                feature.part.check(group, self._placement.workers)

    def _check_deadline(self, group: SequenceGroup, timeout_s: float, now: float) -> None:
        workers = [worker for worker in self._placement.workers if not worker.is_draining]
        if not workers:
            return  # the time until a worker joins is unknown
        queue, slot = self._requests.waiting, self._requests.share.slot_of(group.tenant_id)
        ahead = queue.tokens_ahead(slot, group.priority)
        own = len(group.prompt) + min(worker.expected_prefill for worker in workers)
        paces = self._throughput.queue.per_s, self._throughput.prefill.per_s
        output_s = self._requests.output_s(group)
        if late_by_s(first_token_wait_s(ahead, paces[0], own, paces[1]), output_s, timeout_s) <= 0:
            return
        digests: list[bytes] = []
        self._placement.extend_digests(digests, group.prompt, group)
        max_cached = group.max_cached_tokens(len(group.prompt))
        min_tokens = group.features.num_head_tokens
        num_cached = max(worker.num_cached(digests, max_cached, 0, min_tokens) for worker in workers)
        own -= num_cached
        own_arrival = virtual_arrival(now, len(group.prompt) - num_cached, self._config.aging_tokens_per_s)
        ahead = queue.tokens_ahead(slot, group.priority, own_arrival)
        wait_s = first_token_wait_s(ahead, paces[0], own, paces[1])
        late_s = late_by_s(wait_s, output_s, timeout_s)
        if late_s <= 0:
            return
        self._counts.refused_deadline += 1
        raise UnreachableDeadlineError(
            f"the deadline is in {timeout_s:.1f} s, but the first token would take about {wait_s:.1f} s and the output "
            f"{output_s:.1f} s; retry later, set a later deadline or a lower max_tokens",
            retry_after_s=max(MIN_RETRY_S, late_s),
        )


def _gives_way(live: SequenceGroup, group: SequenceGroup) -> bool:
    """Only the newest stream of a client counts. A gateway that was frozen may also send the request again, but it must
    not take the request back from the gateway that serves the client now. If that gateway is lost, its requests end and
    their request_ids become free.
    """
    return group.takes_over and (not live.takes_over or live.origin == group.origin)


def _check_same(name: str, capacity: WorkerCapacity, other: WorkerCapacity) -> None:
    mine, theirs = getattr(capacity, name), getattr(other, name)
    if mine != theirs:
        raise WorkerMismatchError(
            f"worker {capacity.worker_id} has {name} {mine}, but worker {other.worker_id} has {theirs}; start all "
            f"workers with the same {name}"
        )
