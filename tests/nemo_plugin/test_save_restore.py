"""A .nemo file that names our strategy, with and without us."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

from nemo.collections.asr.models import EncDecCTCModelBPE
from omegaconf import OmegaConf, open_dict

from nemo_gpu_decoding import register, unregister


@pytest.fixture
def saved(ctc_model, assets, tmp_path):
    """A model file whose decoding section uses most of what we understand."""
    cfg = {
        "strategy": "flexctc_beam",
        "beam": {
            "beam_size": 8,
            "merge": "prefix",
            "ngram_lm_model": str(assets / "lm" / "tok3.arpa"),
            "boosting_tree": {"key_phrases_list": ["gdansk"], "ignore_case": True},
            "boosting_tree_alpha": 1.0,
        },
    }
    ctc_model.change_decoding_strategy(cfg, verbose=False)
    path = str(tmp_path / "model.nemo")
    ctc_model.save_to(path)
    return path


def texts(model, files):
    return [result.text for result in model.transcribe(files, verbose=False)]


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
        assert all(texts(model, files[:2]))
    finally:
        register()


def test_an_lm_that_is_gone_is_reported_by_its_key_when_restoring(saved, tmp_path):
    config = EncDecCTCModelBPE.restore_from(saved, return_config=True)
    config.decoding.beam.ngram_lm_model = "/nowhere/lm.arpa"
    with pytest.raises(FileNotFoundError, match=r"beam\.ngram_lm_model"):
        EncDecCTCModelBPE.restore_from(saved, override_config_path=config, map_location="cpu")


def test_a_transducers_enums_come_back_by_name(transducer, assets, tmp_path, files):
    cfg = {
        "strategy": "alsd_pp",
        "beam": {
            "beam_size": 6,
            "max_symbols": 7,
            "blank_lm_score_mode": "no_score",
            "pruning_mode": "early",
            "ngram_lm_model": str(assets / "lm" / "tok3.arpa"),
            "ngram_lm_alpha": 0.2,
            "return_best_hypothesis": False,
            "n_best": 2,
        },
    }
    transducer.change_decoding_strategy(cfg, verbose=False)
    expected = texts(transducer, files[:2])
    path = str(tmp_path / "model.nemo")
    transducer.save_to(path)
    # NeMo's own enums are written with their names
    plain = {"strategy": "alsd_pp", "beam": {"beam_size": 6}}
    transducer.change_decoding_strategy(plain, verbose=False)
    with_names = str(tmp_path / "names.nemo")
    transducer.save_to(with_names)

    kind = type(transducer)
    saved = kind.restore_from(with_names, return_config=True).decoding.beam
    assert (str(saved.pruning_mode), str(saved.blank_lm_score_mode)) == ("LATE", "LM_WEIGHTED_FULL")
    search = kind.restore_from(with_names, map_location="cpu").decoding.decoding.options.search
    assert (search.pruning_mode, search.blank_lm_score_mode) == ("late", "lm_weighted_full")
    model = kind.restore_from(path, map_location="cpu").eval()
    search = model.decoding.decoding.options.search
    assert (search.pruning_mode, search.blank_lm_score_mode) == ("early", "no_score")
    assert (search.max_symbols, search.n_best) == (7, 2)
    assert texts(model, files[:2]) == expected
