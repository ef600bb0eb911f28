"""aes_pp against its own algorithm in plain Python, and never above the true probability."""

import pytest

from nemo_gpu_decoding.search.transducer.aes import AESPlusPlus
from nemo_gpu_decoding.search.transducer.config import AESConfig
from tests.oracles.transducer import Scorer, aes, brute_force
from tests.search.alsd_pp.test_oracles import BLANK_MODES, DURATIONS, assert_same, fusion_of
from tests.search.transducer.table_networks import TableNetworks, random_frames

AES_CEILING = 1 - 1e-6
# beam_size, maes_num_steps, maes_expansion_beta, maes_expansion_gamma
LIMITS = [(1, 2, 2, 2.3), (3, 1, 0, 2.3), (5, 2, 2, 2.3), (4, 3, 1, 6.0), (6, 2, 3, float("inf"))]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("pruning", ["late", "early"])
@pytest.mark.parametrize("what", ["nothing", "lm", "boosting", "both"])
@pytest.mark.parametrize("durations", DURATIONS, ids=str)
def test_same_as_plain_python(durations, what, pruning, weighted):
    networks = TableNetworks(9, durations, seed=3)
    for seed, (beam_size, steps, beta, gamma) in enumerate(LIMITS):
        frames = random_frames(1, 9, seed=seed)
        fusion = fusion_of(9, what, seed=seed)
        expected = aes(
            Scorer(networks, frames[0], fusion, weighted_blank=weighted, ceiling=AES_CEILING),
            beam_size=beam_size, num_steps=steps, beta=beta, gamma=gamma, early=pruning == "early",
        )  # fmt: skip
        config = AESConfig(
            beam_size=beam_size, n_best=beam_size, maes_num_steps=steps, maes_expansion_beta=beta,
            maes_expansion_gamma=gamma, pruning_mode=pruning,
            blank_lm_score_mode=BLANK_MODES[weighted],
        )  # fmt: skip
        nbest = AESPlusPlus(networks, config, fusion).decode(frames, [9])[0]
        assert_same(nbest, expected, durations)


@pytest.mark.parametrize("durations", DURATIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_never_more_probable_than_all_alignments_together(durations, seed):
    networks = TableNetworks(2, durations, seed=seed, max_length=3)
    frames = random_frames(1, 4, seed=seed)
    whole = brute_force(Scorer(networks, frames[0]), max_length=3)
    config = AESConfig(beam_size=64, n_best=64, maes_expansion_gamma=float("inf"), maes_num_steps=4)
    nbest = AESPlusPlus(networks, config).decode(frames, [4])[0]
    assert len(nbest) > 3
    for path in nbest:
        assert path.score <= whole[tuple(path.tokens)] + 1e-4
