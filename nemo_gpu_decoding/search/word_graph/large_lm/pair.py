"""Load the two LMs of paged_biglm, and build their `LmPair` (`scorer.py`) for the words of a graph.

**Difference automaton** of the large and the small LM: a search needs one state and one look-up instead of two. The
large LM must contain all n-grams of the small LM, for example because the small LM was pruned from it. Then a state h
of the large LM determines the small LM's state s(h): the longest suffix of its context that the small LM knows. If h
has no arc for a word, s(h) has none either, unless s(h) has a shorter context. So both LMs back off together:

    arc w of h           cost_large(w | h) - cost_small(w | s(h))
    back-off of h        B_large(h) - B_small(s(h))    if s(h) backs off, too
                         B_large(h)                    if the back-off state of h has the same small state

The automaton has the states and arcs of the large LM. Only the costs differ; they are float32.
"""

import logging
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from nemo_gpu_decoding.cache import cached, file_key
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.lm import packed
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import CONTEXT_BOUNDS, LmPair, context_bounds, lm_of

logger = logging.getLogger("nemo_gpu_decoding")

_WORTH_PACKING = 1 << 28  # bytes; a larger ARPA file takes many seconds to read

MOST_STATES = 1 << 31  # of an LM: a state takes half of an int64, see `lm_of`
AUTO_NGRAMS = 10_000_000  # with difference "auto", a larger LM gets no difference automaton

# Pairs by graph, large LM, small LM and option. An entry goes when its graph or one of its LMs is deleted.
_ready: WeakKeyDictionary[WordGraph, WeakKeyDictionary] = WeakKeyDictionary()
_lock = threading.Lock()


def shared_lm_pair(graph: WordGraph, large: packed.PackedLM, small: packed.PackedLM, difference: str) -> LmPair:
    """Return the result of `make_lm_pair`, shared by decoders with the same graph, LMs and option."""
    with _lock:  # held while a pair is built: another caller most likely needs the same pair
        of_graph = _ready.setdefault(graph, WeakKeyDictionary())
        ready = of_graph.setdefault(large, WeakKeyDictionary()).setdefault(small, {})
        if difference not in ready:
            ready[difference] = make_lm_pair(graph, large, small, difference)
        return ready[difference]


