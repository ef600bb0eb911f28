"""Combine the LMs, boosting trees and weights of all utterances in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.checks import FieldError, check_kind, fields_named
from nemo_gpu_decoding.cuda.launch import as_records
from nemo_gpu_decoding.cuda.upload import arrays_on_device
from nemo_gpu_decoding.fusion.allowed import PRICE_WEIGHT, AllowedTokens, with_costs
from nemo_gpu_decoding.fusion.automaton import AutomatonArrays, BackoffAutomaton, concatenate, empty_automaton
from nemo_gpu_decoding.fusion.fusion import NO_LM, Fusion, Request
from nemo_gpu_decoding.fusion.grammar import Grammar
from nemo_gpu_decoding.fusion.phrases import Aliases, warn_if_large
from nemo_gpu_decoding.jit import CopiedByFields, inlined

# LM and boosting of an utterance; constant over its frames.
UTTERANCE = np.dtype(
    [
        ("lm_start", np.int32),  # states before the first label
        ("boosting_start", np.int32),
        ("lm_weight", np.float32),  # 0: no LM
        ("boosting_weight", np.float32),  # 0: no boosting
    ]
)
_UNCHANGED = Request()


class Rules(NamedTuple):
    """The language lock and grammar of an utterance, to describe its result. The search itself reads automata."""

    allowed: AllowedTokens | None = None
    grammar: Grammar | None = None


# Start state and weight of an utterance's LM, its tree and the tree's weight, its rules
_Row = tuple[Any, Any, BackoffAutomaton, Any, Rules]


class FusionLabels(NamedTuple):
    """The label set that a decoder's LM and boosting automata must have, with limits of the strategy."""

    size: int  # number of labels
    opened: int = 0  # number of labels with words that the graph lacks; 0: requests may have no such words
    unit: str = "tokens"  # for messages, as `hint`
    hint: str = " (vocab_size)"
    lm_in_graph: bool = False  # whether the graph holds an LM, which `Fusion.lm_weight` scales
    max_states: int = 1 << 31  # of an automaton
    blank_id: int = 1 << 31  # column of the blank; a token behind it has the label column - 1
    unlocked: str = ""  # why tokens cannot be forbidden; "": they can
    beam_beta: float = 0.0  # bonus per token that the boosting automata hold, natural log


@dataclass(frozen=True)
class BatchFusion(CopiedByFields):
    """The LM, boosting tree and weights of n utterances, which stay the same in all frames of an utterance."""

    lm: BackoffAutomaton  # all LMs of the decoder
    lm_starts: np.ndarray  # [n] int32, start state of each utterance's LM
    lm_weights: np.ndarray  # [n] float32; 0: no LM
    trees: tuple[BackoffAutomaton, ...]  # boosting trees, each once; at least one
    tree_of: np.ndarray  # [n] number of each utterance's tree
    boosting_weights: np.ndarray  # [n] float32; 0: no boosting
    rules: tuple[Rules, ...]  # [n]

    def __len__(self) -> int:
        return len(self.lm_weights)

    @staticmethod
    def resolve(
        fusion: Fusion, n: int, requests: Sequence[Request | None] | None, labels: FusionLabels
    ) -> BatchFusion:
        """Return the fusion of n utterances: the decoder's values, replaced by those of each utterance's request.

        Raises:
            ValueError: a request does not fit the decoder; the message names it.
        """
        checked = _checked_requests(requests, fusion, n, labels)
        distinct = {id(request): request for request in checked}  # without requests all utterances are alike
        nothing = _nothing(labels.size)
        joined_lm, starts = fusion.token_lms
        lm = joined_lm or nothing
        priced: dict[tuple[int, int, float], tuple[BackoffAutomaton | None, float]] = {}

        def settled(request: Request) -> _Row:
            tree, requested = request.boosting or fusion.boosting, request.boosting_weight
            weight = 0.0 if tree is None else fusion.boosting_weight if requested is None else requested
            rules = Rules(request.allowed or fusion.allowed, request.grammar or fusion.grammar)
            if rules.grammar is not None:
                tree, weight = rules.grammar.automaton, PRICE_WEIGHT
            if rules.allowed is not None or labels.beam_beta:
                key = id(rules.allowed), id(tree), weight
                if key not in priced:
                    costs = np.zeros(labels.size) if rules.allowed is None else rules.allowed.costs
                    priced[key] = with_costs(tree, weight, costs - labels.beam_beta)
                tree, weight = priced[key]
            lm_start = starts.get(request.lm, lm.start_state)
            return lm_start, _lm_weight(fusion, request, labels), tree or nothing, weight, rules

        of_request = {key: settled(request) for key, request in distinct.items()}
        return _batch_of(lm, [of_request[id(request)] for request in checked])

    def replaced(self, rows: Sequence[int], new: BatchFusion) -> BatchFusion:
        """Return a copy in which utterance rows[i] has the LM, tree and weights that utterance i has in `new`."""
        of_rows = self._rows()
        for row, of_row in zip(rows, new._rows(), strict=True):
            of_rows[row] = of_row
        return _batch_of(self.lm, of_rows)

    def _rows(self) -> list[_Row]:
        trees = map(self.trees.__getitem__, self.tree_of)
        return list(zip(self.lm_starts, self.lm_weights, trees, self.boosting_weights, self.rules, strict=True))

    def aliases_of(self, utterance: int) -> Aliases | None:
        """Return the aliases of the phrases that are boosted in this utterance, or None."""
        return self.trees[self.tree_of[utterance]].aliases if self.boosting_weights[utterance] else None

    def moved_states(self, after: BatchFusion) -> np.ndarray:
        """Return how far each utterance's boosting states move if `after` replaces this `BatchFusion`, [n] int32.

        In the `arrays` of `after`, an utterance's tree may be at another offset, after other trees.
        """
        return after.arrays.utterances["boosting_start"] - self.arrays.utterances["boosting_start"]

    @cached_property
    def arrays(self) -> FusionArrays:
        """Return the automata and weights of all utterances as arrays for compiled code."""
        boosting, starts = concatenate(self.trees)
        utterances = np.zeros(len(self), UTTERANCE)
        utterances["lm_start"], utterances["boosting_start"] = self.lm_starts, starts[self.tree_of]
        utterances["lm_weight"], utterances["boosting_weight"] = self.lm_weights, self.boosting_weights
        return FusionArrays(self.lm.arrays, boosting, utterances)


