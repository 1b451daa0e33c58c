"""The demo model: about 1 M parameters, 2 MB. The services' wheel and a checkout contain it."""

from __future__ import annotations

from pathlib import Path


def demo_model_dir() -> Path:
    """The model's folder, a complete Hugging Face checkpoint. Raises FileNotFoundError when it is not installed."""
    folder = Path(__file__).resolve().parent / "demo_model"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"no demo model in {folder}: it comes with the services, `pip install 'quire-server[all]'`; in a checkout, "
            "run scripts/train_demo.py"
        )
    return folder
