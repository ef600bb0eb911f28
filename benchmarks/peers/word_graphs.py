"""Decoders of word graphs, on the T o L o G of the strategy's graph.

kaldi_decoder is Kaldi's FasterDecoder as a Python package [Kaldi, Povey et al. 2011]; riva-asrlib-decoder is NVIDIA's
CUDA decoder [CUDA-WFST], which NeMo's `wfst` uses. Both use the beam and the limit of hypotheses of the strategy. The
log-probs are scaled before the clock starts, because Kaldi's decoder has no acoustic scale. Kaldi's decoder gets its
fastest settings: a const FST and `min_active` 0. Its default of 20 keeps hypotheses outside the beam, and takes up to
20 times as long on peaked posteriors for the same words.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.options import BenchOptions
from benchmarks.ours import LARGE, word_graph
from benchmarks.peers.base import Hypothesis, Output, Peer, Ready, Setting
from benchmarks.peers.tlg import composed_graph
from benchmarks.tasks import Task
from nemo_gpu_decoding.graph.csr import WordGraph

# Note of a row if Riva's decoder is not available: the figure of its authors' abstract.
PUBLISHED = (
    "; published for it: up to 7 times the throughput of the fastest CPU decoder "
    "(Galvez and Kaldewey 2023, arXiv 2311.04996)"
)
PIPELINED = 50  # frames of an utterance in one of Riva's launches, as in NeMo


def kaldi_decoder(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    from kaldi_decoder import DecodableCtc, FasterDecoder, FasterDecoderOptions
    from kaldifst import get_linear_symbol_sequence

    graph = word_graph(task, LARGE)
    fst = _const_fst(graph, options.topology, task.vocab_size)
    search = FasterDecoderOptions(beam=setting.beam_size, max_active=options.max_active, min_active=0)
    scaled = _once(lambda log_probs: (log_probs * task.weights.acoustic_scale).cpu().numpy())

    def run(log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Any]:
        found = []
        for frames, length in zip(scaled(log_probs), lengths.tolist(), strict=True):
            decoder = FasterDecoder(fst, search)
            decoder.decode(DecodableCtc(frames[:length]))
            found.append(decoder.get_best_path())
        return found

    def best(found: tuple[bool, Any]) -> Hypothesis:
        if not found[0]:
            return Hypothesis([], -np.inf)
        _, _, words, weight = get_linear_symbol_sequence(found[1])
        return Hypothesis(list(words), -(weight.value1 + weight.value2))

    def read(found: list[Any]) -> list[Output]:
        return [" ".join(graph.words[word] for word in best(path).labels) for path in found]

    return Ready(run, read, lambda *batch: [[best(path)] for path in run(*batch)])


def riva(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    from riva.asrlib.decoder.python_decoder import BatchedMappedDecoderCuda, BatchedMappedDecoderCudaConfig

    config = BatchedMappedDecoderCudaConfig()
    config.n_input_per_chunk = PIPELINED
    online = config.online_opts
    online.decoder_opts.default_beam = float(setting.beam_size)
    online.decoder_opts.max_active = options.max_active
    online.determinize_lattice = True
    online.max_batch_size = online.num_channels = len(task.texts)
    online.frame_shift_seconds = 1
    online.lattice_postprocessor_opts.acoustic_scale = 1.0
    online.lattice_postprocessor_opts.nbest = 1
    graph = word_graph(task, LARGE)
    with tempfile.TemporaryDirectory(prefix="nemo-gpu-decoding-") as folder:
        words, tlg = Path(folder) / "words.txt", Path(folder) / "tlg.fst"
        lines = [f"{word}\t{label}\n" for label, word in enumerate(graph.words)]
        words.write_text("".join(lines), encoding="utf-8")
        composed_graph(graph, options.topology, task.vocab_size).write(str(tlg))
        decoder = BatchedMappedDecoderCuda(config, str(tlg), str(words), task.vocab_size + 1)
    scaled = _once(lambda log_probs: (log_probs * task.weights.acoustic_scale).contiguous())

    def read(found: list[Any]) -> list[Output]:
        return [" ".join(graph.words[word] for word in paths[0].words if word) for paths in found]

    return Ready(
        lambda log_probs, lengths: decoder.decode_nbest(scaled(log_probs), lengths.cpu().long().contiguous()), read
    )


def _once(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """The same change, remembered for the batch that comes again."""
    seen: list[Any] = [None, None]

    def changed(batch: torch.Tensor) -> Any:
        if seen[0] is not batch:
            seen[:] = batch, change(batch)
        return seen[1]

    return changed


@lru_cache(maxsize=1)
def _const_fst(graph: WordGraph, topology: str, vocab_size: int) -> Any:
    """T o L o G in the form that kaldi_decoder searches a little quicker than others."""
    import kaldifst

    return kaldifst.StdConstFst(composed_graph(graph, topology, vocab_size))


KALDI_DECODER = Peer(
    "kaldi_decoder", kaldi_decoder, ("kaldi_decoder", "kaldifst"),
    "pip install '.[bench,wfst]'",
)  # fmt: skip
RIVA = Peer(
    "riva", riva, ("riva.asrlib", "kaldifst"),
    "pip install riva-asrlib-decoder kaldifst (Python 3.12 and older)", otherwise=PUBLISHED,
)  # fmt: skip
