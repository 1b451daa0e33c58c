"""The engine on a GPU: Triton kernels, rows that live on the device, steps that run behind each other.

Nothing here is imported unless `--backend cuda` asks for it. With TRITON_INTERPRET=1 all of it runs on a CPU.
"""
