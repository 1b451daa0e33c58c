"""A served model: its properties, its tokenizer and chat template, and the limits that follow from them."""

from __future__ import annotations

import asyncio
import logging
import re
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import xxhash
from google.protobuf.message import DecodeError
from quire.v1 import types_pb2 as types

from gateway_svc.request.public_prefixes import NO_PREFIXES, PublicPrefixes
from gateway_svc.text.bundle import BundleError, ModelText, Tokenizer, model_text_from_files
from gateway_svc.text.chat_output import DETECTED, ChatFormat, ParserNames
from request_fields.sizes import SizeLimits
from svc_common.errors import InvalidRequestError
from svc_common.memory import trim

log = logging.getLogger(__name__)

MAX_CACHED_BUNDLES = 16
# In a revision, before the digest of the gateway's chat templates, of the adapter, and the version of updated weights.
TEMPLATES_MARK, ADAPTER_MARK, WEIGHTS_MARK = "~+@"
MAX_DIGITS = 20  # digits of a uint64
SMALL_PROMPT_BYTES = 4096  # prompts up to this size are tokenized before their length is checked


def model_part(revision: str) -> str:
    """The part of a revision that schedulers announce."""
    return re.split(f"[{TEMPLATES_MARK}{ADAPTER_MARK}{WEIGHTS_MARK}]", revision, maxsplit=1)[0]


def size_limits_of(info: types.ModelInfo) -> SizeLimits:
    """Limits of the largest worker of a scheduler. Before a worker has registered, the pool size is unknown."""
    if not info.max_num_blocks:
        return SizeLimits(info.max_model_len, info.max_model_len)
    return SizeLimits.of_pool(info.max_model_len, info.max_num_blocks, info.block_size, info.attention_window or None)


@dataclass(frozen=True)
class ServedModel:
    """One model as announced by its scheduler, with the tokenizer of its bundle."""

    info: types.ModelInfo
    text: ModelText
    parsers: ParserNames = field(default=DETECTED)
    # Results of gateway_svc/request/validation.py, which adds and removes them.
    parameters: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    adapter: types.AdapterInfo | None = None  # requests for it name it instead of the model
    alias: str = ""  # the route by which the request names it; empty: none
    public_prefixes: tuple[array[int], ...] = field(default=(), repr=False)  # token ids whose blocks tenants share

    @cached_property
    def name(self) -> str:
        """The name in requests: of the adapter, if there is one, else of the model."""
        return self.info.model if self.adapter is None else self.adapter.name

    @property
    def names(self) -> dict[str, Any]:
        """The fields of an answer that name the model."""
        return {"model": self.alias, "target": self.name} if self.alias else {"model": self.name}

    @property
    def adapter_digest(self) -> bytes:
        """Empty: no adapter."""
        return b"" if self.adapter is None else self.adapter.digest

    @property
    def revision(self) -> str:
        """Everything besides the request that determines the tokens: that of the model, the gateway's chat templates,
        the adapter's content and the updated weights."""
        info, found = self.info, self.info.revision
        if self.text.templates_digest:
            found += f"{TEMPLATES_MARK}{self.text.templates_digest}"
        if self.adapter is not None:
            found += f"{ADAPTER_MARK}{self.adapter.digest.hex()}"
        return f"{found}{WEIGHTS_MARK}{info.weight_version}.{info.weights_revision}" if info.weight_version else found

    def continues(self, revision: str) -> bool:
        """Whether a request that began on `revision` may continue here: with the same weights, or newer ones, as
        requests do that run while weights are updated (docs/rollouts.md)."""
        mine, theirs = (one.partition(WEIGHTS_MARK) for one in (self.revision, revision))
        version = theirs[2].partition(".")[0] or "0"
        is_older = version.isdecimal() and len(version) <= MAX_DIGITS and int(version) < self.info.weight_version
        return mine[0] == theirs[0] and (is_older or mine[2] == theirs[2])

    @cached_property
    def limits(self) -> SizeLimits:
        """Size limits of one sequence."""
        return size_limits_of(self.info)

    @property
    def max_prompt_bytes(self) -> int:
        """Any text with more bytes has more tokens than the model accepts."""
        if self.text.tokenizer is None:
            return SMALL_PROMPT_BYTES
        return max(SMALL_PROMPT_BYTES, self.info.max_model_len * self.text.tokenizer.max_token_bytes)

    def chat_format(self, template: str, *, has_tools: bool) -> ChatFormat:
        """The format of chat answers with this template: detected, or set by --tool-parser and --reasoning-parser."""
        detected = ChatFormat()
        if self.text.tokenizer is not None:
            detected = self.text.tokenizer.chat_format(template, has_tools=has_tools)
        return self.parsers.format_of(self.name, detected)

    def require_tokenizer(self, field: str) -> Tokenizer:
        """The tokenizer. Raises InvalidRequestError if the model has none."""
        if self.text.tokenizer is None:
            raise InvalidRequestError(
                f"{field}: model {self.name!r} has no tokenizer.json, so it accepts and returns token ids only; send "
                "prompt.tokens and no stop strings",
                field=field,
            )
        return self.text.tokenizer


