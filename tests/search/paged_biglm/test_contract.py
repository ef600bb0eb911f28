"""What is paged_biglm's own about bad input; the rest is in tests/contract."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig
from tests.graph.toy import PIECES
from tests.random_models import random_log_probs
from tests.search.paged_biglm.models import LM, make, random_lm

pytest.importorskip("kaldifst")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 0.0}, "beam is 0.0"),
        ({"large_lm_weight": -0.5}, "large_lm_weight is -0.5, expected a finite number >= 0"),
        ({"large_lm_weight": float("nan")}, "large_lm_weight is nan"),
        ({"composition": "static"}, "composition is 'static', expected one of lazy, eager"),
        ({"group_size": -1}, "group_size is -1"),
        ({"group_size": 4, "composition": "eager"}, "group_size is 4 with composition 'eager'"),
        ({"difference": "maybe"}, "difference is 'maybe', expected one of auto, always, never"),
        ({"placement": "disk"}, "placement is 'disk', expected one of auto, device, paged"),
        ({"cache_mb": 0}, "cache_mb is 0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PagedBigLMConfig(**options)


@pytest.mark.parametrize("which", ["large", "small"])
def test_lms_that_cannot_score_all_words_are_named(which):
    table = random_lm(1).table
    lacking = LM({g: w for g, w in table.items() if not {"cab", "<unk>"} & set(g)})
    lms = {"small": random_lm(1), "large": random_lm(2)} | {which: lacking}
    message = rf"{which} .* has neither 1 words of the graph, such as 'cab', nor <unk>"
    with pytest.raises(ValueError, match=message):
        make(**lms, graph=random_lm(1).graph)


def test_words_that_the_graph_never_tells_need_not_be_in_the_lms():
    from dataclasses import replace

    small, large = random_lm(1), random_lm(2)
    lacking = LM({gram: w for gram, w in large.table.items() if "<unk>" not in gram})
    graph = replace(small.graph, words=(*small.graph.words, "#0", "unheard"))
    log_probs = random_log_probs(2, 12, len(PIECES) + 1, seed=1)
    expected = make(small, lacking).decode(log_probs, [12, 12])
    results = make(small, lacking, graph=graph).decode(log_probs, [12, 12])
    assert [n.best.text for n in results] == [n.best.text for n in expected]
    assert [n.best.score for n in results] == [n.best.score for n in expected]


def test_decoders_of_the_same_graph_and_lms_share_what_they_have_made_of_them():
    import gc
    import weakref

    from nemo_gpu_decoding.search.word_graph.lm_pair import shared_lm_pair

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
        make(random_lm(1, keep=0.8), random_lm(2), difference="always")
