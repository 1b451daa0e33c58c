"""Every kernel of the GPU engine compared with a plain reference, in the shapes and settings of a worker.

`case.py` runs and compares a kernel; the other modules define the cases.
"""
