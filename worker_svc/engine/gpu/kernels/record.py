"""Layout of a row record on the device, in int32 words. Floats are stored as their bits.

    last sampled token | sampling parameters, in the order of SamplingParams | sample index | number of banned ids |
    first output position without them | whether the row is processed (process.py) | block table |
    banned ids (MAX_BANNED_IDS words)

64-bit integers take two words, the low word first. A kernel module names the words of the parameters that it reads.
"""

from __future__ import annotations

from itertools import accumulate

import triton.language as tl

from request_fields.fields import SAMPLER_FIELDS, Kind

ALIGNMENT = 8  # words: kernels are compiled for aligned block tables
_SIZES = {"last_token": 1, **{name: 1 + (field.kind is Kind.UINT64) for name, field in SAMPLER_FIELDS.items()}}
_SIZES |= {"sample_index": 1, "num_banned": 1, "banned_before": 1, "is_processed": 1}

WORDS = dict(zip(_SIZES, accumulate(_SIZES.values(), initial=0), strict=False))  # first word of each field
TABLE = -(-sum(_SIZES.values()) // ALIGNMENT) * ALIGNMENT

# Words that several kernels read.
LAST_TOKEN = tl.constexpr(WORDS["last_token"])
TEMPERATURE = tl.constexpr(WORDS["temperature"])
