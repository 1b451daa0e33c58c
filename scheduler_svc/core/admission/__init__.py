"""A request from its arrival to a row of a worker: checks, limits, the choice of the worker, and the barrier."""
