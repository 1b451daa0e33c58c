"""Embeddings and scores of texts: their configuration, weights and computation. Reads checkpoints; no other I/O."""
