"""The model side of a worker: torch, no gRPC."""
