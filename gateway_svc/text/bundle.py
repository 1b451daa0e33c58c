"""The tokenizer and chat template of a model, built from the files of its bundle.

    tokenizer.json               needed for text; without it a model accepts and returns token ids only
    tokenizer_config.json        special tokens, add_bos_token, chat_template
    special_tokens_map.json      special tokens of older checkpoints
    chat_template.jinja          preferred to the one in tokenizer_config.json
    additional_chat_templates/   named templates, e.g. tool_use
    generation_config.json       read for unsupported settings only; the worker reads the sampling defaults

Files are read as transformers reads them, so that token ids are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from gateway_svc.text.chat import ChatMessages, ChatTemplate, ChatTemplateError
from gateway_svc.text.detokenizer import Detokenizer, DetokenizerFactory
from request_fields.checks import unserved_settings

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")
TEMPLATE_FOLDER = "additional_chat_templates/"


class BundleError(ValueError):
    """A file of the bundle is invalid; the message names it."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """The content of a bundle. `tokenizer` is None for a checkpoint without tokenizer.json."""

    tokenizer: Tokenizer | None
    unserved: tuple[str, ...] = ()  # settings of generation_config.json that are not supported
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # texts of bos_token, eos_token and so on


def model_text_from_files(files: Mapping[str, bytes]) -> ModelText:
    """Build a ModelText from file names and contents. Raises BundleError."""
    tokenizer = Tokenizer.from_files(files) if "tokenizer.json" in files else None
    unserved = tuple(unserved_settings(_json_object(files, "generation_config.json")))
    return ModelText(tokenizer, unserved, _named_tokens(_token_settings(files)))


class Tokenizer:
    """Converts between text and token ids for one model. Thread-safe."""

    def __init__(self, backend: Backend, templates: Mapping[str, ChatTemplate]) -> None:
        self._backend = backend
        self._templates = dict(templates)
        self._detokenizers = DetokenizerFactory(backend)
        self.max_token_bytes = max((len(token.encode()) for token in backend.get_vocab()), default=1)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
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
        _update_post_processor(backend, config, named)
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        sources = _template_sources(files, config)
        return cls(backend, {name: ChatTemplate(source, named) for name, source in sources.items()})

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template."""
        template = self._templates.get("default")
        return None if template is None else template.source

    def token_strings(self, ids: Iterable[int]) -> list[str]:
        """The entries of the vocabulary for these ids, e.g. `Ġthe`; empty for an id without a token."""
        return [self._backend.id_to_token(id_) or "" for id_ in ids]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Special tokens in the text become their ids, as in transformers."""
        # Only the library's batch calls release the GIL, and a long text takes seconds.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids. Incomplete characters become U+FFFD; ids without a token are skipped."""
        return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def encode_chat(
        self,
        messages: ChatMessages,
        *,
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn. Raises ChatTemplateError."""
        text = self.render_chat(
            messages, tools=tools, template_kwargs=template_kwargs, continue_final_message=continue_final_message
        )
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: ChatMessages,
        *,
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The conversation as the text that `encode_chat` tokenizes. Raises ChatTemplateError."""
        return self._template(has_tools=tools is not None).render(
            messages, tools=tools, template_kwargs=template_kwargs or {}, continue_final_message=continue_final_message
        )

    def new_detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A detokenizer for one stream of ids."""
        return self._detokenizers.new(skip_special_tokens=skip_special_tokens)

    def _template(self, *, has_tools: bool) -> ChatTemplate:
        template = self._templates.get("tool_use") if has_tools else None
        template = template or self._templates.get("default")
        if template is None:
            have = f" (it has only: {', '.join(sorted(self._templates))})" if self._templates else ""
            raise ChatTemplateError(f"the model has no chat template{have}; send prompt.text or prompt.tokens")
        return template


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


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
    return AddedToken(str(entry["content"]), special=bool(entry.get("special", False)), **flags)


def _update_post_processor(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Apply add_bos_token and add_eos_token of the configuration; they take precedence over tokenizer.json."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    bos = named.get("bos_token") if config.get("add_bos_token") else None
    eos = named.get("eos_token") if config.get("add_eos_token") else None
    tokens = [(token, backend.token_to_id(token)) for token in (bos, eos) if token]
    single = " ".join([*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])])
    pair = f"{single}{f' {bos}:1' if bos else ''} $B:1{f' {eos}:1' if eos else ''}"
    backend.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


def _template_sources(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    sources: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        sources["default"] = inline
    elif isinstance(inline, list):
        sources.update({str(entry["name"]): str(entry["template"]) for entry in inline if isinstance(entry, dict)})
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
