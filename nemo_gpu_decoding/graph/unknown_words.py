"""Let requests boost words that the graph lacks, without building a new graph.

In an open-vocabulary graph <unk> is a loop: an epsilon arc with cost `word_cost` and output label (olabel) <unk>, a
beginning piece, further pieces with cost `piece_cost` each, and an epsilon arc back. `with_piece_labels`
adds olabels to the loop: one per piece, and </unk> on the arc back. With the pieces ▁a = 0 and b = 1 and
W words, "ab" in the loop writes

    <unk>    ▁a    b        </unk>
    unk      W     W + 1    W + 2

An unknown word is then a sequence of olabels, like a phrase of words. The boosting automaton of an utterance
(`word_boosting.py`) matches this sequence and refunds the cost of the loop. The word then costs as much as in a graph
that was built with the word: the LM's cost of <unk>, minus the word's bonus. [CUDA-WFST] names this as future work.

A graph with a closed vocabulary gets the loop by `with_new_words` when the first request needs it. The graph's file
has the states where the loop begins (`Entrance`). States, arcs and closure arcs of the graph keep their numbers, and
the loop's follow. Only the ranges of closure arcs of states differ, so both graphs share the other arrays on a GPU.
The search of an utterance without new words reads the graph without the loop: it visits no arc of the loop, and no
result changes. A new word costs as much as an added word (`lm/arpa.py`).

Labels of pieces have no text: `WordGraph.expanded` and LMs skip them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.graph import csr
from nemo_gpu_decoding.graph.grammar import Grammar
from nemo_gpu_decoding.graph.lexicon import OpenVocabulary
from nemo_gpu_decoding.jit import read_only
from nemo_gpu_decoding.schema import checked_options, option
from nemo_gpu_decoding.vocabulary import Vocabulary

WORD_COST, PIECE_COST = "unknown word cost", "unknown piece cost"  # keys of a graph's report
NEW_WORDS = "new words"  # key of the `Entrance` in the report


class Entrance(NamedTuple):
    """The states in which the words of a request enter a graph with a closed vocabulary."""

    state: int  # the graph state with an empty LM context
    cost: float  # of an added word in that state, natural log
    tokens: int  # number of tokens of the model

    @classmethod
    def of(cls, graph: csr.WordGraph, grammar: Grammar, vocab_size: int) -> Entrance:
        states, _, epsilons, _ = graph.arrays
        start = states[graph.start]
        of_start = epsilons[start["epsilon_begin"] : start["epsilon_end"]]
        backed_off = of_start["target"][of_start["olabel"] == 0]  # <s> backs off to no context
        return cls(int(backed_off[0]) if len(backed_off) else graph.start, grammar.cost_of_added_word, vocab_size)


def with_new_words(graph: csr.WordGraph) -> csr.WordGraph:
    """Return a graph with the loop of <unk> beside its words, for the requests of some utterances.

    Args:
        graph: a graph with a closed vocabulary, from `build_graph` or one of its files.

    Raises:
        ValueError: the graph does not say where new words begin.
    """
    if num_opened_labels(graph) == 0:
        raise ValueError(
            f"graph ({graph.name}) does not say where words that it lacks begin: build it anew, with build-graph or "
            "build_graph, or with wfst.open_vocabulary_decoding"
        )
    entrance, costs = Entrance(**graph.report[NEW_WORDS]), OpenVocabulary()  # the requests refund the costs
    unknown = len(graph.words)
    words, labels = _with_pieces((*graph.words, "<unk>"), entrance.tokens, costs.word_cost, costs.piece_cost)
    loop, spelling = _new_loop(graph, entrance, labels)
    states = np.append(graph.arrays.states, loop)
    shut = read_only(states.copy())
    epsilons, sequences = _with_entrances(graph, entrance, labels, states)
    arrays = csr.GraphArrays(states, np.append(graph.arrays.arcs, spelling), epsilons, sequences)
    return replace(graph, arrays=arrays, words=words, unknown=unknown, pieces=labels, shut=shut)


def _with_pieces(words: Sequence[str], count: int, *costs: float) -> tuple[tuple[str, ...], csr.PieceLabels]:
    """Return the words, followed by a name for each piece and one for the end, and their labels."""
    names = (f"<piece {token}>" for token in range(count))
    return (*words, *names, "</unk>"), csr.PieceLabels(len(words), len(words) + count, *costs)


def _new_loop(graph: csr.WordGraph, entrance: Entrance, labels: csr.PieceLabels) -> tuple[np.ndarray, np.ndarray]:
    """Return the two states of the loop, without closure arcs, and their arcs, which read first and later pieces."""
    assert graph.spellings is not None
    first, begins = len(graph.arrays.arcs), len(graph.arrays.states)
    beginning = np.unique(graph.spellings.beginning)
    arcs, loop = np.zeros(entrance.tokens, csr.GRAPH_ARC), np.zeros(2, csr.GRAPH_STATE)
    arcs["ilabel"] = np.append(beginning, np.setdiff1d(np.arange(entrance.tokens), beginning))
    arcs["olabel"] = labels.first + arcs["ilabel"]
    arcs["cost"], arcs["target"] = labels.piece_cost, begins + 1
    loop["arc_begin"] = first, first + len(beginning)
    loop["arc_end"] = first + len(beginning), first + entrance.tokens
    loop["final_cost"], loop["least_cost"] = csr.INFINITE, labels.piece_cost
    return loop, arcs


def _with_entrances(
    graph: csr.WordGraph, entrance: Entrance, labels: csr.PieceLabels, states: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the closure arcs of the graph, then closure arcs of all states from which the loop is entered or left.

    Args:
        states: [S + 2], with the loop; output: the new ranges of closure arcs.

    Returns:
        [E] EPSILON; [C, 2] int32, the word sequences.
    """
    epsilons, begins, num_words = graph.arrays.epsilons, len(states) - 2, labels.end + 1
    sources, unknown = csr.arc_sources(graph.arrays.states, "epsilon"), labels.first - 1
    leads, sequences = np.flatnonzero(epsilons["target"] == entrance.state), dict[tuple[int, int], int]()
    entering = np.zeros(len(leads) + 1, csr.EPSILON)  # after the closure arcs into the state, and those out of it
    entering[:-1] = epsilons[leads]
    before, number = np.unique(entering["olabel"], return_inverse=True)
    behind = [_behind(olabel, unknown, num_words, sequences) if olabel else unknown for olabel in before.tolist()]
    entering["olabel"] = np.array(behind)[number]
    entering["cost"] += np.float32(entrance.cost + labels.word_cost)
    entering["target"], entering["least_cost"] = begins, labels.piece_cost
    into = np.append(sources[leads], entrance.state)
    opened, added = np.unique(into, return_counts=True)
    kept = np.isin(sources, opened)
    table = np.append(epsilons[kept], entering)[np.argsort(np.append(sources[kept], into), kind="stable")]
    sizes = states["epsilon_end"][opened] - states["epsilon_begin"][opened] + added
    ends = len(epsilons) + np.cumsum(sizes)
    states["epsilon_begin"][opened], states["epsilon_end"][opened] = ends - sizes, ends
    table = np.append(epsilons, table)
    at = states[entrance.state]
    leaving = np.append(np.zeros(1, csr.EPSILON), table[at["epsilon_begin"] : at["epsilon_end"]])
    leaving["target"][0], leaving["least_cost"][0] = entrance.state, at["least_cost"]
    for n, olabel in enumerate(leaving["olabel"].tolist()):
        leaving["olabel"][n] = _behind(labels.end, olabel, num_words, sequences)
    states["epsilon_begin"][-1], states["epsilon_end"][-1] = len(table), len(table) + len(leaving)
    return np.append(table, leaving), np.array(list(sequences), np.int32).reshape(-1, 2)


