"""Finds a Hugging Face Hub model in the local cache, or downloads it with `huggingface_hub`.

Only downloads need `huggingface_hub`. The cache has the same layout:
CACHE/models--ORG--NAME/refs/REVISION holds a commit, snapshots/COMMIT/ its files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_REVISION = "main"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SMALL_FILES = (
    CONFIG,
    INDEX,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


class HubError(Exception):
    """A model cannot be found or downloaded. The message has the remedy."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the Hub."""

    repo: str  # ORG/NAME
    revision: str = DEFAULT_REVISION  # a branch, a tag or a commit

    def __str__(self) -> str:
        return self.repo if self.revision == DEFAULT_REVISION else f"{self.repo}@{self.revision}"


def parse_name(name: str) -> HubModel | None:
    """The model in ORG/NAME or ORG/NAME@REVISION; None if `name` has another form."""
    match = NAME.fullmatch(name)
    return HubModel(match["repo"], match["revision"] or DEFAULT_REVISION) if match else None


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of the local cache: HF_HUB_CACHE, HF_HOME/hub, or ~/.cache/huggingface/hub."""
    if environment.get("HF_HUB_CACHE"):
        return Path(environment["HF_HUB_CACHE"]).expanduser()
    base = Path(environment.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(environment.get("HF_HOME") or base / "huggingface").expanduser() / "hub"


def find_cached(model: HubModel, cache: Path) -> Path | None:
    """The snapshot folder of a model in the cache, complete or not; None if there is none."""
    root = cache / f"models--{model.repo.replace('/', '--')}"
    ref = root / "refs" / model.revision
    commit = ref.read_text().strip() if ref.is_file() else model.revision
    snapshot = root / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def missing_files(folder: Path) -> list[str]:
    """The required files that a folder does not have. Reads the index of a sharded checkpoint."""
    missing = [] if (folder / CONFIG).is_file() else [CONFIG]
    return missing + [name for name in weight_files(folder) if not (folder / name).is_file()]


def weight_files(folder: Path) -> list[str]:
    """The weight files that the index names; without an index, the single file."""
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        return sorted(set(map(str, weight_map.values())))
    except FileNotFoundError:
        return [WEIGHTS]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise HubError(f"{folder / INDEX} is damaged; remove it, then start again") from None


def find_model(model: HubModel, *, say: Callable[[str], None], check_config: Callable[[Path], None]) -> Path:
    """The folder of a model. It is downloaded unless it is cached. `check_config` is called with the folder before the
    weights are downloaded, and raises an error for an unsupported model. Raises HubError.
    """
    cache = cache_dir()
    cached = find_cached(model, cache)
    is_usable = cached is not None and not missing_files(cached)
    if cached is not None and is_usable and (cached / TOKENIZER).is_file():
        say(f"{model} is in the local cache: {cached}")
        return cached
    try:
        return _download(model, cache, cached, say, check_config)
    except HubError:
        if cached is None or not is_usable:
            raise
        say(f"{model} is in the local cache without {TOKENIZER}, so only token ids can be used: {cached}")
        return cached


def _download(
    model: HubModel,
    cache: Path,
    cached: Path | None,
    say: Callable[[str], None],
    check_config: Callable[[Path], None],
) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise HubError(
            f"{_not_cached(model, cache, cached)}; a download needs the package huggingface_hub: "
            "run `pip install 'quire-client[hub]'`"
        ) from None
    say(f"downloading {model} into {cache}")
    try:
        small = snapshot_download(model.repo, revision=model.revision, cache_dir=cache, allow_patterns=[*SMALL_FILES])
        folder = Path(small)
        if (folder / CONFIG).is_file():
            check_config(folder)
        weights = weight_files(folder)
        snapshot_download(model.repo, revision=model.revision, cache_dir=cache, allow_patterns=weights)
    except HubError:
        raise
    except Exception as error:  # huggingface_hub and its HTTP library raise errors of many types
        raise HubError(_download_failed(model, cache, cached, error)) from None
    missing = missing_files(folder)
    if missing:
        raise HubError(
            f"{model} is incomplete: {folder} has no {', '.join(missing)}; either the Hub at {_endpoint()} cannot be "
            "reached, or the model has no safetensors weights"
        )
    return folder


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _not_cached(model: HubModel, cache: Path, cached: Path | None) -> str:
    """The message about what is missing in the local cache."""
    if cached is None:
        return f"{model} is not in the local cache {cache}"
    return f"{model} is incomplete in the local cache: {cached} has no {', '.join(missing_files(cached))}"


def _download_failed(model: HubModel, cache: Path, cached: Path | None, error: BaseException) -> str:
    kind, start = type(error).__name__, f"{_not_cached(model, cache, cached)}, and the download failed"
    if kind == "GatedRepoError":
        return f"{start}: access to {model.repo} is restricted; request it on the model's page and set HF_TOKEN"
    if kind == "RepositoryNotFoundError":
        return f"{start}: the Hub has no model {model.repo}, or it is private; check the name, or set HF_TOKEN"
    if kind == "RevisionNotFoundError":
        return f"{start}: {model.repo} has no revision {model.revision}"
    while cause := error.__cause__ or error.__context__:
        error = cause
    words = f"{type(error).__name__}: {' '.join(str(error).split()).partition('. ')[0][:100]}"
    return f"{start} (from {_endpoint()}: {words}); use --model FOLDER, or set HF_HUB_CACHE to a cache that has it"
