"""What an utterance is decoded with, and how it begins; else as in `cuda_wfst/streams.py`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nemo_gpu_decoding.search.cuda_wfst import streams
from nemo_gpu_decoding.search.cuda_wfst.streams import Utterance
from nemo_gpu_decoding.search.paged_biglm.composition import Rescoring
from nemo_gpu_decoding.search.paged_biglm.tokens import PROGRESS, TOKEN


@dataclass(frozen=True, eq=False)
class Setup(streams.Setup):
    """What one utterance is decoded with; its `search` is the `ways.Search` of this folder."""

    rescoring: Rescoring

    def new_utterance(self) -> Utterance:
        """Nothing read: one token in the start state, whose history is the LMs' start."""
        tokens = self._first_token(TOKEN)
        tokens["lm"] = self.rescoring.start
        return self._with_room(tokens, np.zeros(1, PROGRESS))
