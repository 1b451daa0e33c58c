"""The backends of CPUs: compiled kernels, and plain torch as their reference."""
