"""Processes with limits, for code and data that may be hostile: chat templates, grammars, images. I/O: their pipes."""
