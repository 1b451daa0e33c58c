"""Analysis of answers: differences between two models, and reasons for a token. I/O: gRPC, files."""
