"""Large LMs that requests name: each utterance has the results of a decoder with its LM alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph.config import COMPOSITIONS
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST
from tests.contract.subject import all_facts
from tests.random_models import random_log_probs
from tests.search.word_graph.models import VOCAB, make_paged, nested_pair, random_lm

pytest.importorskip("kaldifst")
NAMES = (None, "nested", "other", "none", "none")


def decoders(**options):
    """A decoder with a pool, and for each name the decoder whose only large LM is that one."""
    small, nested = nested_pair(1)
    larges = {None: random_lm(20, keep=0.8), "nested": nested, "other": random_lm(3)}
    alone = {name: make_paged(small, large, beam=9.0, **options) for name, large in larges.items()}
    pool = {name: large.packed for name, large in larges.items() if name is not None}
    weights = {"other": 0.6}
    decoder = alone[None].with_options(alone[None].config, Fusion(lm_pool=pool, lm_pool_weights=weights))
    alone["other"] = alone["other"].with_options(alone["other"].config, Fusion(lm_weight=0.6))
    alone["none"] = alone[None].with_options(alone[None].config, Fusion(lm_weight=0.0))
    return decoder, alone


@pytest.mark.parametrize("options", [*({"composition": name} for name in COMPOSITIONS), {"n_best": 3}])
def test_each_utterance_has_the_results_of_its_lm_alone(options):
    decoder, alone = decoders(**options)
    tree, frames = build_word_boosting({"cab": 2.0, "a bb": 1.0}, decoder.graph), 30
    requests = [
        Request(lm=NAMES[i % len(NAMES)], boosting=tree if i % 3 == 0 else None, lm_weight=0.4 if i % 7 == 6 else None)
        if NAMES[i % len(NAMES)] != "none" else Request(lm="none")
        for i in range(25)
    ]  # fmt: skip
    lengths = [frames - i for i in range(25)]
    log_probs = random_log_probs(25, frames, VOCAB + 1, seed=3, sharpness=1.5)
    expected = [
        alone[request.lm].decode(log_probs[i : i + 1], [lengths[i]], [replace(request, lm=None)])[0]
        for i, request in enumerate(requests)
    ]
    found = decoder.decode(log_probs, lengths, requests)
    assert all_facts(found) == all_facts(expected)
    streams = decoder.open(25, requests)
    for begin in range(0, frames, 11):
        sizes = [max(0, min(11, length - begin)) for length in lengths]
        decoder.push(streams, log_probs[:, begin : begin + 11], sizes)
        decoder.partial(streams)
    assert all_facts(decoder.close(streams)) == all_facts(expected)
    assert len({nbest.best.text for nbest in decoder.decode(
        log_probs[:1].expand(4, -1, -1), [frames] * 4, [Request(lm=name) for name in NAMES[:4]])}) > 1  # fmt: skip


def test_a_stream_that_is_reopened_has_the_lm_of_its_new_request():
    decoder, alone = decoders()
    log_probs = random_log_probs(2, 20, VOCAB + 1, seed=4)
    streams = decoder.open(2, [Request(lm="nested"), None])
    decoder.push(streams, log_probs, [20, 20])
    decoder.close(streams, rows=[0])
    decoder.reopen(streams, [0], [Request(lm="other")])
    decoder.push(streams, log_probs, [20, 0])
    expected = [alone["other"].decode(log_probs[:1], [20])[0], alone[None].decode(log_probs[1:], [20])[0]]
    assert all_facts(decoder.close(streams)) == all_facts(expected)


def test_what_does_not_fit_is_refused():
    decoder, alone = decoders()
    log_probs = random_log_probs(1, 5, VOCAB + 1, seed=0)
    with pytest.raises(ValueError, match=r"requests\[0\]\.lm is 'nestet', expected one of nested, other, none"):
        decoder.decode(log_probs, [5], [Request(lm="nestet")])
    with pytest.raises(ValueError, match=r"requests\[0\]\.lm is 'nested', .*the decoder has no lm_pool"):
        alone[None].decode(log_probs, [5], [Request(lm="nested")])
    with pytest.raises(ValueError, match=r"fusion\.lm_pool\[a\] is a str, expected a PackedLM"):
        alone[None].with_options(alone[None].config, Fusion(lm_pool={"a": "a.arpa"}))
    graph = decoder.graph
    with pytest.raises(ValueError, match=r"fusion\.lm_pool has nested, other, expected no LMs"):
        CudaWFST(graph, VOCAB, VOCAB, fusion=decoder.fusion)
    why_not = decoder._why_not_cuda(decoder.open(1), torch.device("cuda"))
    assert why_not == "lm_pool has nested, other, expected no LMs: the CUDA kernels read one large LM"
