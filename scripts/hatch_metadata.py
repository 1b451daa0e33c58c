"""Metadata hook: both wheels take their requirements from the root pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).resolve().parents[1]
CLIENT_EXTRAS = {"bench", "hub"}


class RequirementsOfCheckout(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        checkout = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras: dict[str, list[str]] = checkout["optional-dependencies"]
        is_client = metadata["name"] == "quire-client"
        if is_client:
            metadata["dependencies"] = checkout["dependencies"]
            names = CLIENT_EXTRAS
        else:
            metadata["dependencies"] = [f"quire-client=={checkout['version']}"]
            names = extras.keys() - CLIENT_EXTRAS - {"dev"}
        metadata["optional-dependencies"] = {
            name: [line.replace("quire[", f"{metadata['name']}[") for line in extras[name]] for name in sorted(names)
        }
        metadata["requires-python"] = checkout["requires-python"]
        metadata["license"] = checkout["license"]
        metadata["readme"] = {"content-type": "text/markdown", "text": (ROOT / checkout["readme"]).read_text()}
