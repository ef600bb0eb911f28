"""riva-asrlib-decoder: NVIDIA's CUDA decoder of word graphs [CUDA-WFST], which NeMo's `wfst` uses.

It gets the T o L o G that our graph belongs to, our beam and our limit of hypotheses, and log-probs that
have been scaled before the clock starts.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch

from nemo_gpu_decoding.bench.peers.base import Output, Peer, Setting
from nemo_gpu_decoding.bench.task import Task
from nemo_gpu_decoding.bench.word_graph.graphs import composed_graph, word_graph
from nemo_gpu_decoding.bench.word_graph.settings import GraphSetting

# What a row says where this decoder cannot be had: the figure of its authors' abstract.
PUBLISHED = (
    "published for it: up to 7 times the throughput of the fastest CPU decoder "
    "(Galvez and Kaldewey 2023, arXiv 2311.04996)"
)
PIPELINED = 50  # frames of an utterance in one of its launches, as in NeMo


class RivaDecoder(Peer):
    name = "riva"
    needs = ("riva", "kaldifst")
    install = "pip install riva-asrlib-decoder kaldifst (Python 3.12 and older)"

    def available(self) -> str | None:
        reason = super().available()
        if reason is None and importlib.util.find_spec("riva.asrlib") is None:  # riva has other parts
            reason = f"riva.asrlib not installed: {self.install}"
        return f"{reason}; {PUBLISHED}" if reason else None

    def prepare(self, task: Task, setting: Setting) -> None:
        assert isinstance(setting, GraphSetting)
        from riva.asrlib.decoder.python_decoder import BatchedMappedDecoderCuda

        graph = word_graph(task)
        fst = composed_graph(graph, setting.topology, task.vocab_size)
        with tempfile.TemporaryDirectory(prefix="nemo-gpu-decoding-") as folder:
            words, tlg = Path(folder) / "words.txt", Path(folder) / "tlg.fst"
            lines = [f"{word}\t{label}\n" for label, word in enumerate(graph.words)]
            words.write_text("".join(lines), encoding="utf-8")
            fst.write(str(tlg))
            self._search = BatchedMappedDecoderCuda(
                _options(setting, len(task.texts)), str(tlg), str(words), task.vocab_size + 1
            )
        self._words = graph.words
        self._scale = setting.acoustic_scale
        self._batch: torch.Tensor | None = None
        self._scaled = torch.empty(0)

    def decode(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Output]:
        return [
            " ".join(self._words[word] for word in hypotheses[0].words if word)
            for hypotheses in self.results(log_probs, lengths)
        ]

    def results(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Any]:
        """Of each utterance its hypotheses, as the decoder gives them."""
        if self._batch is not log_probs:
            self._batch, self._scaled = log_probs, (log_probs * self._scale).contiguous()
        return self._search.decode_nbest(self._scaled, lengths.cpu().long().contiguous())


def _options(setting: GraphSetting, batch: int) -> Any:
    from riva.asrlib.decoder.python_decoder import BatchedMappedDecoderCudaConfig

    options = BatchedMappedDecoderCudaConfig()
    options.n_input_per_chunk = PIPELINED
    online = options.online_opts
    online.decoder_opts.default_beam = float(setting.beam_size)
    online.decoder_opts.max_active = setting.max_active
    online.determinize_lattice = True
    online.max_batch_size = online.num_channels = batch
    online.frame_shift_seconds = 1
    online.lattice_postprocessor_opts.acoustic_scale = 1.0
    online.lattice_postprocessor_opts.nbest = 1
    return options