def check_fusion(fusion: Fusion, labels: FusionLabels) -> None:
    """Check that the LMs and the boosting tree of a fusion are automata over the decoder's labels.

    Raises:
        ValueError: an automaton has other labels, or an LM is given although the graph has an LM.
    """
    for name, lm in (("lm", fusion.lm), ("source_lm", fusion.source_lm)):
        if lm is not None and labels.lm_in_graph:
            raise ValueError(f"fusion.{name} is {lm.name}, expected None: the LM of a word graph is in the graph")
        _check_automaton(f"fusion.{name}", lm, labels)
    if fusion.lm_pool and labels.lm_in_graph:
        names = ", ".join(fusion.lm_pool)
        raise ValueError(f"fusion.lm_pool has {names}, expected no LMs: the LM of a word graph is in the graph")
    for name, lm in fusion.lm_pool.items():
        _check_automaton(f"fusion.lm_pool[{name}]", lm, labels)
    _check_automaton("fusion.lm", fusion.token_lms[0], labels)
    if not labels.lm_in_graph:  # words of a graph need larger weights than tokens
        warn_if_large("boosting_weight", fusion.boosting_weight)
    _check_automaton("fusion.boosting", fusion.boosting, labels)
    _check_rules("fusion", fusion, labels)


def _check_automaton(name: str, automaton: BackoffAutomaton | None, labels: FusionLabels) -> None:
    if automaton is None:
        return
    check_kind(name, automaton, BackoffAutomaton, ": load_ngram_lm or build_boosting_tree makes it")
    if automaton.vocab_size not in (labels.size, labels.opened):
        raise ValueError(
            f"{name} ({automaton.name}) was made for {automaton.vocab_size} {labels.unit}, "
            f"expected {labels.size}{labels.hint}"
        )
    if automaton.num_states > labels.max_states:
        raise ValueError(
            f"{name} ({automaton.name}) has {automaton.num_states} states, expected at most {labels.max_states}"
        )


def _check_rules(name: str, given: Fusion | Request, labels: FusionLabels) -> None:
    for field, kind in (("allowed", AllowedTokens), ("grammar", Grammar)):
        if getattr(given, field) is not None:
            maker = {"allowed": "allowed_tokens", "grammar": "build_grammar"}[field]
            check_kind(f"{name}.{field}", getattr(given, field), kind, f": {maker} makes it")
        if labels.unlocked and getattr(given, field) is not None:
            raise ValueError(f"{name}.{field} is given, expected None: {labels.unlocked}")
    if given.allowed is not None and len(given.allowed.is_allowed) != labels.size:
        tokens = len(given.allowed.is_allowed)
        raise ValueError(f"{name}.allowed is for {tokens} tokens, expected {labels.size}{labels.hint}")
    _check_automaton(f"{name}.grammar", None if given.grammar is None else given.grammar.automaton, labels)


