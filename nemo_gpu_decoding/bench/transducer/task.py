"""What a transducer decodes: encoder output, and the networks that belong to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from nemo_gpu_decoding.bench.task import Utterances
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks

RNNT, TDT = "rnnt", "tdt"


@dataclass(frozen=True, eq=False)
class TransducerTask(Utterances):
    """B utterances of up to T frames of size D over V tokens."""

    encoder_output: torch.Tensor  # [B, T, D] float32
    networks: TransducerNetworks
    # The same networks as NeMo's decoders take them: (prediction network, joint).
    nemo_modules: Callable[[], tuple[Any, Any]]

    @property
    def inputs(self) -> torch.Tensor:
        return self.encoder_output

    def with_inputs(self, inputs: torch.Tensor) -> TransducerTask:
        return replace(self, encoder_output=inputs)

    @property
    def kind(self) -> str:
        return TDT if self.networks.durations else RNNT
