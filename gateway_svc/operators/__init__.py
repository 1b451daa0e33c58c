"""Operators' tools: the admin service and its port, the state of the console, the audit log. Does I/O."""
