"""The ranks of a worker as processes on one or several hosts."""
