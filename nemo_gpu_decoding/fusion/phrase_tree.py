"""From scored token sequences to a boosting tree: a prefix tree with failure links and weights.

What a text earns (refund "full")
    A phrase occurs wherever its tokens do, overlapping and nested occurrences included; of the phrases
    that begin at the same token only the one with the largest bonus counts. The bonuses of all
    occurrences add up. Nothing else is left at the end of an utterance: the bonus does not depend on
    what the other phrases look like or on how far an unfinished phrase got.

How it is paid out
    A phrase must be helped before it is complete, so the tokens of an unfinished one are paid in
    advance. For a node t of the tree, with parent p and failure link f (its longest proper suffix):

        committed(t) = largest bonus of a phrase that is a prefix of t (or t)
        advance(t)   = largest partial sum of a phrase through t, less committed(t); at least 0
        earned(t)    = committed(t) - committed(p) + earned(f)     phrases that end with t
        arc p -> t     earned(t) + advance(t) - advance(p)
        back-off t->f  advance(f) - advance(t)
        final t        -advance(t)

    The advances cancel along every path, whatever is read; only what was earned remains.

An example, token bonuses 1 each, phrases "a b" and "b c" and "a b c d" (committed in brackets):

    text "a b x":   a +1   b +1 [2]   x: the advance is 0, "a b" is kept             total 2
    text "a b c x": c +3: 1 in advance for "a b c d", 2 for "b c"; x takes back 1    total 4
    text "a":       +1, final weight -1                                              total 0

NeMo's boosting tree (refund "nemo", `GPUBoostingTreeModel`, TurboBias arXiv 2508.07014, after
Icefall's context graph) differs: an utterance that ends inside a phrase keeps the advance; leaving a
longer phrase takes back a completed prefix of it as well; leaving a completed phrase towards a suffix
pays no advance there but takes one back later; and when two phrases share tokens, the second may
raise a shared node without raising what hangs below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.prefix_tree import ROOT, PrefixTree


@dataclass(frozen=True)
class ScoredSequence:
    """One way to spell a phrase in tokens, with the bonus of each token (natural log)."""

    tokens: Sequence[int]
    scores: np.ndarray  # [len(tokens)] float64; their sum is the bonus of the phrase
    context_score: float  # bonus of a token before depth scaling, which NeMo compares at shared nodes


@dataclass(frozen=True)
class _NodeWeights:
    """Per node; entry 0 belongs to the root and has no arc."""

    arcs: np.ndarray  # weight of the arc that leads to the node
    backoffs: np.ndarray
    finals: np.ndarray


def token_scores(length: int, context_score: float, depth_scaling: float, uniform: bool) -> np.ndarray:
    """NeMo's bonus of each token of a phrase: later tokens are surer, hence worth more. [length]"""
    scores = np.full(length, context_score, np.float64)
    if not uniform:
        scores[1:] = context_score * depth_scaling + np.log(np.arange(2, length + 1))
    return scores


def build_phrase_automaton(
    sequences: Sequence[ScoredSequence],
    vocab_size: int,
    *,
    unk_score: float = 0.0,
    refund: str = "full",
    uniform_weights: bool = False,
    name: str = "phrases",
) -> BackoffAutomaton:
    """The boosting tree of the sequences; its root lists only the tokens that begin one.

    Args:
        unk_score: weight of a token that neither goes on with a phrase nor begins one.
        refund: "full" or "nemo", see above.
        uniform_weights: for "nemo" only, Icefall's way of paying: a completed phrase shows its bonus
            twice until it is left.
    """
    tree = PrefixTree(vocab_size)
    paths = _add_paths(tree, sequences)
    links = tree.suffix_links()
    if refund == "full":
        weights = _full_refund(tree, links, sequences, paths)
    else:
        weights = _nemo_refund(tree, links, sequences, paths, uniform_weights)
    weights.backoffs[ROOT] = unk_score
    nodes = np.arange(1, len(tree))
    nodes = nodes[np.argsort(tree.parents[1:] * vocab_size + tree.labels[1:])]
    sources, states = tree.parents[nodes], np.arange(len(tree))
    return BackoffAutomaton.from_arrays(
        vocab_size=vocab_size,
        start_state=ROOT,
        arc_begin=np.searchsorted(sources, states),
        arc_end=np.searchsorted(sources, states, side="right"),
        backoff_to=links,
        backoff_weights=weights.backoffs,
        final_weights=weights.finals,
        arc_labels=tree.labels[nodes],
        arc_weights=weights.arcs[nodes],
        arc_targets=nodes,
        name=name,
    )


def _add_paths(tree: PrefixTree, sequences: Sequence[ScoredSequence]) -> list[np.ndarray]:
    """Put all sequences into the tree; the nodes that each passes."""
    lengths = np.array([len(sequence.tokens) for sequence in sequences])
    tokens = np.concatenate([np.asarray(sequence.tokens, np.int64) for sequence in sequences])
    begins = np.cumsum(lengths) - lengths
    passed = np.zeros(len(tokens), np.int64)
    nodes = np.full(len(sequences), ROOT)
    for depth in range(lengths.max()):
        active = np.flatnonzero(lengths > depth)
        at = begins[active] + depth
        nodes[active] = passed[at] = tree.find_or_add(nodes[active], tokens[at])
    return np.split(passed, begins[1:])


def _full_refund(
    tree: PrefixTree, links: np.ndarray, sequences: Sequence[ScoredSequence], paths: list[np.ndarray]
) -> _NodeWeights:
    partial_sums = [np.cumsum(sequence.scores) for sequence in sequences]
    promised, bonus = np.zeros(len(tree)), np.zeros(len(tree))
    np.maximum.at(promised, np.concatenate(paths), np.concatenate(partial_sums))
    np.maximum.at(bonus, [path[-1] for path in paths], [sums[-1] for sums in partial_sums])
    committed, earned = np.zeros(len(tree)), np.zeros(len(tree))
    for level in tree.levels():
        parents = tree.parents[level]
        committed[level] = np.maximum(committed[parents], bonus[level])
        earned[level] = committed[level] - committed[parents] + earned[links[level]]
    advance = np.maximum(promised - committed, 0.0)
    arcs = earned + advance - advance[tree.parents]
    return _NodeWeights(arcs, advance[links] - advance, -advance)


def _nemo_refund(
    tree: PrefixTree,
    links: np.ndarray,
    sequences: Sequence[ScoredSequence],
    paths: list[np.ndarray],
    uniform_weights: bool,
) -> _NodeWeights:
    """NeMo's weights, faults included; the order of the sequences matters."""
    token_score: list[float | None] = [None] * len(tree)
    node_score, is_end = np.zeros(len(tree)), np.zeros(len(tree), bool)
    for sequence, path in zip(sequences, paths, strict=True):
        total = 0.0
        for node, score in zip(path.tolist(), sequence.scores.tolist(), strict=True):
            shared = token_score[node]
            own = score if shared is None else max(sequence.context_score, shared)
            token_score[node] = own
            total += own
            node_score[node] = total  # of this node only: what hangs below keeps its old sum
        is_end[path[-1]] = True
    arcs = np.array([0.0, *token_score[1:]], np.float64)
    keeps_bonus = is_end & (tree.depths == 1) if uniform_weights else is_end
    if uniform_weights:
        arcs += np.where(is_end & (tree.depths > 1), node_score, 0.0)
    backoffs = np.where(keeps_bonus, 0.0, node_score[links] - node_score)
    return _NodeWeights(arcs, backoffs, np.zeros(len(tree)))
