"""The model side of a worker: checkpoint, KV pool, rows, forward pass, sampling. Imports no network code.

`ModelRunner` is the entry point, `batch` defines the input and output of a step, and `config` the settings.
"""
