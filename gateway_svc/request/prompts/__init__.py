"""One reader per kind of prompt: its checks, its parser and where they run. I/O: threads and sandbox processes."""
