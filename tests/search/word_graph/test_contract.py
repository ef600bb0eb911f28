"""The checks of tests/contract for both searches on the CPU, which share compiled code, and what is their own."""

from dataclasses import replace

import numba
import numpy as np
import pytest

from nemo_gpu_decoding.fusion.automaton import empty_automaton
from nemo_gpu_decoding.graph.csr import GraphArrays
from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig, WFSTConfig
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST
from nemo_gpu_decoding.search.word_graph.frame import advance
from tests.contract.checks import *
from tests.contract.subjects import rows
from tests.graph.toy import BLANK, PIECES
from tests.random_models import random_log_probs
from tests.search.word_graph.models import LM, make, make_paged, random_lm, toy_graph

pytest.importorskip("kaldifst")
TABLE = rows("cpu", "cuda_wfst", "paged_biglm")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        *(
            (kind, {"beam": beam}, f"beam is {beam}, expected a finite number > 0")
            for kind in (WFSTConfig, PagedBigLMConfig)
            for beam in (0.0, float("inf"))
        ),
        (WFSTConfig, {"topology": "tiny"}, "topology is 'tiny', expected one of compact, normal, minimal, graph"),
        (WFSTConfig, {"max_active": 0}, "max_active is 0"),
        (WFSTConfig, {"min_active": -1}, "min_active is -1"),
        (WFSTConfig, {"max_active": 7, "min_active": 8}, r"min_active is 8, expected an integer 0 \.\. 7"),
        (WFSTConfig, {"acoustic_scale": 0.0}, "acoustic_scale is 0.0"),
        (WFSTConfig, {"lattice_beam": -2.0}, "lattice_beam is -2.0"),
        (WFSTConfig, {"n_best": 0}, "n_best is 0"),
        (WFSTConfig, {"threads": -1}, "threads is -1"),
        (WFSTConfig, {"backend": "tpu"}, "backend is 'tpu'"),
        (PagedBigLMConfig, {"large_lm_weight": -0.5}, "large_lm_weight is -0.5, expected a finite number >= 0"),
        (PagedBigLMConfig, {"composition": "static"}, "composition is 'static', expected one of lazy, let"),
        (PagedBigLMConfig, {"group_size": -1}, "group_size is -1"),
        (PagedBigLMConfig, {"difference": "maybe"}, "difference is 'maybe', expected one of auto, always, never"),
        (PagedBigLMConfig, {"placement": "disk"}, "placement is 'disk', expected one of auto, device, paged"),
        (PagedBigLMConfig, {"cache_mb": 0}, "cache_mb is 0"),
    ],
)
def test_invalid_option_raises_an_error_that_names_it(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_topology_default_means_normal_as_in_nemo():
    log_probs = random_log_probs(1, 20, len(PIECES) + 1, seed=1)
    decoders = [make(toy_graph(0), topology=name) for name in ("default", "normal")]
    theirs, ours = (decoder.decode(log_probs, [20]) for decoder in decoders)
    assert theirs[0].best.score == ours[0].best.score


def test_a_state_with_more_epsilons_than_there_is_room_for_is_refused():
    graph = toy_graph(0)
    states, arcs, epsilons, word_sequences = graph.arrays
    states, many = states.copy(), np.repeat(epsilons[:1], 1024)
    states["epsilon_begin"][graph.start] = len(epsilons)
    states["epsilon_end"][graph.start] = len(epsilons) + len(many)
    arrays = GraphArrays(states, arcs, np.concatenate([epsilons, many]), word_sequences)
    with pytest.raises(ValueError, match=r"1024 closure arcs .* at most 1023"):
        CudaWFST(replace(graph, arrays=arrays), len(PIECES), BLANK)


def test_graphs_and_phrases_of_another_model_are_named():
    with pytest.raises(ValueError, match=r"graph .* reads column 4, expected 0 \.\. 3"):
        CudaWFST(toy_graph(0), vocab_size=3, blank_id=3)
    with pytest.raises(ValueError, match=r"reads the blank \(column 2\)"):
        CudaWFST(toy_graph(0), vocab_size=len(PIECES), blank_id=2)
    with pytest.raises(ValueError, match=f"blank_id is 9, expected an integer 0 .. {BLANK}"):
        CudaWFST(toy_graph(0), vocab_size=len(PIECES), blank_id=9)
    with pytest.raises(ValueError, match="was made for 3 words, expected 8"):
        make(toy_graph(0), boosting=empty_automaton(3))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_path_that_cannot_go_on_is_named(backend, emulated_runtime):
    log_probs = random_log_probs(1, 4, len(PIECES) + 1, seed=1)
    log_probs[0, 0, 1:] = -np.inf  # ▁a, then a label that no word goes on with
    log_probs[0, 1, [0, 1, 2, 3, 5]] = -np.inf
    with pytest.raises(ValueError, match=r"log_probs\[0, 1\] makes every path through the graph impossible"):
        make(toy_graph(0), backend=backend).decode(log_probs, [4])


def test_the_search_without_a_large_lm_is_compiled_for_records_without_its_fields():
    make(toy_graph(0)).decode(random_log_probs(1, 4, len(PIECES) + 1, seed=1), [4])
    plain = [types for types in advance.signatures if isinstance(types[5], numba.types.NoneType)]
    assert plain
    for *_, work in plain:
        records = [array.dtype for array in work.types if isinstance(array, numba.types.Array)]
        fields = [name for record in records for name in getattr(record, "fields", ())]
        assert "key" in fields
        assert not [name for name in fields if name.startswith("lm") or name == "difference"]


# ------------------------------------------------------------------------------ paged_biglm
@pytest.mark.parametrize("which", ["large", "small"])
def test_lms_that_cannot_score_all_words_are_named(which):
    lacking = LM({g: w for g, w in random_lm(1).table.items() if not {"cab", "<unk>"} & set(g)})
    lms = {"small": random_lm(1), "large": random_lm(2)} | {which: lacking}
    with pytest.raises(ValueError, match=rf"{which} .* has neither 1 words of the graph, such as 'cab', nor <unk>"):
        make_paged(**lms, graph=random_lm(1).graph)


def test_lms_need_only_words_that_the_graph_emits():
    from dataclasses import replace

    small, large = random_lm(1), random_lm(2)
    lacking = LM({gram: w for gram, w in large.table.items() if "<unk>" not in gram})
    graph = replace(small.graph, words=(*small.graph.words, "#0", "unheard"))
    log_probs = random_log_probs(2, 12, len(PIECES) + 1, seed=1)
    expected = make_paged(small, lacking).decode(log_probs, [12, 12])
    results = make_paged(small, lacking, graph=graph).decode(log_probs, [12, 12])
    assert [n.best.text for n in results] == [n.best.text for n in expected]
    assert [n.best.score for n in results] == [n.best.score for n in expected]


def test_decoders_share_derived_data_of_graph_and_lms():
    import gc
    import weakref

    from nemo_gpu_decoding.search.word_graph.large_lm.pair import shared_lm_pair

    small, large = random_lm(1), LM(random_lm(2).table)
    ready = shared_lm_pair(small.graph, large.packed, small.packed, "auto")
    assert shared_lm_pair(small.graph, large.packed, small.packed, "auto") is ready
    assert shared_lm_pair(small.graph, large.packed, small.packed, "never") is not ready
    assert shared_lm_pair(small.graph, small.packed, small.packed, "auto") is not ready
    gone = weakref.ref(large.packed)
    del large, ready
    gc.collect()
    assert gone() is None


def test_a_small_lm_that_is_no_part_of_the_large_one_is_named():
    with pytest.raises(ValueError, match=r"difference is 'always', but small .* has n-grams that large"):
        make_paged(random_lm(1, keep=0.8), random_lm(2), difference="always")
