"""Pay the bonuses of words by the costs of a word graph or, with hotwords, by an automaton over its labels.

The search of a graph that contains them needs no automaton, and its lower bounds are tighter. The automaton is

state 0          between words: every word has its bonus; <unk> leads to state 1
state 1          before the first piece of an unknown word, which pays a part of the penalty
state 2          after it; further pieces cost nothing, and the end pays the rest
other states     in an unknown word that begins like a hotword: as in pyctcdecode, the penalty is due at its end only,
                 and each piece earns a part of the bonus; where the word goes on in another way, both are settled

Unknown words that paid at their ends would displace words of the LM from the beam, and lose against them later.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from nemo_gpu_decoding.compat.alphabet import Alphabet, spellings
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns
from nemo_gpu_decoding.graph.csr import INFINITE, GraphArrays, WordGraph, arc_sources
from nemo_gpu_decoding.graph.unknown_words import spelling_states

OUTSIDE, ENTERED, INSIDE = 0, 1, 2
# What an unknown word pays at first, natural log. It is less than the default beam, because an unknown word that
# begins like one of the LM must stay in the beam until the sound tells them apart.
MOST_ENTRY = 8.0
Arc = tuple[int, float, int]  # label, weight, target
Hotwords = Mapping[tuple[int, ...], float]  # the tokens of a word -> its bonus


def bonus_automaton(
    weights: np.ndarray, graph: WordGraph, penalty: float, alphabet: Alphabet, hotwords: Hotwords
) -> BackoffAutomaton:
    """Return the automaton of words and hotwords.

    Args:
        weights: [number of labels] bonus of each word, natural log; 0 for other labels.
        graph: a graph with labels for the pieces of unknown words, or with a closed vocabulary.
        penalty: cost of an unknown word, <= 0.
        hotwords: unknown words.
    """
    arcs: list[list[Arc]] = [[(label, weight, OUTSIDE) for label, weight in enumerate(weights.tolist())]]
    backoff_to, backoffs, finals = [OUTSIDE], [0.0], [0.0]
    if graph.pieces is not None:
        end, pieces = graph.pieces.end, range(graph.pieces.first, graph.pieces.end)
        arcs[OUTSIDE][graph.unknown] = (graph.unknown, float(weights[graph.unknown]), ENTERED)
        earned = _earned(alphabet, hotwords)
        numbers = {(): ENTERED} | {prefix: INSIDE + n for n, prefix in enumerate(earned, 1)}
        arcs += [[] for _ in range(INSIDE + len(earned))]
        entry = max(penalty, -MOST_ENTRY)
        arcs[INSIDE] = [(label, 0.0, INSIDE) for label in pieces] + [(end, penalty - entry, OUTSIDE)]
        backoff_to += [OUTSIDE, OUTSIDE] + [INSIDE] * len(earned)
        backoffs += [0.0, 0.0]
        finals += [0.0, penalty - entry]
        for prefix, value in earned.items():
            number, due = numbers[prefix], penalty + hotwords.get(prefix, 0.0) - value
            label, before = graph.pieces.first + prefix[-1], earned.get(prefix[:-1], 0.0)
            arcs[numbers[prefix[:-1]]].append((label, value - before, number))
            arcs[number].append((end, due, OUTSIDE))
            backoffs.append(entry - value)
            finals.append(due)
        begun = {label for label, _, _ in arcs[ENTERED]}
        arcs[ENTERED] += [(label, entry, INSIDE) for label in pieces if label not in begun]
    return _automaton(arcs, backoff_to, backoffs, finals, len(weights))


def weighted_graph(graph: WordGraph, weights: np.ndarray, penalty: float, alpha: float) -> WordGraph:
    """Return a graph whose costs contain the bonuses; alpha is the factor of the LM's costs, the rest is as above."""
    states, arcs, epsilons, sequences = (array.copy() for array in graph.arrays)
    bonuses, entry = np.append(weights, np.zeros(len(sequences))), max(penalty, -MOST_ENTRY)
    begins, inside = np.zeros((2, len(states)), bool)
    if graph.pieces is not None:
        bonuses[graph.pieces.end] = penalty - entry
        begins, inside = spelling_states(graph)
    for n, (first, second) in enumerate(sequences.tolist(), len(weights)):  # of labels before their own
        bonuses[n] = bonuses[first] + bonuses[second]
    sources, ends = arc_sources(states, "arc"), states["final_cost"] < INFINITE
    arcs["cost"] = alpha * arcs["cost"] - bonuses[arcs["olabel"]] - entry * begins[sources]
    epsilons["cost"] = alpha * epsilons["cost"] - bonuses[epsilons["olabel"]]
    states["final_cost"][ends] = alpha * states["final_cost"][ends] - (penalty - entry) * inside[ends]
    states["least_cost"] = INFINITE
    np.minimum.at(states["least_cost"], sources, arcs["cost"])
    epsilons["least_cost"] = states["least_cost"][epsilons["target"]]
    return replace(graph, arrays=GraphArrays(states, arcs, epsilons, sequences))


