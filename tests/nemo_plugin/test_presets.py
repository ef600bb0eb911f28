"""The presets under conf/: only keys that exist, and they work."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from nemo.collections.asr.parts.submodules.rnnt_decoding import RNNTDecodingConfig
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError

from nemo_gpu_decoding.conf import load_preset, preset_names
from nemo_gpu_decoding.nemo_plugin.ctc_config import ctc_beam_keys, read_ctc_options
from nemo_gpu_decoding.nemo_plugin.paged_config import paged_keys, read_paged_options
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES
from nemo_gpu_decoding.nemo_plugin.transducer_config import (
    read_transducer_options,
    transducer_beam_keys,
)
from nemo_gpu_decoding.nemo_plugin.wfst_config import read_wfst_options, wfst_keys

CONFIGS = {"ctc_decoding": CTCDecodingConfig, "rnnt_decoding": RNNTDecodingConfig}
PRESETS = [(group, name) for group in CONFIGS for name in preset_names(group)]


def test_the_presets():
    variants = ("", "_boosting", "_lm", "_lm_boosting")
    assert preset_names("ctc_decoding") == [
        *(f"cuda_wfst_lm{variant}" for variant in ("", "_boosting", "_open")),
        *(f"flexctc_beam{variant}" for variant in variants),
        *(f"paged_biglm_lm{variant}" for variant in ("", "_boosting")),
    ]
    assert preset_names("rnnt_decoding") == [
        f"{strategy}{variant}" for strategy in ("aes_pp", "alsd_pp") for variant in variants
    ]
    assert set(preset_names()) == {name for _, name in PRESETS}
    with pytest.raises(ValueError, match="flexctc_beam_lm"):
        load_preset("flexctc")


def reader(preset):
    """The section with a preset's options, its valid keys, and what reads it."""
    if preset.strategy == "paged_biglm":
        return "wfst", paged_keys(), read_paged_options
    if STRATEGIES[preset.strategy].section == "wfst":
        return "wfst", wfst_keys(), read_wfst_options
    if preset.strategy == "flexctc_beam":
        return "beam", ctc_beam_keys(), read_ctc_options
    strategy = preset.strategy
    return "beam", transducer_beam_keys(strategy), lambda cfg: read_transducer_options(cfg, strategy)


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_every_key_is_nemos_or_ours(group, name):
    preset = load_preset(name)
    section, keys, read = reader(preset)
    assert set(preset) <= set(OmegaConf.structured(CONFIGS[group]))
    assert set(preset[section]) <= set(keys[section])
    assert set(preset[section].get("boosting_tree", {})) <= set(keys[f"{section}.boosting_tree"])
    for key in ("arpa_lm_path", "large_lm_path"):
        if key in preset.get("wfst", {}):
            preset.wfst[key] = __file__  # any file: the LM is read later
    read(preset)


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_presets_merge_into_nemos_structured_config(group, name):
    preset, nemos = load_preset(name), OmegaConf.structured(CONFIGS[group])
    ours = [key for key in preset.get("wfst", {}) if key not in nemos.wfst]
    if not ours:
        OmegaConf.merge(nemos, preset)
        return
    with pytest.raises(ConfigKeyError, match=ours[0]):  # the preset says what to do in scripts
        OmegaConf.merge(nemos, preset)
    with open_dict(nemos):  # as Hydra's `+key=value`
        for key in ours:
            OmegaConf.update(nemos, f"wfst.{key}", preset.wfst[key], force_add=True)


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_presets_decode(group, name, ctc_model, hybrid_model, files, utterances, assets):
    preset = load_preset(name)
    section = STRATEGIES[preset.strategy].section
    if section == "wfst":
        preset.wfst.arpa_lm_path = str(assets / "lm" / "word3.arpa")
    if "large_lm_path" in preset[section]:
        preset.wfst.large_lm_path = str(assets / "lm" / "word3.arpa")
    if "ngram_lm_model" in preset[section]:
        preset.beam.ngram_lm_model = str(assets / "lm" / "tok3.arpa")
    if "boosting_tree" in preset[section]:
        preset[section].boosting_tree.key_phrases_file = str(assets / "phrases.txt")
    model = ctc_model if group == "ctc_decoding" else hybrid_model
    model.change_decoding_strategy(preset, verbose=False)
    result = model.transcribe(files[2], verbose=False)
    assert result[0].text == utterances[2]["text"]
