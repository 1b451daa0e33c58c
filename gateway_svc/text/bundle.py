"""The tokenizer and chat template of a model, built from the files of its bundle.

    tokenizer.json               needed for text; without it a model accepts and returns token ids only
    tokenizer_config.json        special tokens, chat_template
    special_tokens_map.json      special tokens of older checkpoints
    chat_template.jinja          overrides chat_template.json, which overrides tokenizer_config.json
    additional_chat_templates/   named templates, e.g. tool_use
    preprocessor_config.json     settings of the image processor; overrides `image_processor` of processor_config.json
    generation_config.json       read for unsupported settings only; the worker reads the sampling defaults

Files are read as transformers reads them, so that token ids are the same.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import xxhash
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from gateway_svc.text.chat import ChatTemplateError
from gateway_svc.text.chat_output import ChatFormat, detect_format
from gateway_svc.text.detokenizer import Detokenizer, DetokenizerFactory
from request_fields.checks import unserved_settings

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")
LONG_CHARS = 8  # a text with more characters per token than this has repetitions, or too many tokens
PART_CHARS = 4
MAX_CUT_TOKENS = 64  # more tokens than a cut within a word adds
TEMPLATE_FOLDER = "additional_chat_templates/"


class RenderOptions(TypedDict, total=False):
    """Options of a chat template in addition to the messages."""

    tools: Sequence[Any] | None
    template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    add_generation_prompt: bool


MULTI_LABEL = "multi_label_classification"  # problem_type of a model


class BundleError(ValueError):
    """A file of the bundle is invalid; the message names it."""


class TooManyTokensError(ValueError):
    """A text has more tokens than it may have."""


@dataclass(frozen=True, slots=True)
class PoolingText:
    """Additions of sentence-transformers to the texts of a model."""

    prompts: Mapping[str, str] = field(default_factory=dict)  # by name; they precede a text
    default_prompt: str = ""  # name of the prompt of a request without one; empty: none
    adds_generation_prompt: bool = False  # in chat templates of pairs
    labels: Mapping[int, str] = field(default_factory=dict)  # names of classes
    has_many_labels: bool = False  # an input may be of several classes


@dataclass(frozen=True, slots=True)
class ModelText:
    """The content of a bundle. `tokenizer` is None for a checkpoint without tokenizer.json."""

    tokenizer: Tokenizer | None
    unserved: tuple[str, ...] = ()  # settings of generation_config.json that are not supported
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # texts of bos_token, eos_token and so on
    packed_tokenizer: bytes = b""  # tokenizer.json, compressed by zlib
    pooling: PoolingText = field(default_factory=PoolingText)
    preprocessor: str = ""  # settings of the image processor as JSON; empty: the model has none
    templates_digest: str = ""  # digest of the templates that replace those of the model; empty: there are none


def model_text_from_files(files: Mapping[str, bytes], templates: Mapping[str, str] | None = None) -> ModelText:
    """Build a ModelText from file names and contents. `templates`: further chat templates, by name; they replace
    templates of the same name. Raises BundleError.
    """
    tokenizer = Tokenizer.from_files(files, templates) if "tokenizer.json" in files else None
    unserved = tuple(unserved_settings(_json_object(files, "generation_config.json")))
    return ModelText(
        tokenizer,
        unserved,
        _named_tokens(_token_settings(files)),
        zlib.compress(files.get("tokenizer.json", b""), 1),
        _pooling_text(files),
        _preprocessor(files),
        xxhash.xxh3_64_hexdigest(json.dumps(templates, sort_keys=True).encode()) if templates else "",
    )


def _preprocessor(files: Mapping[str, bytes]) -> str:
    own: Any = _json_object(files, "preprocessor_config.json")
    settings = own or _json_object(files, "processor_config.json").get("image_processor")
    return json.dumps(settings) if isinstance(settings, dict) and settings else ""


def _pooling_text(files: Mapping[str, bytes]) -> PoolingText:
    config = _json_object(files, "config_sentence_transformers.json")
    prompts = config.get("prompts") or {}
    given = _json_object(files, "sentence_bert_config.json").get("processing_kwargs") or {}
    template = given.get("chat_template") or {}
    return PoolingText(
        {str(name): str(text) for name, text in prompts.items()},
        str(config.get("default_prompt_name") or ""),
        bool(template.get("add_generation_prompt", False)),
        _labels(files),
        _json_object(files, "config.json").get("problem_type") == MULTI_LABEL,
    )


def _labels(files: Mapping[str, bytes]) -> dict[int, str]:
    given = _json_object(files, "config.json").get("id2label")
    items = given.items() if isinstance(given, dict) else ()
    return {int(number): str(label) for number, label in items if str(number).isdecimal()}


class Tokenizer:
    """Converts between text and token ids for one model. Thread-safe."""

    def __init__(self, backend: Backend, templates: Mapping[str, str], *, is_continued: bool = True) -> None:
        self._backend = backend
        self._num_after = _num_after(backend) if is_continued else 0  # special tokens behind a text that are left out
        self._cutting: dict[int, Backend] = {}
        self.templates = dict(templates)  # sources of the chat templates, by name
        self._formats = {name: detect_format(source, self.has_token) for name, source in templates.items()}
        self._bare_format = detect_format("", self.has_token)
        self._detokenizers = DetokenizerFactory(backend)
        self.max_token_bytes = max((len(token.encode()) for token in backend.get_vocab()), default=1)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], templates: Mapping[str, str] | None = None) -> Tokenizer:
        """Build from the files of a model folder, by name. Raises BundleError."""
        config = _json_object(files, "tokenizer_config.json")
        legacy = _json_object(files, "special_tokens_map.json")
        try:
            backend = Backend.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises bare Exception
            raise BundleError(f"tokenizer.json cannot be read: {error}") from None
        backend.no_truncation()
        backend.no_padding()
        named = _named_tokens({**legacy, **config})
        _add_missing_tokens(backend, named, {**legacy, **config})
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        sources = {**_template_sources(files, config), **(templates or {})}
        is_continued = not _json_object(files, "config.json").get("is_encoder_decoder")
        return cls(backend, sources, is_continued=is_continued)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.templates)

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template."""
        return self.templates.get("default")

    def token_strings(self, ids: Iterable[int]) -> list[str]:
        """The entries of the vocabulary for these ids, e.g. `Ġthe`; empty for an id without a token."""
        return [self._backend.id_to_token(id_) or "" for id_ in ids]

    def encode(self, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Token ids of a text. Special tokens in the text become their ids, as in transformers. A text that the model
        continues has none of those that tokenizer.json puts behind it, such as EOS.

        Raises TooManyTokensError for a text that has far more than `most` tokens.
        """
        if most is not None and len(text) > LONG_CHARS * most:
            self._check_parts(text, most)
        # Only the library's batch calls release the GIL, and a long text takes seconds.
        ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids[: -self._num_after] if self._num_after and add_special_tokens else ids

    def _check_parts(self, text: str, most: int) -> None:
        """Count the tokens of a text part by part: a token takes 130 bytes while it is made."""
        num_tokens, size = 0, PART_CHARS * most
        for start in range(0, len(text), size):
            part = text[start : start + size]
            num_tokens += len(self._backend.encode_batch_fast([part], add_special_tokens=False)[0]) - MAX_CUT_TOKENS
            if num_tokens > most:
                raise TooManyTokensError(f"has more than {most} tokens")

    def encode_cut(self, text: str, limit: int | None) -> list[int]:
        """Token ids of a text with special tokens. `limit`: it is cut to this many, and keeps its special tokens."""
        backend = self._backend if limit is None else self._cut_to(limit)
        return backend.encode_batch_fast([text])[0].ids

    def encode_pair(self, first: str, second: str, limit: int | None) -> tuple[list[int], int]:
        """Token ids of two texts with special tokens, and the position of the first token of type 1; 0: there is none.
        `limit`: the longer text is cut until both fit.
        """
        backend = self._backend if limit is None else self._cut_to(limit)
        found = backend.encode_batch([(first, second)])[0]
        return found.ids, found.type_ids.index(1) if 1 in found.type_ids else 0

    def _cut_to(self, limit: int) -> Backend:
        """A copy of the tokenizer that cuts texts: the limit is a setting of the whole tokenizer."""
        if limit not in self._cutting:
            backend = Backend.from_str(self._backend.to_str())
            backend.enable_truncation(limit)
            self._cutting = {limit: backend}
        return self._cutting[limit]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids. Incomplete characters become U+FFFD; ids without a token are skipped."""
        return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def template_name(self, name: str, *, has_tools: bool) -> str:
        """The name of the chat template for a request. Raises ChatTemplateError if there is none.

        If `name` is empty: the template for tools if there are tools and it exists, else the default.
        """
        chosen = self._chosen(name, has_tools=has_tools)
        if chosen in self.templates:
            return chosen
        have = ", ".join(sorted(self.templates))
        if name:
            raise ChatTemplateError(
                f"there is no chat template {name[:80]!r}; templates of this model: {have or 'none'}"
            )
        shown = f" (it has only: {have})" if have else ""
        raise ChatTemplateError(f"the model has no chat template{shown}; send prompt.text or prompt.tokens")

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each id's text, which need not be whole characters. A special token has the bytes of its name,
        an id without a token has none.
        """
        return self._detokenizers.token_bytes(ids)

    def chat_format(self, template: str = "", *, has_tools: bool = False) -> ChatFormat:
        """The format of chat answers, detected from the template and the vocabulary."""
        chosen = self._chosen(template, has_tools=has_tools)
        return self._formats.get(chosen, self._bare_format)

    def has_token(self, text: str) -> bool:
        """Whether the text is one token of the vocabulary."""
        return self.token_id(text) is not None

    def token_id(self, text: str) -> int | None:
        """The id of a text that is one token of the vocabulary, else None."""
        return self._backend.token_to_id(text)

    def new_detokenizer(self, *, skip_special_tokens: bool, visible: frozenset[str] = frozenset()) -> Detokenizer:
        """A detokenizer for one stream of ids. `visible`: special tokens that are never skipped."""
        return self._detokenizers.new(skip_special_tokens=skip_special_tokens, visible=visible)

    def _chosen(self, name: str, *, has_tools: bool) -> str:
        if name:
            return name
        return "tool_use" if has_tools and "tool_use" in self.templates else "default"


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        value = json.loads(files[name].decode("utf-8"))
    except ValueError as error:
        raise BundleError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BundleError(f"{name} holds a JSON {type(value).__name__}; it must hold an object")
    return value


def _token_settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    return {**_json_object(files, "special_tokens_map.json"), **_json_object(files, "tokenizer_config.json")}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _token_text(config[name]) for name in NAMED_TOKENS if config.get(name) is not None}
    return {name: text for name, text in named.items() if text}


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


def _add_missing_tokens(backend: Backend, named: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """Add special tokens that are only in the configuration, and mark tokens special that the configuration lists."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder") or {}
    listed = [(int(id_), entry) for id_, entry in decoder.items() if isinstance(entry, dict)]
    for _, entry in sorted(listed, key=lambda item: item[0]):
        if entry.get("content") and entry["content"] not in known:
            backend.add_tokens([_added_token(entry)])
    extra: list[Any] = []
    for key in EXTRA_TOKENS:
        value = config.get(key) or []
        extra += list(value.values()) if isinstance(value, dict) else list(value)
    for text in [*named.values(), *map(_token_text, extra)]:
        present = known.get(text)
        if text and (present is None or not present.special):
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _num_after(backend: Backend) -> int:
    """The number of special tokens that the post-processor puts behind a text."""
    mask: list[int] = backend.encode("a").special_tokens_mask
    return mask[::-1].index(0) if 0 in mask else 0


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
    return AddedToken(str(entry["content"]), special=bool(entry.get("special", False)), **flags)


def _inline_sources(value: Any) -> dict[str, str]:
    """One template, or several by name: as an object, or as a list of objects with name and template."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {str(name): str(source) for name, source in value.items()}
    if isinstance(value, list):
        return {str(entry["name"]): str(entry["template"]) for entry in value if isinstance(entry, dict)}
    return {}


def _template_sources(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    sources: dict[str, str] = {}
    for value in (config, _json_object(files, "chat_template.json")):
        sources.update(_inline_sources(value.get("chat_template")))
    separate = {
        name.removeprefix(TEMPLATE_FOLDER).removesuffix(".jinja"): name
        for name in files
        if name.startswith(TEMPLATE_FOLDER) and name.endswith(".jinja")
    }
    if "chat_template.jinja" in files:
        separate["default"] = "chat_template.jinja"
    for key, name in separate.items():
        try:
            sources[key] = files[name].decode("utf-8")
        except UnicodeDecodeError as error:
            raise BundleError(f"{name} is not UTF-8: {error}") from None
    return sources
