"""Build the boosting tree of phrases (context graph): a trie of token sequences with failure links and weights.

What a text earns (refund "full")
    A phrase occurs wherever its tokens do. With `is_continuation`, an occurrence counts only if it ends a
    word: the text ends there, or the next token does not continue the word. Phrases whose last character
    cannot be in a word ("c++") always count. Without `is_continuation`, all occurrences count. At the end of
    an utterance, unfinished phrases earn 0.

    With `overlapping`, all occurrences count, including nested ones. If several begin at the same token, only
    the largest bonus counts. `overlapping` suits lists of digit strings, in which phrases often contain others.

    Without `overlapping` (the default of `BoostingConfig`), each token counts for one phrase. The matching is
    that of Aho & Corasick (1975): a match is the longest suffix that begins a phrase. Within a match, the set of
    occurrences counts that do not overlap and have the largest total bonus. When the match ends, these bonuses are
    final, and matching continues after the last occurrence, even if the next token takes its bonus back.

    A negative bonus is a penalty. If several penalties begin at the same token, the largest counts. Without
    `overlapping`, a penalty does not count if it begins inside a phrase with a final bonus and ends after it.

Weights
    Tokens of an unfinished phrase get an advance on the bonus, so that the beam keeps them. A complete phrase
    gets its bonus at once; a token that continues the last word takes it back. For a node t of the trie, with
    parent p, label l and suffix link s (its longest proper suffix):

        base(t)       = committed(p), or kept(p) if l continues a word
        kept(t)       = largest of base(t) and before(t, b) + b for the bonuses b of phrases that t ends
                        with, but in no word
        committed(t)  = largest of kept(t) and before(t, b) + b for all phrases that t ends with
        before(t, b)  = value of the tokens before that phrase, defined like base(t)
        advance(t)    = largest partial sum of a phrase through t, less committed(t); at least 0
        earned(t)     = committed(t) - base(t)
        revocable(t)  = refund(t) = committed(t) - kept(t)         taken back if the word goes on
        failure link f(t) = longest suffix that begins after the last phrase in committed(t)

        arc p -> t    earned(t) + advance(t) - advance(p), less revocable(p) if l is a continuation
        back-off t->f advance(f) - advance(t), less refund(t) for continuations (see below)
        final t       -advance(t)

    With `overlapping`, only phrases equal to the sequence of t count, before(t, b) = 0, f = s, and
    earned(s) and revocable(s) are added to those of t.

    The advances cancel along every path; only the earned bonuses remain. Penalties are subtracted with the
    weights of overlapping phrases, without advances, because an unfinished phrase with a penalty costs 0.

An example with bonus 1 per token, phrases "a b" and "b c" and "a b c d" (committed in brackets), where
no token is a continuation:

    text "a b x":     a +1   b +1 [2]   x: the advance is 0, "a b" is kept           total 2
    text "a b c x":   c +1: in advance for "a b c d"; x takes it back                total 2
    text "a b c d":   c +1   d +1 [4]                                                total 4
    text "a":         +1, final weight -1                                            total 0

    Overlapping: "a b c x": c +3: 1 in advance, 2 for "b c"; x takes back 1          total 4
    If x continues a word: "a b x" loses the 2 of "a b" with x                       total 0

NeMo's boosting tree (refund "nemo", `GPUBoostingTreeModel`, TurboBias arXiv 2508.07014) differs. An utterance that
ends inside a phrase keeps the advance. A text that leaves a longer phrase also loses the bonus of a complete phrase at
its begin. A text that goes on from a complete phrase to its suffix loses an advance that it never got. A phrase that
shares tokens with another may raise the weight of a node, but not of the nodes below it.

**Refunds** are back-off arcs with a weight that depends on the label. A back-off arc has one weight for all labels. If
some labels must also lose a refund r, the arc leads to a copy of the back-off state. In the copy, the weights of these
labels are lower by r. The copy backs off to a copy of the next back-off state with the sum of the refunds so far. The
last copy is a copy of the root: it has arcs for the labels that pay refunds, and backs off to the root for all other
labels:

    t --back-off, refund 2--> f --back-off, refund 1--> root

    t --> copy of f, less 2 --> copy of root, less 3 --> root
    f --> copy of root, less 1 --> root

Copies of the root are large but shared: there is one per distinct sum of refunds. A copy has arcs for the refunding
labels, or for all other labels, whichever are fewer. Copies of other states have as many arcs as the originals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns, in_ranges

# Each distinct sum of refunds needs a state with arcs for up to half of the labels. Further bonuses are rounded.
MAX_BONUSES = 64
_ROUNDED_BITS, ROOT = 8, 0


class Trie:
    """A trie in flat arrays, with suffix links; `find_or_add` adds many nodes at once.

    Labels are 0 .. radix-1; all ids are int64 arrays. Node 0 is the root. A sorted array of the keys
    parent * radix + label  gives the children of many nodes at once. With the sequences "ab" and "ba" over
    {0: a, 1: b} (radix 2):

        node     0 (root)   1 "a"   2 "b"   3 "ab"   4 "ba"
        parent   -1         0       0       1        2
        label    -1         0       1       1        0
        key      -          0       1       3        4
        suffix   0          0       0       2        1

    The suffix link of a node leads to the longest proper suffix of its sequence that is a node too: the
    failure link of Aho & Corasick (1975).
    """

    def __init__(self, radix: int) -> None:
        self.radix = radix
        self.parents = np.array([-1], np.int64)
        self.labels = np.array([-1], np.int64)
        self.depths = np.array([0], np.int64)
        self._keys = np.zeros(0, np.int64)  # sorted
        self.nodes = np.zeros(0, np.int64)  # node of each key: all nodes but the root, by parent and label

    def __len__(self) -> int:
        return len(self.parents)

    def find(self, nodes: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the child of nodes[i] under labels[i] for each i, or -1 if there is none."""
        if not len(self._keys):
            return np.full(len(nodes), -1)
        keys = nodes * self.radix + labels
        at = np.searchsorted(self._keys, keys)
        at[at == len(self._keys)] = 0
        return np.where(self._keys[at] == keys, self.nodes[at], -1)

    def find_or_add(self, nodes: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the child of each node under each label like `find`, and add children that are missing."""
        children = self.find(nodes, labels)
        missing = np.flatnonzero(children < 0)
        if len(missing):
            keys = np.unique(nodes[missing] * self.radix + labels[missing])
            parents, new = keys // self.radix, len(self) + np.arange(len(keys))
            self.parents = np.append(self.parents, parents)
            self.labels = np.append(self.labels, keys % self.radix)
            self.depths = np.append(self.depths, self.depths[parents] + 1)
            merged = np.append(self._keys, keys)
            order = np.argsort(merged, kind="stable")  # two sorted runs: close to a merge
            self._keys, self.nodes = merged[order], np.append(self.nodes, new)[order]
            children[missing] = self.find(nodes[missing], labels[missing])
        return children

    def ancestors(self, nodes: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return for each i the ancestor that is steps[i] levels above nodes[i]."""
        nodes = nodes.copy()
        for step in range(steps.max(initial=0)):
            climbing = steps > step
            nodes[climbing] = self.parents[nodes[climbing]]
        return nodes

    def levels(self) -> list[np.ndarray]:
        """Return a list of node arrays: the nodes of depth 1, the nodes of depth 2, and so on."""
        order = np.argsort(self.depths, kind="stable")
        ends = np.searchsorted(self.depths[order], np.arange(self.depths.max() + 1), side="right")
        return np.split(order, ends)[1:-1]

    def suffix_links(self) -> np.ndarray:
        """Return the suffix link of each node, [nodes]: the node of its longest proper suffix; 0 for the root."""
        links = np.zeros(len(self), np.int64)
        for level in self.levels()[1:]:
            # the suffix is a child of the parent's suffix, or of a suffix of the latter
            nodes, pending = links[self.parents[level]], np.arange(len(level))
            while len(pending):
                children = self.find(nodes[pending], self.labels[level[pending]])
                hit = children >= 0
                links[level[pending[hit]]] = children[hit]
                pending = pending[~hit & (nodes[pending] != ROOT)]
                nodes[pending] = links[nodes[pending]]
        return links


@dataclass(frozen=True)
class ScoredSequence:
    """A token sequence that spells a phrase, with the bonus of each token (natural log)."""

    tokens: Sequence[int]
    scores: np.ndarray  # [len(tokens)] float64, none < 0 or none > 0; their sum is the phrase's bonus
    context_score: float  # bonus of a token before depth scaling, which NeMo compares at shared nodes
    ends_in_word: bool = True  # whether the next token may continue the word of the last character
    # [len(tokens)] advance after each token of the unfinished phrase; None: the partial sums of the scores
    promised: np.ndarray | None = None


@dataclass(frozen=True)
class _NodeWeights:
    """The weights of all nodes of the trie, as arrays; entry 0 is the root, to which no arc leads."""

    arcs: np.ndarray  # weight of the arc that leads to the node
    backoff_to: np.ndarray  # failure links
    backoffs: np.ndarray
    finals: np.ndarray
    refunds: np.ndarray  # subtracted from labels that continue a word and take the back-off arc


def token_scores(length: int, context_score: float, depth_scaling: float, uniform: bool) -> np.ndarray:
    """Return NeMo's bonus of each token in a phrase, larger for later tokens, [length]."""
    scores = np.full(length, context_score, np.float64)
    if not uniform:
        scores[1:] = context_score * depth_scaling + np.log(np.arange(2, length + 1))
    return scores


def build_context_graph(
    sequences: Sequence[ScoredSequence],
    vocab_size: int,
    *,
    unk_score: float = 0.0,
    refund: str = "full",
    overlapping: bool = True,
    uniform_weights: bool = False,
    is_continuation: np.ndarray | None = None,
    label_before: int | None = None,
    name: str = "phrases",
) -> BackoffAutomaton:
    """Return the boosting tree of token sequences.

    Args:
        unk_score: weight of a token that neither continues nor begins a phrase.
        refund: "full" or "nemo", see the module docstring.
        overlapping: for "full" only, count all occurrences of phrases, even if they overlap.
        uniform_weights: for NeMo's only, Icefall's: a complete phrase has its bonus twice until the match ends.
        is_continuation: for "full" only; [V] bool, whether a label continues the word before it; None: phrases count
            wherever they occur.
        label_before: before an utterance: a space, if sequences begin with a space to match beginnings of words.
    """
    trie = Trie(vocab_size)
    paths = _add_paths(trie, sequences)
    links = trie.suffix_links()
    continuations = np.zeros(vocab_size, bool) if is_continuation is None else is_continuation
    if refund == "full":
        weights = _full_refund(trie, links, sequences, paths, continuations, overlapping)
    else:
        weights = _nemo_refund(trie, links, sequences, paths, uniform_weights)
    weights.backoffs[ROOT] = unk_score
    start = ROOT
    if label_before is not None:
        start = max(ROOT, int(trie.find(np.array([ROOT]), np.array([label_before]))[0]))
        weights.arcs[start] += unk_score
    counts, nodes = np.bincount(trie.parents[1:], minlength=len(trie)), trie.nodes  # states; edges that lead to them
    of_states = weights.backoff_to, weights.backoffs, weights.finals
    columns = Columns.grouped(counts, *of_states, trie.labels[nodes], weights.arcs[nodes], nodes)
    columns = with_refunds(columns, weights.refunds, continuations)
    return BackoffAutomaton.from_columns(columns, vocab_size, start, name)


def _add_paths(trie: Trie, sequences: Sequence[ScoredSequence]) -> list[np.ndarray]:
    """Add all sequences to the trie; return, for each sequence, the nodes on its path."""
    lengths = np.array([len(sequence.tokens) for sequence in sequences])
    tokens = np.concatenate([np.asarray(sequence.tokens, np.int64) for sequence in sequences])
    begins = np.cumsum(lengths) - lengths
    passed = np.zeros(len(tokens), np.int64)
    nodes = np.full(len(sequences), ROOT)
    for depth in range(lengths.max()):
        active = np.flatnonzero(lengths > depth)
        at = begins[active] + depth
        nodes[active] = passed[at] = trie.find_or_add(nodes[active], tokens[at])
    return np.split(passed, begins[1:])


def _full_refund(
    trie: Trie,
    links: np.ndarray,
    sequences: Sequence[ScoredSequence],
    paths: list[np.ndarray],
    continuations: np.ndarray,
    overlapping: bool,
) -> _NodeWeights:
    """Return the weights of all nodes for refund "full"; variables are named as in the module docstring."""
    ends = np.array([path[-1] for path in paths])
    in_word = continuations.any() & np.array([sequence.ends_in_word for sequence in sequences])
    bonuses = np.array([sequence.scores.sum() for sequence in sequences])
    bonuses[in_word] = _few_values(bonuses[in_word])
    promised = np.zeros(len(trie))
    sums = [np.cumsum(s.scores) if s.promised is None else s.promised for s in sequences]
    np.maximum.at(promised, np.concatenate(paths), np.concatenate(sums))
    is_continuation = continuations[trie.labels]  # the root's value is unused
    last = _LastNodes(len(trie), ends, bonuses, in_word)
    if overlapping:
        backoff_to = links
        committed, kept, earned, revocable = _overlapping(trie, links, last, is_continuation)
    else:
        committed, kept, backoff_to = _apart(trie, links, last, is_continuation)
        revocable = committed - kept
        earned = committed - np.where(is_continuation, kept[trie.parents], committed[trie.parents])
    advance, refunds = np.maximum(promised - committed, 0.0), committed - kept
    if (bonuses < 0).any():
        penalties = _LastNodes(len(trie), ends, -bonuses, in_word)
        _, _, cost, covered = _overlapping(trie, links, penalties, is_continuation)
        earned, revocable, refunds = earned - cost, revocable - covered, refunds - (covered - covered[backoff_to])
    arcs = earned + advance - advance[trie.parents]
    arcs -= np.where(is_continuation, revocable[trie.parents], 0.0)
    return _NodeWeights(arcs, backoff_to, advance[backoff_to] - advance, -advance, refunds)


class _LastNodes:
    """The largest bonus > 0 of phrases that end at each node: among all phrases, and among those that always count."""

    def __init__(self, nodes: int, ends: np.ndarray, bonuses: np.ndarray, in_word: np.ndarray) -> None:
        self.bonus, self.sure = np.zeros(nodes), np.zeros(nodes)
        np.maximum.at(self.bonus, ends, bonuses)
        np.maximum.at(self.sure, ends[~in_word], bonuses[~in_word])


def _apart(
    trie: Trie, links: np.ndarray, last: _LastNodes, is_continuation: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return committed, kept and failure link of each node for matching without `overlapping`, [nodes] each."""
    committed, kept = np.zeros(len(trie)), np.zeros(len(trie))
    committed_end, kept_end = np.zeros(len(trie), np.int64), np.zeros(len(trie), np.int64)  # in tokens
    ending = np.zeros(len(trie), np.int64)  # the longest suffix, or the node itself, with a bonus
    for level in trie.levels():
        ending[level] = np.where(last.bonus[level] > 0, level, ending[links[level]])
        parents, goes_on, depths = trie.parents[level], is_continuation[level], trie.depths[level]
        sure = np.where(goes_on, kept[parents], committed[parents])
        sure_end = np.where(goes_on, kept_end[parents], committed_end[parents])
        best, phrases = sure.copy(), ending[level]
        while phrases.any():
            first = trie.ancestors(level, np.maximum(trie.depths[phrases] - 1, 0))
            outside = trie.parents[first]
            before = np.where(is_continuation[first], kept[outside], committed[outside])
            is_better = (last.sure[phrases] > 0) & (before + last.sure[phrases] > sure)
            sure = np.where(is_better, before + last.sure[phrases], sure)
            sure_end = np.where(is_better, depths, sure_end)
            best = np.maximum(best, np.where(phrases > 0, before + last.bonus[phrases], 0.0))
            phrases = ending[links[phrases]]
        kept[level], kept_end[level] = sure, sure_end
        committed[level] = np.maximum(best, sure)
        committed_end[level] = np.where(committed[level] > sure, depths, sure_end)
    backoff_to, left = links.copy(), trie.depths - committed_end
    while (overlaps := trie.depths[backoff_to] > left).any():
        backoff_to[overlaps] = links[backoff_to[overlaps]]
    return committed, kept, backoff_to


def _overlapping(
    trie: Trie, links: np.ndarray, last: _LastNodes, is_continuation: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return committed, kept, earned and revocable of each node for matching with `overlapping`, [nodes] each."""
    committed, kept, earned, revocable = (np.zeros(len(trie)) for _ in range(4))
    for level in trie.levels():
        parents = trie.parents[level]
        base = np.where(is_continuation[level], kept[parents], committed[parents])
        kept[level] = np.maximum(base, last.sure[level])
        committed[level] = np.maximum(kept[level], last.bonus[level])
        earned[level] = committed[level] - base + earned[links[level]]
        revocable[level] = committed[level] - kept[level] + revocable[links[level]]
    return committed, kept, earned, revocable


def _few_values(bonuses: np.ndarray) -> np.ndarray:
    """Return the bonuses in float32 precision, and round them if they have more than `MAX_BONUSES` distinct values.

    Bonuses are rounded to multiples of a power of two, so that their sums have few distinct values too.
    """
    values = bonuses.astype(np.float32).astype(np.float64)
    if len(np.unique(values)) <= MAX_BONUSES:
        return values
    _, exponent = np.frexp(np.median(np.abs(values[values != 0])))
    step = np.ldexp(1.0, int(exponent) - 1 - _ROUNDED_BITS)
    return np.round(values / step) * step


def _nemo_refund(
    trie: Trie, links: np.ndarray, sequences: Sequence[ScoredSequence], paths: list[np.ndarray], uniform: bool
) -> _NodeWeights:
    """Return the weights of NeMo's tree, with NeMo's errors; the weights depend on the order of the sequences."""
    token_score: list[float | None] = [None] * len(trie)
    node_score, is_end = np.zeros(len(trie)), np.zeros(len(trie), bool)
    for sequence, path in zip(sequences, paths, strict=True):
        total = 0.0
        for node, score in zip(path.tolist(), sequence.scores.tolist(), strict=True):
            shared = token_score[node]
            token_score[node] = score if shared is None else max(sequence.context_score, shared)
            total += token_score[node]
            node_score[node] = total  # as in NeMo, nodes below keep their old sums
        is_end[path[-1]] = True
    arcs = np.array([0.0, *token_score[1:]], np.float64)
    keeps_bonus = is_end & (trie.depths == 1) if uniform else is_end
    if uniform:
        arcs += np.where(is_end & (trie.depths > 1), node_score, 0.0)
    backoffs = np.where(keeps_bonus, 0.0, node_score[links] - node_score)
    return _NodeWeights(arcs, links, backoffs, np.zeros(len(trie)), np.zeros(len(trie)))


# ------------------------------------------------------------------------------------------- refunds


def with_refunds(columns: Columns, refunds: np.ndarray, is_refunding: np.ndarray) -> Columns:
    """Return an automaton in which refunding labels lose the refund of each state from which they back off.

    Args:
        columns: an automaton with the single root `ROOT`; its states keep their numbers, copies come after them.
        refunds: [S] refund of each state, natural log; the root's is ignored.
        is_refunding: [V] bool, whether a label loses refunds.
    """
    refunding_states = np.flatnonzero(refunds * (np.arange(len(refunds)) != ROOT))
    if not len(refunding_states) or not is_refunding.any():
        return columns
    copied, refund, first, onward = _copies(columns.backoff_to, refunds, refunding_states)
    of_root = copied == ROOT
    backoff_to, copies_backoff_to = columns.backoff_to.copy(), np.full(len(copied), ROOT)
    backoff_to[refunding_states] = len(backoff_to) + first
    copies_backoff_to[~of_root] = len(backoff_to) + onward
    lists_refunding = 2 * is_refunding.sum() <= len(is_refunding)
    listed = np.flatnonzero(is_refunding == lists_refunding)
    root_backoffs = 0.0 if lists_refunding else -refund
    backoff_weights = np.where(of_root, root_backoffs, columns.backoff_weights[copied])
    counts, labels, weights, targets = _copied_arcs(columns, listed, copied)
    weights -= np.where(is_refunding[labels], np.repeat(refund, counts), 0.0)
    ends = len(columns.arc_labels) + np.cumsum(counts)
    final_weights = np.zeros(len(copied))  # no arc leads to a copy
    of_states = ends - counts, ends, copies_backoff_to, backoff_weights, final_weights
    originals = columns._replace(backoff_to=backoff_to)
    return Columns(*map(np.append, originals, (*of_states, labels, weights, targets)))


def _copies(
    backoff_to: np.ndarray, refunds: np.ndarray, refunding_states: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """List the copies of states that refunds need, one for each state and sum of refunds.

    Returns:
        the original state of each copy and its refund; the copy that each of `refunding_states` backs
        off to; the copy that each copy of a state other than the root backs off to.
    """
    needed_first = np.stack([backoff_to[refunding_states], refunds[refunding_states]], 1)
    copies = np.unique(needed_first, axis=0)
    while True:  # one round per link of the longest back-off chain
        inner = copies[copies[:, 0] != ROOT]
        states = inner[:, 0].astype(np.int64)
        needed_next = np.stack([backoff_to[states], inner[:, 1] + refunds[states]], 1)
        grown, number = np.unique(np.concatenate([needed_first, needed_next, copies]), axis=0, return_inverse=True)
        if len(grown) == len(copies):
            break
        copies = grown
    first, onward, _ = np.split(number.ravel(), np.cumsum([len(needed_first), len(needed_next)]))
    return copies[:, 0].astype(np.int64), copies[:, 1], first, onward


def _copied_arcs(
    columns: Columns, listed: np.ndarray, copied: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the number of arcs of each copy, and labels, weights and targets of these arcs without refunds."""
    weights = np.full(len(listed), columns.backoff_weights[ROOT], np.float64)
    targets = np.full(len(listed), ROOT)
    own = slice(columns.arc_begin[ROOT], columns.arc_end[ROOT])
    _, at, own_at = np.intersect1d(listed, columns.arc_labels[own], assume_unique=True, return_indices=True)
    weights[at], targets[at] = columns.arc_weights[own][own_at], columns.arc_targets[own][own_at]
    of_root = copied == ROOT
    begins = np.where(of_root, len(columns.arc_labels), columns.arc_begin[copied])
    counts = np.where(of_root, len(listed), columns.arc_end[copied] - columns.arc_begin[copied])
    _, source = in_ranges(begins, counts)
    return (
        counts,
        np.append(columns.arc_labels, listed)[source],
        np.append(columns.arc_weights, weights)[source],
        np.append(columns.arc_targets, targets)[source],
    )
