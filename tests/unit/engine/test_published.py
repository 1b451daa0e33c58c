"""A published model per row of docs/models.md: its configuration is read, and tensors with its names, shapes and types
(small, with random values) load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.engine.driver import Driver
from tests.unit.engine.models import load_reference
from tests.unit.engine.published import ROWS, Published
from worker_svc.engine.checkpoint.families import ARCHITECTURES, ENCODER_DECODER_NAMES
from worker_svc.engine.checkpoint.model_folder import decoder_config
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.encoder.families import ENCODERS
from worker_svc.engine.model_runner import ModelRunner

DTYPES = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "u8": torch.uint8,
    "i64": torch.int64,
}


def write(row: Published, folder: Path) -> Path:
    """The checkpoint in small."""
    (folder / "config.json").write_text(json.dumps(row.small_config()))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape, dtype in row.shapes():
        numbers = torch.randn(shape, generator=generator) * 0.2
        if name.endswith(("_scale_inv", "_scale")):
            numbers = numbers.abs() + 0.1
        if dtype == "u8":
            numbers = numbers.abs() * 40 + 110  # also an exponent of MXFP4 that is not far from 1
        tensors[name] = numbers.to(DTYPES[dtype])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def name_of(row: Published) -> str:
    (name,) = row.config["architectures"]
    return str(name)


def test_each_row_of_the_table_has_a_published_model() -> None:
    names = {name_of(row) for row in ROWS}
    assert {*ARCHITECTURES, *ENCODER_DECODER_NAMES} - names == set()
    assert {name.removesuffix("Model").removesuffix("ForMaskedLM") for name in names} >= ENCODERS.keys()


@pytest.mark.parametrize("row", [row for row in ROWS if name_of(row) in ARCHITECTURES], ids=lambda row: row.model)
def test_a_published_configuration_is_read(row: Published) -> None:
    config = decoder_config(dict(row.config))
    assert parse_config(config).num_layers == config.get("num_hidden_layers", config.get("n_layer"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model)
def test_a_published_checkpoint_loads(row: Published, tmp_path: Path) -> None:
    ModelRunner(EngineConfig(write(row, tmp_path), num_blocks=8, threads=1))


COMPARED = [
    row
    for row in ROWS
    if name_of(row) in ARCHITECTURES and row.has_reference and "quantization_config" not in row.config
]


@pytest.mark.deep
@pytest.mark.parametrize("row", COMPARED, ids=lambda row: row.model)
def test_a_published_checkpoint_has_the_logits_of_transformers(row: Published, tmp_path: Path) -> None:
    folder = write(row, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    if name_of(row) in ("Phi3ForCausalLM", "GlmForCausalLM", "Glm4ForCausalLM", "SmolLM3ForCausalLM"):
        config["pad_token_id"] = 0  # the default of these classes is too large here
    (folder / "config.json").write_text(json.dumps(config))
    driver = Driver(ModelRunner(EngineConfig(folder, "float32", num_blocks=8, threads=1)))
    prompt = [(7 * i) % 48 for i in range(40)]
    driver.open(0, prompt)
    driver.prefill(0)
    with torch.no_grad():
        expected = load_reference(folder)(input_ids=torch.tensor([prompt])).logits[0, -1].float()
    torch.testing.assert_close(driver.logits[0, len(prompt)], expected, atol=2e-4, rtol=1e-3)
