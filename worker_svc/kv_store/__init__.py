"""Blocks outside the pool: their records, and the tier of a worker. Files and threads; no gRPC, no torch."""
