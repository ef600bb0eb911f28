"""`LmPair` of a word graph: both LMs and the graph's words in them; `composition.py` says what for."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

import numpy as np

from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.lm.packed import NO_LABEL, PackedLM
from nemo_gpu_decoding.search.word_graph.composition import LmPair, lm_of
from nemo_gpu_decoding.search.word_graph.difference import difference_of

MOST_STATES = 1 << 31  # of an LM, for a state to fit into half a key
AUTO_NGRAMS = 10_000_000  # a larger LM is subtracted from only if it is asked for

# Ready ones by graph, large LM, small LM and option; forgotten with any of them
_ready: WeakKeyDictionary[WordGraph, WeakKeyDictionary] = WeakKeyDictionary()
_lock = threading.Lock()


def shared_lm_pair(graph: WordGraph, large: PackedLM, small: PackedLM, difference: str) -> LmPair:
    """As `make_lm_pair`, but decoders with the same graph and LMs share one, as long as these live."""
    with _lock:  # also while it is made: whoever waits most likely waits for that one
        of_graph = _ready.setdefault(graph, WeakKeyDictionary())
        ready = of_graph.setdefault(large, WeakKeyDictionary()).setdefault(small, {})
        if difference not in ready:
            ready[difference] = make_lm_pair(graph, large, small, difference)
        return ready[difference]


def make_lm_pair(graph: WordGraph, large: PackedLM, small: PackedLM, difference: str) -> LmPair:
    """Match the words of graph and LMs, and subtract the small LM where that is wanted.

    Args:
        difference: auto, always or never, see `PagedBigLMConfig`.

    Raises:
        ValueError: a word that the graph emits is in neither the LM nor its <unk>; too many states;
            difference "always" but the small LM is no part of the large one.
    """
    emitted = graph.output_words
    large_labels = _labels(graph, emitted, large, "large")
    small_labels = _labels(graph, emitted, small, "small")
    for name, lm in (("large", large), ("small", small)):
        if lm.num_states >= MOST_STATES:
            raise ValueError(f"{name} ({lm.name}) has {lm.num_states} states, expected fewer than {MOST_STATES}")
    merged = None
    if difference == "always" or (difference == "auto" and sum(large.counts) <= AUTO_NGRAMS):
        merged = difference_of(large, small)
        if merged is not None and not _agree(large, small, large_labels[emitted], small_labels[emitted]):
            merged = None
    if difference == "always" and merged is None:
        raise ValueError(
            f"difference is 'always', but small ({small.name}) has n-grams that large ({large.name}) "
            "has not, expected a part of it: set difference to 'auto' or 'never'"
        )
    return LmPair(
        large=(merged or large).arrays,
        small=small.arrays,
        is_difference=merged is not None,
        large_labels=large_labels,
        small_labels=small_labels,
        large_end=large.sentence_end,
        small_end=small.sentence_end,
        start=int(lm_of(large.start_state, 0 if merged is not None else small.start_state)),
    )


def _labels(graph: WordGraph, emitted: np.ndarray, lm: PackedLM, name: str) -> np.ndarray:
    """The LM's label of each emitted word of the graph; that of <unk> for words it does not list."""
    labels = np.full(len(graph.words), NO_LABEL, np.int64)
    labels[emitted] = [lm.label(graph.words[word]) for word in emitted.tolist()]
    unlisted = emitted[labels[emitted] == NO_LABEL]
    if len(unlisted):
        examples = ", ".join(repr(graph.words[i]) for i in unlisted[:3])
        raise ValueError(
            f"{name} ({lm.name}) has neither {len(unlisted)} words of the graph, such as {examples}, "
            "nor <unk>, expected an LM that can score all of them"
        )
    return labels


def _agree(large: PackedLM, small: PackedLM, large_labels: np.ndarray, small_labels: np.ndarray) -> bool:
    """Whether the small LM's label of each word is that of the large LM's label."""
    of_large = [small.label(large.words[label]) for label in large_labels.tolist()]
    return bool((np.array(of_large, np.int64) == small_labels).all())
