"""The stateless gateway: public gRPC and HTTP APIs, tokenizing and detokenizing."""
