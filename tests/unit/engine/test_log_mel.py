"""Log-mel features equal those of WhisperFeatureExtractor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from tests.processes.encoder_models import tone
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.encoder_decoder.log_mel import AudioSettings, LogMel, read_audio_settings


@pytest.mark.parametrize("num_mel_bins", [16, 80, 128])
@pytest.mark.parametrize("seconds", [0.05, 1.3, 2.0])
def test_features_equal_those_of_transformers(num_mel_bins: int, seconds: float) -> None:
    waveform = tone(1, seconds)
    extractor = WhisperFeatureExtractor(feature_size=num_mel_bins, chunk_length=2)
    expected = extractor(waveform, sampling_rate=16_000, return_tensors="np").input_features[0]
    found = LogMel(AudioSettings(num_mel_bins, 16_000, 160, 400, 32_000))(waveform)
    assert found.shape == expected.shape == (num_mel_bins, 200)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_settings_come_from_either_file_of_a_folder(tmp_path: Path) -> None:
    assert read_audio_settings(tmp_path, 80) == AudioSettings(80, 16_000, 160, 400, 480_000)
    settings = {"feature_size": 16, "chunk_length": 2}
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": settings}))
    assert read_audio_settings(tmp_path, 16).num_frames == 200
    with pytest.raises(CheckpointError, match=r"feature_size: preprocessor_config\.json has 16, but num_mel_bins"):
        read_audio_settings(tmp_path, 80)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"hop_length": 0}))
    with pytest.raises(CheckpointError, match=r"hop_length: .* must hold a positive integer, found 0"):
        read_audio_settings(tmp_path, 16)
