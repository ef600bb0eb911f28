"""Hybrid models with both heads; models that are saved and restored; presets under conf/."""

import pickle
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException
from nemo.collections.asr.models import EncDecCTCModelBPE
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from nemo.collections.asr.parts.submodules.rnnt_decoding import RNNTDecodingConfig
from omegaconf import OmegaConf, open_dict

from nemo_gpu_decoding import register, unregister
from nemo_gpu_decoding.nemo_plugin import hydra_schemas
from nemo_gpu_decoding.nemo_plugin.ctc import FlexCTCInfer
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES
from nemo_gpu_decoding.nemo_plugin.transducer import TransducerInfer
from nemo_gpu_decoding.presets import load_preset, preset_names
from tests.assets import ROOT
from tests.nemo_plugin.usage import texts_of

pytestmark = pytest.mark.slow

FLEXCTC = {"strategy": "flexctc_beam", "beam": {"beam_size": 4, "beam_beta": 0.0}}


def test_the_ctc_head_is_switched_and_the_transducer_left_alone(hybrid_model, files):
    transducer = hybrid_model.decoding
    before = texts_of(hybrid_model, files)
    hybrid_model.change_decoding_strategy(FLEXCTC, decoder_type="ctc", verbose=False)
    assert hybrid_model.cur_decoder == "ctc"
    assert isinstance(hybrid_model.ctc_decoding.decoding, FlexCTCInfer)
    assert hybrid_model.decoding is transducer
    assert hybrid_model.cfg.decoding.strategy == "greedy_batch"
    assert hybrid_model.cfg.aux_ctc.decoding.strategy == "flexctc_beam"
    ctc_texts = texts_of(hybrid_model, files)
    hybrid_model.change_decoding_strategy(None, decoder_type="rnnt", verbose=False)
    assert texts_of(hybrid_model, files) == before
    hybrid_model.change_decoding_strategy(None, decoder_type="ctc", verbose=False)
    assert isinstance(hybrid_model.ctc_decoding.decoding, FlexCTCInfer)
    assert texts_of(hybrid_model, files) == ctc_texts


def test_restored_hybrids_keep_both_strategies(transducer, files, tmp_path):
    cfg = {"strategy": "alsd_pp", "beam": {"beam_size": 3}}
    transducer.change_decoding_strategy(FLEXCTC, decoder_type="ctc", verbose=False)
    transducer.change_decoding_strategy(cfg, decoder_type="rnnt", verbose=False)
    expected = texts_of(transducer, files[:2])
    transducer.save_to(str(tmp_path / "hybrid.nemo"))
    other = type(transducer).restore_from(str(tmp_path / "hybrid.nemo"), map_location="cpu").eval()
    assert isinstance(other.decoding.decoding, TransducerInfer)
    assert isinstance(other.ctc_decoding.decoding, FlexCTCInfer)
    assert other.decoding.decoding.options == transducer.decoding.decoding.options
    assert texts_of(other, files[:2]) == expected
    config = type(transducer).restore_from(str(tmp_path / "hybrid.nemo"), return_config=True)
    with open_dict(config):
        config.decoding.beam.ngram_lm_model = "/nowhere/lm.arpa"
    other = (
        type(transducer)
        .restore_from(str(tmp_path / "hybrid.nemo"), override_config_path=config, map_location="cpu")
        .eval()
    )
    other.change_decoding_strategy(FLEXCTC, decoder_type="ctc", verbose=False)
    assert all(texts_of(other, files[:1]))  # the other head needs no LM


@pytest.fixture
def saved(ctc_model, assets, tmp_path):
    """A model file whose decoding section uses most of what we understand."""
    cfg = {
        "strategy": "flexctc_beam",
        "beam": {
            "beam_size": 8, "merge": "prefix", "ngram_lm_model": str(assets / "lm" / "tok3.arpa"),
            "boosting_tree": {"key_phrases_list": ["gdansk"], "ignore_case": True}, "boosting_tree_alpha": 1.0,
        },
    }  # fmt: skip
    ctc_model.change_decoding_strategy(cfg, verbose=False)
    path = str(tmp_path / "model.nemo")
    ctc_model.save_to(path)
    return path


def test_without_the_plugin_restore_with_another_decoding_section(saved, files, tmp_path):
    unregister()
    try:
        with pytest.raises(ValueError, match="flexctc_beam"):
            EncDecCTCModelBPE.restore_from(saved, map_location="cpu")
        config = EncDecCTCModelBPE.restore_from(saved, return_config=True)
        with open_dict(config):
            config.decoding = {"strategy": "greedy_batch"}
        OmegaConf.save(config, tmp_path / "greedy.yaml")
        model = EncDecCTCModelBPE.restore_from(
            saved, override_config_path=str(tmp_path / "greedy.yaml"), map_location="cpu"
        ).eval()
        assert type(model.decoding).__module__.startswith("nemo.")
        assert all(texts_of(model, files[:2]))
    finally:
        register()


@pytest.mark.parametrize(
    ("strategy", "section", "problem"),
    [("flexctc_beam", "beam", r"beam\.ngram_lm_model"), ("greedy_batch", "greedy", "/nowhere/lm.arpa")],
)
def test_a_model_whose_lm_is_missing_is_restored_and_its_decoding_names_the_file(
    strategy, section, problem, saved, files
):
    config = EncDecCTCModelBPE.restore_from(saved, return_config=True)
    with open_dict(config):
        config.decoding = {
            "strategy": strategy,
            section: {"ngram_lm_model": "/nowhere/lm.arpa", "ngram_lm_alpha": 0.3},
        }
    model = EncDecCTCModelBPE.restore_from(saved, override_config_path=config, map_location="cpu").eval()
    with pytest.raises(FileNotFoundError, match=problem):
        texts_of(model, files[:1])
    model.change_decoding_strategy({"strategy": "flexctc_beam"}, verbose=False)
    assert all(texts_of(model, files[:1]))


