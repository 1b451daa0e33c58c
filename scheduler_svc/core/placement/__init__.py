"""Choice of the worker on which a waiting sequence should run."""
