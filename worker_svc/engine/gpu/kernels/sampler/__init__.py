"""Kernels behind the logits: banned ids, processing, thresholds of filters, sampling. No I/O."""
