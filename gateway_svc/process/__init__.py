"""The process: flags, ports, child processes, start and drain. Does I/O."""
