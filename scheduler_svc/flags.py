"""Flags of quire-scheduler."""

from __future__ import annotations

import argparse
import math

from scheduler_svc.core.config import MAX_BURST_S
from svc_common import config
from svc_common.channels import DEFAULT_MAX_BUNDLE
from svc_common.config import Flag, address, in_range, path, size_bytes, switch, text
from svc_common.memory import MEMORY_FLAG
from svc_common.observe.tracing import TRACE_FLAGS
from svc_common.redis.server import redis_flags
from svc_common.security.trust import TRUST_FLAGS

DESCRIPTION = """Queues, places, batches and preempts requests, and manages the KV blocks of its workers.

Workers register here (quire-worker --scheduler HOST:PORT); gateways attach here (quire-gateway --scheduler HOST:PORT).
All workers of one scheduler serve one model: the model of the first worker that becomes ready."""

EPILOG = """examples:
  quire-scheduler
  quire-scheduler --listen 0.0.0.0:50052 --token-file tokens --redis redis://cache:6379/0 --log-format json
"""

FLAGS = (
    Flag("--listen", address, "host:port to serve on", default="127.0.0.1:50052"),
    Flag("--advertise", address,
        "address at which other schedulers reach this one, to read blocks that its workers hold; unset: that of "
        "--listen, or if that is all interfaces, this host's address on the way to Redis"),
    redis_flags("cached prefixes and the counter of leases"),
    Flag("--scheduler-id", text, "name in logs and in Redis; unset: host name", metavar="ID"),
    Flag("--max-waiting", in_range(int, 1, 1 << 20),
        "limit of sequences in the queue; further requests get RESOURCE_EXHAUSTED", default=1024,
    ),
    Flag("--max-waiting-tokens", in_range(int, 1, 1 << 40),
        "limit of tokens in the queue (prompts plus expected outputs); further requests get RESOURCE_EXHAUSTED",
        default=4 << 20,
    ),
    Flag("--max-input-bytes", size_bytes,
        "limit of the data of inputs that are not tokens (embeddings) and of old answers (draft_of) of all open "
        "requests; further requests with such data get RESOURCE_EXHAUSTED", default="1G",
    ),
    MEMORY_FLAG,
    Flag("--watermark", in_range(float, 0.0, 0.5),
        "fraction of a pool that admission leaves free, rounded down to whole blocks", default=0.01,
    ),
    Flag("--aging-s", in_range(float, 0.0, 3600.0),
        "seconds that a request may be overtaken for lack of room; then its eligible workers are reserved for "
        "it", default=2.0,
    ),
    Flag("--aging-tokens-per-s", in_range(float, 1.0, math.inf),
        "uncached prompt tokens that one second of waiting offsets in queue order: short prompts overtake long "
        "ones that arrived slightly earlier; use about 5 %% of a worker's prefill rate; inf: first come, first "
        "served", default=1000.0,
    ),
    Flag("--burst-ms", in_range(float, 0.0, 1000 * MAX_BURST_S),
        "longest time that a worker may decode per message; higher values save CPU time in all services, but a "
        "new request may wait this long for each message in flight; 0: one step per message", default=5.0,
    ),
    Flag("--max-step-ms", in_range(float, 0.0, 60_000.0),
        "longest time of a step with prompts while other requests decode, as far as measured: it bounds the pause of a "
        "stream, and lower values slow prompts down; 0: the time of a worker's --max-num-batched-tokens", default=0.0,
    ),
    Flag("--no-prefix-caching", switch, "do not share cached prompt prefixes between requests"),
    Flag("--revision", text,
        "accept only workers with this revision of their model (`quire status` shows it); unset: the revision of the "
        "first worker of all schedulers of the model", default="", metavar="REVISION",
    ),
    Flag("--heartbeat-timeout-s", in_range(float, 0.1, 3600.0),
        "seconds without a heartbeat after which a worker is lost, although it answers pings", default=30.0,
    ),
    Flag("--gateway-heartbeat-s", in_range(float, 0.0, 3600.0),
        "seconds between heartbeats to and from gateways; a gateway that misses 30 is cut off; 0: no heartbeats",
        default=1.0,
    ),
    Flag("--step-timeout-s", in_range(float, 0.1, 3600.0),
        "seconds without an answer to a step after which the worker is lost", default=120.0,
    ),
    Flag("--worker-patience-s", in_range(float, 0.0, 24 * 3600.0),
        "seconds that a request may wait while no present worker can run it; then it fails", default=60.0,
    ),
    Flag("--drain-timeout-s", in_range(float, 0.0, 3600.0),
        "seconds that running requests have to finish after SIGTERM", default=30.0,
    ),
    Flag("--max-bundle-bytes", size_bytes,
        "limit on the size of a worker's bundle (tokenizer and chat templates); a worker with a larger one is "
        "refused", default=DEFAULT_MAX_BUNDLE,
    ),
    TRUST_FLAGS,
    TRACE_FLAGS,
    Flag("--internal-tls-worker-name", text,
        "DNS name of a worker in its certificate, beside that of its role; {id} stands for its --worker-id. A "
        "worker may then register only its own id, and only an address where a server with this name answers. "
        "Unset: certificates do not name ids", metavar="TEMPLATE",
    ),
    Flag("--block-key-file", path,
        "keys of all schedulers of this model, 64 hexadecimal digits per line. The scheduler signs cached "
        "blocks with the first key and adopts only blocks that are signed with one of the keys. Unset: it "
        "adopts all blocks",
    ),
)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """All flags of the scheduler."""
    return config.make_parser("scheduler", DESCRIPTION, EPILOG, FLAGS)
