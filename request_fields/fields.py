"""One row per request field. Validation, defaults, wire packing, HTTP bodies, SDK options, flags, the comments of the
protocol and the tables of docs/ derive from these rows.

To add a sampling parameter: the proto field, a row of `FIELDS` and an attribute of `SamplingParams` here, and the
sampler of each backend. `scripts/docs_tables.py` then writes comments and tables, `scripts/gen_types.py` the options of
the SDK.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum, Flag, auto
from functools import cache
from typing import Any, Protocol

MAX_UINT32 = 2**32 - 1
MAX_BEAM_WIDTH = 64
MAX_BEST_OF = 20  # OpenAI's limit
MAX_BANNED_IDS = 512  # token ids that min_tokens may ban: EOS and stop_token_ids
MAX_ALLOWED_IDS = 1 << 16  # allowed_token_ids of one request
MAX_RULE_IDS = 1024  # banned_token_ids of one request; also entries of logit_bias
MAX_BAD_WORDS = 128  # strings of one request; each has up to two sequences of token ids
MAX_BAD_WORD_CHARS = 128
MAX_BAD_WORD_IDS = 1024  # token ids of one sequence
MAX_LOGIT_BIAS = 100
MAX_GRAMMAR_BYTES = 128 << 10  # size of a schema, regular expression or grammar
GRAMMAR_FIELDS = frozenset(
    {"json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"}
)  # at most one may be set
MAX_MARKER_IDS = 16  # token ids of a marker of reasoning
MAX_THINKING_LAST_IDS = 256
MAX_DRAFT_IDS = 1 << 16  # tokens of an old answer
MAX_DRAFT_BYTES = 256 << 10
DRAFT_FIELDS = "draft_of", "draft_token_ids", "draft_text"  # at most one may be set
MAX_PATTERN_SIZE = 128  # tokens; with MAX_PATTERN_COUNT it bounds the time of a check, which each token has
MAX_PATTERN_COUNT = 32
MAX_LOGPROBS = 128  # upper limit of --max-logprobs: a step's log probabilities must fit in one message


class FieldError(ValueError):
    """A field has an invalid value. The message names field, value and limit."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


class ProtoMessage(Protocol):
    """The methods of a protobuf message that are used here."""

    def ListFields(self) -> Sequence[tuple[Any, Any]]: ...


def has_grammar(sampling: ProtoMessage) -> bool:
    """Whether a SamplingParams constrains the output."""
    return not GRAMMAR_FIELDS.isdisjoint(field.name for field, _ in sampling.ListFields())


class Kind(Enum):
    """Type of a field's value, named as in the protocol."""

    FLOAT = "float"
    INT32 = "int32"
    UINT32 = "uint32"
    UINT64 = "uint64"
    BOOL = "bool"
    ENUM = "enum"
    STRING = "string"
    STRINGS = "list of strings"
    TOKEN_IDS = "list of token ids"
    BLOBS = "list of bytes"
    BIASES = "map of token id to float"
    COUNTS = "map of name to uint32"


NUMBERS = (Kind.FLOAT, Kind.INT32, Kind.UINT32, Kind.UINT64)


class Side(Flag):
    """The services that apply a field."""

    GATEWAY = auto()
    SCHEDULER = auto()
    WORKER = auto()


class Resume(Enum):
    """The way in which a Continuation rebuilds the state that a field needs."""

    STATELESS = "no state: a function of logits and output position"
    COUNTED = "from the number of output tokens"
    REPLAYED = "by replaying the output"
    PER_REQUEST = "sent again with the request"


class BodyForm(Enum):
    """How HTTP bodies write a field, if they also accept other values than the protocol."""

    PLAIN = ""
    MINUS_1_IS_OFF = "-1 turns it off, like 0."
    SIGNED = "A negative number is taken modulo 2^64."  # OpenAI's seed has a sign
    ONE_OR_LIST = "A string or a list of strings."
    OBJECT_OR_TEXT = "A JSON object or its text."
    TEXT_OR_PREDICTION = "A string or OpenAI's object of type `content`."


