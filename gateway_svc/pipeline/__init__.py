"""One call from start to end, the same for gRPC and HTTP: read, plan, submit, answer. Does I/O through lower rooms."""
