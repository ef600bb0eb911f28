"""Our transducer searches in the shape of `Peer`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from nemo_gpu_decoding.bench.peers.base import Setting
from nemo_gpu_decoding.bench.strategies import Strategy, make_fusion
from nemo_gpu_decoding.bench.transducer.task import TransducerTask
from nemo_gpu_decoding.search.result import NBest, Path
from nemo_gpu_decoding.search.transducer.aes import AESPlusPlus
from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.transducer.config import AESConfig, ALSDConfig
from nemo_gpu_decoding.search.transducer.decoder import TransducerDecoder


class TransducerStrategy(Strategy):
    """A transducer search of ours; its networks are those of the task."""

    def prepare(self, task: TransducerTask, setting: Setting) -> None:
        self.fusion = make_fusion(task, setting, self.options)
        self.decoder = self._make(task, setting)

    @abstractmethod
    def _make(self, task: TransducerTask, setting: Setting) -> TransducerDecoder[Any]:
        """The decoder, once `fusion` is there."""

    def paths(self, inputs: torch.Tensor, lengths: torch.Tensor) -> list[Path]:
        return [nbest.best for nbest in self.results(inputs, lengths)]

    def results(self, inputs: torch.Tensor, lengths: torch.Tensor) -> list[NBest]:
        return self.decoder.decode(inputs, lengths)


class ALSD(TransducerStrategy):
    name = "alsd_pp"

    def _make(self, task: TransducerTask, setting: Setting) -> TransducerDecoder[Any]:
        config = ALSDConfig(
            beam_size=setting.beam_size,
            max_symbols=self.options.max_symbols,
            threads=setting.threads,
            backend=self.backend,
        )
        return ALSDPlusPlus(task.networks, config, self.fusion)


class AES(TransducerStrategy):
    name = "aes_pp"

    def _make(self, task: TransducerTask, setting: Setting) -> TransducerDecoder[Any]:
        config = AESConfig(
            beam_size=setting.beam_size,
            pruning_mode="late",  # as NeMo's default
            threads=setting.threads,
            backend=self.backend,
        )
        return AESPlusPlus(task.networks, config, self.fusion)


TRANSDUCER_STRATEGIES: dict[str, type[Strategy]] = {ALSD.name: ALSD, AES.name: AES}
