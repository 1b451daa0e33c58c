"""Public prefixes: beginnings of prompts, such as a template, whose cached blocks all tenants share (docs/keys.md)."""

from __future__ import annotations

import argparse
import asyncio
import logging
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path

from quire.v1 import types_pb2 as types

from gateway_svc.text.bundle import Tokenizer
from svc_common.config import Flag, SettingError, text

log = logging.getLogger(__name__)

PUBLIC_PREFIX_FLAG = Flag("--public-prefix", text,
    "file with the text with which prompts of a model begin: tenants share its cached blocks, and nothing else. Repeat "
    "the flag for more texts or models (in the environment variable, separate them by commas)",
    metavar="MODEL=FILE", is_list=True,
)  # fmt: skip


class PublicPrefixes:
    """The texts of public prefixes by model."""

    def __init__(self, texts: Mapping[str, Sequence[str]]) -> None:
        self._texts = texts

    async def ids_of(self, info: types.ModelInfo, tokenizer: Tokenizer | None) -> tuple[array[int], ...]:
        """The token ids of a model's prefixes. They are computed in a thread: a text may be long."""
        texts = self._texts.get(info.model, ())
        if texts and tokenizer is None:
            log.warning("model %r has no tokenizer.json: its --public-prefix has no effect", info.model)
        if not texts or tokenizer is None:
            return ()
        found = await asyncio.to_thread(_tokenize, texts, tokenizer)
        log.info("model %r: public prefixes of %s tokens", info.model, ", ".join(str(len(ids)) for ids in found))
        return found


NO_PREFIXES = PublicPrefixes({})


def _tokenize(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[array[int], ...]:
    return tuple(array("I", tokenizer.encode(one, add_special_tokens=False)) for one in texts)


def public_prefixes(args: argparse.Namespace) -> PublicPrefixes:
    """The prefixes of --public-prefix. Raises SettingError."""
    texts: dict[str, list[str]] = {}
    for value in args.public_prefix:
        model, _, path = value.partition("=")
        if not model or not path:
            raise SettingError(f"--public-prefix is {value!r}; must be MODEL=FILE")
        try:
            texts.setdefault(model, []).append(Path(path).read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"--public-prefix {value}: the file cannot be read: {error}") from None
    return PublicPrefixes(texts)


def num_public_tokens(ids: array[int], prefixes: Sequence[array[int]]) -> int:
    """The most leading tokens that a prompt has in common with a prefix. The prompt may end inside the prefix, and the
    last tokens of the prefix may differ from those of the same text inside a longer one.
    """
    return max((_num_common(ids, prefix) for prefix in prefixes), default=0)


def _num_common(ids: array[int], prefix: array[int]) -> int:
    lengths = range(1, min(len(ids), len(prefix)) + 1)
    return bisect_left(lengths, True, key=lambda length: ids[:length] != prefix[:length])
