"""`AESPlusPlus`: the public face of aes_pp."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.aes_pp import cpu
from nemo_gpu_decoding.search.aes_pp.config import AESConfig
from nemo_gpu_decoding.search.transducer.cuda_step import DeviceStep
from nemo_gpu_decoding.search.transducer.decoder import TransducerDecoder
from nemo_gpu_decoding.search.transducer.engine import Strategy
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks


class AESPlusPlus(TransducerDecoder[AESConfig]):
    """Batched adaptive expansion search of RNN-T and TDT models [ALSD++/AES++].

    Faster than `ALSDPlusPlus`, and nearly as accurate, for models that rarely emit more than one token
    per frame.

    Args:
        networks: prediction network and joint, see `TransducerNetworks`.
        config: see `AESConfig`.
        fusion: LM and boosting tree over the V tokens of the networks.

    Example: see `ALSDPlusPlus`.

    Raises:
        ValueError: an argument is out of range or does not fit the others.
    """

    def __init__(
        self,
        networks: TransducerNetworks,
        config: AESConfig | None = None,
        fusion: Fusion | None = None,
    ) -> None:
        super().__init__(networks, config or AESConfig(), fusion)
        choices = (networks.vocab_size + 1) * len(self._durations)
        self._limits = cpu.Limits(
            steps=self.config.maes_num_steps,
            expansions=min(self.config.beam_size + self.config.maes_expansion_beta, choices),
            gamma=np.float32(self.config.maes_expansion_gamma),
        )

    def _strategy(self) -> Strategy:
        limits = self._limits
        stays = np.flatnonzero(self._durations == 0)  # a token that stays in its frame
        kernels = DeviceStep(
            source="search/aes_pp/kernel.cu",
            per_hypothesis=limits.expansions,
            pooled=True,
            expand_options=(
                ("num_steps", np.int32(limits.steps)),
                ("gamma", limits.gamma),
                ("stay", np.int32(stays[-1] if len(stays) else -1)),
            ),
            merge_options=(("timed", int(bool(self.networks.durations))), ("num_steps", limits.steps)),
        )
        return Strategy(cpu.step, limits, kernels, self._search, self._durations)
