"""What NeMo's maes_batch does that aes_pp does not. Each test fails once NeMo has mended it."""

import pytest
import torch

from nemo_gpu_decoding.search.transducer.aes import AESPlusPlus
from nemo_gpu_decoding.search.transducer.config import AESConfig
from tests.search.aes_pp.test_equals_nemo import both, corrected
from tests.search.transducer.nemo_models import (
    VOCAB,
    FusionPair,
    random_encoder_output,
    random_nemo_model,
)

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")


@pytest.fixture(scope="module")
def nemo_class():
    from nemo.collections.asr.parts.submodules.rnnt_maes_batched_computer import (
        ModifiedAESBatchedRNNTComputer,
    )

    return ModifiedAESBatchedRNNTComputer


@pytest.fixture(scope="module")
def fusions():
    return FusionPair.load()


def computer_of(kind, model, beam_size=6):
    return kind(
        *model, blank_index=VOCAB, beam_size=beam_size, maes_num_steps=2, maes_expansion_beta=2,
        maes_expansion_gamma=2.3, allow_cuda_graphs=False,
    )  # fmt: skip


def blanks_of_best(computer, encoder_output):
    with torch.no_grad():
        hyps, _ = computer(encoder_output, torch.tensor([encoder_output.shape[1]]))
        hyps.to_hyps_list()
    return int((hyps.transcript_wb[0, 0] == VOCAB).sum())


def test_hypotheses_leave_frames_without_a_blank_in_nemo(nemo_class):
    """Every frame of an RNN-T alignment ends with a blank; NeMo forgets to ask for some of them."""
    from nemo_gpu_decoding.nemo_plugin.transducer_networks import networks_of

    model = random_nemo_model(blank_bias=4.0)
    frames = 25
    missing = 0
    for seed in range(4):
        encoder_output = random_encoder_output(frames, seed=seed)
        missing += frames - blanks_of_best(computer_of(nemo_class, model), encoder_output)
        assert blanks_of_best(computer_of(corrected(nemo_class), model), encoder_output) == frames
        config = AESConfig(beam_size=6, alignments=True)
        ours = AESPlusPlus(networks_of(*model), config).decode(encoder_output, [frames])[0].best
        assert (ours.alignment == VOCAB).sum() == frames
    assert missing > 0


def test_the_joint_counts_twice_in_nemo(nemo_class, fusions):
    """Early pruning with lm_weighted_full: the score holds the joint's log-probs a second time."""
    model = random_nemo_model()
    mode = ("lm", "early", "lm_weighted_full")
    expected, nbest = both(nemo_class, model, fusions, 1, mode, seed=0, steps=1, frames=3)
    tokens, _, _, score = expected[0]
    assert tokens == nbest.best.tokens.tolist() == []  # so that the score is that of three blanks
    once = nbest.best.score / 1.4  # less the LM's share, LM_WEIGHT = 0.4
    assert score == pytest.approx(2.4 * once, abs=1e-4)


def test_boosting_beside_an_lm_is_ignored_in_nemo(fusions):
    from nemo.collections.asr.parts.submodules.rnnt_beam_decoding import BeamBatchedRNNTInfer

    from nemo_gpu_decoding.nemo_plugin.transducer_networks import networks_of

    model = random_nemo_model(blank_bias=4.0)
    infer = BeamBatchedRNNTInfer(
        *model, blank_index=VOCAB, beam_size=4, search_type="maes_batch", **fusions.for_nemo("both")
    )
    assert infer.decoding_computer.ngram_lm_batch is fusions.nemo["lm"]
    scores = []
    for what in ("lm", "both"):
        decoder = AESPlusPlus(networks_of(*model), AESConfig(beam_size=4), fusions.for_us(what))
        scores.append(decoder.decode(random_encoder_output(20, seed=0), [20])[0].best.score)
    assert scores[0] != pytest.approx(scores[1], abs=1e-3)
