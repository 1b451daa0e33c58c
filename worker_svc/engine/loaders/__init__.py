"""Loads the model of a folder with its KV pool: one module per kind of model. Reads files."""
