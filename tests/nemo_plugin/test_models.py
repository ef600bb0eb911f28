"""Hybrid models with both heads; models that are saved and restored."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

from __future__ import annotations

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

from nemo.collections.asr.models import EncDecCTCModelBPE
from omegaconf import OmegaConf, open_dict

from nemo_gpu_decoding import register, unregister
from nemo_gpu_decoding.nemo_plugin.ctc import FlexCTCInfer
from nemo_gpu_decoding.nemo_plugin.transducer import TransducerInfer

FLEXCTC = {"strategy": "flexctc_beam", "beam": {"beam_size": 4, "beam_beta": 0.0}}


def texts(model, files, **kwargs):
    return [result.text for result in model.transcribe(files, verbose=False, **kwargs)]


def test_the_ctc_head_is_switched_and_the_transducer_left_alone(hybrid_model, files):
    transducer = hybrid_model.decoding
    before = texts(hybrid_model, files)
    hybrid_model.change_decoding_strategy(FLEXCTC, decoder_type="ctc", verbose=False)
    assert hybrid_model.cur_decoder == "ctc"
    assert isinstance(hybrid_model.ctc_decoding.decoding, FlexCTCInfer)
    assert hybrid_model.decoding is transducer
    assert hybrid_model.cfg.decoding.strategy == "greedy_batch"
    assert hybrid_model.cfg.aux_ctc.decoding.strategy == "flexctc_beam"
    ctc_texts = texts(hybrid_model, files)
    hybrid_model.change_decoding_strategy(None, decoder_type="rnnt", verbose=False)
    assert texts(hybrid_model, files) == before
    hybrid_model.change_decoding_strategy(None, decoder_type="ctc", verbose=False)
    assert isinstance(hybrid_model.ctc_decoding.decoding, FlexCTCInfer)
    assert texts(hybrid_model, files) == ctc_texts


def test_same_texts_and_times_as_the_greedy_ctc_head(hybrid_model, files):
    hybrid_model.change_decoding_strategy(
        {"strategy": "greedy_batch"}, decoder_type="ctc", verbose=False
    )
    greedy = hybrid_model.transcribe(files, timestamps=True, verbose=False)
    hybrid_model.change_decoding_strategy(FLEXCTC, decoder_type="ctc", verbose=False)
    ours = hybrid_model.transcribe(files, timestamps=True, verbose=False)
    equal = [(a, b) for a, b in zip(greedy, ours, strict=True) if a.text == b.text]
    assert len(equal) >= len(files) - 1
    for a, b in equal:
        assert a.timestamp["word"] == b.timestamp["word"]


@pytest.mark.parametrize("timestamps", [None, True])
def test_n_best(hybrid_model, files, timestamps):
    cfg = {**FLEXCTC, "beam": {**FLEXCTC["beam"], "return_best_hypothesis": False}}
    hybrid_model.change_decoding_strategy(cfg, decoder_type="ctc", verbose=False)
    results = hybrid_model.transcribe(
        files, return_hypotheses=True, timestamps=timestamps, batch_size=2, verbose=False
    )
    assert all(1 < len(n_best) <= 4 for n_best in results)
    if timestamps:
        assert "start" in results[0][1].timestamp["word"][0]


def test_restored_hybrids_keep_the_strategy(hybrid_model, files, tmp_path):
    hybrid_model.change_decoding_strategy(FLEXCTC, decoder_type="ctc", verbose=False)
    expected = texts(hybrid_model, files[:2])
    hybrid_model.save_to(str(tmp_path / "hybrid.nemo"))
    other = type(hybrid_model).restore_from(str(tmp_path / "hybrid.nemo"), map_location="cpu").eval()
    assert other.cur_decoder == "rnnt"  # NeMo begins with the transducer
    other.change_decoding_strategy(None, decoder_type="ctc", verbose=False)
    assert isinstance(other.ctc_decoding.decoding, FlexCTCInfer)
    assert texts(other, files[:2]) == expected


@pytest.mark.parametrize("strategy", ["alsd_pp", "aes_pp"])
def test_both_heads_with_ours(transducer, files, strategy):
    greedy_ctc = transducer.ctc_decoding
    transducer.change_decoding_strategy({"strategy": strategy}, verbose=False)
    assert transducer.cur_decoder == "rnnt"
    assert transducer.ctc_decoding is greedy_ctc
    rnnt_texts = texts(transducer, files)
    transducer.change_decoding_strategy(FLEXCTC, decoder_type="ctc", verbose=False)
    assert isinstance(transducer.decoding.decoding, TransducerInfer)
    assert isinstance(transducer.ctc_decoding.decoding, FlexCTCInfer)
    ctc_texts = texts(transducer, files)
    assert ctc_texts != rnnt_texts
    transducer.change_decoding_strategy(None, decoder_type="rnnt", verbose=False)
    assert isinstance(transducer.decoding.decoding, TransducerInfer)
    assert texts(transducer, files) == rnnt_texts
    transducer.change_decoding_strategy(None, decoder_type="ctc", verbose=False)
    assert texts(transducer, files) == ctc_texts


def test_restored_hybrids_keep_both_strategies(transducer, files, tmp_path):
    cfg = {"strategy": "alsd_pp", "beam": {"beam_size": 3}}
    transducer.change_decoding_strategy(FLEXCTC, decoder_type="ctc", verbose=False)
    transducer.change_decoding_strategy(cfg, decoder_type="rnnt", verbose=False)
    expected = texts(transducer, files[:2])
    transducer.save_to(str(tmp_path / "hybrid.nemo"))
    other = type(transducer).restore_from(str(tmp_path / "hybrid.nemo"), map_location="cpu").eval()
    assert isinstance(other.decoding.decoding, TransducerInfer)
    assert isinstance(other.ctc_decoding.decoding, FlexCTCInfer)
    assert other.decoding.decoding.options == transducer.decoding.decoding.options
    assert texts(other, files[:2]) == expected


# ------------------------------------------------------------------------ saved and restored models


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


def texts_of(model, files):
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
        assert all(texts_of(model, files[:2]))
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
    expected = texts_of(transducer, files[:2])
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
    assert texts_of(model, files[:2]) == expected
