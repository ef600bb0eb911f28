"""`ALSDPlusPlus`: the public face of alsd_pp."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.alsd_pp import cpu
from nemo_gpu_decoding.search.alsd_pp.config import ALSDConfig
from nemo_gpu_decoding.search.transducer.cuda_step import DeviceStep
from nemo_gpu_decoding.search.transducer.decoder import TransducerDecoder
from nemo_gpu_decoding.search.transducer.engine import Strategy
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks


class ALSDPlusPlus(TransducerDecoder[ALSDConfig]):
    """Batched alignment-length synchronous decoding of RNN-T and TDT models [ALSD++/AES++].

    Args:
        networks: prediction network and joint, see `TransducerNetworks`.
        config: see `ALSDConfig`.
        fusion: LM and boosting tree over the V tokens of the networks.

    Example:
        >>> embedding, lstm = torch.nn.Embedding(11, 16), torch.nn.LSTM(16, 16)
        >>> linear = torch.nn.Linear
        >>> joint = torch.nn.Sequential(torch.nn.ReLU(), linear(16, 11))
        >>> networks = LSTMNetworks(embedding, lstm, linear(8, 16), linear(16, 16), joint)
        >>> decoder = ALSDPlusPlus(networks, ALSDConfig(beam_size=4))
        >>> tokens = decoder.decode(torch.randn(1, 50, 8), [50])[0].best.tokens

    Raises:
        ValueError: an argument is out of range or does not fit the others.
    """

    def __init__(
        self,
        networks: TransducerNetworks,
        config: ALSDConfig | None = None,
        fusion: Fusion | None = None,
    ) -> None:
        super().__init__(networks, config or ALSDConfig(), fusion)

    def _strategy(self) -> Strategy:
        limit = self.config.max_symbols
        kernels = DeviceStep(
            source="search/alsd_pp/kernel.cu",
            per_hypothesis=self.config.beam_size,
            pooled=False,
            expand_options=(("max_symbols", np.int32(limit)),),
            merge_options=(),
        )
        return Strategy(cpu.step, limit, kernels, self._search, self._durations)