def num_opened_labels(graph: csr.WordGraph) -> int:
    """Return the number of labels, without word sequences, of `with_new_words(graph)`; 0: it takes no new words."""
    known = graph.spellings is not None and len(graph.spellings.beginning) > 0
    if graph.unknown or not known or NEW_WORDS not in graph.report or len(graph.arrays.word_sequences):
        return 0
    return len(graph.words) + Entrance(**graph.report[NEW_WORDS]).tokens + 2


def with_piece_labels(graph: csr.WordGraph) -> csr.WordGraph:
    """Return a graph with olabels on the pieces of <unk>; its arcs are copies, the other arrays are shared.

    Args:
        graph: a graph with an open vocabulary, from `build_graph` or one of its files.

    Raises:
        ValueError: the graph was built without an open vocabulary.
    """
    if graph.pieces is not None:
        return graph
    if not graph.unknown or graph.spellings is None or WORD_COST not in graph.report:
        raise ValueError(f"graph ({graph.name}) was built without an open vocabulary, expected one with it")
    num_words, num_pieces = len(graph.words), graph.largest_label + 1
    words, labels = _with_pieces(graph.words, num_pieces, graph.report[WORD_COST], graph.report[PIECE_COST])
    begins, inside = spelling_states(graph)
    states = graph.arrays.states
    arcs, epsilons, sequences = (array.copy() for array in graph.arrays[1:])
    for table in (arcs["olabel"], epsilons["olabel"], sequences):  # sequences are numbered after the words
        table[table >= num_words] += len(words) - num_words
    spells = (begins | inside)[csr.arc_sources(states, "arc")]
    if arcs["olabel"][spells].any() or (inside[arcs["target"]] != spells).any():
        raise ValueError(f"graph ({graph.name}) has arcs between words and the pieces of <unk>, expected none")
    arcs["olabel"][spells] = labels.first + arcs["ilabel"][spells]
    more = {tuple(pair): len(words) + n for n, pair in enumerate(sequences.tolist())}
    leaving = np.flatnonzero(inside[csr.arc_sources(states, "epsilon")])
    for olabel in np.unique(epsilons["olabel"][leaving]).tolist():
        same = leaving[epsilons["olabel"][leaving] == olabel]
        epsilons["olabel"][same] = _behind(labels.end, olabel, len(words), more)
    arrays = csr.GraphArrays(states, arcs, epsilons, np.array(list(more), np.int32).reshape(-1, 2))
    return replace(graph, arrays=arrays, words=words, pieces=labels)