@dataclass(frozen=True, slots=True)
class Http:
    """A field in the HTTP bodies of generations."""

    name: str = ""  # if it differs from the field's name
    alias: str = ""  # another name, which has precedence
    form: BodyForm = BodyForm.PLAIN
    doc: str = ""  # facts that the other columns do not have


@dataclass(frozen=True, slots=True)
class Field:
    """One request field. A limit of None means no limit."""

    path: str  # path in GenerateRequest, such as sampling.top_p
    kind: Kind
    doc: str  # its meaning, without limits and default
    applied_by: Side
    resume: Resume = Resume.PER_REQUEST
    default: Any = None  # used if neither the request nor the model sets the field; None: see `doc`
    low: float | None = None
    high: float | None = None
    excludes_low: bool = False
    values: Mapping[Any, int] | None = None  # values of an enum in the SDK and over HTTP, with their numbers
    counts: Mapping[str, int] | None = None  # names of a map of counts, with their highest values
    max_items: int | None = None
    max_chars: int | None = None  # limit of each string in a list
    max_bytes: int | None = None
    config_key: str = ""  # key in generation_config.json; its value is the model's default
    config_off: Any = None  # the value of this key that means "off"; it is replaced by `default`
    is_filter: bool = False  # drops unlikely tokens, unless it has its default value
    has_flag: bool = False  # `quire generate` and `quire chat` have a flag for it
    sdk_option: str = ""  # keyword option of the SDK, if it differs from the field's name
    http: Http | None = Http()  # None: no body has it, or only some endpoints (gateway_svc/http/fields.py)
    works_with_beams: bool = True  # may be set with beam_width
    needs_beams: bool = False  # may be set only with beam_width

    @property
    def message(self) -> str:
        """The message in GenerateRequest that has the field; empty for a field of GenerateRequest itself."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def option(self) -> str:
        """The field's keyword option in the SDK."""
        return self.sdk_option or self.name

    @property
    def allowed(self) -> str:
        """The range of a number, in words; empty if there is none."""
        if self.high is None:
            return "" if self.low is None else f"at least {self.low}"
        return f"above {self.low} and at most {self.high}" if self.excludes_low else f"from {self.low} to {self.high}"


