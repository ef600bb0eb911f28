"""The presets under conf/: only keys that exist, and they work."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from nemo.collections.asr.parts.submodules.rnnt_decoding import RNNTDecodingConfig
from omegaconf import OmegaConf

from nemo_gpu_decoding.conf import load_preset, preset_names
from nemo_gpu_decoding.nemo_plugin.ctc_config import ctc_beam_keys, read_ctc_options
from nemo_gpu_decoding.nemo_plugin.transducer_config import (
    read_transducer_options,
    transducer_beam_keys,
)

CONFIGS = {"ctc_decoding": CTCDecodingConfig, "rnnt_decoding": RNNTDecodingConfig}
PRESETS = [(group, name) for group in CONFIGS for name in preset_names(group)]


def test_the_presets():
    variants = ("", "_boosting", "_lm", "_lm_boosting")
    assert preset_names("ctc_decoding") == [f"flexctc_beam{variant}" for variant in variants]
    assert preset_names("rnnt_decoding") == [
        f"{strategy}{variant}" for strategy in ("aes_pp", "alsd_pp") for variant in variants
    ]
    assert set(preset_names()) == {name for _, name in PRESETS}
    with pytest.raises(ValueError, match="flexctc_beam_lm"):
        load_preset("flexctc")


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_every_key_is_nemos_or_ours(group, name):
    preset = load_preset(name)
    keys = ctc_beam_keys() if group == "ctc_decoding" else transducer_beam_keys(preset.strategy)
    assert set(preset) <= set(OmegaConf.structured(CONFIGS[group]))
    assert set(preset.beam) <= set(keys["beam"])
    assert set(preset.beam.get("boosting_tree", {})) <= set(keys["beam.boosting_tree"])
    if group == "ctc_decoding":
        read_ctc_options(preset)
    else:
        read_transducer_options(preset, preset.strategy)


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_presets_merge_into_nemos_structured_config(group, name):
    OmegaConf.merge(OmegaConf.structured(CONFIGS[group]), load_preset(name))


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_presets_decode(group, name, ctc_model, hybrid_model, files, utterances, assets):
    preset = load_preset(name)
    if "ngram_lm_model" in preset.beam:
        preset.beam.ngram_lm_model = str(assets / "lm" / "tok3.arpa")
    if "boosting_tree" in preset.beam:
        preset.beam.boosting_tree.key_phrases_file = str(assets / "phrases.txt")
    model = ctc_model if group == "ctc_decoding" else hybrid_model
    model.change_decoding_strategy(preset, verbose=False)
    result = model.transcribe(files[2], verbose=False)
    assert result[0].text == utterances[2]["text"]
