"""One step on the device: its buffer, row records, graphs, and the results besides tokens. No I/O."""
