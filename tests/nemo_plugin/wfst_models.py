"""Word graphs, LMs and models for the tests of cuda_wfst behind NeMo."""

from __future__ import annotations

import numpy as np
import torch

from tests.oracles.ngram import arpa_text

LETTERS = [*"abcdefghijklmnopqrstuvwxyz", " "]


def write_arpa(path, words, pairs=(), unknown=True):
    """A word LM of equally likely words, with some likely pairs; returns its path as text."""
    one = -1.0
    table = {("<s>",): (-99.0, -0.3), ("</s>",): (one, 0.0)} | {(w,): (one, -0.3) for w in words}
    if unknown:
        table[("<unk>",)] = (-3.0, 0.0)
    path.write_text(arpa_text(table | dict.fromkeys(pairs, (-0.2, 0.0))))
    return str(path)


def spoken(columns, num_columns, blank, likely=0.8):
    """Log-probs [1, T, num_columns] in which each token lasts a frame, followed by a blank."""
    frames = [column for token in columns for column in (token, blank)]
    probs = np.full((len(frames), num_columns), (1 - likely) / (num_columns - 1))
    probs[np.arange(len(frames)), frames] = likely
    return torch.from_numpy(np.log(probs)).float()[None]