FIELDS = (
    Field(
        "sampling.temperature", Kind.FLOAT, "Divides the logits. 0 is greedy.",
        Side.WORKER, Resume.STATELESS, default=1.0, low=0, high=2, config_key="temperature", has_flag=True,
        works_with_beams=False,
    ),
    Field(
        "sampling.top_p", Kind.FLOAT, "Keep the smallest set of tokens whose probability reaches top_p. 1 is off.",
        Side.WORKER, Resume.STATELESS, default=1.0, low=0, high=1, excludes_low=True, config_key="top_p", config_off=0,
        is_filter=True, has_flag=True, works_with_beams=False,
    ),
    Field(
        "sampling.top_k", Kind.UINT32, "Keep the k most likely tokens. 0 is off.",
        Side.WORKER, Resume.STATELESS, default=0, low=0, high=MAX_UINT32, config_key="top_k", config_off=-1,
        is_filter=True, has_flag=True, http=Http(form=BodyForm.MINUS_1_IS_OFF), works_with_beams=False,
    ),
    Field(
        "sampling.min_p", Kind.FLOAT,
        "Drop tokens less likely than min_p times the most likely token. Applied before top_k and top_p. 0 is off.",
        Side.WORKER, Resume.STATELESS, default=0.0, low=0, high=1, config_key="min_p",
        is_filter=True, has_flag=True, works_with_beams=False,
    ),
    Field(
        "sampling.top_a", Kind.FLOAT,
        "Drop tokens less likely than top_a times the square of the highest probability. Applied after min_p, to the "
        "probabilities of the tokens that it keeps. 0 is off.",
        Side.WORKER, Resume.STATELESS, default=0.0, low=0, high=1,
        is_filter=True, has_flag=True, works_with_beams=False,
    ),
    Field(
        "sampling.seed", Kind.UINT64,
        "The same seed gives the same tokens: the token at output position p of sample i is a function of the logits, "
        "seed, i and p. Unset: it follows from request_id; Accepted has it.",
        Side.GATEWAY | Side.WORKER, Resume.STATELESS, low=0, high=2**64 - 1, has_flag=True,
        http=Http(form=BodyForm.SIGNED),
    ),
    Field(
        "sampling.n", Kind.UINT32, "Samples of one prompt; the prompt is computed once.",
        Side.GATEWAY | Side.SCHEDULER, default=1, low=1,
    ),
    Field(
        "sampling.best_of", Kind.UINT32,
        "Compute this many samples and return the n with the highest sums of log probabilities, in decreasing order, "
        "when all have ended. At least n, and at most the rows of a worker. Unset: n.",
        Side.GATEWAY, Resume.PER_REQUEST, low=1, high=MAX_BEST_OF, has_flag=True,
        http=Http(doc="More than n: not with `stream`."), works_with_beams=False,
    ),
    Field(
        "sampling.repetition_penalty", Kind.FLOAT,
        "Divides positive logits and multiplies others, for each token in the prompt or the output. 1 is off.",
        Side.WORKER, Resume.REPLAYED, default=1.0, low=0.01, high=100, config_key="repetition_penalty", has_flag=True,
    ),
    Field(
        "sampling.frequency_penalty", Kind.FLOAT,
        "Subtracted from the logit of each token in the output, once per occurrence. 0 is off.",
        Side.WORKER, Resume.REPLAYED, default=0.0, low=-2, high=2, config_key="frequency_penalty", has_flag=True,
    ),
    Field(
        "sampling.presence_penalty", Kind.FLOAT,
        "Subtracted from the logit of each token in the output. 0 is off.",
        Side.WORKER, Resume.REPLAYED, default=0.0, low=-2, high=2, config_key="presence_penalty", has_flag=True,
    ),
    Field(
        "sampling.logit_bias", Kind.BIASES, "Added to the logits of these tokens, before the penalties.",
        Side.WORKER, Resume.STATELESS, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS, max_items=MAX_RULE_IDS,
    ),
    Field(
        "sampling.allowed_token_ids", Kind.TOKEN_IDS, "Only these tokens can be sampled. Empty: all.",
        Side.WORKER, Resume.STATELESS, max_items=MAX_ALLOWED_IDS,
    ),
    Field(
        "sampling.banned_token_ids", Kind.TOKEN_IDS, "These tokens cannot be sampled.",
        Side.WORKER, Resume.STATELESS, max_items=MAX_RULE_IDS,
    ),
    Field(
        "sampling.bad_words", Kind.STRINGS,
        "Strings that the output does not contain. Each is tokenized with and without a leading space; the last token "
        "of each result cannot be sampled after the tokens before it. The same text from other tokens is not detected.",
        Side.GATEWAY | Side.WORKER, Resume.REPLAYED, max_items=MAX_BAD_WORDS, max_chars=MAX_BAD_WORD_CHARS,
        has_flag=True, http=Http(form=BodyForm.ONE_OR_LIST),
    ),
    Field(
        "sampling.beam_width", Kind.UINT32,
        "Beam search with this many beams, at most the rows of a worker: the n best sequences are sent when the search "
        "ends. Not with parameters of sampling, stop strings, grammars or log probabilities (docs/beam-search.md). 0 "
        "and 1 are off.",
        Side.GATEWAY | Side.SCHEDULER, Resume.PER_REQUEST, default=0, low=0, high=MAX_BEAM_WIDTH, has_flag=True,
    ),
    Field(
        "sampling.length_penalty", Kind.FLOAT,
        "With beam_width: a sequence's score is the sum of log probabilities / (output tokens ^ length_penalty).",
        Side.SCHEDULER, Resume.PER_REQUEST, default=1.0, low=-10, high=10, has_flag=True, needs_beams=True,
    ),
    Field(
        "sampling.early_stopping", Kind.ENUM,
        "With beam_width: when the search ends, as in transformers. Unset: false.",
        Side.SCHEDULER, Resume.PER_REQUEST, low=0, high=3, values={False: 1, True: 2, "never": 3}, needs_beams=True,
    ),
    Field(
        "sampling.logprobs_mode", Kind.ENUM,
        "The distribution whose log probabilities are returned: `raw`, of the model's logits, or `processed`, after "
        "penalties, bans, temperature and filters. Unset: the gateway's --logprobs-mode (docs/rollouts.md).",
        Side.GATEWAY | Side.WORKER, Resume.STATELESS, low=0, high=2,
        values={"raw": 1, "processed": 2}, has_flag=True, http=None, works_with_beams=False,
    ),
    Field(
        "sampling.num_forced_tokens", Kind.UINT32,
        "The last k tokens of the prompt count as output: with output.prompt_logprobs, their log probabilities are the "
        "bits that Generate returns for them with the same parameters. Shorter than the prompt.",
        Side.GATEWAY | Side.WORKER, Resume.COUNTED, low=0, http=None, works_with_beams=False,
    ),
    Field(
        "sampling.logits_digests", Kind.BOOL,
        "Return a digest of the model's logits with each log probability: xxh3_64 of all of them as float32.",
        Side.WORKER, Resume.STATELESS, http=None, works_with_beams=False,
    ),
    Field(
        "sampling.json_schema", Kind.STRING, "The output is JSON that matches this JSON Schema.",
        Side.GATEWAY | Side.SCHEDULER | Side.WORKER, Resume.REPLAYED, max_bytes=MAX_GRAMMAR_BYTES,
        http=Http("guided_json", form=BodyForm.OBJECT_OR_TEXT), works_with_beams=False,
    ),
    Field(
        "sampling.json_object", Kind.BOOL, "The output is a JSON object.",
        Side.GATEWAY | Side.SCHEDULER | Side.WORKER, Resume.REPLAYED,
        http=Http("guided_json_object"), works_with_beams=False,
    ),
    Field(
        "sampling.regex", Kind.STRING, "The output matches this regular expression as a whole.",
        Side.GATEWAY | Side.SCHEDULER | Side.WORKER, Resume.REPLAYED, max_bytes=MAX_GRAMMAR_BYTES, has_flag=True,
        http=Http("guided_regex"), works_with_beams=False,
    ),
    Field(
        "sampling.choice", Kind.STRINGS, "The output is one of these strings.",
        Side.GATEWAY | Side.SCHEDULER | Side.WORKER, Resume.REPLAYED, max_items=1024, max_chars=1024,
        http=Http("guided_choice"), works_with_beams=False,
    ),
    Field(
        "sampling.grammar", Kind.STRING, "The output matches this grammar, in llguidance's variant of Lark or in GBNF.",
        Side.GATEWAY | Side.SCHEDULER | Side.WORKER, Resume.REPLAYED, max_bytes=MAX_GRAMMAR_BYTES,
        http=Http("guided_grammar"), works_with_beams=False,
    ),
    Field(
        "sampling.structural_tag", Kind.STRING,
        "The output is text with parts that match JSON Schemas, as this structural tag of vLLM or xgrammar says "
        "(docs/structured-output.md).",
        Side.GATEWAY | Side.SCHEDULER | Side.WORKER, Resume.REPLAYED, max_bytes=MAX_GRAMMAR_BYTES,
        http=Http("structural_tag", form=BodyForm.OBJECT_OR_TEXT), works_with_beams=False,
    ),
    Field(
        "sampling.thinking_token_budget", Kind.UINT32,
        "Tokens of reasoning after which its end marker is forced; 0 forces it at once (docs/chat.md). Unset: no "
        "limit.",
        Side.GATEWAY | Side.WORKER, Resume.REPLAYED, low=0, has_flag=True, works_with_beams=False,
    ),
    Field(
        "sampling.thinking_start_ids", Kind.TOKEN_IDS,
        "With thinking_end_ids: the token ids, in a row, after which reasoning begins. Empty: it begins with the "
        "output.",
        Side.WORKER, Resume.REPLAYED, max_items=MAX_MARKER_IDS, http=None, works_with_beams=False,
    ),
    Field(
        "sampling.thinking_end_ids", Kind.TOKEN_IDS,
        "With thinking_token_budget: token ids that end reasoning; the first one is forced. Empty: the markers are "
        "those of the model's format.",
        Side.GATEWAY | Side.WORKER, Resume.REPLAYED, max_items=MAX_MARKER_IDS, http=None, works_with_beams=False,
    ),
    Field(
        "sampling.thinking_last_ids", Kind.TOKEN_IDS,
        "With thinking_end_ids: token ids that are forced before the end id.",
        Side.WORKER, Resume.REPLAYED, max_items=MAX_THINKING_LAST_IDS, http=None, works_with_beams=False,
    ),
    Field(
        "sampling.thinking_repeats", Kind.BOOL,
        "With thinking_start_ids: reasoning begins anywhere in the output, and again after its end; the budget is that "
        "of all of it. False: it begins with one of the first tokens, once.",
        Side.WORKER, Resume.REPLAYED, http=None, works_with_beams=False,
    ),
    Field(
        "sampling.speculative", Kind.BOOL,
        "False: the worker computes no drafts of this request (docs/speculation.md). The tokens are the same. "
        "Unset: true.",
        Side.WORKER, Resume.STATELESS, has_flag=True,
    ),
    Field(
        "stop.max_tokens", Kind.UINT32,
        "Maximum output tokens. 0 computes the prompt, which fills the prefix cache, and returns no token. Unset: as "
        "many as fit after the prompt in max_model_len and the KV pool.",
        Side.GATEWAY | Side.SCHEDULER, Resume.COUNTED, low=0, has_flag=True, http=Http(alias="max_completion_tokens"),
    ),
    Field(
        "stop.min_tokens", Kind.UINT32,
        "Minimum number of output tokens; at most max_tokens. Before that, EOS and stop_token_ids cannot be sampled, "
        "and stop strings are not matched.",
        Side.GATEWAY | Side.SCHEDULER | Side.WORKER, Resume.COUNTED, default=0, low=0, has_flag=True,
    ),
    Field(
        "stop.stop", Kind.STRINGS,
        "Strings that end the output, matched in the output text only. The text is cut before the match.",
        Side.GATEWAY, Resume.REPLAYED, max_items=16, max_chars=256, has_flag=True,
        http=Http(form=BodyForm.ONE_OR_LIST), works_with_beams=False,
    ),
    Field(
        "stop.stop_token_ids", Kind.TOKEN_IDS,
        "Token ids that end the output. The id is in token_ids but not in the text.",
        Side.GATEWAY | Side.SCHEDULER, Resume.COUNTED, max_items=256,
    ),
    Field(
        "stop.ignore_eos", Kind.BOOL, "Continue past the model's end-of-sequence ids.",
        Side.GATEWAY | Side.SCHEDULER, Resume.COUNTED, default=False, has_flag=True,
    ),
    Field(
        "stop.include_stop_in_output", Kind.BOOL, "Keep the matched stop string in the text.",
        Side.GATEWAY, Resume.REPLAYED, default=False, http=Http("include_stop_str_in_output"),
    ),
    Field(
        "stop.repetition_detection", Kind.COUNTS,
        "End the output when it ends with min_count (at least 2) repetitions of the same min_pattern_size to "
        "max_pattern_size tokens, but not before min_tokens. max_pattern_size 0 is off; min_pattern_size 0 means 1.",
        Side.GATEWAY | Side.SCHEDULER, Resume.REPLAYED, works_with_beams=False,
        counts={
            "max_pattern_size": MAX_PATTERN_SIZE, "min_pattern_size": MAX_PATTERN_SIZE, "min_count": MAX_PATTERN_COUNT,
        },
    ),
    Field(
        "output.text", Kind.BOOL, "Send the text.",
        Side.GATEWAY, Resume.REPLAYED, default=True, sdk_option="send_text", http=None,
    ),
    Field(
        "output.token_ids", Kind.BOOL, "Send the token ids.",
        Side.GATEWAY, default=True, sdk_option="send_token_ids", http=None,
    ),
    Field(
        "output.skip_special_tokens", Kind.BOOL, "Leave special tokens out of the text.",
        Side.GATEWAY, Resume.REPLAYED, default=True,
    ),
    Field(
        "output.parse_chat", Kind.BOOL,
        "Send the text as parts: reasoning, content and tool calls (docs/chat.md). The SDK's default for chats: true.",
        Side.GATEWAY, Resume.REPLAYED, default=False, http=None,
    ),
    Field(
        "output.logprobs", Kind.UINT32,
        "Return the log probability of each output token and of this many most likely tokens. "
        "At most the gateway's --max-logprobs, 20 by default. Unset: none.",
        Side.GATEWAY | Side.WORKER, Resume.REPLAYED, low=0, high=MAX_LOGPROBS, has_flag=True,
        http=None, works_with_beams=False,
    ),
    Field(
        "output.prompt_logprobs", Kind.UINT32,
        "Return the log probability of each prompt token except the first, and of this many most likely tokens. "
        "The prompt is computed without the prefix cache. Unset: none.",
        Side.GATEWAY | Side.SCHEDULER | Side.WORKER, Resume.COUNTED, low=0, high=MAX_LOGPROBS, has_flag=True,
        http=None, works_with_beams=False,
    ),
    Field(
        "scheduling.priority", Kind.INT32, "Requests with a lower number run first.",
        Side.SCHEDULER, default=0, low=-1000, high=1000,
    ),
    Field(
        "scheduling.cache_salt", Kind.STRING, "Requests with different salts share no cached blocks.",
        Side.SCHEDULER, default="", max_bytes=128,
    ),
    Field(
        "scheduling.determinism", Kind.ENUM, "`exact` is refused where workers run `best_effort`. Unset: either.",
        Side.GATEWAY, low=0, high=2, values={"best_effort": 1, "exact": 2}, http=None,
    ),
    Field(
        "scheduling.tenant_id", Kind.STRING, "The tenant whose share of the workers the request uses; requests without "
        "one have a common share. Where requests have owners, it is the owner (docs/keys.md); else it is not verified.",
        Side.SCHEDULER, default="", max_bytes=128, http=None,
    ),
    Field(
        "scheduling.conversation", Kind.STRING, "A name of the conversation that the request is a turn of. Its cached "
        "blocks are evicted as late as blocks that were used twice; those of an earlier turn that a later turn no "
        "longer has, as those of other requests.",
        Side.SCHEDULER, default="", max_bytes=128, http=Http("prompt_cache_key"),
    ),
    Field(
        "truncate_prompt_tokens", Kind.UINT32, "Keep only the last k tokens of the prompt. Unset: all.",
        Side.GATEWAY, low=1,
    ),
    Field(
        "resumable", Kind.BOOL,
        "Keep a record of the request in Redis, so that a client can continue it by its id (docs/resume.md). Refused "
        "with FAILED_PRECONDITION if the gateways keep no records.",
        Side.GATEWAY, default=False, has_flag=True, http=None,
    ),
    Field(
        "receipt", Kind.BOOL,
        "Return a signed receipt of each sample (docs/receipts.md). Sets output.logprobs, if it is unset, and "
        "sampling.logits_digests. Refused with FAILED_PRECONDITION by gateways without --receipt-key-file.",
        Side.GATEWAY, http=None, works_with_beams=False,
    ),
    Field(
        "session_id", Kind.STRING,
        "Continue this session (docs/sessions.md): the prompt is the session's prompt, its output, and then the new "
        "input. Fields that are not set have the session's values. Empty: the prompt is complete.",
        Side.GATEWAY, default="", max_bytes=64, has_flag=True, http=None,
    ),
    Field(
        "session_sample", Kind.UINT32, "With session_id: the sample whose output is continued.",
        Side.GATEWAY, default=0, http=None,
    ),
    Field(
        "draft_of", Kind.STRING,
        "Id of an earlier request with a record: a response, a session or a resumable request. Its output is proposed "
        "as drafts (docs/speculation.md); the tokens are those without it. NOT_FOUND if the caller has no such record.",
        Side.GATEWAY, default="", max_bytes=64, has_flag=True,
    ),
    Field(
        "draft_token_ids", Kind.TOKEN_IDS, "An old answer, in place of draft_of.",
        Side.GATEWAY | Side.WORKER, Resume.STATELESS, max_items=MAX_DRAFT_IDS,
    ),
    Field(
        "draft_text", Kind.STRING, "The text of an old answer, in place of draft_of.",
        Side.GATEWAY, default="", max_bytes=MAX_DRAFT_BYTES,
        http=Http(alias="prediction", form=BodyForm.TEXT_OR_PREDICTION),
    ),
    Field(
        "adapter", Kind.STRING, "Name of a LoRA adapter of the model (docs/adapters.md). Empty: none, or the adapter "
        "that `model` names.",
        Side.GATEWAY, default="", max_bytes=512, has_flag=True, http=None,
    ),
    Field(
        "media", Kind.BLOBS, "Encoded images, one for each placeholder of a prompt of text or tokens, in order "
        "(docs/images.md). Chats have images in their parts.",
        Side.GATEWAY, sdk_option="images", http=None,
    ),
)  # fmt: skip

