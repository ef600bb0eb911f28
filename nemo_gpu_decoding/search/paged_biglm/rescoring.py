"""From two LMs and a word graph to what the search asks; `composition.py` says what for."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.lm.packed import NO_LABEL, PackedLM
from nemo_gpu_decoding.search.paged_biglm.composition import Rescoring
from nemo_gpu_decoding.search.paged_biglm.difference import difference_of
from nemo_gpu_decoding.search.paged_biglm.tokens import lm_of

MOST_STATES = 1 << 31  # of an LM, for a state to fit into half a key
AUTO_NGRAMS = 10_000_000  # a larger LM is subtracted from only if it is asked for


def make_rescoring(graph: WordGraph, large: PackedLM, small: PackedLM, difference: str) -> Rescoring:
    """Match the words of graph and LMs, and subtract the small LM where that is wanted.

    Args:
        difference: auto, always or never, see `BigLMConfig`.

    Raises:
        ValueError: a word is in neither the LM nor its <unk>; too many states; difference "always" but
            the small LM is no part of the large one.
    """
    large_labels = _labels(graph, large, "large")
    small_labels = _labels(graph, small, "small")
    for name, lm in (("large", large), ("small", small)):
        if lm.num_states >= MOST_STATES:
            raise ValueError(
                f"{name} ({lm.name}) has {lm.num_states} states, expected fewer than {MOST_STATES}"
            )
    merged = None
    if difference == "always" or (difference == "auto" and sum(large.counts) <= AUTO_NGRAMS):
        merged = difference_of(large, small)
        if merged is not None and not _agree(large, small, large_labels, small_labels):
            merged = None
    if difference == "always" and merged is None:
        raise ValueError(
            f"difference is 'always', but small ({small.name}) has n-grams that large ({large.name}) "
            "has not, expected a part of it: set difference to 'auto' or 'never'"
        )
    return Rescoring(
        large=(merged or large).arrays,
        small=small.arrays,
        is_difference=merged is not None,
        large_labels=large_labels,
        small_labels=small_labels,
        large_end=large.sentence_end,
        small_end=small.sentence_end,
        start=int(lm_of(large.start_state, 0 if merged is not None else small.start_state)),
    )


def _labels(graph: WordGraph, lm: PackedLM, name: str) -> np.ndarray:
    """The LM's label of each word of the graph; that of <unk> for words it does not list."""
    labels = np.array([lm.label(word) for word in graph.words], np.int64)
    labels[0] = 0  # "<eps>" is never asked for
    unlisted = np.flatnonzero(labels == NO_LABEL)
    if len(unlisted):
        examples = ", ".join(repr(graph.words[i]) for i in unlisted[:3])
        raise ValueError(
            f"{name} ({lm.name}) has neither {len(unlisted)} words of the graph, such as {examples}, "
            "nor <unk>, expected an LM that can score all of them"
        )
    return labels


def _agree(large: PackedLM, small: PackedLM, large_labels: np.ndarray, small_labels: np.ndarray) -> bool:
    """Whether the small LM's label of each word is that of the large LM's label."""
    of_large = [small.label(large.words[label]) for label in large_labels[1:].tolist()]
    return bool((np.array(of_large, np.int64) == small_labels[1:]).all())
