"""The two LMs of paged_biglm: loading them, and their `LmPair` with the words of a graph (`scorer.py`)."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from nemo_gpu_decoding.cache import cached, file_key
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed import NO_LABEL, PackedLM
from nemo_gpu_decoding.lm.packed_file import is_packed_lm, load_packed_lm
from nemo_gpu_decoding.search.word_graph.large_lm.difference import difference_of
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import LmPair, lm_of

logger = logging.getLogger("nemo_gpu_decoding")

_WORTH_PACKING = 1 << 28  # bytes of an ARPA file that takes many seconds to read

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
    large_labels, small_labels = lm_labels(graph, large, "large"), lm_labels(graph, small, "small")
    for name, lm in (("large", large), ("small", small)):
        if lm.num_states >= MOST_STATES:
            raise ValueError(f"{name} ({lm.name}) has {lm.num_states} states, expected fewer than {MOST_STATES}")
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


def lm_labels(graph: WordGraph, lm: PackedLM, name: str) -> np.ndarray:
    """The LM's label of each word that a graph emits, [W] int64; that of <unk> for words it does not list.

    Raises:
        ValueError: a word is in neither the LM nor its <unk>; `name` is the argument to be named.
    """
    emitted = graph.output_words
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
    emitted = large_labels != NO_LABEL
    of_large = [small.label(large.words[label]) for label in large_labels[emitted].tolist()]
    return bool((np.array(of_large, np.int64) == small_labels[emitted]).all())


# ------------------------------------------------------------------------------------------ loading


def load_large_lm(path: Path) -> PackedLM:
    """The large LM: mapped if it is packed, else packed in memory.

    Raises:
        ValueError: the file is damaged, or no LM.
    """
    return cached(("large LM", file_key(path)), partial(_load_large, path))


def load_small_lm(path: Path, graph: WordGraph) -> PackedLM:
    """The LM that a graph was made of, with the words that were added to it for the graph.

    Raises:
        ValueError: the file is damaged, no LM, or packed without words that the graph has.
    """
    return cached(("small LM", file_key(path), graph.fingerprint), partial(_load_small, path, graph))


def _load_large(path: Path) -> PackedLM:
    if is_packed_lm(path):
        return load_packed_lm(path)
    if path.stat().st_size > _WORTH_PACKING:
        logger.warning(
            "`wfst.large_lm_path` is the ARPA file %s, which is read as a whole and kept in memory; "
            "what `nemo-gpu-decoding pack-lm` makes of it loads at once.",
            path,
        )
    return pack_arpa_in_memory(path)


def _load_small(path: Path, graph: WordGraph) -> PackedLM:
    words = _words_of(graph)
    if not is_packed_lm(path):
        # the graph's words that the file lacks were added by the same rule when the graph was built
        return pack_arpa_in_memory(path, added_words=words)
    lm = load_packed_lm(path)
    lacking = [word for word in words if word not in lm.word_ids]
    if lacking:
        raise ValueError(
            f"wfst.small_lm_path is {path}, which has not all words of the graph, such as "
            f"{', '.join(map(repr, lacking[:3]))}, expected the LM that the graph was made of; words "
            "that were added to the graph need the ARPA file"
        )
    return lm


def _words_of(graph: WordGraph) -> list[str]:
    """The words that the graph emits; what stands in <...> is no word."""
    words = [graph.words[label] for label in graph.output_words.tolist()]
    return [word for word in words if not (word.startswith("<") and word.endswith(">"))]
