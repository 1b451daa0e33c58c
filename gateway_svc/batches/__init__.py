"""Files of requests that gateways answer at the lowest priority (docs/batches.md). I/O: Redis, or SQLite."""
