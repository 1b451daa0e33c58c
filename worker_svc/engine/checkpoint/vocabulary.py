"""Whether two model folders have the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker_svc.engine.checkpoint.model_folder import read_object

TOKENIZER = "tokenizer.json"


def check_same_vocabulary(folder: Path, other: Path, size: int, other_size: int) -> None:
    """Raises ValueError unless equal ids are equal tokens. Configurations may pad the vocabulary differently."""
    files = [path for path in (folder / TOKENIZER, other / TOKENIZER) if path.exists()]
    if not files and size == other_size:
        return
    if not files:
        raise ValueError(f"{other} has {other_size} token ids and no {TOKENIZER}, but {folder} has {size} ids")
    if len(files) == 1:
        raise ValueError(f"only {files[0]} exists: {other} and {folder} must have the same tokenizer")
    first, second = (_ids(read_object(path)) for path in files)
    differing = first.items() ^ second.items()
    if differing:
        token, id_ = min(differing, key=lambda pair: (pair[1], pair[0]))
        raise ValueError(
            f"the tokenizers of {other} and {folder} differ, first in token {token!r} with id {id_}; drafts need the "
            "same vocabulary"
        )


def _ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """The id of each token."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    pairs = vocabulary if isinstance(vocabulary, dict) else {piece[0]: id_ for id_, piece in enumerate(vocabulary)}
    return pairs | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
