"""What stands in a result beyond its text: alignments, and what happens when an LM forbids the end."""

import numpy as np
import pytest

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from tests.oracles.ctc import collapse
from tests.random_models import random_log_probs


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


def test_no_alignments_unless_asked_for():
    path = FlexCTCBeam(6, 6).decode(random_log_probs(1, 5, 7, seed=0), [5])[0].best
    assert path.alignment is None
    assert path.alignment_log_probs is None


def lm_that_never_ends(vocab_size):
    return BackoffAutomaton.from_columns(
        Columns(
            arc_begin=[0],
            arc_end=[0],
            backoff_to=[0],
            backoff_weights=[-1.0],
            final_weights=[-np.inf],
            arc_labels=[],
            arc_weights=[],
            arc_targets=[],
        ),
        vocab_size=vocab_size,
        start_state=0,
    )


def test_an_lm_without_an_end_still_gives_a_result_and_says_so():
    decoder = FlexCTCBeam(3, 3, FlexCTCConfig(beam_size=4, n_best=2), Fusion(lm_that_never_ends(3), 0.5))
    log_probs = random_log_probs(2, 8, 4, seed=2)
    streams = decoder.open(2)
    decoder.push(streams, log_probs, [8, 8])
    partial = [nbest.best.score for nbest in decoder.partial(streams)]
    results = decoder.close(streams)
    assert [nbest.best.score for nbest in results] == partial
    assert all("end-of-sentence" in nbest.notes[0] for nbest in results)
