"""From the message of a client to a plan: checks, prompts, defaults. I/O: threads and sandbox processes, no network."""
