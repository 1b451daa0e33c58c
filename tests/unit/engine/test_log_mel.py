"""Log-mel features equal those of WhisperFeatureExtractor."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from tests.processes.encoder_models import tone
from worker_svc.engine.encoder_decoder.log_mel import AudioSettings, LogMel


@pytest.mark.parametrize("num_mel_bins", [16, 80, 128])
@pytest.mark.parametrize("seconds", [0.05, 1.3, 2.0])
def test_features_equal_those_of_transformers(num_mel_bins: int, seconds: float) -> None:
    waveform = tone(1, seconds)
    extractor = WhisperFeatureExtractor(feature_size=num_mel_bins, chunk_length=2)
    expected = extractor(waveform, sampling_rate=16_000, return_tensors="np").input_features[0]
    found = LogMel(AudioSettings(num_mel_bins, 16_000, 160, 400, 32_000))(waveform)
    assert found.shape == expected.shape == (num_mel_bins, 200)
    np.testing.assert_allclose(found, expected, atol=2e-5)
