"""Prefixes as schedulers and gateways share them: chained digests, and the index of the workers that hold them."""
