"""What an utterance is decoded with, and how it begins; else as in `word_graph/streams.py`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nemo_gpu_decoding.search.word_graph import streams
from nemo_gpu_decoding.search.word_graph.composition.composition import Rescoring
from nemo_gpu_decoding.search.word_graph.composition.tokens import PROGRESS, TOKEN
from nemo_gpu_decoding.search.word_graph.composition.ways import CompositionParams, Search
from nemo_gpu_decoding.search.word_graph.streams import Utterance


@dataclass(frozen=True, eq=False)
class Setup(streams.Setup):
    """What one utterance is decoded with."""

    composition: CompositionParams
    rescoring: Rescoring

    @cached_property
    def search(self) -> Search:
        """All options as compiled code takes them."""
        return Search(*self.params, *self.weights, *self.composition)

    def new_utterance(self) -> Utterance:
        """Nothing read: one token in the start state, whose history is the LMs' start."""
        tokens = self._first_token(TOKEN)
        tokens["lm"] = self.rescoring.start
        return self._with_room(tokens, np.zeros(1, PROGRESS))
