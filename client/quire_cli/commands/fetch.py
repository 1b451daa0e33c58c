"""`quire fetch ORG/NAME@COMMIT --to DIR`: downloads a model of the Hugging Face Hub once, pinned to a commit."""

from __future__ import annotations

import argparse
import os
import re

from hub_models.find import HubError, find_model, parse_name
from quire_cli.output import complain

COMMIT = re.compile(r"[0-9a-f]{40}")


def run(args: argparse.Namespace) -> int:
    """Print the folder of the model, DIR/models--ORG--NAME/snapshots/COMMIT. If it is complete, nothing is downloaded.

    Several processes may run it at once in a shared folder: huggingface_hub locks each file.
    """
    model = parse_name(args.model)
    if model is None or not COMMIT.fullmatch(model.revision):
        complain(f"{args.model!r} is not pinned: write ORG/NAME@COMMIT with the 40 hexadecimal digits of a commit")
        return 2
    os.environ["HF_HUB_CACHE"] = str(args.to)
    try:
        folder = find_model(model, say=lambda line: print(line, flush=True), check_config=lambda folder: None)
    except HubError as error:
        complain(str(error))
        return 1
    print(folder)
    return 0
