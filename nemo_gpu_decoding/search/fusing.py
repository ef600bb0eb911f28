"""Which LM, boosting tree and weights each utterance of a batch is decoded with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nemo_gpu_decoding.fusion.automaton import (
    AutomatonArrays,
    BackoffAutomaton,
    concatenate,
    empty_automaton,
)
from nemo_gpu_decoding.fusion.fusion import Fusion, Request


@dataclass(frozen=True)
class BatchFusion:
    """The fusion of n utterances, from their first frame to their last."""

    lm: BackoffAutomaton
    lm_weights: np.ndarray  # [n] float32; 0: no LM
    trees: tuple[BackoffAutomaton, ...]  # boosting trees, each once; at least one
    tree_of: np.ndarray  # [n] number of each utterance's tree
    boosting_weights: np.ndarray  # [n] float32; 0: no boosting

    def __len__(self) -> int:
        return len(self.lm_weights)

    @cached_property
    def boosting(self) -> AutomatonArrays:
        """All trees in one set of arrays."""
        return self._joined[0]

    @cached_property
    def lm_starts(self) -> np.ndarray:
        """The state of the LM in which each utterance begins, [n] int32."""
        return np.full(len(self), self.lm.start_state, np.int32)

    @cached_property
    def boosting_starts(self) -> np.ndarray:
        """The state of `boosting` in which each utterance begins, [n] int32."""
        return self._joined[1][self.tree_of]

    @cached_property
    def _joined(self) -> tuple[AutomatonArrays, np.ndarray]:
        return concatenate(self.trees)


class Fuser:
    """Turns a decoder's fusion and the requests of single utterances into a `BatchFusion`.

    Raises:
        ValueError: an automaton was made for another number of tokens.
    """

    def __init__(self, vocab_size: int, fusion: Fusion) -> None:
        self.vocab_size = vocab_size
        self.fusion = fusion
        self._nothing = empty_automaton(vocab_size)
        self._check_automaton("fusion.lm", fusion.lm)
        self._check_automaton("fusion.boosting", fusion.boosting)

    def of(self, n: int, requests: Sequence[Request | None] | None) -> BatchFusion:
        """The fusion of n utterances.

        Raises:
            ValueError: a request does not fit the decoder; the message names it.
        """
        wishes = self._checked_requests(n, requests)
        trees = [wish.boosting or self.fusion.boosting for wish in wishes]
        distinct = {id(tree): tree for tree in trees if tree is not None} or {0: self._nothing}
        number_of = {key: number for number, key in enumerate(distinct)}
        lm_weights = [_weight(self.fusion.lm, self.fusion.lm_weight, wish.lm_weight) for wish in wishes]
        boosting_weights = [
            _weight(tree, self.fusion.boosting_weight, wish.boosting_weight)
            for tree, wish in zip(trees, wishes, strict=True)
        ]
        return BatchFusion(
            lm=self.fusion.lm or self._nothing,
            lm_weights=np.array(lm_weights, np.float32),
            trees=tuple(distinct.values()),
            # an utterance without a tree has weight 0, so that any will do
            tree_of=np.array([number_of.get(id(tree), 0) for tree in trees], np.int64),
            boosting_weights=np.array(boosting_weights, np.float32),
        )

    def _checked_requests(self, n: int, requests: Sequence[Request | None] | None) -> list[Request]:
        if requests is None:
            return [Request()] * n
        if len(requests) != n:
            raise ValueError(f"requests has {len(requests)} entries, expected {n}: one per utterance")
        for i, request in enumerate(requests):
            if request is None:
                continue
            if not isinstance(request, Request):
                raise ValueError(
                    f"requests[{i}] is a {type(request).__name__}, expected a Request or None"
                )
            self._check_automaton(f"requests[{i}].boosting", request.boosting)
            if request.lm_weight is not None and self.fusion.lm is None:
                raise ValueError(
                    f"requests[{i}].lm_weight is {request.lm_weight}, but the decoder has no LM"
                )
            if request.boosting_weight is not None and not (request.boosting or self.fusion.boosting):
                raise ValueError(
                    f"requests[{i}].boosting_weight is {request.boosting_weight}, but neither the "
                    "request nor the decoder has a boosting tree"
                )
        return [request or Request() for request in requests]

    def _check_automaton(self, name: str, automaton: BackoffAutomaton | None) -> None:
        if automaton is not None and automaton.vocab_size != self.vocab_size:
            raise ValueError(
                f"{name} ({automaton.name}) was made for {automaton.vocab_size} tokens, "
                f"expected {self.vocab_size} (vocab_size)"
            )


def _weight(automaton: BackoffAutomaton | None, own: float, wished: float | None) -> float:
    if automaton is None:
        return 0.0
    return own if wished is None else wished
