"""The open rows of a worker, and the check and the inputs of their steps. No I/O."""
