"""flexctc_beam against the enumeration of all alignments and the search that scores everything."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from nemo_gpu_decoding.fusion.allowed import AllowedTokens
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.flexctc_beam.backpointers import new_back_pointers, new_traces, trace_back
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from tests.oracles.ctc import beam_search, collapse, ranking
from tests.random_models import random_boosting, random_lm, random_log_probs

problems = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "frames": st.integers(1, 5),
        "vocab_size": st.integers(1, 3),
        "sharpness": st.sampled_from([0.3, 1.0, 3.0]),
        "beam_beta": st.sampled_from([-0.5, 0.0, 0.7]),
        "lm_weight": st.sampled_from([0.0, 0.5, 1.0]),
        "boosting_weight": st.sampled_from([0.0, 0.8]),
        "source_lm_weight": st.sampled_from([0.0, 0.4, 1.5]),
        "price": st.sampled_from([None, 0.6, float("inf")]),
    }
)


def fusion_of(problem):
    vocab_size, seed = problem["vocab_size"], problem["seed"]
    source = random_lm(vocab_size, seed=seed + 1, order=2) if problem["lm_weight"] else None
    is_allowed = (True, False, True)[:vocab_size]
    allowed = None if problem["price"] is None else AllowedTokens(is_allowed, problem["price"])
    return Fusion(
        random_lm(vocab_size, seed=seed), problem["lm_weight"],
        random_boosting(vocab_size, seed=seed, phrases=2), problem["boosting_weight"],
        source, problem["source_lm_weight"] if source else None, allowed,
    )  # fmt: skip


@pytest.mark.parametrize("merge", ["max", "sum", "prefix"])
@settings(max_examples=60, deadline=None)
@given(problem=problems, blank_first=st.booleans())
def test_wide_beam_finds_the_true_n_best(merge, problem, blank_first):
    vocab_size, frames = problem["vocab_size"], problem["frames"]
    blank_id = 0 if blank_first else vocab_size
    log_probs = random_log_probs(1, frames, vocab_size + 1, seed=problem["seed"], sharpness=problem["sharpness"])
    fusion = fusion_of(problem)
    expected = ranking(
        log_probs[0].numpy().astype(np.float64), blank_id,
        add=merge != "max", fusion=fusion, beam_beta=problem["beam_beta"],
    )  # fmt: skip
    config = FlexCTCConfig(
        beam_size=2048, n_best=10, beam_beta=problem["beam_beta"], beam_threshold=float("inf"), merge=merge
    )
    nbest = FlexCTCBeam(vocab_size, blank_id, config, fusion).decode(log_probs, [frames])[0]
    assert len(nbest) == min(10, len(expected))
    scores = {text: score for score, text in expected}
    for path, (score, _) in zip(nbest, expected, strict=False):
        assert path.score == pytest.approx(score, abs=1e-4)
        assert scores[tuple(path.tokens.tolist())] == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("merge", ["max", "sum", "prefix"])
@pytest.mark.parametrize("beam_size", [1, 3, 8])
@pytest.mark.parametrize("fused", [False, True])
def test_a_forbidden_token_is_one_with_probability_0(merge, beam_size, fused):
    tokens, blank_id = 9, 4
    log_probs = random_log_probs(4, 20, tokens + 1, seed=beam_size)
    is_allowed = (True, True, False, True, True, False, True, False, True)
    columns = [label + (label >= blank_id) for label in range(tokens) if not is_allowed[label]]
    masked = log_probs.clone()
    masked[:, :, columns] = -torch.inf
    own = Fusion(random_lm(tokens, seed=1), 0.5, random_boosting(tokens, seed=2), 0.8) if fused else Fusion()
    config = FlexCTCConfig(beam_size=beam_size, n_best=beam_size, merge=merge)
    found = FlexCTCBeam(tokens, blank_id, config, replace(own, allowed=AllowedTokens(is_allowed)))
    expected = FlexCTCBeam(tokens, blank_id, config, own).decode(masked)
    for nbest, same in zip(found.decode(log_probs), expected, strict=True):
        assert [path.outside_share for path in nbest] == [0.0] * len(nbest)
        assert [(path.tokens.tolist(), path.score) for path in nbest] == [(p.tokens.tolist(), p.score) for p in same]


# ---------- Narrow beams against the search that scores everything: bounds change nothing, to the bit
narrow_problems = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "frames": st.integers(1, 12),
        "vocab_size": st.integers(2, 30),
        "sharpness": st.sampled_from([0.3, 1.0, 3.0]),
        "beam_size": st.integers(1, 6),
        "beam_beta": st.sampled_from([-0.5, 0.0, 0.7]),
        "threshold": st.sampled_from([2.0, 8.0, 100.0]),
        "branching": st.sampled_from([1, 2, 12]),  # fewer and more arcs than are offered one by one
        "score": st.sampled_from([0.0, -1e5, -1e6]),  # of the first frame: float32 rounds sums to 1/128 and 1/16
    }
)


def hypotheses_of(problem, fusion, *, blank_id):
    """The beam after all frames from `FlexCTCBeam`, as {tokens: score}."""
    log_probs = random_log_probs(
        1, problem["frames"], problem["vocab_size"] + 1,
        seed=problem["seed"], sharpness=problem["sharpness"],
    )  # fmt: skip
    log_probs[0, 0] += problem["score"]
    config = FlexCTCConfig(
        beam_size=problem["beam_size"], n_best=problem["beam_size"], beam_beta=problem["beam_beta"],
        beam_threshold=problem["threshold"], threads=1,
    )  # fmt: skip
    decoder = FlexCTCBeam(problem["vocab_size"], blank_id, config, fusion)
    streams = decoder.open(1)
    decoder.push(streams, log_probs, [problem["frames"]])
    found = decoder.partial(streams, problem["beam_size"])[0]
    expected = beam_search(
        log_probs[0].numpy(), blank_id, problem["beam_size"],
        fusion=fusion, beam_beta=problem["beam_beta"], threshold=problem["threshold"],
    )  # fmt: skip
    best: dict[tuple[int, ...], float] = {}
    for score, tokens in expected:  # a text may stand there twice, ending in a blank or not
        best[tokens] = max(score, best.get(tokens, -np.inf))
    return {tuple(path.tokens): path.score for path in found}, best


# the LM gives a token up whose score would be rounded up to the floor, but for the slack of `least_lm_weight`
ROUNDED_UP = {
    "seed": 6, "frames": 8, "vocab_size": 6, "sharpness": 0.3, "beam_size": 6, "beam_beta": -0.5,
    "threshold": 2.0, "branching": 1, "score": -1e5,
}  # fmt: skip


@pytest.mark.parametrize("parts", ["nothing", "lm", "boosting", "both", "source"])
@example(problem=ROUNDED_UP, blank_first=False)
@settings(max_examples=80, deadline=None)
@given(problem=narrow_problems, blank_first=st.booleans())
def test_results_equal_scoring_every_candidate(parts, problem, blank_first):
    vocab_size, seed = problem["vocab_size"], problem["seed"]
    lm = random_lm(vocab_size, seed=seed, branching=problem["branching"], order=2)
    tree = random_boosting(vocab_size, seed=seed)
    source = random_lm(vocab_size, seed=seed + 1, order=2) if parts == "source" else None
    fusion = Fusion(
        lm if parts in ("lm", "both", "source") else None, 0.6,
        tree if parts in ("boosting", "both") else None, 0.8,
        source, 0.9 if source else None,
    )  # fmt: skip
    found, expected = hypotheses_of(problem, fusion, blank_id=0 if blank_first else vocab_size)
    assert found == expected


def test_the_best_hypothesis_stays_whatever_the_threshold():
    """Float32 rounds the best score less such a threshold to the best score."""
    log_probs = random_log_probs(2, 12, 7, seed=3)
    narrow = FlexCTCBeam(6, 6, FlexCTCConfig(beam_size=4, beam_threshold=1e-9)).decode(log_probs, [12, 12])
    single = FlexCTCBeam(6, 6, FlexCTCConfig(beam_size=1)).decode(log_probs, [12, 12])
    assert [nbest.best.tokens.tolist() for nbest in narrow] == [nbest.best.tokens.tolist() for nbest in single]
    assert [nbest.best.score for nbest in narrow] == [nbest.best.score for nbest in single]


# --- What stands in a result beyond its text: alignments, and what happens when an LM forbids the end
@pytest.mark.parametrize("merge", ["max", "sum"])
def test_alignments_spell_the_text_and_its_score(merge):
    log_probs = random_log_probs(3, 25, 7, seed=1)
    config = FlexCTCConfig(beam_size=8, n_best=3, alignments=True, merge=merge)
    for b, nbest in enumerate(FlexCTCBeam(6, 6, config).decode(log_probs, [25, 10, 25])):
        for path in nbest:
            assert collapse(path.alignment.tolist(), 6) == tuple(path.tokens)
            assert path.alignment[path.frames].tolist() == path.tokens.tolist()
            picked = log_probs[b, range(len(path.alignment)), path.alignment]
            np.testing.assert_array_equal(path.alignment_log_probs, picked)
            if merge == "max":
                assert path.parts.acoustic == pytest.approx(float(picked.sum()), abs=1e-4)


def test_frames_after_a_blank_do_not_belong_to_the_token():
    """With merge "prefix" the frames of a path need not be one alignment: 4 4 - 4 can stand for one token."""
    back_pointers = new_back_pointers(1, 5, 1)
    back_pointers.labels[0, :, 0] = [~4, 4, 9, 4, 4]  # the blank is 9
    back_pointers.parents[:] = 0
    back_pointers.log_probs[0, :, 0] = np.log([0.5, 0.3, 0.9, 0.8, 0.8])
    traces = new_traces(1, 1, 5)
    trace_back(back_pointers, 0, (0, 5), 0, 9, traces, 0, 0)
    assert traces.lengths[0, 0] == 1
    assert (traces.tokens[0, 0, 0], traces.frames[0, 0, 0], traces.repeats[0, 0, 0]) == (4, 0, 2)
    assert traces.confidence[0, 0, 0] == pytest.approx(0.4)


def test_lm_without_sentence_end_gives_a_result_with_a_note():
    columns = Columns(
        arc_begin=[0], arc_end=[0], backoff_to=[0], backoff_weights=[-1.0], final_weights=[-np.inf],
        arc_labels=[], arc_weights=[], arc_targets=[],
    )  # fmt: skip
    never_ends = BackoffAutomaton.from_columns(columns, vocab_size=3, start_state=0)
    decoder = FlexCTCBeam(3, 3, FlexCTCConfig(beam_size=4, n_best=2), Fusion(never_ends, 0.5))
    log_probs = random_log_probs(2, 8, 4, seed=2)
    streams = decoder.open(2)
    decoder.push(streams, log_probs, [8, 8])
    partial = [nbest.best.score for nbest in decoder.partial(streams)]
    results = decoder.close(streams)
    assert [nbest.best.score for nbest in results] == partial
    assert all("end-of-sentence" in nbest.notes[0] for nbest in results)


def closer_alternatives(frames):
    """[1, frames, 7]: tokens and blanks in turn. Each alternative is closer than older ones, which leave the beam."""
    labels = np.random.default_rng(2).integers(0, 6, frames)
    log_probs = np.full((1, frames, 7), -20.0)
    log_probs[0, 1::2, 6] = 0.0
    for t in range(0, frames, 2):
        log_probs[0, t, labels[t]] = 0.0
        log_probs[0, t, (labels[t] + 1) % 6] = -5.0 + 4.0 * t / frames
    return torch.from_numpy(log_probs).log_softmax(dim=-1).float()


@pytest.mark.parametrize("merge", ["max", "sum", "prefix"])
def test_partial_results_trace_back_what_live_hypotheses_do_not_share(merge, monkeypatch):
    monkeypatch.setattr("nemo_gpu_decoding.search.committed.MIN_COMMIT", 16)
    frames, chunk = 3000, 20
    log_probs = closer_alternatives(frames)
    decoder = FlexCTCBeam(6, 6, FlexCTCConfig(backend="cpu", threads=1, beam_size=4, merge=merge))
    streams, tails = decoder.open(1), []
    for first in range(0, frames, chunk):
        decoder.push(streams, log_probs[:, first : first + chunk], [chunk])
        best = decoder.partial(streams)[0].best
        tails.append(len(getattr(best, "_tail", best)))
    assert len(best) > 1000
    assert max(tails) < 60
    for n in (0, 5, len(best) - 1):
        rest = best.after(n)
        assert (len(rest), rest.tokens.tolist()) == (len(best) - n, best.tokens[n:].tolist())
        assert rest.after(1).frames.tolist() == best.frames[n + 1 :].tolist()
    (closed,) = decoder.close(streams)
    (whole,) = decoder.decode(log_probs, [frames])
    assert closed.best.tokens.tolist() == whole.best.tokens.tolist()
    assert closed.best.parts == whole.best.parts
