"""Run the searches behind pyctcdecode's interface, and compute the log-probs that they read."""

import math

import numpy as np
import torch

from nemo_gpu_decoding.checks import check_int
from nemo_gpu_decoding.compat.alphabet import Alphabet
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.search.flexctc_beam.config import MAX_BEAM_SIZE, FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.word_graph.config import MAX_ACTIVE_LIMIT, WFSTConfig
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST

# States that the search with an LM keeps per hypothesis of pyctcdecode: the graph has several for one text, and
# charges for a word at its beginning; pyctcdecode charges at its end. Chosen on utterances outside the benchmark.
STATES = 10
LEAD = 3.0  # extra beam width over beam_prune_logp, natural log: a word gets its bonus before it is spelled
MOST_RESULTS = 10_000
SKIPPED = np.float32(-1000)  # log-prob of an unlikely token: a path of the graph takes it if there is no other
LEAST_LOGP = math.log(1e-15)  # tokens with smaller log-probs are always skipped


class TokenSearch(FlexCTCBeam):
    """The token-level search `flexctc_beam` with pyctcdecode's options, for decoding without an LM.

    Args:
        vocab_size: V, which is also the column of the blank.
        beam_width: hypotheses per frame.
        beam_prune_logp: pyctcdecode's option, < 0.
        n_best: number of results.
    """

    def __init__(self, vocab_size: int, beam_width: int, beam_prune_logp: float, n_best: int) -> None:
        check_int("beam_width", beam_width, 1, MAX_BEAM_SIZE)
        config = FlexCTCConfig(
            beam_size=beam_width, beam_threshold=-beam_prune_logp, merge="prefix", n_best=n_best, backend="cpu"
        )
        super().__init__(vocab_size, vocab_size, config)
        self._is_sampled = True  # rows without unlikely tokens do not add up to 1
        self._params = self._params._replace(recombines=n_best == 1)


class WordSearch(CudaWFST):
    """The word-graph search `cuda_wfst` for decoding with a word LM; other arguments as for `TokenSearch`."""

    def __init__(self, graph: WordGraph, size: int, beam_width: int, beam_prune_logp: float, n_best: int) -> None:
        config = WFSTConfig(
            beam=LEAD - beam_prune_logp,
            lattice_beam=-beam_prune_logp,
            max_active=min(STATES * beam_width, MAX_ACTIVE_LIMIT),
            n_best=min(n_best, MOST_RESULTS),
            topology="normal",
            backend="cpu",
        )
        super().__init__(graph, size, size, config)
        self._is_sampled = True

    def _most_bonus(self, boosting: BackoffAutomaton, weight: float) -> float:
        """Return the largest bonus of a word, without a warning: users of this interface choose no graph beam."""
        return weight * max(0.0, float(boosting.arrays.states["upper_bound"].max())) * self.graph.most_words


def log_probs_of(logits: np.ndarray, name: str, alphabet: Alphabet) -> np.ndarray:
    """Convert logits, log-probs or probabilities to log-probs [T, V + 1] with the blank as last column.

    Args:
        logits: [T, columns] float32.
        name: name of the logits in messages.

    Raises:
        ValueError: a frame has NaN or +inf, or -inf alone.
    """
    if len(logits) and logits.min() >= 0 and math.isclose(logits.sum() / len(logits), 1, rel_tol=1e-5):
        log_probs = np.log(np.clip(logits, 1e-15, 1))
    else:
        log_probs = torch.from_numpy(logits).log_softmax(1).numpy()
    for frame in np.flatnonzero(np.isnan(log_probs.max(axis=1)))[:1].tolist():
        for column in np.flatnonzero(~(logits[frame] < np.inf))[:1].tolist():
            raise ValueError(f"{name}[{frame}, {column}] is {logits[frame, column]}, expected a finite value or -inf")
        raise ValueError(f"{name}[{frame}] leaves no label possible: all its values are -inf")
    if alphabet.blanks == (logits.shape[1] - 1,):
        return log_probs
    blanks = log_probs[:, alphabet.blanks]
    return np.column_stack([np.delete(log_probs, alphabet.blanks, 1), np.logaddexp.reduce(blanks, axis=1)])


def likely_of(log_probs: np.ndarray, token_min_logp: float) -> np.ndarray:
    """Set log-probs below token_min_logp to `SKIPPED`, except the most likely token of each frame."""
    least = np.minimum(log_probs.max(axis=1, keepdims=True), max(token_min_logp, LEAST_LOGP))
    return np.where(log_probs >= least, log_probs, SKIPPED)


def aligned_score(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, values: np.ndarray) -> float:
    """Return the sum of log-probs [T, V + 1] along an alignment, in which token i lasts from starts[i] to stops[i]."""
    labels = np.full(len(values), values.shape[1] - 1)
    for token, start, stop in zip(tokens.tolist(), starts.tolist(), stops.tolist(), strict=True):
        labels[max(start, 0) : max(stop, 0)] = token
    return float(sum(values[np.arange(len(values)), labels].tolist(), 0.0))
