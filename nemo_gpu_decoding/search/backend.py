"""Which backend decodes: a decision made once per situation, said once in the log."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

logger = logging.getLogger("nemo_gpu_decoding")


def choose_backend(wanted: str, device: torch.device) -> str:
    """The backend for tensors on `device`: "cpu" or "cuda".

    Raises:
        ValueError: `wanted` is "cuda" and there are no CUDA kernels to be had.
    """
    if wanted == "cuda":
        raise ValueError(
            f"backend is 'cuda' for log_probs on {device}, expected 'cpu' or 'auto': {NO_KERNELS}"
        )
    if wanted == "auto" and device.type == "cuda":
        _say_once(f"backend cpu for log_probs on {device}: {NO_KERNELS}; they are copied to the host")
    return "cpu"


NO_KERNELS = "this version has no CUDA kernels yet"


@lru_cache(maxsize=32)
def _say_once(message: str) -> None:
    logger.info(message)
