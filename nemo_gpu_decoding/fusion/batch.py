"""Fusion of a batch: the LM, boosting tree and weights of each utterance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import as_records
from nemo_gpu_decoding.cuda.upload import arrays_on_device
from nemo_gpu_decoding.fusion.aliases import Aliases
from nemo_gpu_decoding.fusion.allowed import AllowedTokens
from nemo_gpu_decoding.fusion.automaton import AutomatonArrays, BackoffAutomaton, concatenate, empty_automaton
from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.jit import inlined

# LM and boosting of an utterance; constant over its frames.
UTTERANCE = np.dtype(
    [
        ("lm_start", np.int32),  # states before the first label
        ("boosting_start", np.int32),
        ("lm_weight", np.float32),  # 0: no LM
        ("boosting_weight", np.float32),  # 0: no boosting
    ]
)


class FusionLabels(NamedTuple):
    """The labels of the automata in a decoder's fusion."""

    size: int  # number of labels
    unit: str = "tokens"  # for messages, as `hint`
    hint: str = " (vocab_size)"
    lm_in_graph: bool = False  # the graph holds an LM that `Fusion.lm_weight` scales
    max_states: int = 1 << 31  # of an automaton
    blank_id: int = 1 << 31  # column of the blank; a token above it has its column minus 1 as label
    unlocked: str = ""  # why tokens cannot be forbidden; "": they can


@dataclass(frozen=True)
class BatchFusion:
    """The fusion of n utterances, from their first frame to their last."""

    lm: BackoffAutomaton
    lm_weights: np.ndarray  # [n] float32; 0: no LM
    trees: tuple[BackoffAutomaton, ...]  # boosting trees, each once; at least one
    tree_of: np.ndarray  # [n] number of each utterance's tree
    boosting_weights: np.ndarray  # [n] float32; 0: no boosting
    allowed: tuple[AllowedTokens | None, ...]  # [n], for results; their prices are in the trees

    def __len__(self) -> int:
        return len(self.lm_weights)

    @staticmethod
    def resolve(
        fusion: Fusion, n: int, requests: Sequence[Request | None] | None, labels: FusionLabels
    ) -> BatchFusion:
        """The fusion of n utterances: the decoder's, with the values of their requests in its place.

        Raises:
            ValueError: a request does not fit the decoder; the message names it.
        """
        checked = _checked_requests(requests, fusion, n, labels)
        nothing = _nothing(labels.size)
        trees = [request.boosting or fusion.boosting for request in checked]
        lm = fusion.token_lm or (nothing if labels.lm_in_graph else None)
        lm_weights = [_weight(lm, fusion.lm_weight, request.lm_weight) for request in checked]
        boosting_weights = [
            _weight(tree, fusion.boosting_weight, request.boosting_weight)
            for tree, request in zip(trees, checked, strict=True)
        ]
        allowed = tuple(request.allowed or fusion.allowed for request in checked)
        for i, own in enumerate(allowed):
            if own is not None:
                trees[i], boosting_weights[i] = own.applied(trees[i], boosting_weights[i])
        return _batch_of(
            fusion.token_lm or nothing,
            np.array(lm_weights, np.float32),
            [tree or nothing for tree in trees],
            np.array(boosting_weights, np.float32),
            allowed,
        )

    def replaced(self, rows: Sequence[int], own: BatchFusion) -> BatchFusion:
        """A copy in which utterance rows[i] has the fusion of utterance i of `own`."""
        lm_weights, boosting_weights = self.lm_weights.copy(), self.boosting_weights.copy()
        lm_weights[rows], boosting_weights[rows] = own.lm_weights, own.boosting_weights
        trees = [self.trees[number] for number in self.tree_of]
        for row, number in zip(rows, own.tree_of, strict=True):
            trees[row] = own.trees[number]
        allowed = dict(enumerate(self.allowed)) | dict(zip(rows, own.allowed, strict=True))
        return _batch_of(self.lm, lm_weights, trees, boosting_weights, tuple(allowed.values()))

    def aliases_of(self, utterance: int) -> Aliases | None:
        """The aliases of an utterance's phrases."""
        return self.trees[self.tree_of[utterance]].aliases if self.boosting_weights[utterance] else None

    def moved_states(self, after: BatchFusion) -> np.ndarray:
        """Offset of the boosting states of each utterance when `after` replaces this fusion, [n] int32.

        In the `arrays` of `after`, other trees may come before an utterance's tree.
        """
        return after.arrays.utterances["boosting_start"] - self.arrays.utterances["boosting_start"]

    @cached_property
    def arrays(self) -> FusionArrays:
        """The arrays for compiled code."""
        boosting, starts = concatenate(self.trees)
        utterances = np.zeros(len(self), UTTERANCE)
        utterances["lm_start"], utterances["boosting_start"] = self.lm.start_state, starts[self.tree_of]
        utterances["lm_weight"], utterances["boosting_weight"] = self.lm_weights, self.boosting_weights
        return FusionArrays(self.lm.arrays, boosting, utterances)


