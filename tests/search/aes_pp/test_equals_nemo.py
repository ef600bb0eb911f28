"""aes_pp returns what NeMo's maes_batch returns for each RNN-T utterance decoded alone.

maes_batch has two faults that change results; `corrected` NeMo is NeMo with just these mended, see
`nemo_mended`.
"""

import pytest

from nemo_gpu_decoding.search.transducer.aes import AESPlusPlus
from nemo_gpu_decoding.search.transducer.config import AESConfig
from tests.oracles.nemo_patched import mended_class as corrected
from tests.search.transducer.nemo_models import (
    FUSION_MODES,
    VOCAB,
    FusionPair,
    nemo_n_best,
    random_encoder_output,
    random_nemo_model,
)

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

# maes_batch fuses one automaton only
MODES = [mode for mode in FUSION_MODES if mode[0] != "both"]

# In early pruning with lm_weighted_full, the joint's log-probability is added twice.
TWICE_MODE = ("early", "lm_weighted_full")


@pytest.fixture(scope="module")
def fusions():
    return FusionPair.load()


@pytest.fixture(scope="module")
def nemo_class():
    from nemo.collections.asr.parts.submodules.rnnt_maes_batched_computer import (
        ModifiedAESBatchedRNNTComputer,
    )

    return ModifiedAESBatchedRNNTComputer


@pytest.fixture(scope="module")
def corrected_class(nemo_class):
    return corrected(nemo_class)


def both(
    nemo_class, model, fusions, beam_size, mode, seed=0, steps=2, beta=2, gamma=2.3, frames=25,
    encoder_output=None,
):  # fmt: skip
    """(NeMo's n-best, ours) of an utterance, random if none is given."""
    from nemo_gpu_decoding.nemo_plugin.transducer_networks import networks_of

    what, pruning, blank = mode
    if encoder_output is None:
        encoder_output = random_encoder_output(frames, seed=seed)
    fusion = fusions.for_nemo(what)
    computer = nemo_class(
        *model, blank_index=VOCAB, beam_size=beam_size, maes_num_steps=steps,
        maes_expansion_beta=beta, maes_expansion_gamma=gamma, pruning_mode=pruning,
        blank_lm_score_mode=blank, allow_cuda_graphs=False,
        ngram_lm_model=(fusion["fusion_models"] or [None])[0],
        ngram_lm_alpha=(fusion["fusion_models_alpha"] or [0.0])[0],
    )  # fmt: skip
    config = AESConfig(
        beam_size=beam_size, n_best=beam_size, pruning_mode=pruning, blank_lm_score_mode=blank,
        maes_num_steps=steps, maes_expansion_beta=beta, maes_expansion_gamma=gamma, threads=1,
    )  # fmt: skip
    decoder = AESPlusPlus(networks_of(*model), config, fusions.for_us(what))
    expected = nemo_n_best(computer, encoder_output)
    return expected, decoder.decode(encoder_output, [encoder_output.shape[1]])[0]


def assert_equal(expected, nbest):
    assert [path.tokens.tolist() for path in nbest] == [tokens for tokens, *_ in expected]
    for path, (_, starts, _, score) in zip(nbest, expected, strict=True):
        assert path.score == pytest.approx(score, abs=1e-3)
        assert path.frames.tolist() == starts


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("beam_size", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("steps", [2, 3])
def test_same_hypotheses(corrected_class, fusions, beam_size, mode, steps):
    model = random_nemo_model()
    for seed in range(2):
        assert_equal(*both(corrected_class, model, fusions, beam_size, mode, seed, steps=steps))


@pytest.mark.parametrize("mode", [m for m in MODES if m[1:] != TWICE_MODE], ids="-".join)
@pytest.mark.parametrize("beam_size", [1, 2, 3, 4, 6, 8])
def test_same_hypotheses_where_nemo_needs_no_mending(nemo_class, fusions, beam_size, mode):
    """With one expansion per frame the mask is right, and these modes count nothing twice."""
    model = random_nemo_model()
    for seed in range(2):
        assert_equal(*both(nemo_class, model, fusions, beam_size, mode, seed, steps=1))


@pytest.mark.parametrize("kind", [{"prediction": "stateless"}, {"layers": 2}, {"joint": "hat"}], ids=str)
def test_other_networks(corrected_class, fusions, kind):
    model = random_nemo_model(seed=5, blank_bias=7.0, **kind)
    for seed in range(3):
        assert_equal(*both(corrected_class, model, fusions, 5, ("lm", "late", "lm_weighted_full"), seed))
