"""Encoder-decoder models (T5, Whisper): configuration, weights and forward pass. Reads checkpoints; no other I/O."""
