"""Start-up checks: compare every kernel with a plain reference, on the device and in the shapes of this worker.

`case.py` runs and compares a kernel, `start.py` has the table of kernels, and the other modules define the cases.
"""