BY_PATH = {field.path: field for field in FIELDS}
LAST_PRIORITY = int(BY_PATH["scheduling.priority"].high or 0)
"""Priority of background work: lines of batches and copies for shadows."""


@cache
def fields_of(message: str) -> Mapping[str, Field]:
    """The fields of one message of GenerateRequest, by name, in the order of the table."""
    return {field.name: field for field in FIELDS if field.message == message}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a row: the typed form of the `sampling` fields that Side.WORKER applies."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    top_a: float = 0.0


# Keyed by attribute of SamplingParams, in its order, which is also the order in columns and records.
SAMPLER_FIELDS = {attribute.name: BY_PATH[f"sampling.{attribute.name}"] for attribute in fields(SamplingParams)}
FILTERS = {name: field for name, field in SAMPLER_FIELDS.items() if field.is_filter}


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """Builds SamplingParams from values by field name. Missing fields take their defaults; the default seed is 0."""
    return SamplingParams(**{name: given.get(name, field.default or 0) for name, field in SAMPLER_FIELDS.items()})


class FinishReason(Enum):
    """Why a sequence ended, named as in the protocol. Preemption is an event, never a reason."""

    EOS = "eos"  # the model produced its end-of-sequence token
    STOP = "stop"  # a stop string or stop token id matched
    LENGTH = "length"  # max_tokens, max_model_len or the KV pool was reached
    ABORTED = "aborted"  # ended by the client, by Abort or by a deadline
    ERROR = "error"  # the server could not finish the sequence
    REPETITION = "repetition"  # the output ended with a repetition: see repetition_detection

    __hash__ = object.__hash__  # a key of dicts in hot paths; the hash of Enum is a Python function


