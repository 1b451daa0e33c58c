"""Request records: what a gateway needs to continue a request of another gateway. I/O: Redis.

cipher.py          encryption of stored values
store.py           records as messages, of fields that are stored elsewhere
redis_fields.py    the only module that calls Redis: one hash per record, fenced by the run that writes it
fields.py          what the fields hold, and their storage in memory, for one gateway without Redis
recorder.py        one task that periodically writes the output of all open requests
"""
