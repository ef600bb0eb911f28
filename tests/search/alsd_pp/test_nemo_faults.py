"""What NeMo's malsd_batch does that alsd_pp does not. Each test fails once NeMo has mended it."""

import pytest
import torch

from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.transducer.config import ALSDConfig
from tests.oracles.transducer import Scorer, alsd
from tests.search.alsd_pp.test_equals_nemo import nemo_computer
from tests.search.alsd_pp.test_oracles import assert_same
from tests.search.transducer.nemo_models import nemo_n_best, random_encoder_output, random_nemo_model

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

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
