"""Where `finish.cu` puts its results: many arrays in one piece of memory, copied out at once."""

from __future__ import annotations

import math

import numpy as np
import torch

from nemo_gpu_decoding.search.flexctc_beam.engine import Found
from nemo_gpu_decoding.search.flexctc_beam.launch_shape import PROGRESS
from nemo_gpu_decoding.search.history import Traces

_TORCH = {np.int32: torch.int32, np.float32: torch.float32}


class DeviceResults:
    """Room for the N best paths of n utterances of up to T frames.

    `arrays` names the parts as the parameters of `finish` do; all begin at multiples of 4 bytes.
    """

    def __init__(self, n: int, n_best: int, frames: int, alignments: bool, device: torch.device) -> None:
        paths, entries = (n, n_best), (n, n_best, frames)
        self._layout: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            "without_final": (np.int32, (n,)),
            "order": (np.int32, paths),
            "scores": (np.float32, paths),
            "lengths": (np.int32, paths),
            "tokens": (np.int32, entries),
            "frames": (np.int32, entries),
            "repeats": (np.int32, entries),
            "confidence": (np.float32, entries),
        }
        if alignments:
            self._layout["alignment"] = (np.int32, entries)
            self._layout["alignment_log_probs"] = (np.float32, entries)
        self._progress_bytes = n * PROGRESS.itemsize
        size = self._progress_bytes + 4 * sum(math.prod(shape) for _, shape in self._layout.values())
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.arrays: dict[str, torch.Tensor | None] = {
            "reached": self._bytes[: self._progress_bytes].view(n, PROGRESS.itemsize),
            "alignment": None,
            "alignment_log_probs": None,
        }
        for name, (dtype, shape), part in self._parts(self._bytes):
            self.arrays[name] = part.view(_TORCH[dtype]).view(shape)

    def to_host(self) -> tuple[Found, np.ndarray]:
        """Wait for the results; also returns `reached`, [n] PROGRESS."""
        host = self._copied()
        reached = host[: self._progress_bytes].numpy().view(PROGRESS)
        got = {
            name: part.numpy().view(dtype).reshape(shape)
            for name, (dtype, shape), part in self._parts(host)
        }
        traces = Traces(got["lengths"], got["tokens"], got["frames"], got["repeats"], got["confidence"])
        found = Found(
            reached["frames"], got["order"], got["scores"], got["without_final"].astype(bool), traces,
            got.get("alignment"), got.get("alignment_log_probs"),
        )  # fmt: skip
        return found, reached

    def _copied(self) -> torch.Tensor:
        if self._bytes.device.type != "cuda":
            return self._bytes
        host = torch.empty(self._bytes.shape, dtype=torch.uint8, pin_memory=True)
        host.copy_(self._bytes, non_blocking=True)
        torch.cuda.current_stream(self._bytes.device).synchronize()
        return host

    def _parts(self, memory: torch.Tensor):
        begin = self._progress_bytes
        for name, (dtype, shape) in self._layout.items():
            end = begin + 4 * math.prod(shape)
            yield name, (dtype, shape), memory[begin:end]
            begin = end
