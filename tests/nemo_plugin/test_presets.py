"""The presets under conf/: only keys that exist, and they work."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from omegaconf import OmegaConf

from nemo_gpu_decoding.conf import load_preset, preset_names
from nemo_gpu_decoding.nemo_plugin.config import beam_keys, read_beam_options


def test_the_presets():
    expected = ["flexctc_beam", "flexctc_beam_boosting", "flexctc_beam_lm", "flexctc_beam_lm_boosting"]
    assert preset_names() == expected
    with pytest.raises(ValueError, match="flexctc_beam_lm"):
        load_preset("flexctc")


@pytest.mark.parametrize("name", preset_names())
def test_every_key_is_nemos_or_ours(name):
    preset = load_preset(name)
    assert set(preset) <= set(OmegaConf.structured(CTCDecodingConfig))
    assert set(preset.beam) <= set(beam_keys()["beam"])
    assert set(preset.beam.get("boosting_tree", {})) <= set(beam_keys()["beam.boosting_tree"])
    read_beam_options(preset)


@pytest.mark.parametrize("name", preset_names())
def test_presets_merge_into_nemos_structured_config(name):
    OmegaConf.merge(OmegaConf.structured(CTCDecodingConfig), load_preset(name))


@pytest.mark.parametrize("name", preset_names())
def test_presets_decode(name, ctc_model, files, utterances, assets):
    preset = load_preset(name)
    if "ngram_lm_model" in preset.beam:
        preset.beam.ngram_lm_model = str(assets / "lm" / "tok3.arpa")
    if "boosting_tree" in preset.beam:
        preset.beam.boosting_tree.key_phrases_file = str(assets / "phrases.txt")
    ctc_model.change_decoding_strategy(preset, verbose=False)
    result = ctc_model.transcribe(files[2], verbose=False)
    assert result[0].text == utterances[2]["text"]
