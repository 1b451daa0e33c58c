"""Limits of the inputs of a request that are not tokens (CarriedInput). Gateways and schedulers check them."""

from __future__ import annotations

MAX_INPUTS = 256
# Limit for one request, and for all requests that one step opens: a message between services holds 64 MiB.
MAX_INPUT_BYTES = 48 << 20
INPUT_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
EMBEDDING_DTYPES = ("float32", "bfloat16", "float16")
AUDIO_DTYPES = ("float32", "int16")
LEVELS = 256  # values of a channel of an image
