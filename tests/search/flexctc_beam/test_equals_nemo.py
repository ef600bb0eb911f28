"""flexctc_beam returns what NeMo's beam_batch returns for an utterance alone: NeMo adds scores in padded frames."""

import pytest
import torch

from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from tests.assets import sentencepiece_processor
from tests.random_models import random_log_probs
from tests.search.transducer.nemo_models import PHRASES, VOCAB, FusionPair

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

FUSIONS, BETA = ["nothing", "lm", "boosting", "both"], 0.5


@pytest.fixture(scope="module")
def fusions():
    return FusionPair.load()


@pytest.fixture(scope="module")
def emissions():
    """Noisy posteriors of two sentences with listed names, [T, V + 1] each."""
    torch.manual_seed(0)
    texts = [f"call {PHRASES[0]} before noon", f"order {PHRASES[1]}"]
    rows = []
    for i, text in enumerate(texts):
        frames = []
        for token in sentencepiece_processor().encode(text):
            for label in (token, VOCAB):
                logits = torch.randn(VOCAB + 1)
                logits[label] += 4.0 + i
                frames.append(torch.log_softmax(logits, -1))
        rows.append(torch.stack(frames))
    return rows


def nemo_computer(fusions, which, beam_size, threshold=20.0):
    from nemo.collections.asr.parts.submodules.ctc_batched_beam_decoding import BatchedBeamCTCComputer

    return BatchedBeamCTCComputer(
        blank_index=VOCAB, beam_size=beam_size, return_best_hypothesis=False, beam_beta=BETA,
        beam_threshold=threshold, allow_cuda_graphs=False, **fusions.for_nemo(which),
    )  # fmt: skip


def our_decoder(fusions, which, beam_size, threshold=20.0):
    config = FlexCTCConfig(beam_size=beam_size, n_best=beam_size, beam_beta=BETA, beam_threshold=threshold, threads=1)
    return FlexCTCBeam(VOCAB, VOCAB, config, fusions.for_us(which))


def nemo_n_best(computer, log_probs):
    """[(tokens, frames, score)] with different tokens, best first."""
    with torch.no_grad():
        hypotheses = computer(log_probs[None], torch.tensor([len(log_probs)])).to_nbest_hyps_list(score_norm=False)
    distinct = {}
    for hypothesis in hypotheses[0].n_best_hypotheses:
        # NeMo may list a text twice: ending in a blank, and ending in its last token
        distinct.setdefault(tuple(hypothesis.y_sequence.tolist()), (hypothesis.timestamp.tolist(), hypothesis.score))
    return [(list(tokens), frames, score) for tokens, (frames, score) in distinct.items()]


@pytest.mark.parametrize("which", FUSIONS)
@pytest.mark.parametrize("beam_size", [1, 2, 4, 8, 16, 32])
def test_hypotheses_equal_those_of_nemo(emissions, fusions, which, beam_size):
    computer = nemo_computer(fusions, which, beam_size)
    decoder = our_decoder(fusions, which, beam_size)
    for log_probs in emissions:
        expected = nemo_n_best(computer, log_probs)
        nbest = decoder.decode(log_probs[None], [len(log_probs)])[0]
        assert [path.tokens.tolist() for path in nbest] == [tokens for tokens, _, _ in expected]
        assert nbest.best.frames.tolist() == expected[0][1]
        for path, (_, _, score) in zip(nbest, expected, strict=True):
            assert path.score == pytest.approx(score, abs=1e-5, rel=1e-6)


@pytest.mark.parametrize("which", ["nothing", "both"])
@pytest.mark.parametrize("seed", range(5))
def test_hypotheses_equal_those_of_nemo_on_flat_noise(fusions, which, seed):
    """Nothing is peaked here, so that the bound can prune little and ties in rank are close."""
    log_probs = random_log_probs(1, 12, VOCAB + 1, seed=seed, sharpness=1.0)[0]
    expected = nemo_n_best(nemo_computer(fusions, which, 8, threshold=5.0), log_probs)
    nbest = our_decoder(fusions, which, 8, threshold=5.0).decode(log_probs[None], [12])[0]
    assert [path.tokens.tolist() for path in nbest] == [tokens for tokens, _, _ in expected]
    assert nbest.best.score == pytest.approx(expected[0][2], abs=1e-5)
