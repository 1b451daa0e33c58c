"""Debug log lines for the start and end of a request."""

from __future__ import annotations

import logging

from scheduler_svc.core.deltas import Finished
from scheduler_svc.core.sequence import SequenceGroup

log = logging.getLogger(__name__)


def log_queued(group: SequenceGroup) -> None:
    """Log that a request was queued."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    facts = {
        "request_id": group.request_id,
        "prompt_tokens": len(group.prompt),
        "max_tokens": group.stop.max_tokens,
        "samples": group.n,
        "takes_over": group.takes_over,
    }
    log.debug("request %s is queued: %d prompt tokens", group.request_id, len(group.prompt), extra=facts)


def log_finished(finished: Finished, now: float) -> None:
    """Log that a sample of a request has ended."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    group = finished.group
    facts = {
        "request_id": group.request_id,
        "sample": finished.sample_index,
        "reason": finished.reason.value,
        "output_tokens": finished.num_output_tokens,
        "cached_tokens": finished.num_cached_tokens,
        "preemptions": finished.num_preemptions,
        "seconds": round(now - group.arrival, 4),
    }
    log.debug(
        "request %s: sample %d ended (%s) with %d tokens after %.3f s",
        group.request_id,
        finished.sample_index,
        finished.reason.value,
        finished.num_output_tokens,
        now - group.arrival,
        extra=facts,
    )
