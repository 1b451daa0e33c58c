"""The SDK's results: frozen dataclasses, never protos."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_client.images import Image


class Result:
    """Base of all results."""

    __slots__: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary that `json.dumps` accepts."""
        return dict(plain(self))


def plain(value: Any) -> Any:
    """A structure of dataclasses as one that `json.dumps` accepts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, bytes):  # the bytes of a token may not be valid UTF-8
        return value.decode(errors="backslashreplace")
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


class FinishReason(enum.Enum):
    """Why a sample ended."""

    EOS = "eos"  # the model produced its end-of-sequence token
    STOP = "stop"  # a stop string or stop token id matched: see `Sample.matched`
    LENGTH = "length"  # max_tokens, max_model_len or the KV pool was reached
    ABORTED = "aborted"  # ended by the client, by abort() or by a deadline
    ERROR = "error"  # the server could not finish the sample: see `Sample.message`


@dataclass(frozen=True, slots=True)
class ToolCall(Result):
    """A call of a tool. `arguments` is JSON text as the model wrote it: it may be cut off or invalid."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta(Result):
    """New arguments of tool call number `index` of a sample."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message(Result):
    """One message of a conversation. `role` is system, developer, user, assistant or tool."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant message
    tool_call_id: str = ""  # of a tool message: the id of the call that it answers
    name: str = ""
    reasoning: str = ""  # of an assistant message
    parts: tuple[str | Image, ...] = ()  # texts and images in order, instead of content


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
class Usage(Result):
    """Token counts of a sample or of a whole request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    output_tokens: int = 0
    recomputed_tokens: int = 0  # recomputed after a preemption or a move to another worker
    reasoning_tokens: int = 0  # output tokens of reasoning, in a chat
    discarded_tokens: int = 0  # with best_of: tokens of the samples that are not returned; the first sample has them
    processor_seconds: float = 0.0  # of workers; the first sample of a request has the prompt
    block_seconds: float = 0.0  # KV blocks x seconds

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens + self.discarded_tokens


@dataclass(frozen=True, slots=True)
class WeightVersion(Result):
    """Weights of a model (`Client.update_weights`)."""

    version: int = 0  # 0: those of the checkpoint
    revision: str = ""
    weights_digest: str = ""


@dataclass(frozen=True, slots=True)
class WeightVersionSpan(Result):
    """Output tokens of a sample that one version of the weights has computed."""

    weights: WeightVersion
    start: int
    end: int
    keeps_kv: bool = False  # keys and values of the tokens before are those of earlier versions


@dataclass(frozen=True, slots=True)
class PausedSample(Result):
    """A sample that waits for the end of a pause."""

    request_id: str
    index: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class TensorChecksum(Result):
    """A tensor of an update, as the workers have read it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: str


@dataclass(frozen=True, slots=True)
class WeightsStatus(Result):
    """The weights in use, the open update, pauses and what sleeps."""

    weights: WeightVersion
    num_workers: int
    update_id: str = ""
    update_version: int = 0
    tensors: tuple[TensorChecksum, ...] = ()
    pause_ids: tuple[str, ...] = ()
    asleep: tuple[str, ...] = ()


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
    score: float | None = None  # of a beam search: the score of this sample; the first sample has the best score

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
    prompt_tokens: tuple[int, ...]  # of each input
    model: str
    revision: str
    request_id: str


@dataclass(frozen=True, slots=True)
class ScoreResult(Result):
    """Scores of pairs of texts, in order. A higher score is a better match."""

    scores: tuple[float, ...]
    prompt_tokens: tuple[int, ...]  # of each pair
    model: str
    revision: str
    request_id: str


@dataclass(frozen=True, slots=True)
class TokenizeResult(Result):
    """Token ids of a prompt, and the model's limit for prompt + output."""

    ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class ModelInfo(Result):
    """A served model."""

    name: str
    revision: str
    ready_workers: int  # 0: no worker can serve the model now
    max_model_len: int  # prompt + output, in tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int  # tokens per KV block
    max_num_blocks: int  # KV blocks of the largest pool
    max_num_seqs: int  # the largest n of one request
    dtype: str  # float32 or bfloat16
    determinism: str  # exact or best_effort
    quantization: str | None = None  # int8: weights are quantized to 8 bits
    hidden_size: int = 0  # width of prompt embeddings; 0: the workers take tokens only
    adapters: tuple[str, ...] = ()  # names of its LoRA adapters


