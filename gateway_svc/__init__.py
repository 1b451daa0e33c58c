"""The stateless gateway: public gRPC API, tokenizing and detokenizing."""
