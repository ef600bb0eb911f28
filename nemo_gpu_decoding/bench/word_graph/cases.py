"""Which decoders of word graphs are measured beside ours, in what setting."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_gpu_decoding.bench.cases import Case, Check
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.kaldi_decoder import KaldiDecoder
from nemo_gpu_decoding.bench.word_graph.settings import graph_setting

# What the project promises (issue 5): per core, at equal word errors, on 500k n-grams or more.
TARGET = 2.0


def make_word_graph_cases(options: BenchOptions) -> Iterator[Case]:
    """A row for every beam, both decoders with the same settings on the same L o G."""
    if "kaldi_decoder" not in options.peers:
        return
    for beam in options.graph_beams:
        setting = graph_setting(options, beam)
        yield Case(KaldiDecoder, setting, setting, Check.WORDS, TARGET, ("word_lm",))
