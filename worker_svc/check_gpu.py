"""`python -m worker_svc.check_gpu DIR`: whether backend cuda can serve a model here; it prints why not.

`quire up` runs it where a GPU is visible and no backend is chosen."""

from __future__ import annotations

import sys
from pathlib import Path

from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.checkpoint.features import check_features
from worker_svc.engine.checkpoint.model_folder import CheckpointError, decoder_config, read_config
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.engines import is_decoder


def check_gpu(folder: Path) -> None:
    """Raises BackendUnavailableError without a usable GPU, CheckpointError for a model that backend cuda lacks."""
    from worker_svc.engine.gpu.start.setup import find_device

    find_device(EngineConfig(folder, backend="cuda"))
    if is_decoder(folder):
        check_features(parse_config(decoder_config(read_config(folder))).features(), "cuda")


def main(argv: list[str]) -> int:
    try:
        check_gpu(Path(argv[0]))
    except (BackendUnavailableError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