class BundleCache:
    """ModelText by bundle digest, shared by all schedulers of this gateway.

    `templates`: chat templates of all models, by name; they replace a model's own templates of the same name.
    `prefixes`: beginnings of prompts whose blocks tenants share.
    """

    def __init__(self, templates: Mapping[str, str] | None = None, prefixes: PublicPrefixes = NO_PREFIXES) -> None:
        self.prefixes = prefixes
        self._templates = dict(templates or {})
        self._texts: dict[bytes, ModelText] = {b"": ModelText(None)}
        self._locks: dict[bytes, asyncio.Lock] = {}

    async def get(self, digest: bytes, fetch: Callable[[], Awaitable[bytes]]) -> ModelText:
        """The ModelText of a bundle; `fetch` gets the serialized bundle once. Raises BundleError."""
        async with self._locks.setdefault(digest, asyncio.Lock()):
            if digest not in self._texts:
                self._texts[digest] = await asyncio.to_thread(read_bundle, await fetch(), digest, self._templates)
                await asyncio.to_thread(trim)  # parsing takes some times the memory of the result
                self._drop_oldest()
            return self._texts[digest]

    def _drop_oldest(self) -> None:
        while len(self._texts) > MAX_CACHED_BUNDLES:
            oldest = next(digest for digest in self._texts if digest)
            del self._texts[oldest]


def read_bundle(data: bytes, digest: bytes, templates: Mapping[str, str] | None = None) -> ModelText:
    """Build a ModelText from a serialized ModelBundle. Raises BundleError if it is invalid or its digest differs."""
    actual = xxhash.xxh3_128_digest(data)
    if actual != digest:
        raise BundleError(f"the bundle is damaged: its digest is {actual.hex()}, expected {digest.hex()}")
    bundle = types.ModelBundle()
    try:
        bundle.ParseFromString(data)
    except DecodeError as error:
        raise BundleError(f"the bundle is not a valid ModelBundle: {error}") from None
    try:
        return model_text_from_files({file.name: file.data for file in bundle.files}, templates)
    except BundleError:
        raise
    except Exception as error:  # the files are user input, and their parsers raise many types of exceptions
        raise BundleError(f"its files cannot be read: {type(error).__name__}: {error}") from error


def describe_model(model: ServedModel) -> None:
    """Log a model's properties, and warn about unsupported settings."""
    info, text = model.info, model.text
    log.info("model %r: max_model_len %d, vocab_size %d", model.name, info.max_model_len, info.vocab_size)
    if text.tokenizer is None:
        log.warning("model %r has no tokenizer.json: it accepts and returns token ids only", model.name)
    elif not text.tokenizer.has_chat_template:
        log.warning("model %r has no chat template: requests with prompt.chat are refused", model.name)
    if text.unserved:
        log.warning(
            "model %r: unsupported settings of generation_config.json: %s", model.name, ", ".join(text.unserved)
        )