def _checked_requests(
    requests: Sequence[Request | None] | None, fusion: Fusion, n: int, labels: FusionLabels
) -> list[Request]:
    if requests is None:
        return [_UNCHANGED] * n
    check_kind("requests", requests, Sequence, " with a Request or None for each utterance")
    if len(requests) != n:
        raise ValueError(f"requests has {len(requests)} entries, expected {n}: one per utterance")
    seen: set[int] = set()  # utterances may share a request
    for i, request in enumerate(requests):
        if request is None or id(request) in seen:
            continue
        seen.add(id(request))
        if not isinstance(request, Request):
            raise ValueError(f"requests[{i}] is a {type(request).__name__}, expected a Request or None")
        _check_automaton(f"requests[{i}].boosting", request.boosting, labels)
        _check_rules(f"requests[{i}]", request, labels)
        if request.lm is not None and labels.lm_in_graph:
            raise FieldError(f"requests[{i}].lm", request.lm, "None: the LM of a word graph is in the graph")
        with fields_named(f"requests[{i}].{{}}"):
            fusion.check_lm_name(request.lm)
        if request.boosting_weight is not None and not labels.lm_in_graph:
            warn_if_large("boosting_weight of a request", request.boosting_weight)
        if request.boosting is not None and (request.grammar or fusion.grammar):
            raise ValueError(f"requests[{i}].boosting is given, expected None with a grammar, which has all sentences")
        if request.lm_weight is not None and not (request.lm or fusion.lm or labels.lm_in_graph):
            raise ValueError(f"requests[{i}].lm_weight is {request.lm_weight}, but the decoder has no LM")
        if request.boosting_weight is not None and not (request.boosting or fusion.boosting):
            raise ValueError(
                f"requests[{i}].boosting_weight is {request.boosting_weight}, but neither the "
                "request nor the decoder has a boosting tree"
            )
    return [request or _UNCHANGED for request in requests]


def _batch_of(lm: BackoffAutomaton, rows: Sequence[_Row]) -> BatchFusion:
    """Return the `BatchFusion` of utterances from rows with start state, tree and weights; drop unused trees."""
    lm_starts, lm_weights, trees, weights, rules = zip(*rows, strict=True) if rows else [()] * 5
    boosting_weights = np.array(weights, np.float32)
    used = [tree for tree, weight in zip(trees, boosting_weights, strict=True) if weight]
    number_of = {tree: number for number, tree in enumerate(dict.fromkeys(used or trees[:1] or [lm]))}
    # without a tree the weight is 0, so that any tree will do
    tree_of = np.array([number_of.get(tree, 0) for tree in trees], np.int64)
    of_lms = np.array(lm_starts, np.int32), np.array(lm_weights, np.float32)
    return BatchFusion(lm, *of_lms, tuple(number_of), tree_of, boosting_weights, tuple(rules))


_nothing = lru_cache(maxsize=16)(empty_automaton)  # cached, so that it is uploaded once


def _lm_weight(fusion: Fusion, request: Request, labels: FusionLabels) -> float:
    """Return the weight of an utterance's LM, or 0 if the utterance has no LM."""
    has_lm = request.lm != NO_LM and (request.lm or fusion.lm or labels.lm_in_graph)
    if not has_lm:
        return 0.0
    return fusion.lm_weight_of(request.lm) if request.lm_weight is None else request.lm_weight


class FusionArrays(NamedTuple):
    """The automata, start states and weights of n utterances, as arrays that compiled code reads."""

    lm: AutomatonArrays
    boosting: AutomatonArrays  # all boosting trees
    utterances: np.ndarray  # [n] UTTERANCE


class UtteranceFusion(NamedTuple):
    """The automata and weights of one utterance, as compiled code reads them."""

    lm: AutomatonArrays
    boosting: AutomatonArrays
    lm_weight: np.float32  # 0: no LM
    boosting_weight: np.float32  # 0: no boosting


@inlined
def of_utterance(fusion, b):
    """Return the `UtteranceFusion` of utterance b from the `FusionArrays` of a batch."""
    utterance = fusion.utterances[b]
    return UtteranceFusion(fusion.lm, fusion.boosting, utterance.lm_weight, utterance.boosting_weight)


# -- for kernels, see fusion.cuh -------------------------------------------------------------------------


class DeviceAutomaton(NamedTuple):
    """The states and arcs of one or several automata as arrays in GPU memory."""

    states: torch.Tensor  # [S, bytes of automaton.STATE] uint8
    arcs: torch.Tensor  # [A, bytes of automaton.ARC] uint8


def on_device(automaton: BackoffAutomaton, device: torch.device) -> DeviceAutomaton:
    """Return a copy of the automaton in the memory of `device`; it is uploaded at the first call and cached."""
    return DeviceAutomaton(*arrays_on_device(automaton, automaton.arrays, device))


def trees_on_device(fusion: BatchFusion, device: torch.device) -> DeviceAutomaton:
    """Upload all boosting trees of a batch; a single tree is cached, several trees are concatenated per batch."""
    if len(fusion.trees) == 1:
        return on_device(fusion.trees[0], device)
    joined = fusion.arrays.boosting
    return DeviceAutomaton(*(as_records(array).to(device, non_blocking=True) for array in joined))
