"""Why labels are narrowed down before the LM is asked: late, a large LM weight deletes tokens."""

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.transducer.aes import AESPlusPlus
from nemo_gpu_decoding.search.transducer.config import AESConfig
from tests.search.transducer.table_networks import TableNetworks, random_frames

LIKELY, BLANK = 0, 2  # as probable as each other, whatever was said before
UNIFORM = -3.0  # what the LM gives every token, natural log; the default gamma is 2.3


class Undecided(TableNetworks):
    def join(self, frames, predictions):
        logits = torch.full((len(frames), 3), -10.0)
        logits[:, [LIKELY, BLANK]] = 0.0
        return logits


@pytest.fixture(scope="module")
def lm():
    nowhere = np.zeros(1)
    return BackoffAutomaton.from_arrays(
        vocab_size=2,
        start_state=0,
        arc_begin=[0],
        arc_end=[2],
        backoff_to=np.zeros(1, np.int32),
        backoff_weights=nowhere,
        final_weights=nowhere,
        arc_labels=[0, 1],
        arc_weights=[UNIFORM, UNIFORM],
        arc_targets=[0, 0],
    )


def texts(lm, weight, **options):
    config = AESConfig(beam_size=4, n_best=4, **options)
    decoder = AESPlusPlus(Undecided(2), config, Fusion(lm, weight))
    return {tuple(path.tokens.tolist()) for path in decoder.decode(random_frames(1, 1, seed=0), [1])[0]}


def test_by_default_a_token_as_probable_as_the_blank_survives_any_lm_weight(lm):
    for weight in (0.0, 0.1, 1.2, 3.0):
        assert (LIKELY,) in texts(lm, weight)


def test_late_pruning_drops_it_once_the_lm_weighs_enough(lm):
    assert (LIKELY,) in texts(lm, 0.1, pruning_mode="late")
    assert (LIKELY,) not in texts(lm, 1.2, pruning_mode="late")
