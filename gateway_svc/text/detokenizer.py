"""Incremental detokenization: ids in, whole characters out, at a constant cost per token.

For every stream, all deltas plus the flush equal `decode` of all ids. Which text must be held back for that depends on
the tokenizer's decoder:

    ByteLevel              bytes of one incomplete character (at most 3)
    ByteFallback family    the current run of byte tokens: it is decoded as a whole, or becomes U+FFFD
    any other decoder      a window of ids, which is decoded repeatedly while its text may still change
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

REPLACEMENT = "\ufffd"
Utf8Decoder = codecs.getincrementaldecoder("utf-8")
WINDOW = 32  # the generic detokenizer holds back the text of at most this many ids
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SampleText(Protocol):
    """The text of one sample. The text released after k tokens depends only on these k tokens, not on their grouping
    into reads, so a resumed stream continues at exactly the same byte.
    """

    @property
    def stop(self) -> str | None:
        """The stop string that matched; None: no match so far."""

    def read(self, ids: Sequence[int]) -> tuple[str, int]:
        """Add ids. Returns the released text, and how many of the ids belong to the output."""

    def flush(self) -> str:
        """End the text. Returns the text that was held back."""


class Detokenizer:
    """Detokenizes one stream, to its end."""

    __slots__ = ()
    stop: str | None = None

    def push(self, ids: Sequence[int]) -> str:
        """Add new ids. Returns the text that is complete now."""
        raise NotImplementedError

    def flush(self) -> str:
        """End the stream. Returns the text held back, with U+FFFD for an incomplete character."""
        raise NotImplementedError

    def read(self, ids: Sequence[int]) -> tuple[str, int]:
        """Add new ids, which all belong to the output."""
        return self.push(ids), len(ids)


class DetokenizerFactory:
    """Creates the detokenizers of one tokenizer. They share a cache of the text of single tokens."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        added = backend.get_added_tokens_decoder()
        self._added_ids = set(added)
        self._special_ids = {id_: token.content for id_, token in added.items() if token.special}
        self._is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        self._plan = None if self._is_byte_level else _pipeline_plan(decoder)
        # Key: visible special tokens (None: all). Value: the skipped ids, and the texts of the other ids.
        self._kinds: dict[frozenset[str] | None, tuple[frozenset[int], _Pieces]] = {}
        self._bytes = _Pieces({}, self._read_bytes)

    def new(self, *, skip_special_tokens: bool, visible: frozenset[str] = frozenset()) -> Detokenizer:
        """A detokenizer at the start of a stream. `visible`: special tokens that are never skipped."""
        key = visible if skip_special_tokens else None
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = self._new_kind(key)
        if self._is_byte_level:
            return _ByteLevel(kind[1])
        if self._plan is not None:
            return _Pipeline(self._plan, kind[1])
        return _Window(self._backend, kind[0])

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes that each id adds to a text; for an added token (special or not), the bytes of its name."""
        return self._bytes.of(ids)

    def _read_bytes(self, id_: int) -> bytes:
        token = self._backend.id_to_token(id_)
        if token is None:
            return b""
        if id_ in self._added_ids:
            return token.encode()
        if self._is_byte_level:
            return _bytes_of_token(token)
        if self._plan is None:
            return self._backend.decode([id_], skip_special_tokens=False).encode()
        piece = self._plan.piece(token)
        return bytes([piece]) if isinstance(piece, int) else self._plan.with_spaces(piece).encode()

    def _new_kind(self, visible: frozenset[str] | None) -> tuple[frozenset[int], _Pieces]:
        skipped: frozenset[int] = frozenset()
        if visible is not None:
            skipped = frozenset(id_ for id_, text in self._special_ids.items() if text not in visible)
        if self._plan is not None:
            return skipped, _Pieces({}, self._reader(skipped, self._plan.piece, None))
        return skipped, _Pieces({}, self._reader(skipped, _bytes_of_token, b""))

    def _reader(self, skipped: frozenset[int], convert: Callable[[str], Any], nothing: Any) -> Callable[[int], Any]:
        def read(id_: int) -> Any:
            if id_ in skipped:
                return nothing
            token = self._backend.id_to_token(id_)
            return nothing if token is None else convert(token)

        return read


class _Pieces:
    """The text or bytes of single ids, cached for all streams of a tokenizer."""

    __slots__ = ("_cache", "_read")

    def __init__(self, cache: dict[int, Any], read: Callable[[int], Any]) -> None:
        self._cache = cache
        self._read = read

    def of(self, ids: Iterable[int]) -> list[Any]:
        cache = self._cache
        try:
            return [cache[id_] for id_ in ids]
        except KeyError:
            for id_ in ids:
                if id_ not in cache:
                    cache[id_] = self._read(id_)
            return [cache[id_] for id_ in ids]


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable character -> byte, for all 256 bytes."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    table = {chr(byte): byte for byte in kept}
    table.update({chr(256 + i): byte for i, byte in enumerate(moved)})
    return table


BYTE_OF_CHAR = _byte_of_char()


def _bytes_of_token(token: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token is plain text
        return token.encode()


class _ByteLevel(Detokenizer):
    """Byte-level BPE (GPT-2, Llama 3, Qwen, Tekken): tokens are bytes, decoded as UTF-8."""

    __slots__ = ("_decoder", "_pieces")

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._decoder = Utf8Decoder("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(self._pieces.of(ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Plan:
    """A decoder whose steps work token by token: Replace, Metaspace, ByteFallback, Fuse, Strip at the text's start."""

    def __init__(self, steps: list[dict[str, Any]]) -> None:
        kinds = [step["type"] for step in steps]
        split = kinds.index("ByteFallback") if "ByteFallback" in kinds else len(steps)
        self.has_byte_fallback = split < len(steps)
        self._before = [_text_step(step) for step in steps[:split] if step["type"] == "Replace"]
        self._after = [_text_step(step) for step in steps[split + 1 :] if step["type"] == "Replace"]
        self.drops_first_space = any(s["type"] == "Metaspace" and s.get("prepend_scheme") != "never" for s in steps)
        self.metaspace = next((str(s.get("replacement", "▁")) for s in steps if s["type"] == "Metaspace"), "")
        strip: dict[str, Any] = next((s for s in steps if s["type"] == "Strip"), {"content": " ", "start": 0})
        self.strip_char = str(strip["content"])
        self.strip_count = int(strip["start"])

    def piece(self, token: str) -> str | int:
        """A token's text, or its byte if it is a byte token."""
        for step in self._before:
            token = step(token)
        match = BYTE_TOKEN.fullmatch(token) if self.has_byte_fallback else None
        return int(match[1], 16) if match else self.finish(token)

    def with_spaces(self, piece: str) -> str:
        """Replace the metaspace character of a piece with a space."""
        return piece.replace(self.metaspace, " ") if self.metaspace else piece

    def finish(self, text: str) -> str:
        """Apply the steps after ByteFallback."""
        for step in self._after:
            text = step(text)
        return text


