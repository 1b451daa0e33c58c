"""Start-up checks: every kernel against a plain reference, on the device and in the shapes that will serve.

`case.py` runs and compares, the other modules describe what is run, `start.py` has the table of kernels.
"""
