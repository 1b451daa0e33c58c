"""Encoder models (BERT, RoBERTa): configuration and forward pass. Reads checkpoints; no other I/O."""
