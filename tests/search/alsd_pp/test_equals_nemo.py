"""alsd_pp returns what NeMo's malsd_batch returns for each utterance decoded alone, RNN-T and TDT."""

import pytest

from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.transducer.config import ALSDConfig
from tests.search.transducer.nemo_models import (
    DURATIONS,
    FUSION_MODES,
    VOCAB,
    FusionPair,
    nemo_n_best,
    random_encoder_output,
    random_nemo_model,
)

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")


@pytest.fixture(scope="module")
def fusions():
    return FusionPair.load()


def nemo_computer(model, durations, beam_size, max_symbols, pruning, blank, fusion):
    from nemo.collections.asr.parts.submodules.rnnt_malsd_batched_computer import (
        ModifiedALSDBatchedRNNTComputer,
    )
    from nemo.collections.asr.parts.submodules.tdt_malsd_batched_computer import (
        ModifiedALSDBatchedTDTComputer,
    )

    kind, extra = ModifiedALSDBatchedRNNTComputer, {}
    if durations:
        kind, extra = ModifiedALSDBatchedTDTComputer, {"durations": list(durations)}
    return kind(
        *model, blank_index=VOCAB, beam_size=beam_size, max_symbols_per_step=max_symbols,
        pruning_mode=pruning, blank_lm_score_mode=blank, allow_cuda_graphs=False, **fusion, **extra,
    )  # fmt: skip


def assert_equals_nemo(model, fusions, durations, beam_size, mode, seed, frames=25, max_symbols=10):
    from nemo_gpu_decoding.nemo_plugin.transducer_networks import networks_of

    what, pruning, blank = mode
    encoder_output = random_encoder_output(frames, seed=seed)
    computer = nemo_computer(
        model, durations, beam_size, max_symbols, pruning, blank, fusions.for_nemo(what)
    )
    config = ALSDConfig(
        beam_size=beam_size, n_best=beam_size, max_symbols=max_symbols, pruning_mode=pruning,
        blank_lm_score_mode=blank, threads=1,
    )  # fmt: skip
    decoder = ALSDPlusPlus(networks_of(*model, durations), config, fusions.for_us(what))
    expected = nemo_n_best(computer, encoder_output)
    nbest = decoder.decode(encoder_output, [frames])[0]
    assert [path.tokens.tolist() for path in nbest] == [tokens for tokens, *_ in expected]
    for path, (_, starts, token_durations, score) in zip(nbest, expected, strict=True):
        assert path.score == pytest.approx(score, abs=1e-3)
        assert path.frames.tolist() == starts
        if durations:
            assert path.durations.tolist() == token_durations


@pytest.mark.parametrize("mode", FUSION_MODES, ids="-".join)
@pytest.mark.parametrize("durations", [[], DURATIONS], ids=["rnnt", "tdt"])
@pytest.mark.parametrize("beam_size", [1, 2, 3, 4, 6, 8])
def test_same_hypotheses(fusions, durations, beam_size, mode):
    model = random_nemo_model(durations=durations)
    for seed in range(2):
        assert_equals_nemo(model, fusions, durations, beam_size, mode, seed)


@pytest.mark.parametrize("durations", [[], DURATIONS], ids=["rnnt", "tdt"])
@pytest.mark.parametrize("kind", [{"prediction": "stateless"}, {"layers": 2}, {"joint": "hat"}], ids=str)
def test_other_networks(fusions, durations, kind):
    if durations and "joint" in kind:
        pytest.skip("HAT joints give no durations")
    model = random_nemo_model(durations=durations, seed=3, blank_bias=5.0, **kind)
    for seed in range(3):
        assert_equals_nemo(model, fusions, durations, 5, ("lm", "late", "lm_weighted_full"), seed)


@pytest.mark.parametrize("durations", [[], DURATIONS], ids=["rnnt", "tdt"])
@pytest.mark.parametrize("max_symbols", [1, 2])
@pytest.mark.parametrize("pruning", ["late", "early"])
def test_forced_blanks(fusions, durations, max_symbols, pruning):
    model = random_nemo_model(durations=durations, blank_bias=3.0)
    for seed in range(3):
        mode = ("both", pruning, "lm_weighted_full")
        assert_equals_nemo(model, fusions, durations, 4, mode, seed, max_symbols=max_symbols)
