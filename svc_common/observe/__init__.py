"""Logs, metrics and probes, traces, profiles. Does I/O."""