def make_lm_pair(graph: WordGraph, large: packed.PackedLM, small: packed.PackedLM, difference: str) -> LmPair:
    """Map the words of the graph to labels of both LMs, and build the difference automaton if `difference` allows.

    Args:
        difference: "auto", "always" or "never", see `PagedBigLMConfig`.

    Raises:
        ValueError: an LM lists neither a word of the graph nor <unk>; an LM has too many states;
            `difference` is "always" but the large LM lacks n-grams of the small LM.
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
        bounds=np.empty(0, CONTEXT_BOUNDS) if merged is None else context_bounds(merged.arrays),
    )


def lm_labels(graph: WordGraph, lm: packed.PackedLM, name: str) -> np.ndarray:
    """Return the LM's label of each word of a graph; `name` is the LM's name in the error message.

    Returns:
        [W] int64: the label of <unk> for words that the LM does not list; NO_LABEL for words that the graph
        does not emit.

    Raises:
        ValueError: the LM lists neither a word that the graph emits nor <unk>.
    """
    emitted = graph.output_words
    labels = np.full(len(graph.words), packed.NO_LABEL, np.int64)
    labels[emitted] = [lm.label(graph.words[word]) for word in emitted.tolist()]
    unlisted = emitted[labels[emitted] == packed.NO_LABEL]
    if len(unlisted):
        examples = ", ".join(repr(graph.words[i]) for i in unlisted[:3])
        raise ValueError(
            f"{name} ({lm.name}) has neither {len(unlisted)} words of the graph, such as {examples}, "
            "nor <unk>, expected an LM that can score all of them"
        )
    return labels


def with_more_words(lms: LmPair, graph: WordGraph, large: packed.PackedLM, small: packed.PackedLM) -> LmPair:
    """Return a pair with the labels of the words of `with_new_words(graph)`; both LMs score the new words as <unk>."""
    of_lms = []
    known_labels = (lms.large_labels, lms.small_labels)
    for known, unknown in zip(known_labels, labels_of_unknown(graph, large, small), strict=True):
        labels = np.full(len(graph.words), packed.NO_LABEL, np.int64)
        labels[: len(known)], labels[graph.unknown] = known, unknown
        of_lms.append(labels)
    return lms._replace(large_labels=of_lms[0], small_labels=of_lms[1])


def labels_of_unknown(graph: WordGraph, large: packed.PackedLM, small: packed.PackedLM) -> list[int]:
    """Return the labels of <unk> in both LMs; raise a ValueError if an LM has no <unk>."""
    labels = []
    for name, lm in (("large", large), ("small", small)):
        labels.append(lm.label(graph.words[graph.unknown]))
        if labels[-1] == packed.NO_LABEL:
            raise ValueError(f"{name} ({lm.name}) has no <unk>, expected one for words that the graph lacks")
    return labels


def _agree(large: packed.PackedLM, small: packed.PackedLM, large_labels: np.ndarray, small_labels: np.ndarray) -> bool:
    """Return whether each word has the same label in the small LM directly and by way of its word in the large LM."""
    emitted = large_labels != packed.NO_LABEL
    of_large = [small.label(large.words[label]) for label in large_labels[emitted].tolist()]
    return bool((np.array(of_large, np.int64) == small_labels[emitted]).all())


# ------------------------------------------------------------------------------------------ loading


def load_large_lm(path: Path) -> packed.PackedLM:
    """Load the large LM. A packed file is memory-mapped; an ARPA file is packed in memory.

    Raises:
        ValueError: the file is damaged or contains no LM.
    """
    return cached(("large LM", file_key(path)), partial(_load_large, path))


def load_small_lm(path: Path, graph: WordGraph) -> packed.PackedLM:
    """Load the LM that a graph was built from, with the words that the graph build added to it.

    Raises:
        ValueError: the file is damaged, contains no LM, or is packed and lacks words of the graph.
    """
    return cached(("small LM", file_key(path), graph.fingerprint), partial(_load_small, path, graph))


def _load_large(path: Path) -> packed.PackedLM:
    if packed.is_packed_lm(path):
        return packed.load_packed_lm(path)
    if path.stat().st_size > _WORTH_PACKING:
        logger.warning(
            "`wfst.large_lm_path` is the ARPA file %s, which is read as a whole and kept in memory; "
            "what `nemo-gpu-decoding pack-lm` makes of it loads at once.",
            path,
        )
    return pack_arpa_in_memory(path)


def _load_small(path: Path, graph: WordGraph) -> packed.PackedLM:
    words = _words_of(graph)
    if not packed.is_packed_lm(path):
        # The graph build added words that the file lacks by the same rule.
        return pack_arpa_in_memory(path, added_words=words)
    lm = packed.load_packed_lm(path)
    lacking = [word for word in words if word not in lm.word_ids]
    if lacking:
        raise ValueError(
            f"wfst.small_lm_path is {path}, which has not all words of the graph, such as "
            f"{', '.join(map(repr, lacking[:3]))}, expected the LM that the graph was made of; words "
            "that were added to the graph need the ARPA file"
        )
    return lm


def _words_of(graph: WordGraph) -> list[str]:
    """Return the words that the graph emits, without symbols in angle brackets."""
    words = [graph.words[label] for label in graph.output_words.tolist()]
    return [word for word in words if not (word.startswith("<") and word.endswith(">"))]


# ------------------------------------------------------------------------------ difference automaton


_CHUNK = 1 << 20  # arcs that are packed at a time


def difference_of(large: packed.PackedLM, small: packed.PackedLM) -> packed.PackedLM | None:
    """Subtract the small LM's costs from the large LM's; the small LM scores words that it does not list as <unk>.

    Returns:
        the difference automaton, or None if the small LM is no subset of the large LM, or an LM has no </s>.
    """
    if packed.NO_LABEL in (large.sentence_end, small.sentence_end):
        return None
    if not set(small.words) <= set(large.words):
        return None
    labels = np.array([small.label(word) for word in large.words], np.int64)
    back = np.array([large.word_ids[word] for word in small.words], np.int64)
    small_states = np.full(large.num_states, -1, np.int64)
    if not _follow(large.arrays, small.arrays, labels, small_states):
        return None
    if small_states[large.start_state] != small.start_state:
        return None
    states = large.arrays.states.copy()
    if not _subtract_backoffs(large.arrays, small.arrays, back, small_states, states):
        return None
    bits = large.arrays.target_bits + packed.COST_BITS
    arcs = np.zeros(packed.num_words(large.num_arcs, bits), np.uint64)
    counts = np.diff(states["arc_begin"].astype(np.int64)).astype(np.int64)
    sources = np.repeat(np.arange(large.num_states), counts)
    for first in range(0, large.num_arcs, _CHUNK):
        values = np.empty(min(_CHUNK, large.num_arcs - first), np.uint64)
        of_chunk = small_states[sources[first : first + len(values)]]
        _subtract_arcs(large.arrays, small.arrays, labels, of_chunk, first, values)
        packed.write_bits(arcs, bits, first, values)
    arrays = large.arrays._replace(states=states, arcs=arcs)
    return replace(large, arrays=arrays, name=f"{large.name} minus {small.name}")


@compiled
def _next_small(small, state, label):
    """Return the small LM's state after a label; the root after NO_LABEL, a word that the small LM cannot score."""
    if label == packed.NO_LABEL:
        return np.int64(packed.ROOT)
    _, target = packed.lookup(small, state, label)
    return target


