"""A decoder: its configuration, weights, KV pool and forward pass. Reads checkpoints; no other I/O."""
