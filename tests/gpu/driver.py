"""The hand-driven scheduler of the engine tests, over the GPU engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.unit.engine.driver import Driver
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.runner import DeviceRunner


class DeviceDriver(Driver):
    """Records the logits of every row."""

    def _record_logits(self) -> None:
        compute = self.runner._compute
        original = compute._model.forward

        def forward(columns: Any, *rest: Any) -> torch.Tensor | None:
            logits = original(columns, *rest)
            if logits is not None:
                self._sampled.append(logits.detach().clone().cpu())
            return logits

        compute._model.forward = forward


def load(folder: Path, make: Callable[[EngineConfig], DeviceRunner] = DeviceRunner, **settings: Any) -> DeviceRunner:
    fields = {
        "dtype": "float32", "backend": "cuda", "block_size": 16, "num_blocks": 64, "max_num_seqs": 5,
        "max_num_batched_tokens": 128, "determinism": "best_effort",
    } | settings  # fmt: skip
    return make(EngineConfig(folder, **fields))
