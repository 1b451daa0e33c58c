"""The process: flags, ports, start and drain. Does I/O."""