@compiled
def _follow(large, small, labels, small_states):
    """Fill `small_states` [states of the large LM] with the small LM's state of each large state.

    Returns:
        False if paths to a state give it two small states, or if no path leads to a state.
    """
    small_states[packed.ROOT] = packed.ROOT
    pending, count = np.empty(len(small_states), np.int64), 1
    pending[0] = packed.ROOT
    done = 0
    while done < count:
        state = pending[done]
        done += 1
        first = np.int64(large.states[state].arc_begin)
        for arc in range(first, np.int64(large.states[state + 1].arc_begin)):
            _, target = packed.arc_cost_and_target(large, arc)
            label = labels[packed.arc_label(large, arc)]
            small_state = _next_small(small, small_states[state], label)
            if small_states[target] == -1:
                small_states[target] = small_state
                pending[count] = target
                count += 1
            elif small_states[target] != small_state:
                return False
    return count == len(small_states)


@compiled
def _subtract_backoffs(large, small, large_labels, small_states, states):
    """Subtract the small LM's back-off costs in `states`; return False if the LMs do not back off together."""
    for state in range(1, len(small_states)):
        small_state = small_states[state]
        shorter = small_states[np.int64(large.states[state].backoff_to)]
        if small_state == shorter:
            continue
        if np.int64(small.states[small_state].backoff_to) != shorter:
            return False
        first = np.int64(small.states[small_state].arc_begin)
        for arc in range(first, np.int64(small.states[small_state + 1].arc_begin)):
            if packed.find_arc(large, state, large_labels[packed.arc_label(small, arc)]) < 0:
                return False
        states[state].backoff_cost -= small.states[small_state].backoff_cost
    return True


@compiled
def _subtract_arcs(large, small, labels, small_states, first, values):
    """Pack the arcs from `first` on, with the differences as costs.

    Args:
        small_states: [n] int64, the small LM's state of the source of each arc.
        values: [n] uint64, output; an arc's target in the low `target_bits`, its float32 cost above them.
    """
    buffer = np.empty(1, np.float32)
    as_bits = buffer.view(np.uint32)
    for n in range(len(values)):
        cost, target = packed.arc_cost_and_target(large, first + n)
        label = labels[packed.arc_label(large, first + n)]
        if label != packed.NO_LABEL:
            small_cost, _ = packed.lookup(small, small_states[n], label)
            cost -= small_cost
        buffer[0] = cost
        values[n] = np.uint64(target) | (np.uint64(as_bits[0]) << np.uint64(large.target_bits))