class TokenArray(Protocol):
    """Token ids in 4 bytes each: an array of the standard library or of numpy."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    def tobytes(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """The repetition that ends an output: a pattern of `min_pattern_size` to `max_pattern_size` tokens, `min_count`
    times in a row. A function of the output alone.
    """

    max_pattern_size: int
    min_pattern_size: int
    min_count: int

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> RepetitionDetection | None:
        """The typed form of the field's value; None if it is off. Raises FieldError."""
        found = cls(*(counts.get(attribute.name, 0) for attribute in fields(cls)))
        if found.min_pattern_size > found.max_pattern_size:
            limit = f"must be at most max_pattern_size, {found.max_pattern_size}"
            raise FieldError("stop.repetition_detection.min_pattern_size", f"is {found.min_pattern_size}; {limit}")
        if found.max_pattern_size and found.min_count < 2:
            limit = f"must be from 2 to {MAX_PATTERN_COUNT}"
            raise FieldError("stop.repetition_detection.min_count", f"is {found.min_count}; {limit}")
        return found if found.max_pattern_size else None

    def ends(self, output: TokenArray) -> bool:
        """Whether the output ends with such a repetition."""
        newest_first = output[-self.max_pattern_size * self.min_count :][::-1].tobytes()
        longest = min(self.max_pattern_size, len(newest_first) // 4 // self.min_count)
        return any(
            newest_first.startswith(newest_first[: 4 * size * (self.min_count - 1)], 4 * size)
            for size in range(max(self.min_pattern_size, 1), longest + 1)
        )


@dataclass(frozen=True, slots=True)
class StopCondition:
    """Conditions that end a sequence: the typed form of the `stop` fields that Side.SCHEDULER applies."""

    max_tokens: int  # output tokens; 0 computes the prompt and returns nothing
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_detection: RepetitionDetection | None = None
    is_constrained: bool = False  # a grammar allows EOS only where the output is complete, so EOS always ends it

    @property
    def may_end_anywhere(self) -> bool:
        """Whether other tokens than EOS may end the output before max_tokens."""
        return bool(self.stop_token_ids) or self.repetition_detection is not None

    def end_of(self, output: TokenArray, eos_token_ids: Container[int]) -> FinishReason | None:
        """Why the sequence ends with the last token of its output so far; None if it continues."""
        last_token, num_output = int(output[-1]), len(output)
        if self.is_constrained and last_token in eos_token_ids:
            return FinishReason.EOS
        if num_output > self.min_tokens:
            if last_token in eos_token_ids and not self.ignore_eos:
                return FinishReason.EOS
            if last_token in self.stop_token_ids:
                return FinishReason.STOP
        if num_output >= self.max_tokens:
            return FinishReason.LENGTH
        repetition = self.repetition_detection
        if repetition is not None and num_output >= self.min_tokens and repetition.ends(output):
            return FinishReason.REPETITION
        return None

    def banned_ids(self, eos_token_ids: Iterable[int]) -> list[int]:
        """Ids that cannot be sampled before `min_tokens` output tokens exist."""
        if not self.min_tokens:
            return []
        return sorted(self.stop_token_ids.union(() if self.ignore_eos else eos_token_ids))


STOP_NAMES = tuple(attribute.name for attribute in fields(StopCondition))


def stop_condition(given: Mapping[str, Any], *, is_constrained: bool = False) -> StopCondition:
    """Builds a StopCondition from values by field name. max_tokens is required; other missing fields take their
    defaults. `is_constrained`: the output has a grammar. Raises FieldError.
    """
    values = {name: given[name] for name in STOP_NAMES if name in given}
    values["stop_token_ids"] = frozenset(values.get("stop_token_ids", ()))
    values["repetition_detection"] = RepetitionDetection.of(values.get("repetition_detection", {}))
    if is_constrained:
        values["ignore_eos"] = False
    stop = StopCondition(**values, is_constrained=is_constrained)
    if stop.min_tokens > stop.max_tokens:
        raise FieldError("stop.min_tokens", f"is {stop.min_tokens}; must be at most stop.max_tokens, {stop.max_tokens}")
    return stop
