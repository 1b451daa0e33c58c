"""The way of a step through the worker: the lease that allows it, the thread that runs it, the runner."""
