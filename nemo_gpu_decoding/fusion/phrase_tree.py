"""From scored token sequences to a boosting tree: a prefix tree with failure links and weights.

What a text earns (refund "full")
    A phrase occurs wherever its tokens do, overlapping and nested occurrences included. With
    `carries_on` an occurrence counts only if the word ends with it: the text is over, or the next token
    does not carry on the word. A phrase whose last character is part of no word ("c++") counts anyway,
    as do all without `carries_on`. Of the occurrences that begin at the same token, only the one with
    the largest bonus counts. The bonuses add up. Nothing else is left at the end of an utterance: the
    bonus does not depend on what the other phrases look like or on how far an unfinished phrase got.

How it is paid out
    A phrase must be helped before it is complete, so the tokens of an unfinished one are paid in
    advance; what a complete one earns is paid at once, and taken back if the word goes on. For a node t
    of the tree, with parent p, label l and failure link f (its longest proper suffix):

        base(t)       = committed(p), or kept(p) if l carries on a word
        kept(t)       = largest of base(t) and the bonuses of phrases that end with t, but in no word
        committed(t)  = largest of kept(t) and the bonuses of phrases that end with t
        advance(t)    = largest partial sum of a phrase through t, less committed(t); at least 0
        earned(t)     = committed(t) - base(t) + earned(f)         phrases that end with t
        debt(t)       = committed(t) - kept(t)                     what t loses if the word goes on
        revocable(t)  = debt(t) + revocable(f)

        arc p -> t    earned(t) + advance(t) - advance(p), less revocable(p) if l carries on
        back-off t->f advance(f) - advance(t), less debt(t) for labels that carry on (see `debts`)
        final t       -advance(t)

    The advances cancel along every path, whatever is read; only what was earned remains.

An example, token bonuses 1 each, phrases "a b" and "b c" and "a b c d" (committed in brackets), where
no token carries on:

    text "a b x":   a +1   b +1 [2]   x: the advance is 0, "a b" is kept             total 2
    text "a b c x": c +3: 1 in advance for "a b c d", 2 for "b c"; x takes back 1    total 4
    text "a":       +1, final weight -1                                              total 0

    If x carries on: text "a b x" loses the 2 of "a b" with x                        total 0

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
from nemo_gpu_decoding.fusion.debts import Columns, with_debts
from nemo_gpu_decoding.fusion.prefix_tree import ROOT, PrefixTree

# Every different sum of debts costs a state with an arc for up to half of the labels. Beyond so many
# different bonuses they are therefore rounded to multiples of about 1/256 to 1/512 of their median.
MAX_BONUSES = 64
_ROUNDED_BITS = 8


@dataclass(frozen=True)
class ScoredSequence:
    """One way to spell a phrase in tokens, with the bonus of each token (natural log)."""

    tokens: Sequence[int]
    scores: np.ndarray  # [len(tokens)] float64; their sum is the bonus of the phrase
    context_score: float  # bonus of a token before depth scaling, which NeMo compares at shared nodes
    ends_in_word: bool = True  # its last character is one of a word, which the next token may carry on


@dataclass(frozen=True)
class _NodeWeights:
    """Per node; entry 0 belongs to the root and has no arc."""

    arcs: np.ndarray  # weight of the arc that leads to the node
    backoffs: np.ndarray
    finals: np.ndarray
    debts: np.ndarray  # what leaving the node by its back-off arc costs labels that carry on


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
    carries_on: np.ndarray | None = None,
    label_before: int | None = None,
    name: str = "phrases",
) -> BackoffAutomaton:
    """The boosting tree of the sequences.

    Args:
        unk_score: weight of a token that neither goes on with a phrase nor begins one.
        refund: "full" or "nemo", see above.
        uniform_weights: for "nemo" only, Icefall's way of paying: a completed phrase shows its bonus
            twice until it is left.
        carries_on: for "full" only, which labels carry on the word before them, [V] bool; None if
            phrases count wherever they occur.
        label_before: an utterance begins as if this label had been read: a space, for sequences
            that begin with one because they must begin a word. It counts as outside of phrases.
    """
    tree = PrefixTree(vocab_size)
    paths = _add_paths(tree, sequences)
    links = tree.suffix_links()
    carrying = np.zeros(vocab_size, bool) if carries_on is None else carries_on
    if refund == "full":
        weights = _full_refund(tree, links, sequences, paths, carrying)
    else:
        weights = _nemo_refund(tree, links, sequences, paths, uniform_weights)
    weights.backoffs[ROOT] = unk_score
    start = ROOT
    if label_before is not None:
        start = max(ROOT, int(tree.find(np.array([ROOT]), np.array([label_before]))[0]))
        weights.arcs[start] += unk_score
    columns = with_debts(_columns(tree, links, weights), ROOT, weights.debts, carrying)
    return BackoffAutomaton.from_arrays(
        vocab_size=vocab_size, start_state=start, name=name, **columns._asdict()
    )


def _columns(tree: PrefixTree, links: np.ndarray, weights: _NodeWeights) -> Columns:
    """The nodes as states, the edges as arcs."""
    nodes = np.arange(1, len(tree))
    nodes = nodes[np.argsort(tree.parents[1:] * tree.radix + tree.labels[1:])]
    sources, states = tree.parents[nodes], np.arange(len(tree))
    return Columns(
        arc_begin=np.searchsorted(sources, states),
        arc_end=np.searchsorted(sources, states, side="right"),
        backoff_to=links,
        backoff_weights=weights.backoffs,
        final_weights=weights.finals,
        arc_labels=tree.labels[nodes],
        arc_weights=weights.arcs[nodes],
        arc_targets=nodes,
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
    tree: PrefixTree,
    links: np.ndarray,
    sequences: Sequence[ScoredSequence],
    paths: list[np.ndarray],
    carrying: np.ndarray,
) -> _NodeWeights:
    """The weights of the module's docstring, under its names."""
    ends = np.array([path[-1] for path in paths])
    in_word = carrying.any() & np.array([sequence.ends_in_word for sequence in sequences])
    bonuses = np.array([sequence.scores.sum() for sequence in sequences])
    bonuses[in_word] = _few_values(bonuses[in_word])
    promised, bonus, sure = np.zeros(len(tree)), np.zeros(len(tree)), np.zeros(len(tree))
    partial_sums = np.concatenate([np.cumsum(sequence.scores) for sequence in sequences])
    np.maximum.at(promised, np.concatenate(paths), partial_sums)
    np.maximum.at(bonus, ends, bonuses)
    np.maximum.at(sure, ends[~in_word], bonuses[~in_word])
    committed, kept, earned, revocable = (np.zeros(len(tree)) for _ in range(4))
    carries_on = carrying[tree.labels]  # that of the root means nothing
    for level in tree.levels():
        parents = tree.parents[level]
        base = np.where(carries_on[level], kept[parents], committed[parents])
        kept[level] = np.maximum(base, sure[level])
        committed[level] = np.maximum(kept[level], bonus[level])
        earned[level] = committed[level] - base + earned[links[level]]
        revocable[level] = committed[level] - kept[level] + revocable[links[level]]
    advance = np.maximum(promised - committed, 0.0)
    arcs = earned + advance - advance[tree.parents]
    arcs -= np.where(carries_on, revocable[tree.parents], 0.0)
    return _NodeWeights(arcs, advance[links] - advance, -advance, committed - kept)


def _few_values(bonuses: np.ndarray) -> np.ndarray:
    """The bonuses in float32, or more roughly where there are many different ones.

    They are rounded to multiples of one power of two, so that their sums have few values as well.
    """
    values = bonuses.astype(np.float32).astype(np.float64)
    if len(np.unique(values)) <= MAX_BONUSES:
        return values
    _, exponent = np.frexp(np.median(values[values > 0]))
    step = np.ldexp(1.0, int(exponent) - 1 - _ROUNDED_BITS)
    return np.round(values / step) * step


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
    return _NodeWeights(arcs, backoffs, np.zeros(len(tree)), np.zeros(len(tree)))
