"""Errors about a field of a request: its path, its value, the limit, what to do; and the limit of what parts cost."""

from __future__ import annotations

from collections.abc import Sequence

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request.models import ServedModel
from request_fields.fields import FieldError
from request_fields.sizes import LengthError
from svc_common.errors import ContextLengthError, InvalidRequestError

CHAT = "prompt.chat"


class FieldErrors:
    """Converts a FieldError of its block to the error that the client gets. A class, because a request enters several
    blocks and a generator costs more.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, LengthError):
            raise ContextLengthError(str(error), field=error.field, limit=error.limit) from None
        if isinstance(error, FieldError):
            raise InvalidRequestError(str(error), field=error.field) from None


def invalid(field: str, words: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} {words}", field=field)


def check_token_ids(field: str, ids: Sequence[int], model: ServedModel) -> None:
    """Check that all ids are below vocab_size."""
    vocab_size = model.info.vocab_size
    if len(ids) == 0 or max(ids) < vocab_size:
        return
    position = next(i for i, id_ in enumerate(ids) if id_ >= vocab_size)
    raise invalid(field, f"holds token id {ids[position]} at position {position}; vocab_size is {vocab_size}")


MAX_COST = 32 << 20  # limit for one request: twice the largest message
PROMPT_COST = 4 << 10  # handler, plan and message of a prompt
SAMPLE_COST = 4 << 10  # journal, detokenizer and answer of a sample
PARAMETER_COPIES = 4  # copies of the sampling parameters: in request, plan, message, and the message after a move
POOLED_TEXT_COST = 8  # cost of a byte of an input that becomes a vector or a score
LOGPROB_COST = 48  # one log probability in an answer
BYTES_PER_TOKEN = 4  # estimate for a text whose tokens are not counted yet


def check_cost(shared: pb.GenerateRequest, prompts: Sequence[pb.Prompt]) -> None:
    """Refuse a request whose parts would be too large. `shared`: the fields that the requests of all prompts have.

    Their sizes are counted before they are made: a few bytes can stand for much work, such as samples, a schema that
    many prompts share, or the log probabilities of every token of a prompt. gRPC and HTTP count with the same rates
    against one limit. Raises FieldError, which names the field that costs most.
    """
    sampling, output, num_prompts = shared.sampling, shared.output, len(prompts)
    num_samples = max(1, sampling.n, sampling.best_of, sampling.beam_width)
    has_drafts = shared.draft_token_ids or shared.draft_text
    num_draft_bytes = 4 * len(shared.draft_token_ids) + len(shared.draft_text) if has_drafts else 0
    num_logprobs = 1 + output.prompt_logprobs if output.HasField("prompt_logprobs") else 0
    costs = (
        num_prompts * PROMPT_COST + sum([_prompt_bytes(prompt) for prompt in prompts]),
        num_prompts * num_samples * SAMPLE_COST,
        num_prompts * sampling.ByteSize() * PARAMETER_COPIES,
        num_prompts * num_draft_bytes * PARAMETER_COPIES,
        num_logprobs and num_logprobs * sum(map(_num_tokens, prompts)) * LOGPROB_COST,
    )
    if (total := sum(costs)) <= MAX_COST:
        return
    drafts = "draft_token_ids" if shared.draft_token_ids else "draft_text"
    fields = "prompt", _samples_field(sampling), _largest_field(sampling), drafts, "output.prompt_logprobs"
    raise FieldError(
        fields[costs.index(max(costs))],
        f"makes this request too large: {num_prompts} prompts with {num_samples} samples each, {sampling.ByteSize()} "
        f"bytes of parameters per prompt and {num_logprobs} log probabilities per prompt token count as {total} bytes; "
        f"at most {MAX_COST} are allowed: lower it, or send fewer prompts in a request",
    )


def check_pooled_cost(field: str, num_inputs: int, num_bytes: int) -> None:
    """Refuse inputs of an Embed or Score that are too large together. Raises FieldError."""
    total = num_inputs * PROMPT_COST + num_bytes * POOLED_TEXT_COST
    if total > MAX_COST:
        raise FieldError(
            field,
            f"has {num_inputs} items of {num_bytes} bytes, which count as {total} bytes; at most {MAX_COST} are "
            "allowed: send them in parts",
        )


def _samples_field(sampling: types.SamplingParams) -> str:
    return "sampling." + max(("n", "best_of", "beam_width"), key=lambda name: int(getattr(sampling, name)))


def _largest_field(sampling: types.SamplingParams) -> str:
    """The largest parameter. The other ones are small."""
    sizes = {field.name: len(value) for field, value in sampling.ListFields() if hasattr(value, "__len__")}
    return "sampling." + max(sizes, key=sizes.__getitem__, default="n")


def _prompt_bytes(prompt: pb.Prompt) -> int:
    """About as many as its ByteSize, which takes a millisecond for 50,000 ids."""
    return 4 * len(prompt.tokens.ids) if prompt.HasField("tokens") else prompt.ByteSize()


def _num_tokens(prompt: pb.Prompt) -> int:
    """The tokens of a prompt; of a text about as many."""
    return len(prompt.tokens.ids) if prompt.HasField("tokens") else prompt.ByteSize() // BYTES_PER_TOKEN
