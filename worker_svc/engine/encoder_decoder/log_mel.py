"""Log-mel features of audio, as WhisperFeatureExtractor of transformers computes them with numpy.

Every sum has a fixed order, so the features of a waveform do not depend on threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from step_protocol.columns import F32
from worker_svc.engine.checkpoint.model_folder import CheckpointError, read_object

F64 = npt.NDArray[np.float64]

MAX_HZ = 8000.0
FLOOR = 1e-10  # of the power in a mel band
RANGE = 8.0  # log10 of the largest power over the smallest
HZ_PER_MEL = 200.0 / 3  # of the Slaney scale, below 1000 Hz
LOG_FROM_HZ, LOG_FROM_MEL = 1000.0, 15.0
LOG_STEP = np.log(6.4) / 27.0
PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"


@dataclass(frozen=True, slots=True)
class AudioSettings:
    """The settings of a model's feature extractor."""

    num_mel_bins: int
    sampling_rate: int
    hop_length: int
    n_fft: int
    num_samples: int  # every input is padded to this length

    @property
    def num_frames(self) -> int:
        return self.num_samples // self.hop_length


def read_audio_settings(folder: Path, num_mel_bins: int) -> AudioSettings:
    """Reads the settings of a model folder; the defaults are Whisper's. Raises CheckpointError."""
    given: dict[str, Any] = {}
    if (folder / PREPROCESSOR_FILE).exists():
        given = read_object(folder / PREPROCESSOR_FILE)
    elif (folder / PROCESSOR_FILE).exists():
        given = read_object(folder / PROCESSOR_FILE).get("feature_extractor") or {}
    defaults = {
        "feature_size": num_mel_bins,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 30,
    }
    found = {name: given.get(name, default) for name, default in defaults.items()}
    for name, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{name}: {PREPROCESSOR_FILE} must hold a positive integer, found {value!r}")
    if found["feature_size"] != num_mel_bins:
        raise CheckpointError(
            f"feature_size: {PREPROCESSOR_FILE} has {found['feature_size']}, but num_mel_bins of config.json is "
            f"{num_mel_bins}; the files belong to different models"
        )
    num_samples = found["chunk_length"] * found["sampling_rate"]
    return AudioSettings(num_mel_bins, found["sampling_rate"], found["hop_length"], found["n_fft"], num_samples)


class LogMel:
    """Computes features with the settings of one model."""

    def __init__(self, settings: AudioSettings) -> None:
        self._settings = settings
        self._window = np.hanning(settings.n_fft + 1)[:-1]
        self._filters = _filters(settings)

    def __call__(self, waveform: F32) -> F32:
        """[num_mel_bins, num_frames] for a waveform of at most `num_samples` samples."""
        settings = self._settings
        padded = np.zeros(settings.num_samples)
        padded[: len(waveform)] = waveform
        padded = np.pad(padded, settings.n_fft // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, settings.n_fft)[:: settings.hop_length]
        spectrum = np.fft.rfft(frames[: settings.num_frames] * self._window, axis=1).astype(np.complex64)
        power = np.abs(spectrum, dtype=np.float64) ** 2.0
        bands = [(power[:, first:end] * weights).sum(axis=1) for first, end, weights in self._filters]
        logs = np.log10(np.maximum(np.stack(bands), FLOOR)).astype(np.float32)
        features: F32 = (np.maximum(logs, logs.max() - np.float32(RANGE)) + np.float32(4.0)) / np.float32(4.0)
        return features


def _filters(settings: AudioSettings) -> list[tuple[int, int, F64]]:
    """For each mel band: its first frequency bin, one past the last, and the weights of these bins."""
    num_bins = settings.n_fft // 2 + 1
    frequencies = np.linspace(0, settings.sampling_rate // 2, num_bins)
    top = _to_mel(np.array([MAX_HZ]))[0]
    edges = _to_hz(np.linspace(0.0, top, settings.num_mel_bins + 2))
    rises = (frequencies[None] - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falls = (edges[2:, None] - frequencies[None]) / np.diff(edges)[1:, None]
    weights = np.maximum(0.0, np.minimum(rises, falls)) * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    found = []
    for band in weights:
        used = np.flatnonzero(band)
        first, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
        found.append((first, end, band[first:end]))
    return found


def _to_mel(hz: F64) -> F64:
    logs = LOG_FROM_MEL + np.log(np.maximum(hz, LOG_FROM_HZ) / LOG_FROM_HZ) / LOG_STEP
    return np.where(hz < LOG_FROM_HZ, hz / HZ_PER_MEL, logs)


def _to_hz(mel: F64) -> F64:
    logs = LOG_FROM_HZ * np.exp(LOG_STEP * (mel - LOG_FROM_MEL))
    return np.where(mel < LOG_FROM_MEL, HZ_PER_MEL * mel, logs)
