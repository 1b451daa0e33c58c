"""Limits per owner: rates, open streams, models and priorities. I/O: reads their file, counts in Redis."""