@checked_options
@dataclass(frozen=True)
class Speller:
    """An object that spells words which a graph `with_piece_labels` lacks, and computes their refunds."""

    vocabulary: Vocabulary
    # lm_weight / boosting_weight of the utterance: the first scales the graph's costs, the second the
    # refunds
    weight_ratio: float = option(1.0, low=0)

    def spelled(self, word: str, graph: csr.WordGraph) -> tuple[list[int], np.ndarray]:
        """Return the n olabels of a word in the loop of <unk>, and their costs, [n] natural log.

        Raises:
            ValueError: no piece covers a character of the word, or the pieces spell several words.
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


def spelling_states(graph: csr.WordGraph) -> tuple[np.ndarray, np.ndarray]:
    """Return two masks [S]: states that read the first piece of an unknown word, and states that read later pieces."""
    states, arcs, epsilons, _ = graph.arrays
    into = [label for label in np.unique(epsilons["olabel"]).tolist() if graph.expanded(label)[-1:] == [graph.unknown]]
    begins, inside = np.zeros(len(states), bool), np.zeros(len(states), bool)
    begins[epsilons["target"][np.isin(epsilons["olabel"], into)]] = True
    from_states = csr.arc_sources(states, "arc")
    while True:
        targets = arcs["target"][(begins | inside)[from_states]]
        if inside[targets].all():
            return begins, inside
        inside[targets] = True


def _behind(first: int, olabel: int, num_words: int, sequences: dict[tuple[int, int], int]) -> int:
    """Return the label of the sequence "a word, then an output label"; add a new sequence if needed."""
    if olabel == 0:
        return first
    if olabel >= num_words:  # sequences grow from the left
        pair = next(pair for pair, label in sequences.items() if label == olabel)
        first, olabel = _behind(first, pair[0], num_words, sequences), pair[1]
    return sequences.setdefault((first, olabel), num_words + len(sequences))
