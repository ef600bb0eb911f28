"""Compute log-mel spectra with the defaults of NeMo's `AudioToMelSpectrogramPreprocessor`."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

RATE, WINDOW, STRIDE, FFT_SIZE = 16000, 400, 160, 512  # hertz, samples
PREEMPHASIS, GUARD = 0.97, 2.0**-24
LEAST_DEVIATION = 1e-5


def log_mel(samples: Any, features: int = 80, normalize: bool = True) -> Tensor:
    """Return the log-mel spectrogram of an utterance, [features, n // 160] float32; a frame is 10 ms.

    Args:
        samples: [n] in -1 .. 1, at 16 kHz; NumPy or torch.
        features: 80; Parakeet TDT 0.6b has 128.
        normalize: whether to normalise each feature to mean 0 and deviation 1, as NeMo's "per_feature" does.

    Raises:
        ValueError: there are fewer samples than a frame needs, or more than one channel.
    """
    signal = torch.as_tensor(samples).float()
    if signal.ndim != 1 or len(signal) < STRIDE:
        raise ValueError(f"samples has shape {tuple(signal.shape)}, expected [n] of one channel, n >= {STRIDE}")
    frames = len(signal) // STRIDE
    signal = torch.cat([signal[:1], signal[1:] - PREEMPHASIS * signal[:-1]])
    window = torch.hann_window(WINDOW, periodic=False)
    spectra = torch.stft(signal, FFT_SIZE, STRIDE, WINDOW, window, pad_mode="constant", return_complex=True)
    values = torch.log(torch.from_numpy(_mel_filters(features)) @ spectra.abs().square() + GUARD)[:, :frames]
    if not normalize:
        return values
    deviation = values.std(dim=1, keepdim=True).nan_to_num() + LEAST_DEVIATION
    return (values - values.mean(dim=1, keepdim=True)) / deviation


@lru_cache(maxsize=4)
def _mel_filters(features: int) -> np.ndarray:
    """Return Slaney's mel filter bank of triangles with equal area, [features, FFT_SIZE // 2 + 1] float32."""
    edges = _hertz(np.linspace(0, _KNEE + np.log(RATE / 2 / (_LINEAR * _KNEE)) / _OCTAVE, features + 2))
    bins = np.linspace(0, RATE / 2, FFT_SIZE // 2 + 1)
    rising = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    areas = 2 / (edges[2:] - edges[:-2])
    return (np.maximum(0, np.minimum(rising, falling)) * areas[:, None]).astype(np.float32)


# Slaney's scale is linear up to 1000 Hz, and logarithmic from there on.
_LINEAR, _KNEE, _OCTAVE = 200 / 3, 15.0, np.log(6.4) / 27


def _hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < _KNEE, mel * _LINEAR, _LINEAR * _KNEE * np.exp(_OCTAVE * (mel - _KNEE)))
