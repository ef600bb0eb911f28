"""What the large LM is measured beside, in what setting."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_gpu_decoding.bench.cases import Case, Check
from nemo_gpu_decoding.bench.large_lm.strategies import EagerSearch, SmallLMSearch
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.word_graph.settings import graph_setting

# What the project promises (issue 6): against the small LM alone at most 1.3 times its time, with an LM
# 50 times its size; at least twice as fast as eager composition at beams of 13 to 17.
SMALL_TARGET, EAGER_TARGET = 1 / 1.3, 2.0


def make_large_lm_cases(options: BenchOptions) -> Iterator[Case]:
    """A row for every beam beside each peer."""
    for beam in options.graph_beams:
        setting = graph_setting(options, beam)
        if "small_lm" in options.peers:
            yield Case(SmallLMSearch, setting, setting, Check.WER, SMALL_TARGET, ("word_lm",))
        if "eager" in options.peers:
            yield Case(EagerSearch, setting, setting, Check.WORDS, EAGER_TARGET, ("word_lm",))
