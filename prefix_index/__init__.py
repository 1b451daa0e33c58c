"""What schedulers and gateways share about prefixes: the chain of digests, and the index of which worker holds what."""