def test_enums_of_a_saved_transducer_are_restored(transducer, tmp_path):
    """NeMo's own enums are written with their names."""
    transducer.change_decoding_strategy({"strategy": "alsd_pp", "beam": {"beam_size": 6}}, verbose=False)
    path = str(tmp_path / "names.nemo")
    transducer.save_to(path)
    saved = type(transducer).restore_from(path, return_config=True).decoding.beam
    assert (str(saved.pruning_mode), str(saved.blank_lm_score_mode)) == ("LATE", "LM_WEIGHTED_FULL")
    search = type(transducer).restore_from(path, map_location="cpu").decoding.decoding.options.search
    assert (search.pruning_mode, search.blank_lm_score_mode) == ("late", "lm_weighted_full")


# --------------------------------------- The presets under conf/: only keys that exist, and they work
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


def test_every_strategy_has_a_preset():
    assert preset_names("ctc_decoding") == [
        "cuda_wfst", "cuda_wfst_open", "cuda_wfst_paper", "cuda_wfst_phrases", "flexctc_beam", "flexctc_beam_lm",
        "flexctc_beam_paper", "paged_biglm", "paged_biglm_phrases",
    ]  # fmt: skip
    assert preset_names("rnnt_decoding") == ["aes_pp", "aes_pp_lm", "alsd_pp", "alsd_pp_lm", "alsd_pp_paper"]
    assert set(preset_names()) == {name for _, name in PRESETS}
    assert {load_preset(name).strategy for name in preset_names()} == set(STRATEGIES)
    with pytest.raises(ValueError, match=r"preset=flexctc is no file here .*flexctc_beam"):
        load_preset("flexctc")


def composed(schema, *overrides):
    ConfigStore.instance().store(name=schema.__name__, node=schema)
    with initialize(version_base=None):
        return compose(schema.__name__, overrides=list(overrides))


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_presets_compose_in_nemos_scripts(group, name):
    config, preset = composed(ScriptConfig, f"+{group}={name}")[group], load_preset(name)
    nemos = OmegaConf.structured(CONFIGS[group])
    if STRATEGIES[preset.strategy].section == "wfst":  # with keys that NeMo's section lacks
        nemos.wfst = getattr(hydra_schemas, preset.strategy)()
    assert config == OmegaConf.merge(nemos, preset)  # refuses unknown keys
    assert composed(TrainingConfig, f"+{group}@model.decoding={name}").model.decoding.strategy == preset.strategy


@pytest.mark.parametrize("name", ["cuda_wfst_phrases", "paged_biglm_phrases"])
def test_presets_bring_keys_that_nemos_section_lacks(name):
    key = "wfst.boosting_tree.key_phrases_file=names.txt"
    in_script = composed(ScriptConfig, f"+ctc_decoding={name}", f"ctc_decoding.{key}").ctc_decoding
    assert in_script.wfst.boosting_tree.key_phrases_file == "names.txt"
    assert pickle.loads(pickle.dumps(in_script)) == in_script
    with pytest.raises(ConfigCompositionException, match=r"Could not override 'ctc_decoding\.wfst\.boosting"):
        composed(ScriptConfig, f"+ctc_decoding={name}", "ctc_decoding.wfst.boosting=1")
    in_training = composed(TrainingConfig, f"+ctc_decoding@model.decoding={name}", f"model.decoding.{key}")
    assert in_training.model.decoding.wfst.boosting_tree.key_phrases_file == "names.txt"


@dataclass
class StreamingConfig:
    """Where NeMo's YAML for streaming transducers has the section; that for CTC has none."""

    asr: Any = field(default_factory=lambda: {"decoding": {"strategy": "greedy_batch"}})


@dataclass
class CTCStreamingConfig:
    asr: Any = field(default_factory=lambda: {"model_name": ""})


def test_overrides_of_the_page_about_nemos_scripts_compose():
    page = (ROOT / "docs" / "nemo_scripts.md").read_text()
    spans = [span for span in re.findall(r"`([^`\n]+)`", page) if re.match(r"\+*(ctc_|rnnt_|asr\.)decoding\.", span)]
    strategies = set()
    for span in spans:
        schemas = (StreamingConfig, CTCStreamingConfig) if "asr.decoding" in span else (ScriptConfig,)
        for config in [composed(schema, *span.split()) for schema in schemas]:
            for override in span.split():
                key, value = override.lstrip("+").split("=")
                assert str(OmegaConf.select(config, key)) == value
                if key.endswith("strategy"):
                    strategies.add(value)
    assert strategies == set(STRATEGIES)
    assert len(spans) > 8


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_presets_decode(group, name, ctc_model, hybrid_model, files, utterances, assets):
    preset = load_preset(name)
    section = STRATEGIES[preset.strategy].section
    if section == "wfst":
        preset.wfst.arpa_lm_path = str(assets / "lm" / "word3.arpa")
    if preset.strategy == "paged_biglm":
        preset.wfst.large_lm_path = str(assets / "lm" / "word3.arpa")
    if "ngram_lm_model" in preset[section]:
        preset.beam.ngram_lm_model = str(assets / "lm" / "tok3.arpa")
    if "boosting_tree" in preset[section]:
        preset[section].boosting_tree.key_phrases_file = str(assets / "phrases.txt")
    model = ctc_model if group == "ctc_decoding" else hybrid_model
    model.change_decoding_strategy(preset, verbose=False)
    assert model.transcribe(files[2], verbose=False)[0].text == utterances[2]["text"]
