"""The GPU engine: Triton kernels, row records on the device, steps launched ahead of their results.

It is imported only for `--backend cuda`. With TRITON_INTERPRET=1 everything runs on a CPU.
"""
