"""The demo model that ships inside this package: about 1 M parameters, 2 MB."""

from __future__ import annotations

from pathlib import Path


def demo_model_dir() -> Path:
    """The model's folder, as good as any Hugging Face checkpoint. Raises FileNotFoundError when it was stripped."""
    folder = Path(__file__).resolve().parent / "demo_model"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"{folder} holds no model.safetensors; reinstall quire or run scripts/train_demo.py")
    return folder
