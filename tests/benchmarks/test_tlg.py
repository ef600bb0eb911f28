"""T o L o G for other decoders: topologies are NeMo's, chains are single arcs, Kaldi finds our words."""

import numpy as np
import pytest

from benchmarks.peers.tlg import composed_graph, topology_fst
from tests.graph.toy import PIECES
from tests.random_models import random_log_probs
from tests.search.word_graph.models import make, toy_graph

pytestmark = pytest.mark.slow
kaldifst = pytest.importorskip("kaldifst")

TOPOLOGIES = ("compact", "normal", "minimal")
VOCAB, FRAMES = len(PIECES), 25


def test_a_ready_made_topology_has_no_transducer():
    with pytest.raises(ValueError, match="topology is 'graph', expected compact, normal or minimal"):
        topology_fst("graph", VOCAB)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_composed_graph_gives_equal_words_in_kaldi(topology):
    kaldi = pytest.importorskip("kaldi_decoder")
    graph = toy_graph(1)
    log_probs = random_log_probs(3, FRAMES, VOCAB + 1, seed=3)
    ours = make(graph, topology=topology).decode(log_probs, [FRAMES] * 3)
    options = kaldi.FasterDecoderOptions(beam=1e4, min_active=0)
    fst = kaldifst.StdConstFst(composed_graph(graph, topology, VOCAB))
    for frames, nbest in zip(log_probs.numpy(), ours, strict=True):
        decoder = kaldi.FasterDecoder(fst, options)
        decoder.decode(kaldi.DecodableCtc(np.ascontiguousarray(frames)))
        _, path = decoder.get_best_path()
        _, _, words, weight = kaldifst.get_linear_symbol_sequence(path)
        assert [word.label for word in nbest.best.words] == list(words)
        assert nbest.best.score == pytest.approx(-weight.value1 - weight.value2, abs=1e-3)