def check_fusion(fusion: Fusion, labels: FusionLabels) -> None:
    """Check that LMs and boosting tree are automata over these labels.

    Raises:
        ValueError: an automaton has other labels, or a second LM is given beside that of the graph.
    """
    if fusion.lm is not None and labels.lm_in_graph:
        raise ValueError(f"fusion.lm is {fusion.lm.name}, expected None: the LM of a word graph is in the graph")
    _check_automaton("fusion.lm", fusion.lm, labels)
    _check_automaton("fusion.source_lm", fusion.source_lm, labels)
    _check_automaton("fusion.lm", fusion.token_lm, labels)
    _check_automaton("fusion.boosting", fusion.boosting, labels)
    _check_allowed("fusion.allowed", fusion.allowed, labels)


def _check_automaton(name: str, automaton: BackoffAutomaton | None, labels: FusionLabels) -> None:
    if automaton is None:
        return
    if automaton.vocab_size != labels.size:
        raise ValueError(
            f"{name} ({automaton.name}) was made for {automaton.vocab_size} {labels.unit}, "
            f"expected {labels.size}{labels.hint}"
        )
    if automaton.num_states > labels.max_states:
        raise ValueError(
            f"{name} ({automaton.name}) has {automaton.num_states} states, expected at most {labels.max_states}"
        )


def _check_allowed(name: str, allowed: AllowedTokens | None, labels: FusionLabels) -> None:
    if allowed is None:
        return
    if labels.unlocked:
        raise ValueError(f"{name} is given, expected None: {labels.unlocked}")
    if len(allowed.is_allowed) != labels.size:
        raise ValueError(f"{name} is for {len(allowed.is_allowed)} tokens, expected {labels.size}{labels.hint}")


def _checked_requests(
    requests: Sequence[Request | None] | None, fusion: Fusion, n: int, labels: FusionLabels
) -> list[Request]:
    if requests is None:
        return [Request()] * n
    if len(requests) != n:
        raise ValueError(f"requests has {len(requests)} entries, expected {n}: one per utterance")
    for i, request in enumerate(requests):
        if request is None:
            continue
        if not isinstance(request, Request):
            raise ValueError(f"requests[{i}] is a {type(request).__name__}, expected a Request or None")
        _check_automaton(f"requests[{i}].boosting", request.boosting, labels)
        _check_allowed(f"requests[{i}].allowed", request.allowed, labels)
        if request.lm_weight is not None and not (fusion.lm or labels.lm_in_graph):
            raise ValueError(f"requests[{i}].lm_weight is {request.lm_weight}, but the decoder has no LM")
        if request.boosting_weight is not None and not (request.boosting or fusion.boosting):
            raise ValueError(
                f"requests[{i}].boosting_weight is {request.boosting_weight}, but neither the "
                "request nor the decoder has a boosting tree"
            )
    return [request or Request() for request in requests]


def _batch_of(
    lm: BackoffAutomaton,
    lm_weights: np.ndarray,
    trees: list[BackoffAutomaton],
    boosting_weights: np.ndarray,
    allowed: tuple[AllowedTokens | None, ...],
) -> BatchFusion:
    """The fusion of utterances from the LM, and the weights and tree of each; unused trees are dropped."""
    used = [tree for tree, weight in zip(trees, boosting_weights, strict=True) if weight]
    number_of = {tree: number for number, tree in enumerate(dict.fromkeys(used or trees[:1] or [lm]))}
    # an utterance without a tree has weight 0, so that any will do
    tree_of = np.array([number_of.get(tree, 0) for tree in trees], np.int64)
    return BatchFusion(lm, lm_weights, tuple(number_of), tree_of, boosting_weights, allowed)


_nothing = lru_cache(maxsize=16)(empty_automaton)  # cached, so that it is uploaded once


def _weight(automaton: BackoffAutomaton | None, own: float, requested: float | None) -> float:
    if automaton is None:
        return 0.0
    return own if requested is None else requested


class FusionArrays(NamedTuple):
    """The fusion of n utterances as compiled code takes it."""

    lm: AutomatonArrays
    boosting: AutomatonArrays  # all boosting trees
    utterances: np.ndarray  # [n] UTTERANCE


class UtteranceFusion(NamedTuple):
    """The fusion of one utterance as compiled code takes it."""

    lm: AutomatonArrays
    boosting: AutomatonArrays
    lm_weight: np.float32  # 0: no LM
    boosting_weight: np.float32  # 0: no boosting


@inlined
def of_utterance(fusion, b):
    """The `UtteranceFusion` of utterance b of `FusionArrays`."""
    own = fusion.utterances[b]
    return UtteranceFusion(fusion.lm, fusion.boosting, own.lm_weight, own.boosting_weight)


# -- for kernels, see fusion.cuh -------------------------------------------------------------------------


class DeviceAutomaton(NamedTuple):
    """The arrays of one or several automata in a device's memory."""

    states: torch.Tensor  # [S, bytes of automaton.STATE] uint8
    arcs: torch.Tensor  # [A, bytes of automaton.ARC] uint8


def on_device(automaton: BackoffAutomaton, device: torch.device) -> DeviceAutomaton:
    """The automaton in the memory of `device`; uploaded at the first call, then cached."""
    return DeviceAutomaton(*arrays_on_device(automaton, automaton.arrays, device))


def trees_on_device(fusion: BatchFusion, device: torch.device) -> DeviceAutomaton:
    """All boosting trees of a batch; a single tree is cached, several trees are joined per batch."""
    if len(fusion.trees) == 1:
        return on_device(fusion.trees[0], device)
    joined = fusion.arrays.boosting
    return DeviceAutomaton(*(as_records(array).to(device, non_blocking=True) for array in joined))
