"""Request records: what a gateway needs to continue a request of another gateway. I/O: Redis.

cipher.py      encryption of stored values
store.py       the only module that calls Redis: one hash per record, fenced by the run that writes it
recorder.py    one task that periodically writes the output of all open requests
"""
