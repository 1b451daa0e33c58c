"""Layout of a row record on the device, in int32 words, and its updates: single words at any offsets. Floats are stored
as their bits.

    last sampled token | known tokens, after a sample | length of the prompt |
    sampling parameters, in the order of SamplingParams | sample index | number of banned ids |
    first output position without them | whether the row is processed (process.py) | what is added to the index of a
    token after the row's images for its position | block table |
    banned ids (MAX_BANNED_IDS words)

64-bit integers take two words, the low word first. A kernel module names the words of the parameters that it reads.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch

from request_fields.fields import SAMPLER_FIELDS, Kind, SamplingParams, sampling_params
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import tl, triton

BLOCK = 256  # deltas per program
ALIGNMENT = 8  # words: kernels are compiled for aligned block tables
_SIZES = {"last_token": 1, "num_tokens": 1, "prompt_len": 1}
_SIZES |= {name: 1 + (field.kind is Kind.UINT64) for name, field in SAMPLER_FIELDS.items()}
_SIZES |= {"sample_index": 1, "num_banned": 1, "banned_before": 1, "is_processed": 1, "position_delta": 1}

WORDS = dict(zip(_SIZES, accumulate(_SIZES.values(), initial=0), strict=False))  # first word of each field
TABLE = -(-sum(_SIZES.values()) // ALIGNMENT) * ALIGNMENT

# Words that several kernels read.
LAST_TOKEN = tl.constexpr(WORDS["last_token"])
NUM_TOKENS = tl.constexpr(WORDS["num_tokens"])  # the worker computes drafts, else it is not kept
PROMPT_LEN = tl.constexpr(WORDS["prompt_len"])
POSITION_DELTA = tl.constexpr(WORDS["position_delta"])
TEMPERATURE = tl.constexpr(WORDS["temperature"])


def read_record(record: torch.Tensor) -> tuple[SamplingParams, int]:
    """Sampling parameters as a record holds them (min_p as its logarithm), and the sample index."""
    words = record[:TABLE].cpu().numpy()
    types: dict[Kind, np.dtype[Any]] = {Kind.FLOAT: np.dtype("f4"), Kind.UINT64: np.dtype("<u8")}
    found = {}
    for name, field in SAMPLER_FIELDS.items():
        dtype = types.get(field.kind, np.dtype("i4"))
        first = WORDS[name]
        found[name] = words[first : first + dtype.itemsize // 4].view(dtype)[0].item()
    return sampling_params(found), int(words.view(np.uint32)[WORDS["sample_index"]])


@triton.jit(do_not_specialize=["num_deltas"])
def deltas_kernel(state_ptr, delta_ptr, num_deltas, BLOCK: tl.constexpr):
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_item = item < num_deltas
    index = tl.load(delta_ptr + 2 * item, mask=is_item, other=0)
    value = tl.load(delta_ptr + 2 * item + 1, mask=is_item, other=0)
    tl.store(state_ptr + index, value, mask=is_item)


def torch_deltas(state: torch.Tensor, deltas: torch.Tensor) -> None:
    state.view(-1)[deltas[:, 0].long()] = deltas[:, 1]


@kernel("deltas", torch_deltas, writes="state")
def apply_deltas(state: torch.Tensor, deltas: torch.Tensor) -> None:
    """state.view(-1)[deltas[:, 0]] = deltas[:, 1], all int32. No index may occur twice."""
    count = len(deltas)
    deltas_kernel[(triton.cdiv(count, BLOCK),)](state, deltas, count, BLOCK=BLOCK, num_warps=4)
