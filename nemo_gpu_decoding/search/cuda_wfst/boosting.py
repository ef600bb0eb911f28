"""Boosting words and phrases of words in a word graph, per utterance [CUDA-WFST].

A phrase list becomes an automaton over the graph's word labels, in the layout that all boosting has
(`fusion/automaton.py`); its state is part of the key of a search token. Single words need one state
only, so that they cost nothing more in the search. The bonus of a word is applied where the graph
tells the word, which is before pruning; it should stay below half the beam, or else it outweighs what
the search can compare.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.phrase_tree import ScoredSequence, build_phrase_automaton
from nemo_gpu_decoding.graph.csr import WordGraph

logger = logging.getLogger("nemo_gpu_decoding")


def build_word_boosting(
    phrases: Mapping[str, float], graph: WordGraph, *, missing: str = "error", name: str = "phrases"
) -> BackoffAutomaton:
    """The boosting automaton of words and phrases.

    Args:
        phrases: text -> bonus, natural log, > 0. A phrase earns its bonus whenever its words occur one
            after the other; each word earns an equal share, taken back if the phrase breaks off.
        graph: knows the words.
        missing: what to do about phrases with words that the graph does not have: "error", or "skip",
            which names them in a warning.

    Raises:
        ValueError: an empty phrase, a bonus that is not positive, a word that the graph does not have,
            or no phrase left.
    """
    if missing not in ("error", "skip"):
        raise ValueError(f"missing is {missing!r}, expected 'error' or 'skip'")
    sequences, left_out = [], []
    for phrase, bonus in phrases.items():
        words = phrase.split()
        if not words:
            raise ValueError("phrases has an empty phrase, expected at least one word")
        if not 0 < bonus < float("inf"):
            raise ValueError(f"the bonus of {phrase!r} is {bonus}, expected a finite number > 0")
        unknown = [word for word in words if word not in graph.word_ids]
        if unknown:
            left_out.append(f"{phrase!r} ({unknown[0]!r})")
            continue
        labels = [graph.word_ids[word] for word in words]
        shares = np.full(len(labels), bonus / len(labels))
        sequences.append(ScoredSequence(tokens=labels, scores=shares, context_score=bonus))
    if left_out and missing == "error":
        raise ValueError(f"{name}: the graph has not all words of {', '.join(left_out[:5])}")
    if left_out:
        logger.warning("%s: %d left out for words that the graph does not have: %s",
                       name, len(left_out), ", ".join(left_out[:5]))  # fmt: skip
    if not sequences:
        raise ValueError(f"{name} has no phrase that the graph could find")
    return _without_dead_ends(build_phrase_automaton(sequences, len(graph.words), name=name))


def _without_dead_ends(automaton: BackoffAutomaton) -> BackoffAutomaton:
    """The automaton whose arcs pass by states that can do nothing but back off, such as ends of phrases.

    They stay in the arrays, but no search gets there.
    """
    states, arcs = (array.copy() for array in automaton.arrays)
    suffix = states["backoff_to"]
    same_end = states["final_weight"] == states["backoff_weight"] + states["final_weight"][suffix]
    dead_end = (states["arc_begin"] == states["arc_end"]) & same_end
    while (leads_there := dead_end[arcs["target"]]).any():
        targets = arcs["target"][leads_there]
        arcs["weight"][leads_there] += states["backoff_weight"][targets]
        arcs["target"][leads_there] = suffix[targets]
    return BackoffAutomaton.from_arrays(
        vocab_size=automaton.vocab_size,
        start_state=automaton.start_state,
        **{f"arc_{end}": states[f"arc_{end}"] for end in ("begin", "end")},
        backoff_to=suffix,
        backoff_weights=states["backoff_weight"],
        final_weights=states["final_weight"],
        arc_labels=arcs["label"],
        arc_weights=arcs["weight"],
        arc_targets=arcs["target"],
        name=automaton.name,
    )
