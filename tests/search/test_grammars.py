"""Closed grammars in the searches against brute force over all texts, and the kernels against the CPU."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.allowed import AllowedTokens
from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.fusion.grammar import build_grammar
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.oracles.ctc import ranking
from tests.oracles.transducer import Scorer, brute_force
from tests.random_models import random_lm, random_log_probs
from tests.search.flexctc_beam import both
from tests.search.transducer.table_networks import STRATEGIES, TableNetworks, assert_equal, random_frames

VOCABULARY = Vocabulary(("▁a", "b", "▁ab", "▁b"), "bpe")
V = len(VOCABULARY)
SENTENCES = re.compile("ab|a b( b)*|b a")  # with the prefixes of each
PREFIXES = re.compile("a?b?|a b?|(a b)( b)* ?b?|b ?a?|")
SOURCE = ["ab", "b a", *("a" + " b" * n for n in range(1, 16))]  # more than any test has frames


def cost(tokens, price):
    """Of leaving the grammar, with inf * 0 = 0."""
    inside = 0
    while inside < len(tokens) and PREFIXES.fullmatch(VOCABULARY.text(tokens[: inside + 1])):
        inside += 1
    outside = len(tokens) - inside
    whole = SENTENCES.fullmatch(VOCABULARY.text(tokens)) is not None
    return price * outside if outside else 0.0 if whole else price


def best_of(scores, price):
    """The best text with its score; None: all are impossible."""
    costs = {text: score - cost(text, price) for text, score in scores.items()}
    text = max(costs, key=costs.__getitem__)
    return (text, costs[text]) if costs[text] > -math.inf else (None, None)


def assert_is_best(nbest, text, score):
    is_sentence = text is not None and SENTENCES.fullmatch(VOCABULARY.text(text)) is not None
    assert nbest.in_grammar == is_sentence
    assert tuple(nbest.best.tokens.tolist()) == (text if is_sentence else ())
    assert math.isfinite(nbest.best.score)
    parts = nbest.best.parts
    assert parts.acoustic + parts.lm + parts.boosting + parts.insertion == pytest.approx(nbest.best.score, abs=1e-4)
    if score is not None:
        assert nbest.best.score == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("merge", ["max", "sum", "prefix"])
@pytest.mark.parametrize("price", [0.5, 2.0, math.inf])
@pytest.mark.parametrize("lm_weight", [0.0, 0.6])
def test_ctc_finds_the_best_sentence_of_all(merge, price, lm_weight):
    fusion = Fusion(random_lm(V, seed=1), lm_weight)
    grammar = build_grammar(SOURCE, VOCABULARY, price)
    config = FlexCTCConfig(beam_size=1024, beam_threshold=math.inf, merge=merge)
    decoder, found = FlexCTCBeam(V, V, config, fusion), set()
    for seed in range(8):
        log_probs = random_log_probs(1, 5, V + 1, seed=seed)
        values = log_probs[0].numpy().astype(np.float64)
        scores = {text: score for score, text in ranking(values, V, add=merge != "max", fusion=fusion)}
        nbest = decoder.decode(log_probs, requests=[Request(grammar=grammar)])[0]
        assert_is_best(nbest, *best_of(scores, price))
        found.add(nbest.in_grammar)
    assert True in found


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("durations", [(), (0, 1)], ids=str)
@pytest.mark.parametrize("price", [6.0, math.inf])
def test_transducers_find_the_best_sentence_of_all(strategy, durations, price):
    make, options = STRATEGIES[strategy]
    exact = {"maes_expansion_gamma": math.inf, "maes_num_steps": 4} if strategy == "aes_pp" else {}
    config = options(beam_size=256, pruning_mode="late", score_norm=False, **exact)
    grammar, found = build_grammar(SOURCE, VOCABULARY, price), set()
    for seed in range(6):
        networks = TableNetworks(V, durations, seed=7 + seed, max_length=3)
        frames = random_frames(1, 3, seed=seed)
        nbest = make(networks, config, Fusion(grammar=grammar)).decode(frames)[0]
        text, score = best_of(brute_force(Scorer(networks, frames[0]), max_length=3), price)
        if strategy == "aes_pp":  # it counts fewer alignments of a text
            assert nbest.best.score <= score + 1e-4
            text, score = (text, None) if nbest.in_grammar and text == tuple(nbest.best.tokens) else (None, None)
            text = tuple(nbest.best.tokens.tolist()) if nbest.in_grammar else text
        assert_is_best(nbest, text, score)
        found.add(nbest.in_grammar)
    assert True in found


@pytest.mark.parametrize("strategy", ["flexctc_beam", *STRATEGIES])
def test_utterance_without_a_fitting_sentence_is_empty(strategy):
    """Silence, and too few frames for any sentence; also with alignments, and in a stream."""
    grammar = build_grammar(["a b b b b"], VOCABULARY)
    if strategy == "flexctc_beam":
        decoder = FlexCTCBeam(V, V, FlexCTCConfig(beam_size=4, alignments=True), Fusion(grammar=grammar))
        inputs = random_log_probs(1, 3, V + 1, seed=1)
    else:
        make, options = STRATEGIES[strategy]
        config = options(beam_size=4, pruning_mode="late", alignments=True)
        decoder = make(TableNetworks(V, (1, 2), seed=3), config, Fusion(grammar=grammar))
        inputs = random_frames(1, 3, seed=1)
    streams = decoder.open(1)
    decoder.push(streams, inputs)
    decoder.partial(streams)
    for nbest in (decoder.decode(inputs)[0], decoder.close(streams)[0], decoder.decode(inputs, [0])[0]):
        assert nbest.in_grammar is False
        assert (len(nbest.best), nbest.notes) == (0, ())
        assert math.isfinite(nbest.best.score)
        assert (nbest.best.alignment == V).all()
        assert math.isfinite(nbest.best.parts.acoustic)


def test_grammar_and_lock_hold_together():
    log_probs = random_log_probs(4, 12, V + 1, seed=2)
    allowed = AllowedTokens(tuple(piece != "▁ab" for piece in VOCABULARY.pieces))
    fusion = Fusion(allowed=allowed, grammar=build_grammar(["ab", "a b"], VOCABULARY))
    for nbest in FlexCTCBeam(V, V, FlexCTCConfig(beam_size=64, n_best=4), fusion).decode(log_probs):
        assert {tuple(path.tokens.tolist()) for path in nbest} == {(0, 1), (0, 3)}
        assert [path.outside_share for path in nbest] == [0.0, 0.0]


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_early_pruning_is_refused(strategy):
    make, options = STRATEGIES[strategy]
    decoder = make(TableNetworks(V), options(pruning_mode="early"))
    grammar = build_grammar(["ab"], VOCABULARY)
    with pytest.raises(ValueError, match=r"requests\[0\].grammar is given, expected None: pruning_mode 'early'"):
        decoder.decode(random_frames(1, 3, seed=1), requests=[Request(grammar=grammar)])


# ---------------------------------------------------------------------------------- kernels
def requests_of(price):
    grammar = build_grammar(SOURCE, VOCABULARY, price)
    lock = AllowedTokens((True, True, False, True), 0.7)
    return [Request(grammar=grammar), Request(grammar=grammar, allowed=lock), None]


@pytest.mark.slow
@pytest.mark.usefixtures("emulated_runtime")
@pytest.mark.parametrize("price", [1.0, math.inf])
def test_ctc_kernels_find_what_the_cpu_finds(price):
    log_probs = random_log_probs(3, 12, V + 1, seed=3)
    fusion = Fusion(random_lm(V, seed=1), 0.5)
    for merge in ("max", "prefix"):
        both.assert_equal(log_probs, [12, 9, 5], V, fusion, requests_of(price), beam_size=6, n_best=4, merge=merge)


@pytest.mark.slow
@pytest.mark.usefixtures("emulated_runtime")
@pytest.mark.parametrize("price", [1.0, math.inf])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_transducer_kernels_find_what_the_cpu_finds(strategy, price):
    make, options = STRATEGIES[strategy]
    config = options(beam_size=4, n_best=4, pruning_mode="late")
    fusion, frames = Fusion(random_lm(V, seed=1), 0.5), random_frames(3, 10, seed=3)
    assert_equal(
        make, TableNetworks(V, (0, 1, 2), seed=4), config, frames, torch.tensor([10, 7, 4]), fusion, requests_of(price)
    )
    assert replace(config, backend="cpu") != config
