"""Choice of the backend that decodes; each distinct decision is logged once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import torch

from nemo_gpu_decoding.cuda.launch import runtime

logger = logging.getLogger("nemo_gpu_decoding")

Obstacle = Callable[[torch.device], "str | None"]


def choose_backend(wanted: str, device: torch.device, obstacle: Obstacle) -> Literal["cuda", "cpu"]:
    """The backend for tensors on `device`.

    Args:
        wanted: "cuda"; "cpu"; or "auto", which is cuda for tensors on a GPU if kernels run there.
        device: device of the tensors to decode. With "cuda", tensors on the CPU are copied.
        obstacle: the reason why the decoder's kernels cannot use a device that runs kernels, or None.

    Raises:
        ValueError: `wanted` is "cuda" and the kernels cannot run; the message gives the reason.
    """
    if wanted == "cpu" or (wanted == "auto" and device.type != "cuda"):
        _say_once(f"backend cpu for tensors on {device} (option backend={wanted})")
        return "cpu"
    gpu = runtime().device_for(device)
    why_not = runtime().why_not(gpu) or obstacle(gpu)
    if why_not is None:
        _say_once(f"backend cuda for tensors on {device} (option backend={wanted})")
        return "cuda"
    if wanted == "cuda":
        raise ValueError(f"backend is 'cuda' for tensors on {device}, expected 'cpu' or 'auto': {why_not}")
    _say_once(f"backend cpu for tensors on {device}, which are copied to the host: {why_not}")
    return "cpu"


@lru_cache(maxsize=32)
def _say_once(message: str) -> None:
    logger.info(message)
