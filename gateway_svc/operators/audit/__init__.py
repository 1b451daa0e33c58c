"""The audit log: one line per request, with its caller, costs and result, never its text. I/O: a file."""