@dataclass(frozen=True, slots=True)
class SessionSample(Result):
    """The output of one sample of a session."""

    num_tokens: int
    is_finished: bool


@dataclass(frozen=True, slots=True)
class SessionInfo(Result):
    """A session. In a list, only its id and its ends are set."""

    session_id: str
    model: str
    adapter: str
    revision: str
    prompt_tokens: int
    samples: tuple[SessionSample, ...]
    is_running: bool  # a gateway computes its output now
    expires_in_s: float  # until it is deleted, if it is not used
    pinned_for_s: float  # 0: it is not pinned
    base_id: str  # of the session that it continues, or was made from


@dataclass(frozen=True, slots=True)
class AdapterStatus(Result):
    """A LoRA adapter of a model."""

    name: str
    model: str
    digest: str  # of its content, in hex
    path: str  # of its folder on the workers' disks
    num_workers: int  # that have it in memory
    num_resident: int  # workers whose rows can use it without a swap


@dataclass(frozen=True, slots=True)
class WorkerStatus(Result):
    """State of a worker, as its scheduler sees it."""

    worker_id: str
    address: str
    state: str  # loading, joining (not leased yet), ready, draining or lost
    rows_used: int
    rows_total: int
    blocks_free: int
    blocks_cached: int  # cached prefixes that no sequence uses
    blocks_used: int
    steps: int
    worker_epoch: int
    adapters_loaded: int = 0
    adapters_resident: int = 0  # adapters that rows can use without a swap
    adapter_swaps: int = 0
    role: str = "both"  # the work that it prefers: prefill, decode or both
    degradations: tuple[str, ...] = ()  # why it serves slower than it could


@dataclass(frozen=True, slots=True)
class LatencyHistogram(Result):
    """Counts of durations. `counts` has one more item than `bounds_s`: the last bucket has no upper bound."""

    bounds_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    sum_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OpenRequest(Result):
    """A request that has not ended."""

    request_id: str
    worker_id: str  # empty: it waits
    age_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerStatus(Result):
    """A scheduler and its workers."""

    address: str
    model: str  # empty while the scheduler is unreachable
    connected: bool
    num_waiting: int
    max_waiting: int
    num_running: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    prefix_index: str  # memory, redis, or redis (down)
    steps: int
    workers: tuple[WorkerStatus, ...]
    pending_tokens: int = 0  # prompt tokens not computed yet, in the queue and on workers
    max_waiting_tokens: int = 0  # limit of tokens in the queue (prompts plus expected outputs); 0: no limit
    refused_deadline: int = 0  # requests refused because they could not meet their deadline
    output_tokens: int = 0  # since the scheduler started
    finished: int = 0  # sequences that ended since the scheduler started
    first_token: LatencyHistogram = LatencyHistogram()
    slowest: tuple[OpenRequest, ...] = ()  # the oldest open requests, the oldest first; at most 10
    revision: str = ""  # of the model; empty before the first worker
    accepted_draft_tokens: int = 0  # output tokens that were drafts, since the scheduler started


@dataclass(frozen=True, slots=True)
class Status(Result):
    """The state of all schedulers behind one gateway."""

    schedulers: tuple[SchedulerStatus, ...]
    open_streams: int
    is_summary: bool = False  # only `model` and `connected` of each scheduler are known
    pinned_sessions: int | None = None  # of all owners; None: the gateway keeps no records, or cannot read them now
    pins_by_owner: dict[str, int] = field(default_factory=dict)  # of the owners that have the most, at most 20


@dataclass(frozen=True, slots=True)
class AbortResult(Result):
    """The result of `abort`."""

    aborted_ids: tuple[str, ...]
    unknown_ids: tuple[str, ...]
