"""Compiled kernels of the CPU backend: their source, and what builds and loads it."""
