"""Both searches against brute force on tiny problems and against themselves in plain Python."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from nemo_gpu_decoding.fusion.allowed import AllowedTokens
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.transducer.aes import AESPlusPlus
from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.transducer.config import AESConfig, ALSDConfig
from nemo_gpu_decoding.search.transducer.cpu_engine import CPUEngine
from nemo_gpu_decoding.search.transducer.scoring import count_within_gamma, new_candidates
from tests.contract.subject import all_facts, facts
from tests.oracles.transducer import Scorer, aes, alsd, brute_force
from tests.random_models import random_boosting, random_lm
from tests.search.transducer.table_networks import STRATEGIES, TableNetworks, random_frames, random_fusion

DURATIONS = [(), (0, 1), (0, 2, 3), (1, 2), (4, 0, 1)]
BLANK_MODES = {True: "lm_weighted_full", False: "no_score"}


def fusion_of(vocab_size, what, seed=1):
    lm = random_lm(vocab_size, seed=seed) if what in ("lm", "all") else None
    boosting = random_boosting(vocab_size, seed=seed + 1) if what in ("boosting", "all") else None
    source = random_lm(vocab_size, seed=seed + 2, order=2) if what == "all" else None
    price = {"priced": 0.8, "forbidden": np.inf, "all": 0.8}.get(what)
    is_allowed = tuple(v % 3 > 0 for v in range(vocab_size))
    allowed = AllowedTokens(is_allowed, price) if price else None
    return Fusion(lm, 0.5, boosting, 0.7, source, 0.3 if source else None, allowed)


def late_only(pruning, fusion):
    """Without allowed tokens if labels are pruned early."""
    return fusion if pruning == "late" else replace(fusion, allowed=None)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("what", ["nothing", "lm", "priced", "forbidden", "all"])
@pytest.mark.parametrize("durations", DURATIONS, ids=str)
def test_beam_wider_than_all_hypotheses_is_exact(durations, what, weighted):
    networks = TableNetworks(2, durations, seed=7, max_length=3)
    frames = random_frames(1, 3, seed=2)
    fusion = fusion_of(2, what)
    expected = brute_force(Scorer(networks, frames[0], fusion, weighted_blank=weighted), max_length=3)
    config = ALSDConfig(beam_size=256, n_best=256, blank_lm_score_mode=BLANK_MODES[weighted], score_norm=False)
    nbest = ALSDPlusPlus(networks, config, fusion).decode(frames, [3])[0]
    assert {tuple(path.tokens): path.score for path in nbest} == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("blank_mode", BLANK_MODES.values())
@pytest.mark.parametrize("what", ["nothing", "lm", "priced", "all"])
@pytest.mark.parametrize("beta", [0.7, -0.4])
def test_every_token_has_the_bonus_and_no_blank(beta, what, blank_mode):
    """A text of n tokens scores n * beam_beta more, whatever it is fused with."""
    networks, frames = TableNetworks(2, (0, 2), seed=7, max_length=3), random_frames(1, 3, seed=2)
    fusion = fusion_of(2, what)
    expected = brute_force(Scorer(networks, frames[0], fusion, weighted_blank=blank_mode != "no_score"), max_length=3)
    config = ALSDConfig(beam_size=256, n_best=256, blank_lm_score_mode=blank_mode, beam_beta=beta)
    nbest = ALSDPlusPlus(networks, config, fusion).decode(frames, [3])[0]
    found = {tuple(path.tokens): path.score for path in nbest}
    assert found == pytest.approx({text: score + beta * len(text) for text, score in expected.items()}, abs=1e-4)
    assert [path.parts.insertion for path in nbest] == [beta * len(path) for path in nbest]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("pruning", ["late", "early"])
@pytest.mark.parametrize("what", ["nothing", "lm", "boosting", "forbidden", "all"])
@pytest.mark.parametrize("durations", DURATIONS, ids=str)
def test_alsd_equals_plain_python(durations, what, pruning, weighted):
    networks = TableNetworks(9, durations, seed=3)
    for seed, beam_size, max_symbols in ((0, 1, 10), (1, 3, 2), (2, 5, 1), (3, 8, 4)):
        frames = random_frames(1, 9, seed=seed)
        fusion = late_only(pruning, fusion_of(9, what, seed=seed))
        expected = alsd(
            Scorer(networks, frames[0], fusion, weighted_blank=weighted),
            beam_size=beam_size, max_symbols=max_symbols, early=pruning == "early",
        )  # fmt: skip
        config = ALSDConfig(
            beam_size=beam_size, n_best=beam_size, max_symbols=max_symbols, pruning_mode=pruning,
            blank_lm_score_mode=BLANK_MODES[weighted],
        )  # fmt: skip
        assert_same(ALSDPlusPlus(networks, config, fusion).decode(frames, [9])[0], expected, durations)


def assert_same(nbest, expected, durations):
    assert [tuple(path.tokens) for path in nbest] == [text for text, _, _ in expected]
    for path, (_, score, hypothesis) in zip(nbest, expected, strict=True):
        assert path.score == pytest.approx(score, abs=1e-3)
        assert tuple(path.frames) == hypothesis.starts
        if durations:
            assert tuple(path.durations) == hypothesis.durations


@pytest.mark.parametrize("blank_mode", BLANK_MODES.values())
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_a_lock_that_changes_no_text_changes_no_score(strategy, blank_mode):
    """It counts as no bonus in the score of the blank: to the bit."""
    make, config = STRATEGIES[strategy]
    networks, frames = TableNetworks(9, (0, 1, 2), seed=3), random_frames(4, 20, seed=5)
    for fusion in (Fusion(), fusion_of(9, "lm")):
        options = config(beam_size=1, pruning_mode="late", blank_lm_score_mode=blank_mode)
        plain = [nbest.best for nbest in make(networks, options, fusion).decode(frames, [20] * 4)]
        written = set(np.concatenate([path.tokens for path in plain]).tolist())
        assert 0 < len(written) < 9
        allowed = AllowedTokens(tuple(v in written for v in range(9)))
        locked = make(networks, options, replace(fusion, allowed=allowed)).decode(frames, [20] * 4)
        for path, nbest in zip(plain, locked, strict=True):
            assert (nbest.best.tokens.tolist(), nbest.best.score) == (path.tokens.tolist(), path.score)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_early_pruning_is_refused_with_allowed_tokens(strategy):
    make, config = STRATEGIES[strategy]
    with pytest.raises(
        ValueError, match=r"fusion\.allowed is given, expected None: pruning_mode 'early' drops labels"
    ):
        make(TableNetworks(2), config(pruning_mode="early"), fusion_of(2, "priced"))


# ------------------------------------------------------------------------------------- aes_pp
AES_CEILING = 1 - 1e-6
# beam_size, maes_num_steps, maes_expansion_beta, maes_expansion_gamma
LIMITS = [(1, 2, 2, 2.3), (3, 1, 0, 2.3), (5, 2, 2, 2.3), (4, 3, 1, 6.0), (6, 2, 3, float("inf"))]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("pruning", ["late", "early"])
@pytest.mark.parametrize("what", ["nothing", "lm", "boosting", "forbidden", "all"])
@pytest.mark.parametrize("durations", DURATIONS, ids=str)
def test_aes_equals_plain_python(durations, what, pruning, weighted):
    networks = TableNetworks(9, durations, seed=3)
    for seed, (beam_size, steps, beta, gamma) in enumerate(LIMITS):
        frames = random_frames(1, 9, seed=seed)
        fusion = late_only(pruning, fusion_of(9, what, seed=seed))
        expected = aes(
            Scorer(networks, frames[0], fusion, weighted_blank=weighted, ceiling=AES_CEILING),
            beam_size=beam_size, num_steps=steps, beta=beta, gamma=gamma, early=pruning == "early",
        )  # fmt: skip
        config = AESConfig(
            beam_size=beam_size, n_best=beam_size, maes_num_steps=steps, maes_expansion_beta=beta,
            maes_expansion_gamma=gamma, pruning_mode=pruning,
            blank_lm_score_mode=BLANK_MODES[weighted],
        )  # fmt: skip
        assert_same(AESPlusPlus(networks, config, fusion).decode(frames, [9])[0], expected, durations)


@pytest.mark.parametrize("durations", DURATIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_scores_do_not_exceed_the_sum_of_all_alignments(durations, seed):
    networks = TableNetworks(2, durations, seed=seed, max_length=3)
    frames = random_frames(1, 4, seed=seed)
    whole = brute_force(Scorer(networks, frames[0]), max_length=3)
    config = AESConfig(beam_size=64, n_best=64, maes_expansion_gamma=float("inf"), maes_num_steps=4)
    nbest = AESPlusPlus(networks, config).decode(frames, [4])[0]
    assert len(nbest) > 3
    for path in nbest:
        assert path.score <= whole[tuple(path.tokens)] + 1e-4


# ----------- What the joint gave in the last step is not computed again, and nothing else comes of it
V, T = 12, 30
LENGTHS = [T, 0, 17]


class Counting(TableNetworks):
    rows = 0

    def join(self, frames, predictions):
        self.rows += len(frames)
        return super().join(frames, predictions)


def decoded(strategy, durations, chunk=T):
    """(facts of the n-best lists, rows of the joint)"""
    make, config = STRATEGIES[strategy]
    networks = Counting(V, durations, seed=3, blank_bias=2.0)
    decoder = make(networks, config(beam_size=6, n_best=6), random_fusion(V))
    networks.rows = 0  # construction has tried the networks
    frames = random_frames(3, T, seed=2)
    streams = decoder.open(3)
    for begin in range(0, T, chunk):
        sizes = [max(0, min(length - begin, chunk)) for length in LENGTHS]
        decoder.push(streams, frames[:, begin : begin + chunk], sizes)
    return all_facts(decoder.close(streams)), networks.rows


@pytest.fixture
def without_reuse(monkeypatch):
    """What `decoded` returns if every row is computed."""

    def forgetting(self, rows, turn, run, *arguments):
        run.shared.rows.fill(-1)
        return read(self, rows, turn, run, *arguments)

    read = CPUEngine._read_joint

    def decoded_anew(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(CPUEngine, "_read_joint", forgetting)
            return decoded(*arguments)

    return decoded_anew


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("durations", [(), (0, 1, 2, 3, 4), (4, 2, 1)], ids=str)
def test_hypotheses_do_not_depend_on_the_prediction_cache(without_reuse, strategy, durations):
    expected, all_rows = without_reuse(strategy, durations)
    found, rows = decoded(strategy, durations)
    assert found == expected
    if strategy == "alsd_pp" and durations:
        assert rows < all_rows
    else:  # hypotheses of aes_pp wait for each other in a frame, and those of an RNN-T never meet late
        assert rows == all_rows


@pytest.mark.parametrize("durations", [(), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_partial_results_of_long_streams_look_at_the_last_nodes_only(strategy, durations, monkeypatch):
    """Of the best text few tokens are traced back, now and then more, wherever hypotheses differ for long."""
    monkeypatch.setattr("nemo_gpu_decoding.search.committed.MIN_COMMIT", 16)
    make, config = STRATEGIES[strategy]
    chunk, chunks = 20, 40
    frames = random_frames(1, chunk * chunks, seed=4)
    networks = TableNetworks(9, durations, seed=3, blank_bias=14.0, sharpness=4.0)
    decoder = make(networks, config(beam_size=4), random_fusion(9))
    streams, tails = decoder.open(1), []
    for n in range(chunks):
        decoder.push(streams, frames[:, chunk * n : chunk * (n + 1)], [chunk])
        best = decoder.partial(streams)[0].best
        tails.append(len(getattr(best, "_tail", best)))
    assert np.median(tails[chunks // 2 :]) < len(best) / 5
    assert facts(decoder.close(streams)[0]) == facts(decoder.decode(frames, [chunk * chunks])[0])


# ------------------------------------------------------------------------------------------ ties
@compiled
def within_gamma(candidates, count, params):
    return count_within_gamma(candidates, count, params)


class Params(NamedTuple):
    gamma: np.float32


@pytest.mark.parametrize(("gamma", "count"), [(2.0, 2), (2.5, 3), (0.5, 1), (0.0, 0)])
def test_a_candidate_that_is_worse_by_all_of_gamma_is_dropped(gamma, count):
    """As in NeMo: the best one as well, where gamma is 0."""
    candidates = new_candidates(4)
    candidates.rank[:3] = [2, 0, 1]  # best first
    candidates.items["score"][:3] = [-2.0, -3.0, -1.0]
    assert within_gamma(candidates, 3, Params(np.float32(gamma))) == count
