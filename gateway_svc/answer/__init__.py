"""From the journal of a request to the events of its stream. I/O: only through records."""
