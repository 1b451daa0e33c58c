"""The stateless gateway: public gRPC and HTTP APIs, tokenizing and detokenizing."""

import svc_common  # noqa: F401  (selects gRPC's poller, before anything imports gRPC)
