"""Launches of Gemma 2, Phi-3 and GPT-2 through Triton's compiler into a driver that runs nothing."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from triton.runtime.driver import driver

from bench.gpu.dry_run import Device, run
from tests.unit.engine.models import make_model

SIZES = {"vocab_size": 9000, "num_hidden_layers": 2, "max_position_embeddings": 5000}
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": SIZES | {"head_dim": 256, "sliding_window": 100},
    "phi3": SIZES | {"hidden_size": 256, "partial_rotary_factor": 0.75, "sliding_window": 100},
    "gpt2": {"vocab_size": 9000, "n_embd": 256, "n_inner": 512, "n_positions": 5000, "max_position_embeddings": 5000},
}


def main() -> None:
    device, found = Device(), []
    driver.set_active(device)
    for architecture, fields in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), architecture, **fields)
            found.append({"model": architecture} | run({"dtype": "bfloat16"}, Path(folder), device))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
