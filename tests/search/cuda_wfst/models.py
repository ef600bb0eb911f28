"""Decoders, graphs and log-probs for the tests of cuda_wfst."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from nemo_gpu_decoding.graph.build import build_graph
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.openfst import FST_ARC, Fst
from nemo_gpu_decoding.search.cuda_wfst.config import WFSTConfig
from nemo_gpu_decoding.search.cuda_wfst.decoder import CudaWFST
from tests.graph.toy import BLANK, PIECES, toy_arpa, toy_lexicon

VOCAB = len(PIECES)
WIDE = 1e4  # a beam that prunes nothing
ALL = 50000


@lru_cache(maxsize=8)
def toy_graph(seed: int, *, open_vocabulary=None) -> WordGraph:
    arpa = toy_arpa(Path(mkdtemp()) / "toy.arpa", seed=seed)
    return build_graph(
        arpa, toy_lexicon(), vocab_size=len(PIECES), open_vocabulary=open_vocabulary,
        beginning_tokens=[0, 1] if open_vocabulary else None, cache=False,
    )  # fmt: skip


def fst_of(graph: WordGraph) -> Fst:
    """The graph as a transducer again, its epsilon records as epsilon arcs, one for each word."""
    states, arcs, epsilons, _ = graph.arrays
    rows, size = [], len(states)
    for s, state in enumerate(states):
        for arc in arcs[state["arc_begin"] : state["arc_end"]]:
            rows.append((s, arc["label"] + 1, arc["word"], arc["cost"], arc["target"]))
        for record in epsilons[state["epsilon_begin"] : state["epsilon_end"]]:
            *first, last = graph.expanded(int(record["word"])) or [0]
            at = s
            for word in first:
                rows.append((at, 0, word, 0.0, size))
                at, size = size, size + 1
            rows.append((at, 0, last, record["cost"], record["target"]))
    rows.sort(key=lambda row: row[0])
    begin = np.searchsorted([row[0] for row in rows], np.arange(size + 1))
    final = np.full(size, np.inf, np.float32)
    final[: len(states)] = states["final_cost"]
    return Fst(graph.start, final, begin, np.array([row[1:] for row in rows], FST_ARC))


def make(graph, *, vocab_size=VOCAB, blank_id=BLANK, boosting=None, pieces=None, **options):
    options = {"beam": WIDE, "max_active": ALL, "threads": 1, **options}
    return CudaWFST(graph, vocab_size, blank_id, WFSTConfig(**options), boosting=boosting, pieces=pieces)
