"""Checks a model folder without torch.

`python -m worker_svc.check_model DIR` checks config.json only. `quire up` runs it before the weights are downloaded.
"""

from __future__ import annotations

import sys
from pathlib import Path

from worker_svc.engine.checkpoint.families import architecture_of
from worker_svc.engine.checkpoint.model_folder import CheckpointError, check_weight_files, decoder_config, read_object
from worker_svc.engine.checkpoint.quantization_config import QuantizationConfig, quantization_of
from worker_svc.engine.encoder.families import check_encoder, encoder_of
from worker_svc.engine.encoder_decoder.config import is_encoder_decoder, parse_encoder_decoder


def check_model(folder: Path) -> None:
    """Raises CheckpointError if the architecture is not supported or a weight file is missing or damaged."""
    quantization = check_config(folder)
    check_weight_files(folder, is_quantized=quantization is not None)


def check_config(folder: Path) -> QuantizationConfig | None:
    """Raises CheckpointError if the architecture or the quantization in config.json is not supported."""
    config = read_object(folder / "config.json")
    if is_encoder_decoder(config):
        parse_encoder_decoder(config)
        return None
    config = decoder_config(config)
    if encoder_of(config) is not None:
        check_encoder(config)
        return None
    return quantization_of(config, architecture_of(config))


def main(argv: list[str]) -> int:
    try:
        check_config(Path(argv[0]))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
