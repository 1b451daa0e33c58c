"""Shared by all services: serving and draining, settings, errors, logs, metrics. Knows nothing about inference.

The packages of the services import this one first, because gRPC reads its poller from the environment when it is
imported (docs/adr/0014-when-bytes-leave-a-process.md). $GRPC_EXPERIMENTS overrides the poller.
"""

import os

OLDER_POLLER = "-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints"

os.environ.setdefault("GRPC_EXPERIMENTS", OLDER_POLLER)
