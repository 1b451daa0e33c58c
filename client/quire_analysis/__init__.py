"""Analysis of answers: what differs between two models. I/O: gRPC, files."""
