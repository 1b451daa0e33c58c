"""Build hook: generates the code that is not committed, and the SBOM of a published wheel (PEP 770)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SCRIPTS = Path(__file__).parent
PUBLISHED = ("quire-client", "quire-server")
WITH_GENERATED = ("quire", "quire-client")


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        name = self.metadata.name
        if name in WITH_GENERATED:
            for script in ("gen_protos.py", "gen_sync.py"):
                subprocess.run([sys.executable, str(SCRIPTS / script)], check=True)
        if name in PUBLISHED and self.target_name == "wheel":
            self._folder = tempfile.TemporaryDirectory()
            path = Path(self._folder.name) / f"{name}.cdx.json"
            with path.open("w") as file:
                subprocess.run([sys.executable, str(SCRIPTS / "sbom.py"), "wheel", name], check=True, stdout=file)
            build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            self._folder.cleanup()
