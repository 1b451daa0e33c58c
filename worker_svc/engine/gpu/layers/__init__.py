"""The weights of this rank on its device, adapters included, and products with them. Reads checkpoints."""
