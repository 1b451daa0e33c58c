"""What some requests use and others do not: one file per feature, with its two halves. No I/O.

A `Feature` (core/sequence.py) is the request's half, a `WorkerPart` (core/worker_state.py) the state of its rows on
one worker. Queue, placement and planner know only these two classes; the code that makes a request names its features.
"""
