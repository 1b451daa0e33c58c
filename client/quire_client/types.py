"""The SDK's results: frozen dataclasses, never protos."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire_client.plain import Result
from quire_client.results import *  # noqa: F403
from quire_client.results import Message, ModelFacts, ToolCall, ToolCallDelta, Usage, WeightVersionSpan
from request_fields.fields import FinishReason as FinishReason


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most likely tokens at a position."""

    token_id: int
    logprob: float
    token: bytes = b""  # the bytes of its text; empty if the server sends no text


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of one token, and the most likely tokens at its position, most likely first.

    `logprob` is that of the distribution that `logprobs_mode` names: raw, the log-softmax of the model's logits, or
    processed, from which the token was drawn. `rank` is 1 + the number of more likely tokens. `token` has the bytes of
    the token's text, which need not be whole characters.
    """

    token_id: int | None  # None if token ids are neither requested nor needed to resume the stream
    logprob: float
    rank: int
    token: bytes = b""
    top: tuple[TopLogprob, ...] = ()
    raw_logprob: float | None = None  # with the mode `processed`
    num_kept: int | None = None  # with the mode `processed`: token ids that the filters kept; 0 for a prompt token
    logits_digest: int | None = None  # with `logits_digests`: xxh3_64 of the model's logits


@dataclass(frozen=True, slots=True)
class Delta(Result):
    """New output of one sample.

    `offset` is the output position of the first token. `text` has whole characters only and may lag behind the tokens:
    an incomplete character or a possible start of a stop string is held back until the next tokens. In a chat, `text`
    is the content; reasoning and tool calls are separate.
    """

    index: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one per new token, with the option `logprobs`


@dataclass(frozen=True, slots=True)
class Sample(Result):
    """One complete answer."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    matched: int | str | None = None  # the stop token id or stop string, if finish_reason is STOP
    usage: Usage = field(default_factory=Usage)
    preemptions: int = 0
    message: str = ""  # the reason, if finish_reason is ERROR
    reasoning: str = ""  # in a chat
    tool_calls: tuple[ToolCall, ...] = ()  # in a chat
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, with the option `logprobs`
    receipt: str = ""  # with the option `receipt`: a signed record of the sample (docs/receipts.md)
    weight_versions: tuple[WeightVersionSpan, ...] = ()  # empty: the weights were not updated
    cumulative_logprob: float | None = None  # sum of all log probabilities; also with best_of and of a beam search
    score: float | None = None  # score of this sample of a beam search; the first sample has the best score

    def as_message(self) -> Message:
        """The answer as a message, to continue the conversation."""
        return Message("assistant", self.text, tool_calls=self.tool_calls, reasoning=self.reasoning)


@dataclass(frozen=True, slots=True)
class PartialSample(Result):
    """The output of a sample received before its request failed."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    is_finished: bool  # the sample is complete; another sample failed


@dataclass(frozen=True, slots=True)
class GenerateResult(Result):
    """A complete request: its `n` samples in order of their index.

    `text`, `token_ids`, `reasoning`, `tool_calls` and `finish_reason` belong to the first sample; `usage` counts the
    whole request.
    """

    request_id: str
    model: str
    seed: int  # sending the request again with this seed gives the same tokens
    samples: tuple[Sample, ...]
    resumes: int = 0  # how often the stream broke and was resumed
    parsed: Any = None  # the object of the first sample, if `response_model` was given
    # One per prompt token, with the option `prompt_logprobs`; the first token has none.
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def reasoning(self) -> str:
        return self.samples[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.samples[0].tool_calls

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def usage(self) -> Usage:
        """The prompt counts once; output and recomputed tokens are sums over all samples."""
        first = self.samples[0].usage
        return Usage(
            prompt_tokens=first.prompt_tokens,
            cached_tokens=first.cached_tokens,
            output_tokens=sum(s.usage.output_tokens for s in self.samples),
            recomputed_tokens=sum(s.usage.recomputed_tokens for s in self.samples),
            reasoning_tokens=sum(s.usage.reasoning_tokens for s in self.samples),
            discarded_tokens=first.discarded_tokens,
            processor_seconds=sum(s.usage.processor_seconds for s in self.samples),
            block_seconds=sum(s.usage.block_seconds for s in self.samples),
        )


@dataclass(frozen=True, slots=True)
class EmbedResult(Result):
    """Embeddings of several inputs, in order."""

    embeddings: tuple[tuple[float, ...], ...]
    prompt_tokens: tuple[int, ...]  # counts by input
    model: str
    revision: str
    request_id: str


@dataclass(frozen=True, slots=True)
class TokenizeResult(Result):
    """Token ids of a prompt, and the model's limit for prompt + output."""

    token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class ModelInfo(ModelFacts):
    """A served model."""

    name: str = ""
    ready_workers: int = 0  # 0: no worker can serve the model now
    adapters: tuple[str, ...] = ()  # names of its LoRA adapters


@dataclass(frozen=True, slots=True)
class AbortResult(Result):
    """The result of `abort`."""

    aborted_ids: tuple[str, ...]
    unknown_ids: tuple[str, ...]
