"""The joint's output along given hypotheses, for confidence measures and alignments.

A search keeps one number per step. NeMo's confidence measures and alignments need the whole output of the joint, so
the networks run again over the tokens of the hypotheses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.search.result import Path
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks


def step_log_probs(networks: TransducerNetworks, frames: Sequence[Tensor], paths: Sequence[Path]) -> list[Tensor]:
    """Log-probs at every step of every path; labels and durations are normalised separately.

    Args:
        networks: networks of the search.
        frames: [T, D] encoder output of each path's utterance.
        paths: hypotheses with alignments.

    Returns:
        One tensor [m, V + 1], for TDT [m, V + 1 + durations], float32 on the CPU, per path of m steps.
    """
    with torch.inference_mode(), networks.evaluation():
        predictions = _predictions(networks, paths)
        labels = networks.vocab_size + 1
        log_probs = []
        for i, (path, own_frames) in enumerate(zip(paths, frames, strict=True)):
            assert path.alignment is not None
            assert path.alignment_frames is not None
            emits = path.alignment < networks.vocab_size
            texts: np.ndarray = np.cumsum(emits) - emits  # tokens before each step
            projected = networks.project_encoder(own_frames)
            frame_numbers = torch.from_numpy(path.alignment_frames.astype(np.int64)).to(projected.device)
            own = predictions[torch.from_numpy(texts).to(predictions.device), i]
            logits = networks.join(projected[frame_numbers], own).float().cpu()
            parts = (logits[:, :labels], logits[:, labels:])
            log_probs.append(torch.cat([torch.log_softmax(part, dim=-1) for part in parts], dim=-1))
    return log_probs


def _predictions(networks: TransducerNetworks, paths: Sequence[Path]) -> Tensor:
    """[longest + 1, paths, H]: entry u holds the predictions after u tokens."""
    longest = max((len(path) for path in paths), default=0)
    labels = np.zeros((longest, len(paths)), np.int64)
    for i, path in enumerate(paths):
        labels[: len(path), i] = path.tokens
    output, state = networks.start()
    outputs = [output.expand(len(paths), -1)]
    state = tuple(part.expand(len(paths), *part.shape[1:]) for part in state)
    for row in labels:
        output, state = networks.predict(torch.from_numpy(row).to(output.device), state)
        outputs.append(output)
    return torch.stack(outputs)
