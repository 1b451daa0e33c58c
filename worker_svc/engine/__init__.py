"""The model side of a worker: checkpoint, KV pool, rows, forward pass, sampling. Imports no network code.

`ModelRunner` is the way in; `batch` holds what goes in and out, `config` what can be set.
"""
