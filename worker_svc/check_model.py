"""Finds the model folder of a worker, and checks it without torch.

`python -m worker_svc.check_model DIR` checks config.json only. `quire up` runs it before the weights are downloaded.
`python -m worker_svc.check_model --model DIR [FLAGS]` checks the flags of a worker and the whole folder. `quire up`
runs it before it starts a service.
`python -m worker_svc.check_model gpu DIR`, with torch: whether backend cuda can serve the model here. `quire up` runs
it where a GPU is visible and no backend is chosen.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from hub_models.find import HubError, find_model, parse_name
from svc_common import config
from worker_svc.bundle import Bundle, ModelFolderError, read_bundle
from worker_svc.engine.checkpoint.families import architecture_of
from worker_svc.engine.checkpoint.field_types import check_types
from worker_svc.engine.checkpoint.model_folder import CheckpointError, check_weight_files, decoder_config, read_config
from worker_svc.engine.checkpoint.quantization_config import QuantizationConfig, quantization_of
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.encoder.families import check_encoder, encoder_of
from worker_svc.engine.encoder_decoder.config import is_encoder_decoder, parse_encoder_decoder
from worker_svc.flags import check_memory, check_node_flags, check_transfer, engine_config, make_parser

SETTING_ERRORS = (ValueError, HubError, ModelFolderError)
log = logging.getLogger(__name__)


def check_settings(args: argparse.Namespace) -> tuple[EngineConfig, Bundle]:
    """The settings and the model folder of a worker. Raises one of SETTING_ERRORS for what is wrong without torch."""
    check_node_flags(args)
    check_memory(args)
    check_transfer(args)
    resolve_model(args)
    settings, bundle = engine_config(args), read_bundle(args.model)
    if args.executor == "model":
        check_model(args.model)
        _check_length(args)
    return settings, bundle


def _check_length(args: argparse.Namespace) -> None:
    found = read_config(args.model)
    limit = None if is_encoder_decoder(found) else decoder_config(found).get("max_position_embeddings")
    if args.max_model_len and isinstance(limit, int) and args.max_model_len > limit:
        raise ValueError(f"--max-model-len {args.max_model_len} is above the model's {limit}; use {limit} or less")


def check_model(folder: Path) -> None:
    """Raises CheckpointError if the architecture is not supported or a weight file is missing or damaged."""
    quantization = check_config(folder)
    check_weight_files(folder, is_quantized=quantization is not None)


def check_config(folder: Path) -> QuantizationConfig | None:
    """Raises CheckpointError for an architecture, a quantization or a type of a field that is not supported."""
    found = read_config(folder)
    if is_encoder_decoder(found):
        parse_encoder_decoder(found)
        return None
    found = decoder_config(found)
    if encoder_of(found) is not None:
        check_encoder(found)
        return None
    architecture = architecture_of(found)
    check_types(found)
    return quantization_of(found, architecture)


def check_gpu(folder: Path) -> None:
    """Raises ValueError without a usable GPU, or for a model that backend cuda lacks."""
    from worker_svc.engine.backend import BackendUnavailableError
    from worker_svc.engine.checkpoint.features import check_features
    from worker_svc.engine.decoder.parse import parse_config
    from worker_svc.engine.engines import is_decoder
    from worker_svc.engine.gpu.start.setup import find_device

    try:
        find_device(EngineConfig(folder, backend="cuda"))
    except BackendUnavailableError as error:
        raise ValueError(str(error)) from None
    if is_decoder(folder):
        check_features(parse_config(decoder_config(read_config(folder))).features(), "cuda")


def resolve_model(args: argparse.Namespace) -> None:
    """Replaces --model by the folder of the model, which is downloaded unless it is cached, and sets --model-name. An
    existing folder has precedence over a model of the Hub. Raises HubError.
    """
    model = None if args.model.is_dir() else parse_name(str(args.model))
    if model is None:
        return
    try:
        args.model = find_model(model, say=log.info, check_config=_check_found)
    except HubError as error:
        raise HubError(f"--model {model}: there is no such folder, and {error}") from None
    args.model_name = args.model_name or model.repo


def _check_found(folder: Path) -> None:
    """Refuses a model of the Hub before its weights are downloaded."""
    try:
        check_config(folder)
    except CheckpointError as error:
        raise HubError(f"its weights were not downloaded: {error}") from None


def main(argv: list[str]) -> int:
    try:
        if argv[:1] == ["gpu"]:
            check_gpu(Path(argv[1]))
        elif len(argv) == 1:
            check_config(Path(argv[0]))
        else:
            check_settings(config.parse(make_parser(), argv))
    except SETTING_ERRORS as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