def _text_step(step: dict[str, Any]) -> Callable[[str], str]:
    old, new = step["pattern"]["String"], step["content"]
    return lambda text: text.replace(old, new)


def _pipeline_plan(decoder: dict[str, Any] | None) -> _Plan | None:
    """The plan of a decoder that works token by token; None for any other decoder."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    is_known = all(_is_step_known(step) for step in steps)
    is_repeated = any(kinds.count(kind) > 1 for kind in ("ByteFallback", "Strip", "Metaspace", "Fuse"))
    is_metaspace_alone = "Metaspace" not in kinds or len(kinds) == 1
    is_strip_last = "Strip" not in kinds or kinds[-2:] == ["Fuse", "Strip"]
    is_fuse_late = "Fuse" not in kinds or not set(kinds[kinds.index("Fuse") + 1 :]) - {"Strip"}
    if not is_known or is_repeated or not (is_metaspace_alone and is_strip_last and is_fuse_late):
        return None
    return _Plan(steps)


def _is_step_known(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return "String" in step["pattern"]
    if step["type"] == "Strip":
        return bool(step["stop"] == 0)
    return step["type"] in ("ByteFallback", "Fuse", "Metaspace")


class _Pipeline(Detokenizer):
    """SentencePiece-style tokenizers (Llama 2, Mistral, Gemma): text pieces and runs of byte tokens."""

    __slots__ = ("_is_first", "_pieces", "_plan", "_run", "_to_strip")

    def __init__(self, plan: _Plan, pieces: _Pieces) -> None:
        self._plan = plan
        self._pieces = pieces
        self._run = bytearray()
        self._to_strip = plan.strip_count
        self._is_first = True

    def push(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        for piece in self._pieces.of(ids):
            if piece is None:
                continue
            if isinstance(piece, int):
                self._run.append(piece)
                continue
            if self._run:
                parts.append(self._end_run())
            parts.append(self._metaspace(piece) if self._plan.metaspace else piece)
        return self._strip("".join(parts))

    def flush(self) -> str:
        return self._strip(self._end_run()) if self._run else ""

    def _end_run(self) -> str:
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return self._plan.finish(text)

    def _metaspace(self, piece: str) -> str:
        is_dropped = self._is_first and self._plan.drops_first_space
        self._is_first = False
        return piece.replace(self._plan.metaspace, "" if is_dropped else " ")

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._plan.strip_char):
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text


class _Window(Detokenizer):
    """Any other decoder: decodes recent ids with and without the new ids; the difference is the new text."""

    __slots__ = ("_backend", "_ids", "_num_read", "_skipped")

    def __init__(self, backend: Backend, skipped: frozenset[int]) -> None:
        self._backend = backend
        self._skipped = skipped
        self._ids: list[int] = []  # first context ids, whose text was returned; then ids whose text was not
        self._num_read = 0  # number of context ids

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self._push_one(id_) for id_ in ids)

    def flush(self) -> str:
        return self._take()

    def _push_one(self, id_: int) -> str:
        # Ids without text must not be context: a decoder treats the first token of a text differently.
        if id_ in self._skipped or self._backend.id_to_token(id_) is None:
            return ""
        self._ids.append(id_)
        is_open = self._decode(self._ids).endswith(REPLACEMENT)
        if is_open and len(self._ids) - self._num_read < WINDOW:
            return ""
        return self._take()

    def _take(self) -> str:
        before = self._decode(self._ids[: self._num_read])
        delta = self._decode(self._ids)[len(before) :]
        self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids)
        return delta

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)
