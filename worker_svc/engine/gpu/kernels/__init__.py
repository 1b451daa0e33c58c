"""Triton kernels. Each file holds a kernel, the function that launches it, and its torch form (forms.py).

Offsets into the KV pool are converted to int64 before they are multiplied, because a pool has more than 2^31 elements.
"""
