"""A step, as the scheduler sends it and the worker runs it: its types and columns. Plain data; no I/O."""
