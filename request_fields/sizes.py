"""Whether prompt and output of one sequence fit the model and a KV pool, and limits of inputs that are not tokens."""

from __future__ import annotations

from dataclasses import dataclass

from request_fields.fields import FieldError

MAX_INPUTS = 256
# Limit for one request, and for all requests that one step opens: a message between services holds 64 MiB.
MAX_INPUT_BYTES = 48 << 20
INPUT_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
EMBEDDING_DTYPES = ("float32", "bfloat16", "float16")
AUDIO_DTYPES = ("float32", "int16")
LEVELS = 256  # values of a channel of an image


# The largest KV pool that a scheduler accepts from one worker: far above real ones. The 141 GB of an H200 hold 6 M
# tokens of a 135 M-parameter model.
MAX_POOL_BLOCKS = 1 << 22
MAX_POOL_TOKENS = 1 << 26
MAX_BURST = 16  # most decode steps in one message


def largest_pool(block_size: int) -> int:
    """The most blocks of this size that a scheduler accepts from one worker."""
    return min(MAX_POOL_BLOCKS, MAX_POOL_TOKENS // block_size)


def blocks_before(window: int, block_size: int) -> int:
    """The most blocks before the block of a token that it attends to: to `window` tokens, itself included."""
    return -(-(window - 1) // block_size)


def blocks_of_row(window: int, block_size: int, pipeline_depth: int) -> int:
    """The most blocks of a window group that a decoding row needs: those of its window, those that it has freed while
    steps in flight may read them, and a copy of a shared one.
    """
    in_flight = -(-pipeline_depth * MAX_BURST // block_size) + 1
    return blocks_before(window, block_size) + 1 + in_flight + 1


class LengthError(FieldError):
    """Prompt and output are longer than `limit` tokens together."""

    def __init__(self, field: str, problem: str, *, limit: int) -> None:
        super().__init__(field, problem)
        self.limit = limit


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """The largest sequence that the workers of a model can hold, in tokens."""

    max_model_len: int
    pool_tokens: int  # slots of the largest KV pool; `max_model_len` if the tokens of a sequence need not all have one

    @classmethod
    def of_pool(cls, max_model_len: int, num_blocks: int, block_size: int, window: int | None) -> SizeLimits:
        """The limits of a worker with this pool. With an attention window (of all layers), the blocks before the window
        are freed: a pool that holds the window holds a sequence of any length.
        """
        if window is not None and num_blocks > blocks_before(window, block_size):
            return cls(max_model_len, max(max_model_len, num_blocks * block_size))
        return cls(max_model_len, num_blocks * block_size)

    @property
    def max_tokens(self) -> int:
        """The limit of tokens of prompt and output together. The last output token needs no slot."""
        return min(self.max_model_len, self.pool_tokens + 1)

    def fits(self, num_prompt: int, max_tokens: int) -> bool:
        """Whether some worker could run the sequence if it were idle."""
        num_slots = num_prompt + (max_tokens or 1) - 1
        return num_prompt + max_tokens <= self.max_model_len and num_slots <= self.pool_tokens

    def resolve(self, num_prompt: int, max_tokens: int | None) -> int:
        """max_tokens, or the largest that fits if it is unset. Raises LengthError if prompt and output do not fit."""
        room = self.max_tokens - num_prompt
        is_model = self.max_model_len <= self.pool_tokens
        name = "max_model_len" if is_model else "the largest KV pool (max_num_blocks * block_size, plus 1)"
        if (room <= 0 and max_tokens is None) or not self.fits(num_prompt, 0):
            raise LengthError(
                "prompt",
                f"has {num_prompt} tokens; {name} is {self.max_tokens} tokens for prompt and output together: "
                "shorten the prompt",
                limit=self.max_tokens,
            )
        if max_tokens is not None and not self.fits(num_prompt, max_tokens):
            raise LengthError(
                "stop.max_tokens",
                f"is {max_tokens}; the prompt has length {num_prompt}, so the sum is {num_prompt + max_tokens}, "
                f"and {name} is {self.max_tokens}: ask for at most {room}, or shorten the prompt",
                limit=self.max_tokens,
            )
        return room if max_tokens is None else max_tokens
