"""The presets under conf/: only keys that exist, and they work."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

from dataclasses import dataclass, field
from typing import Any

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from nemo.collections.asr.parts.submodules.rnnt_decoding import RNNTDecodingConfig
from omegaconf import OmegaConf

from nemo_gpu_decoding.nemo_plugin import beam_sections, word_graph_sections
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES
from nemo_gpu_decoding.presets import load_preset, preset_names

CONFIGS = {"ctc_decoding": CTCDecodingConfig, "rnnt_decoding": RNNTDecodingConfig}
PRESETS = [(group, name) for group in CONFIGS for name in preset_names(group)]


@dataclass
class ScriptConfig:
    """The sections of transcribe_speech.py's config that are about decoding, under its names."""

    ctc_decoding: CTCDecodingConfig = field(default_factory=CTCDecodingConfig)
    rnnt_decoding: RNNTDecodingConfig = field(default_factory=RNNTDecodingConfig)


@dataclass
class TrainingConfig:
    """Where NeMo's training configs have the section."""

    model: Any = field(default_factory=lambda: {"decoding": {"strategy": "greedy_batch"}})


def test_the_presets():
    assert preset_names("ctc_decoding") == [
        "cuda_wfst",
        "cuda_wfst_open",
        "flexctc_beam",
        "paged_biglm",
    ]
    assert preset_names("rnnt_decoding") == ["aes_pp", "alsd_pp"]
    assert set(preset_names()) == {name for _, name in PRESETS}
    assert {load_preset(name).strategy for name in preset_names()} == set(STRATEGIES)
    with pytest.raises(ValueError, match=r"preset=flexctc is no file here .*flexctc_beam"):
        load_preset("flexctc")


SECTIONS = {
    "flexctc_beam": (beam_sections.FLEXCTC, beam_sections.read_flexctc),
    "cuda_wfst": (word_graph_sections.CUDA_WFST, word_graph_sections.read_cuda_wfst),
    "paged_biglm": (word_graph_sections.PAGED_BIGLM, word_graph_sections.read_paged_biglm),
    "alsd_pp": (beam_sections.TRANSDUCERS["alsd_pp"], beam_sections.read_alsd),
    "aes_pp": (beam_sections.TRANSDUCERS["aes_pp"], beam_sections.read_aes),
}


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_every_key_is_nemos_or_ours(group, name):
    preset = load_preset(name)
    described, read = SECTIONS[preset.strategy]
    section, keys = described.name, described.keys()
    assert set(preset) <= set(OmegaConf.structured(CONFIGS[group]))
    assert set(preset[section]) <= set(keys[section])
    assert set(preset[section].get("boosting_tree", {})) <= set(keys[f"{section}.boosting_tree"])
    if "wfst" in preset:
        preset.wfst.arpa_lm_path = __file__  # any file: the LM is read later
    if name == "paged_biglm":
        preset.wfst.large_lm_path = __file__
    read(preset)


def composed(schema, *overrides):
    ConfigStore.instance().store(name=schema.__name__, node=schema)
    with initialize(version_base=None):
        return compose(schema.__name__, overrides=list(overrides))


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_presets_compose_in_nemos_scripts(group, name):
    config, preset = composed(ScriptConfig, f"+{group}={name}")[group], load_preset(name)
    nemos = OmegaConf.merge(OmegaConf.structured(CONFIGS[group]), preset)  # refuses unknown keys
    assert config == nemos
    in_training = composed(TrainingConfig, f"+{group}@model.decoding={name}").model.decoding
    assert in_training.strategy == preset.strategy


@pytest.mark.parametrize("name", ["cuda_wfst", "paged_biglm"])
def test_keys_of_ours_come_with_a_plus(name):
    section = "ctc_decoding.wfst"
    ours = {"large_lm_path": "large.packed", "boosting_tree.key_phrases_file": "names.txt"}
    plus = [f"+{section}.{key}={value}" for key, value in ours.items()]
    config = composed(ScriptConfig, f"+ctc_decoding={name}", *plus, f"{section}.arpa_lm_path=lm.arpa")
    values = {key: OmegaConf.select(config, f"{section}.{key}") for key in ours}
    assert values == ours


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_presets_decode(group, name, ctc_model, hybrid_model, files, utterances, assets):
    preset = load_preset(name)
    section = STRATEGIES[preset.strategy].section
    if section == "wfst":
        preset.wfst.arpa_lm_path = str(assets / "lm" / "word3.arpa")
    if name == "paged_biglm":
        preset.wfst.large_lm_path = str(assets / "lm" / "word3.arpa")
    if "ngram_lm_model" in preset[section]:
        preset.beam.ngram_lm_model = str(assets / "lm" / "tok3.arpa")
    if "boosting_tree" in preset[section]:
        preset[section].boosting_tree.key_phrases_file = str(assets / "phrases.txt")
    model = ctc_model if group == "ctc_decoding" else hybrid_model
    model.change_decoding_strategy(preset, verbose=False)
    result = model.transcribe(files[2], verbose=False)
    assert result[0].text == utterances[2]["text"]
