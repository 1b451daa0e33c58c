"""Vision towers: configuration and forward pass. Reads checkpoints; no other I/O."""
