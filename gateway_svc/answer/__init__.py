"""From the journal of a request to the events of its stream. No I/O of its own."""
