"""What a request becomes once its parts are made, in bytes. Counted before they are made. Pure.

A few bytes of a request can stand for much work: samples, a schema that many prompts share, the log probabilities of
every token of a prompt. gRPC and HTTP count with the same rates against one limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.v1 import inference_pb2 as pb

from request_fields.fields import FieldError

MAX_COST = 32 << 20  # of one request: twice the largest message
PROMPT_COST = 4 << 10  # handler, plan and message of a prompt
SAMPLE_COST = 4 << 10  # journal, detokenizer and answer of a sample
FIELD_COPIES = 4  # of the other fields: request, plan, message, and the message after a move
LOGPROB_COST = 48  # one log probability in an answer
BYTES_PER_TOKEN = 4  # of a text, whose tokens are not counted yet


def check_cost(shared: pb.GenerateRequest, prompts: Sequence[pb.Prompt]) -> None:
    """Refuse a request whose parts would be too large. `shared`: the fields that the requests of all prompts have.

    Raises FieldError, which names the field that costs most.
    """
    num_samples, num_logprobs, own = samples_of(shared), _logprobs_per_token(shared.output), _own_bytes(shared)
    costs = (
        (len(prompts) * PROMPT_COST + sum(prompt.ByteSize() for prompt in prompts), "prompt"),
        (len(prompts) * num_samples * SAMPLE_COST, f"sampling.{_samples_field(shared)}"),
        (FIELD_COPIES * len(prompts) * own, f"sampling.{_largest_field(shared)}"),
        (LOGPROB_COST * num_logprobs * sum(map(_num_tokens, prompts)), "output.prompt_logprobs"),
    )
    total = sum(cost for cost, _ in costs)
    if total > MAX_COST:
        raise FieldError(
            max(costs)[1],
            f"makes this request too large: {len(prompts)} prompts with {num_samples} samples each, {own} bytes of "
            f"other fields per prompt and {num_logprobs} log probabilities per prompt token count as {total} bytes; at "
            f"most {MAX_COST} are allowed: lower it, or send fewer prompts in a request",
        )


def samples_of(request: pb.GenerateRequest) -> int:
    """The samples or beams that are computed for a prompt."""
    sampling = request.sampling
    return max(1, sampling.n, sampling.best_of, sampling.beam_width)


def _samples_field(request: pb.GenerateRequest) -> str:
    return max(("n", "best_of", "beam_width"), key=lambda name: int(getattr(request.sampling, name)))


def _own_bytes(shared: pb.GenerateRequest) -> int:
    """Bytes of the fields besides the prompt."""
    return shared.ByteSize() - (shared.prompt.ByteSize() if shared.HasField("prompt") else 0)


def _largest_field(shared: pb.GenerateRequest) -> str:
    """The largest field of `sampling`: other messages are small."""
    sizes = {field.name: len(value) for field, value in shared.sampling.ListFields() if hasattr(value, "__len__")}
    return max(sizes, key=sizes.__getitem__, default="n")


def _logprobs_per_token(output: pb.OutputParams) -> int:
    return 1 + output.prompt_logprobs if output.HasField("prompt_logprobs") else 0


def _num_tokens(prompt: pb.Prompt) -> int:
    """The tokens of a prompt; of a text about as many."""
    return len(prompt.tokens.ids) if prompt.HasField("tokens") else prompt.ByteSize() // BYTES_PER_TOKEN
