"""The kernels of prediction networks, token by token, beside NeMo's decoders."""

from __future__ import annotations

import pytest
import torch

from nemo_gpu_decoding.search.transducer.cuda_prediction import LSTM, STATELESS, PredictionPaths
from tests.search.transducer.nemo_models import HIDDEN, VOCAB, random_nemo_model
from tests.search.transducer.test_prediction import TextsInMemory, assert_outputs

pytestmark = [pytest.mark.nemo, pytest.mark.usefixtures("emulated_runtime", "small_blocks")]
pytest.importorskip("nemo.collections.asr")


def assert_steps_are_those_of(decoder, joint, path):
    from nemo_gpu_decoding.nemo_plugin.transducer_networks import networks_of

    def expected(text):
        labels = torch.tensor([[VOCAB, *text]])
        outputs, _ = decoder.predict(labels, None, add_sos=False, batch_size=1)
        return joint.project_prednet(outputs)[0, -1]

    with torch.inference_mode():
        networks = networks_of(decoder, joint)
        memory, paths = TextsInMemory(networks), PredictionPaths(networks)
        memory.run(paths.on(memory.work))
        assert paths.path == path
        assert_outputs(memory, expected)


@pytest.mark.parametrize("layers", [1, 2])
def test_lstm(layers):
    assert_steps_are_those_of(*random_nemo_model(layers=layers), LSTM)


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("mode", ["layer", None])
def test_stateless(context, mode):
    from nemo.collections.asr.modules.rnnt import StatelessTransducerDecoder

    _, joint = random_nemo_model()
    decoder = StatelessTransducerDecoder(
        {"pred_hidden": HIDDEN}, VOCAB, context_size=context, normalization_mode=mode
    )
    assert_steps_are_those_of(decoder.eval(), joint, STATELESS)
