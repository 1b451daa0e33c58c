"""The worker service: holds the KV pool and runs the model."""

import svc_common  # noqa: F401  (selects gRPC's poller, before anything imports gRPC)
