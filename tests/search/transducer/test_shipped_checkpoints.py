"""On the shipped RNN-T and TDT checkpoints and real log-mel input both searches equal NeMo's."""

import functools
import json

import pytest
import soundfile
import torch

from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.transducer.config import ALSDConfig
from tests.assets import ASSETS
from tests.search.aes_pp import test_equals_nemo as aes
from tests.search.alsd_pp.test_equals_nemo import nemo_computer
from tests.search.transducer.nemo_models import FUSION_MODES, FusionPair, nemo_n_best

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

UTTERANCES = 3


@pytest.fixture(scope="module")
def fusions():
    return FusionPair.load()


@functools.cache
def checkpoint(kind):
    """((decoder, joint), durations, encoder outputs [1, T, D] of single utterances)."""
    from nemo.collections.asr.models import ASRModel

    path = ASSETS / "models" / f"self_hybrid_{kind}.nemo"
    model = ASRModel.restore_from(str(path), map_location="cpu").eval()
    lines = (ASSETS / "speech" / "test.json").read_text().splitlines()[:UTTERANCES]
    outputs = []
    for line in lines:
        audio = ASSETS / "speech" / json.loads(line)["audio_filepath"]
        samples = torch.from_numpy(soundfile.read(audio, dtype="float32")[0])[None]
        with torch.no_grad():
            encoded, _ = model(
                input_signal=samples, input_signal_length=torch.tensor([samples.shape[1]])
            )
        outputs.append(encoded.transpose(1, 2))
    durations = list(model.cfg.get("model_defaults", {}).get("tdt_durations", None) or [])
    return (model.decoder, model.joint), durations, outputs


def assert_equal(expected, nbest):
    """Texts, times and scores; only the order of nearly equal scores may differ."""
    by_text = {tuple(path.tokens.tolist()): path for path in nbest}
    assert nbest.best.tokens.tolist() == expected[0][0]
    for tokens, starts, _, score in expected:
        path = by_text[tuple(tokens)]
        assert path.score == pytest.approx(score, abs=1e-3)
        assert path.frames.tolist() == starts


@pytest.mark.parametrize("mode", FUSION_MODES, ids="-".join)
@pytest.mark.parametrize("beam_size", [1, 4, 8])
@pytest.mark.parametrize("kind", ["rnnt", "tdt"])
def test_alsd_pp(fusions, kind, beam_size, mode):
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
        assert_equal(nemo_n_best(computer, encoder_output), nbest)
        assert len(nbest.best) > 5


@pytest.mark.parametrize("mode", aes.MODES, ids="-".join)
@pytest.mark.parametrize("beam_size", [1, 4, 8])
@pytest.mark.parametrize("mended", [True, False])
def test_aes_pp(fusions, beam_size, mode, mended):
    """All of NeMo with its faults mended; as it is, the best text, although some scores are too good."""
    from nemo.collections.asr.parts.submodules.rnnt_maes_batched_computer import (
        ModifiedAESBatchedRNNTComputer,
    )

    model, _, outputs = checkpoint("rnnt")  # NeMo has no maes_batch for TDT
    if not mended and mode[1:] == aes.TWICE_MODE:
        pytest.skip("NeMo counts the joint twice in this mode")
    computer = ModifiedAESBatchedRNNTComputer
    if mended:
        computer = aes.corrected(computer)
    for encoder_output in outputs:
        expected, nbest = aes.both(
            computer, model, fusions, beam_size, mode, encoder_output=encoder_output
        )
        if mended:
            assert_equal(expected, nbest)
        else:
            assert nbest.best.tokens.tolist() == expected[0][0]
