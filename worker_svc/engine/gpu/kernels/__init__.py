"""Triton kernels, one per file, each with the same operation in plain torch beside it.

`launch` functions take tensors and fix the grid; `reference` functions say what a kernel must compute. Offsets into the
KV pool are int64 before they are multiplied: a pool has more than 2^31 elements.
"""
