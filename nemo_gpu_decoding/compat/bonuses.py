"""The bonuses of words as a boosting automaton over the labels of a word graph.

state 0          between words: every word has its bonus; <unk> leads to state 1
state 1          in an unknown word: its pieces cost nothing; its end, or that of the utterance, pays the penalty
other states     in an unknown word that begins like a hotword: each piece earns a part of the hotword's bonus,
                 which is taken back where the word goes on in another way
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns
from nemo_gpu_decoding.graph.csr import WordGraph

OUTSIDE, INSIDE = 0, 1
# Part of the penalty of an unknown word that its beginning pays, natural log; the rest is paid at its end, because
# hypotheses that paid all of it could not compete with words of the LM until the sound tells that it is none
MOST_ENTRY = 4.0
Arc = tuple[int, float, int]  # label, weight, target


def bonus_automaton(
    weights: np.ndarray, graph: WordGraph, penalty: float, hotwords: Mapping[tuple[int, ...], float]
) -> BackoffAutomaton:
    """The automaton of words and hotwords.

    Args:
        weights: [number of labels] bonus of each word, natural log; 0 for other labels.
        graph: with labels for the pieces of unknown words, or with a closed vocabulary.
        penalty: of an unknown word, <= 0.
        hotwords: bonus of unknown words, by the labels of their pieces.
    """
    arcs: list[list[Arc]] = [[(label, weight, OUTSIDE) for label, weight in enumerate(weights.tolist())]]
    backoffs, finals = [0.0], [0.0]
    if graph.pieces is not None:
        end = graph.pieces.end
        entry = max(penalty, -MOST_ENTRY)
        penalty -= entry
        arcs[OUTSIDE][graph.unknown] = (graph.unknown, float(weights[graph.unknown]) + entry, INSIDE)
        earned = _earned(hotwords)
        numbers = {prefix: INSIDE + n for n, prefix in enumerate(earned)}
        arcs += [[] for _ in numbers]
        for prefix, number in numbers.items():
            rest = hotwords.get(prefix, 0.0) - earned[prefix]
            if prefix:
                parent = prefix[:-1]
                arcs[numbers[parent]].append((prefix[-1], earned[prefix] - earned[parent], number))
            if prefix in hotwords or not prefix:
                arcs[number].append((end, penalty + rest, OUTSIDE))
            backoffs.append(-earned[prefix])
            finals.append(penalty + rest)
        begun = {label for label, _, _ in arcs[INSIDE]}
        arcs[INSIDE] += [(label, 0.0, INSIDE) for label in range(graph.pieces.first, end) if label not in begun]
    return _automaton([sorted(own) for own in arcs], backoffs, finals, len(weights))


def _earned(hotwords: Mapping[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    """The part of a bonus that each beginning of a hotword earns, the empty one first and parents before children."""
    earned: dict[tuple[int, ...], float] = {(): 0.0}
    for spelled, bonus in hotwords.items():
        for n in range(1, len(spelled) + 1):
            earned[spelled[:n]] = max(earned.get(spelled[:n], 0.0), bonus * n / len(spelled))
    return earned


def _automaton(arcs: list[list[Arc]], backoffs: list[float], finals: list[float], num_labels: int) -> BackoffAutomaton:
    """The automaton of the arcs of each state; states in a hotword back off to INSIDE, and that to OUTSIDE."""
    ends = np.cumsum([len(own) for own in arcs])
    labels, weights, targets = zip(*(arc for own in arcs for arc in own), strict=True)
    backoff_to = np.full(len(arcs), INSIDE)
    backoff_to[: INSIDE + 1] = OUTSIDE
    columns = Columns(
        arc_begin=np.append(0, ends[:-1]),
        arc_end=ends,
        backoff_to=backoff_to,
        backoff_weights=np.array(backoffs),
        final_weights=np.array(finals),
        arc_labels=np.array(labels),
        arc_weights=np.array(weights),
        arc_targets=np.array(targets),
    )
    return BackoffAutomaton.from_columns(columns, num_labels, OUTSIDE, "bonuses of words")
