"""Processes with limits, for code and data that may be hostile: chat templates of checkpoints, grammars of requests."""
