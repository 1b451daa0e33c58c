"""The model of a run, an adapter of it, and the ways in which its workers propose drafts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from quire_client.demo import demo_model_dir

from tests.unit.engine.adapters import ATTENTION, FEED_FORWARD, make_adapter
from tests.unit.engine.heads import add_mtp, make_eagle
from tests.unit.engine.models import make_model

ARCHITECTURES = {"heads": "glm4_moe", "recurrent": "qwen3_5"}
SIZES = {"vocab_size": 2048, "eos_token_id": 2}  # sizes of the demo model's tokenizer


@dataclass(frozen=True, slots=True)
class Model:
    """`proposers`: a value of --speculate for each worker; None: no drafts."""

    folder: Path
    adapter: Path
    proposers: tuple[str | None, ...]


def write_model(folder: Path, name: str) -> Model:
    """The demo model, or random weights with its tokenizer and a layer that predicts a further token."""
    torch.set_num_threads(1)
    target = demo_model_dir()
    proposers: tuple[str | None, ...] = "suffix", f"draft:{target}", None
    if name != "demo":
        target = make_model(folder / name, ARCHITECTURES[name], **SIZES)
        target = add_mtp(target, agrees=True)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo_model_dir() / file, target)
        head = f"eagle:{make_eagle(folder / 'eagle', target, agrees=True)}" if name == "heads" else "suffix"
        proposers = "mtp", head, None
    modules = FEED_FORWARD if name == "recurrent" else ATTENTION
    return Model(target, make_adapter(target, folder / "lora", target_modules=modules), proposers)
