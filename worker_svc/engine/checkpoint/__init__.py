"""A model folder: its files and tensors, which families they may belong to, and how they are quantized. Reads files."""
