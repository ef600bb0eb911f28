"""Boost words that an open-vocabulary graph lacks, per utterance, without building a new graph.

In an open-vocabulary graph <unk> is a loop: an epsilon arc with cost `word_cost` and olabel <unk>, a
beginning piece, further pieces with cost `piece_cost` each, and an epsilon arc back. `with_piece_labels`
adds olabels to the loop: one per piece, and </unk> on the arc back. With the pieces ▁a = 0 and b = 1 and
W words, "ab" in the loop writes

    <unk>    ▁a    b        </unk>
    unk      W     W + 1    W + 2

A word is now a sequence of olabels, like a phrase of words. The boosting automaton of an utterance
(`word_boosting.py`) matches it and refunds the cost of the loop. The word then has the same cost as in a
graph that was built with it: the LM's cost of <unk>, less its bonus. [CUDA-WFST] names this as future
work.

These labels have no text: `WordGraph.expanded` and LMs skip them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nemo_gpu_decoding.checks import FieldError, check_number
from nemo_gpu_decoding.graph.csr import GraphArrays, PieceLabels, WordGraph, arc_sources
from nemo_gpu_decoding.graph.lexicon import OpenVocabulary
from nemo_gpu_decoding.vocabulary import Vocabulary

WORD_COST, PIECE_COST = "unknown word cost", "unknown piece cost"  # in the report of a graph


def with_piece_labels(graph: WordGraph, costs: OpenVocabulary | None = None) -> WordGraph:
    """A graph with olabels on the pieces of <unk>; its arcs are copies, the other arrays are shared.

    Args:
        graph: with an open vocabulary.
        costs: of the open vocabulary; needed if the file of the graph does not have them.

    Raises:
        ValueError: the graph has no open vocabulary, or its costs are not known.
    """
    if graph.pieces is not None:
        return graph
    if not graph.unknown or graph.spellings is None:
        raise ValueError(f"graph ({graph.name}) has a closed vocabulary, expected one with an open vocabulary")
    if WORD_COST in graph.report:
        costs = OpenVocabulary(graph.report[WORD_COST], graph.report[PIECE_COST])
    if costs is None:
        raise FieldError("costs", None, f"the OpenVocabulary that the graph ({graph.name}) was built with")
    num_words, num_pieces = len(graph.words), graph.largest_label + 1
    labels = PieceLabels(num_words, num_words + num_pieces, costs.word_cost, costs.piece_cost)
    names = (f"<piece {token}>" for token in range(num_pieces))
    words = (*graph.words, *names, "</unk>")
    begins, inside = _loop(graph)
    states = graph.arrays.states
    arcs, epsilons, sequences = (array.copy() for array in graph.arrays[1:])
    for table in (arcs["olabel"], epsilons["olabel"], sequences):  # sequences are numbered after the words
        table[table >= num_words] += len(words) - num_words
    spells = (begins | inside)[arc_sources(states, "arc")]
    if arcs["olabel"][spells].any() or (inside[arcs["target"]] != spells).any():
        raise ValueError(f"graph ({graph.name}) has arcs between words and the pieces of <unk>, expected none")
    arcs["olabel"][spells] = labels.first + arcs["ilabel"][spells]
    more = {tuple(pair): len(words) + n for n, pair in enumerate(sequences.tolist())}
    leaving = np.flatnonzero(inside[arc_sources(states, "epsilon")])
    for olabel in np.unique(epsilons["olabel"][leaving]).tolist():
        own = leaving[epsilons["olabel"][leaving] == olabel]
        epsilons["olabel"][own] = _behind(labels.end, olabel, len(words), more)
    arrays = GraphArrays(states, arcs, epsilons, np.array(list(more), np.int32).reshape(-1, 2))
    return replace(graph, arrays=arrays, words=words, pieces=labels)


@dataclass(frozen=True)
class Speller:
    """Spells words that a graph `with_piece_labels` lacks, and computes their refunds."""

    vocabulary: Vocabulary
    # lm_weight / boosting_weight of the utterance: the first scales the graph's costs, the second the
    # refunds
    weight_ratio: float = 1.0

    def __post_init__(self) -> None:
        check_number("weight_ratio", self.weight_ratio)

    def spelled(self, word: str, graph: WordGraph) -> tuple[list[int], np.ndarray]:
        """The n olabels of a word in the loop of <unk>, and their costs, [n] natural log.

        Raises:
            ValueError: no piece covers some character, or the pieces are those of several words.
        """
        assert graph.pieces is not None
        assert graph.spellings is not None
        tokens, vocabulary = self.vocabulary.tokenize(word), self.vocabulary
        if vocabulary.space is not None:
            tokens = [vocabulary.space, *tokens]
        beginning = set(graph.spellings.beginning.tolist())
        if tokens[0] not in beginning or beginning & set(tokens[1:]):
            text = " ".join(repr(vocabulary.pieces[token]) for token in tokens)
            raise ValueError(f"the word {word!r} is spelled {text}, expected pieces of which the first begins a word")
        labels = [graph.unknown, *(graph.pieces.first + token for token in tokens), graph.pieces.end]
        costs = [graph.pieces.word_cost, *[graph.pieces.piece_cost] * len(tokens), 0.0]
        return labels, self.weight_ratio * np.array(costs)


def _loop(graph: WordGraph) -> tuple[np.ndarray, np.ndarray]:
    """Masks [S] of the states that read the first piece of an unknown word, and of those for other pieces."""
    states, arcs, epsilons, _ = graph.arrays
    into = [label for label in np.unique(epsilons["olabel"]).tolist() if graph.expanded(label)[-1:] == [graph.unknown]]
    begins, inside = np.zeros(len(states), bool), np.zeros(len(states), bool)
    begins[epsilons["target"][np.isin(epsilons["olabel"], into)]] = True
    from_states = arc_sources(states, "arc")
    while True:
        found = arcs["target"][(begins | inside)[from_states]]
        if inside[found].all():
            return begins, inside
        inside[found] = True


def _behind(first: int, olabel: int, num_words: int, sequences: dict[tuple[int, int], int]) -> int:
    """The label of the sequence of a word and an output label; adds new sequences."""
    if olabel == 0:
        return first
    if olabel >= num_words:  # sequences grow from the left
        pair = next(pair for pair, label in sequences.items() if label == olabel)
        first, olabel = _behind(first, pair[0], num_words, sequences), pair[1]
    return sequences.setdefault((first, olabel), num_words + len(sequences))
