"""alsd_pp returns what NeMo's malsd_batch returns for each utterance decoded alone, RNN-T and TDT."""

import pytest
import torch

from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.transducer.config import ALSDConfig
from tests.oracles.transducer import Scorer, alsd
from tests.search.transducer.nemo_models import (
    DURATIONS,
    FUSION_MODES,
    VOCAB,
    FusionPair,
    assert_equal_texts,
    checkpoint,
    nemo_n_best,
    random_encoder_output,
    random_nemo_model,
)
from tests.search.transducer.test_oracles import assert_same

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


@pytest.mark.parametrize("mode", FUSION_MODES, ids="-".join)
@pytest.mark.parametrize("beam_size", [1, 4, 8])
@pytest.mark.parametrize("kind", ["rnnt", "tdt"])
def test_shipped_checkpoints(fusions, kind, beam_size, mode):
    from nemo_gpu_decoding.nemo_plugin.transducer_networks import networks_of

    model, durations, outputs = checkpoint(kind)
    what, pruning, blank = mode
    computer = nemo_computer(model, durations, beam_size, 10, pruning, blank, fusions.for_nemo(what))
    config = ALSDConfig(
        beam_size=beam_size, n_best=beam_size, pruning_mode=pruning, blank_lm_score_mode=blank
    )
    decoder = ALSDPlusPlus(networks_of(*model, durations), config, fusions.for_us(what))
    for encoder_output in outputs:
        nbest = decoder.decode(encoder_output, [encoder_output.shape[1]])[0]
        assert_equal_texts(nemo_n_best(computer, encoder_output), nbest)
        assert len(nbest.best) > 5


# What malsd_batch does that alsd_pp does not. Each test fails once NeMo has mended it.

LATE = ("late", "lm_weighted_full")


def computer_of(model, durations=(), beam_size=4):
    return nemo_computer(model, durations, beam_size, 10, *LATE, {})


def test_rows_of_length_zero_emit_tokens_in_nemo():
    from nemo_gpu_decoding.nemo_plugin.transducer_networks import networks_of

    model = random_nemo_model(blank_bias=0.0)
    encoder_output = random_encoder_output(10, seed=0).expand(2, -1, -1)
    with torch.no_grad():
        hyps, _ = computer_of(model)(encoder_output, torch.tensor([10, 0]))
    assert len(hyps.to_hyps_list()[1].y_sequence) > 0
    ours = ALSDPlusPlus(networks_of(*model)).decode(encoder_output, [10, 0])
    assert len(ours[0].best) > 0
    assert (len(ours[1].best), ours[1].best.score) == (0, 0.0)


def test_durations_are_taken_for_their_index_in_nemo():
    from nemo_gpu_decoding.nemo_plugin.transducer_networks import networks_of

    durations = [0, 2, 4]
    model = random_nemo_model(durations=durations, blank_bias=4.0)
    encoder_output = random_encoder_output(20, seed=1)
    best = nemo_n_best(computer_of(model, durations), encoder_output)[0]
    assert set(best[2]) - set(durations)
    networks = networks_of(*model, durations)
    with torch.no_grad():
        expected = alsd(Scorer(networks, encoder_output[0]), beam_size=4)
        nbest = ALSDPlusPlus(networks, ALSDConfig(n_best=4)).decode(encoder_output, [20])[0]
    assert_same(nbest, expected, durations)


def test_a_beam_wider_than_the_vocabulary_stops_nemo():
    from nemo_gpu_decoding.nemo_plugin.transducer_networks import networks_of

    model = random_nemo_model()
    encoder_output = random_encoder_output(3, seed=1)
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        nemo_n_best(computer_of(model, beam_size=200), encoder_output)
    config = ALSDConfig(beam_size=200, n_best=200)
    assert len(ALSDPlusPlus(networks_of(*model), config).decode(encoder_output, [3])[0]) == 200


def test_stateless_prediction_networks_stop_nemo():
    from nemo.collections.asr.modules.rnnt import StatelessTransducerDecoder

    from nemo_gpu_decoding.nemo_plugin.transducer_networks import networks_of

    decoder, joint = random_nemo_model(prediction="stateless")
    decoder.__class__ = StatelessTransducerDecoder  # without the method that `random_nemo_model` adds
    encoder_output = random_encoder_output(3, seed=1)
    with pytest.raises(NotImplementedError):
        nemo_n_best(computer_of((decoder, joint)), encoder_output)
    assert len(ALSDPlusPlus(networks_of(decoder, joint)).decode(encoder_output, [3])) == 1
