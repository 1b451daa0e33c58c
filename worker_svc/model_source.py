"""The folder of the model that a worker serves: a local one, or one of the Hugging Face Hub."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from hub_models.find import HubError, find_model, parse_name
from worker_svc.check_model import check_config
from worker_svc.engine.checkpoint.model_folder import CheckpointError

log = logging.getLogger(__name__)


def resolve_model(args: argparse.Namespace) -> None:
    """Replaces --model by the folder of the model, which is downloaded unless it is cached, and sets --model-name. An
    existing folder has precedence over a model of the Hub. Raises HubError.
    """
    model = None if args.model.is_dir() else parse_name(str(args.model))
    if model is None:
        return
    try:
        args.model = find_model(model, say=log.info, check_config=_check_config)
    except HubError as error:
        raise HubError(f"--model {model}: there is no such folder, and {error}") from None
    args.model_name = args.model_name or model.repo


def _check_config(folder: Path) -> None:
    """Refuses a model before its weights are downloaded."""
    try:
        check_config(folder)
    except CheckpointError as error:
        raise HubError(f"its weights were not downloaded: {error}") from None
