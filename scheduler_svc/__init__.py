"""The scheduler service: owns sequences and the KV blocks of the workers it leases."""

import svc_common  # noqa: F401  (selects gRPC's poller, before anything imports gRPC)
