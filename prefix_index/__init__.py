"""What schedulers and gateways agree on about prefixes: the chain of digests, and the index of who holds what."""
