"""The specification of a simulated worker's output, in plain Python, so that tests and clients can compute it.

    digest of a context      sum over its tokens of mix(position << 32 | token_id), modulo 2**64; 0 for no token.
                             With an adapter, the first 8 bytes of the adapter's digest are added
    draw                     mix(digest ^ mix(seed ^ mix(output_position << 32 | sample_index)))
    token                    printable_ids[draw % len(printable_ids)], or the end-of-sequence id with its probability
    log probabilities        token r of the ranking has -r / 8; the ranking is all ids in order, starting at
                             mix(digest) % vocab_size and continuing at 0, so that r counts from 1
    mix                      the finalizer of splitmix64

A temperature below 1e-5 is greedy, as in a real model: seed and sample index count as 0. For a row that asks for
processing (worker_svc/engine/sampling/processors.py), all logits are 1 before, the token is printable_ids[draw % len]
of the printable ids with the highest logit, and an end-of-sequence id with a logit of minus infinity does not occur.
Other sampling parameters are ignored. Positions count from 0 over prompt and output; the output position counts output
tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker_svc.engine.checkpoint.model_folder import eos_token_ids, read_object

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SimVocabulary:
    """Vocabulary of a simulated model. Without an end-of-sequence id or probability, output never ends by itself."""

    printable_ids: tuple[int, ...]
    eos_token_id: int | None = None
    eos_probability: float = 0.0

    def __post_init__(self) -> None:
        if not self.printable_ids:
            raise ValueError("the tokenizer has no printable token; use another model folder")
        if not 0 <= self.eos_probability <= 1:
            raise ValueError(f"eos_probability must be from 0 to 1, got {self.eos_probability}")
        if self.eos_probability and self.eos_token_id is None:
            raise ValueError("eos_probability is set, but the model folder has no eos_token_id")

    @property
    def eos_below(self) -> int:
        """A second draw below this ends the output."""
        return min(int(self.eos_probability * 2**64), MASK)


def start_digest(adapter: bytes) -> int:
    """The digest of the empty context for rows with this adapter."""
    return int.from_bytes(adapter[:8], "little")


# -- the vocabulary of a model folder ----------------------------------------------------------------------------------


def read_vocabulary(model_dir: Path, *, eos_probability: float = 0.0) -> SimVocabulary:
    """Ids that the folder's tokenizer can print one by one, without end-of-sequence ids.

    Without tokenizer.json: all ids. Raises ValueError for a file that cannot be read.
    """
    config = read_object(model_dir / "config.json")
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ValueError(f"{model_dir / 'config.json'}: vocab_size must be at least 1, found {vocab_size!r}")
    generation = model_dir / "generation_config.json"
    eos_ids = eos_token_ids(read_object(generation) if generation.is_file() else {}, config)
    tokenizer = model_dir / "tokenizer.json"
    known = _printable_ids(read_object(tokenizer)) if tokenizer.is_file() else set(range(vocab_size))
    printable = sorted(token_id for token_id in known if token_id < vocab_size and token_id not in eos_ids)
    return SimVocabulary(tuple(printable), eos_ids[0] if eos_ids else None, eos_probability)


def _printable_ids(tokenizer: dict[str, Any]) -> set[int]:
    vocab = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocab, list):  # Unigram: [piece, score] in the order of ids
        vocab = {entry[0]: token_id for token_id, entry in enumerate(vocab)}
    added = {token["id"] for token in tokenizer.get("added_tokens", ())}
    byte_of = _byte_of_char() if "ByteLevel" in json.dumps(tokenizer.get("decoder")) else None
    return {token_id for piece, token_id in vocab.items() if token_id not in added and _is_printable(piece, byte_of)}


def _is_printable(piece: str, byte_of: dict[str, int] | None) -> bool:
    """Whether a token is text by itself: whole characters, none of them a control character."""
    text = piece.replace("\u2581", " ")  # SentencePiece represents a space this way
    if byte_of is not None:
        try:
            text = bytes(byte_of[char] for char in piece).decode()
        except (KeyError, UnicodeDecodeError):
            return False
    elif piece.startswith("<") and piece.endswith(">"):  # a byte or a control token
        return False
    return bool(text) and "\ufffd" not in text and all(char.isprintable() or char in "\n\t" for char in text)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table of visible characters that stand for bytes."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): byte for byte in visible}
    return table | {chr(256 + i): byte for i, byte in enumerate(hidden)}