def _earned(alphabet: Alphabet, hotwords: Hotwords) -> dict[tuple[int, ...], float]:
    """Return the part of a bonus that each beginning of a hotword earns, by its characters; parents come first."""
    earned: dict[tuple[int, ...], float] = {}
    for spelled, bonus in hotwords.items():
        lengths = np.cumsum([alphabet.lengths[token] for token in spelled]).tolist()
        for n, length in enumerate(lengths, 1):
            earned[spelled[:n]] = max(earned.get(spelled[:n], 0.0), bonus * length / lengths[-1])
    return earned


def _automaton(
    arcs: list[list[Arc]], backoff_to: list[int], backoffs: list[float], finals: list[float], num_labels: int
) -> BackoffAutomaton:
    """Return the automaton of the arcs of each state."""
    arcs = [sorted(arcs_of_state) for arcs_of_state in arcs]
    ends = np.cumsum(list(map(len, arcs)))
    labels, weights, targets = zip(*itertools.chain.from_iterable(arcs), strict=True)
    columns = Columns(
        arc_begin=np.append(0, ends[:-1]),
        arc_end=ends,
        backoff_to=np.array(backoff_to),
        backoff_weights=np.array(backoffs),
        final_weights=np.array(finals),
        arc_labels=np.array(labels),
        arc_weights=np.array(weights),
        arc_targets=np.array(targets),
    )
    return BackoffAutomaton.from_columns(columns, num_labels, OUTSIDE, "bonuses of words")


@lru_cache(maxsize=8)
def hotword_automaton(alphabet: Alphabet, words: frozenset[tuple[str, float]]) -> BackoffAutomaton:
    """Return the automaton of hotwords over tokens, for the search without an LM; `words`: with their bonuses.

    state 0          between words
    state 1          in a word that does not begin like a hotword
    next states      after a hotword, one for each bonus: a token that does not begin a word takes the bonus back
    other states     in a hotword
    """
    hotwords = {tokens: bonus for word, bonus in words for tokens in spellings(alphabet, word)}
    earned, bonuses, count = _earned(alphabet, hotwords), sorted(set(hotwords.values())), len(alphabet.pieces)
    numbers = {prefix: n for n, prefix in enumerate(earned, 2 + len(bonuses))}
    first = {prefix[0]: (value, numbers[prefix]) for prefix, value in earned.items() if len(prefix) == 1}
    inside = [token for token in range(count) if not alphabet.breaks(token)]
    between = {token: first.get(token, (0.0, int(token != alphabet.separator))) for token in range(count)}
    arcs = [[(token, *step) for token, step in between.items()], [(token, 0.0, 1) for token in inside]]
    arcs += [[(token, -bonus, 1) for token in inside] for bonus in bonuses]
    arcs += [[] for _ in earned]
    backoff_to, due = [0] * (2 + len(bonuses)), [0.0] * (2 + len(bonuses))
    for prefix, value in earned.items():
        if len(prefix) > 1:
            arcs[numbers[prefix[:-1]]].append((prefix[-1], value - earned[prefix[:-1]], numbers[prefix]))
        backoff_to.append(2 + bonuses.index(hotwords[prefix]) if prefix in hotwords else 1)
        due.append(hotwords.get(prefix, 0.0) - value)
    return _automaton(arcs, backoff_to, due, due, count)
