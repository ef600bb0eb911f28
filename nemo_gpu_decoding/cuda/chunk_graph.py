"""A CUDA graph without nodes of its own: captured work that is replayed as often as the host says."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture_chunk(device: torch.device, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture `body`; run it once before, as for any graph. Replays are on the current stream.

    Raises:
        RuntimeError: CUDA refuses; nothing has changed then.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    return graph
