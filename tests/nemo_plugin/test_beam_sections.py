"""NeMo's `beam` section to the options of each strategy: strict, and as NeMo understands it."""

import enum
from dataclasses import fields

import pytest
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from nemo.collections.asr.parts.submodules.rnnt_beam_decoding import BeamRNNTInferConfig
from nemo.collections.asr.parts.submodules.rnnt_decoding import RNNTDecodingConfig
from nemo.collections.asr.parts.utils.batched_beam_decoding_utils import BlankLMScoreMode, PruningMode
from nemo.utils import logging as nemo_logging
from omegaconf import OmegaConf

from nemo_gpu_decoding.fusion.allowed import AllowedTokens
from nemo_gpu_decoding.fusion.boosting import BoostingConfig
from nemo_gpu_decoding.nemo_plugin import section
from nemo_gpu_decoding.nemo_plugin.beam_sections import FLEXCTC, TRANSDUCERS, read_aes, read_alsd, read_flexctc
from nemo_gpu_decoding.nemo_plugin.infer import load_fusion
from nemo_gpu_decoding.nemo_plugin.section import FusionOptions
from nemo_gpu_decoding.presets import load_preset
from nemo_gpu_decoding.search.transducer.config import ALSDConfig
from nemo_gpu_decoding.vocabulary import Vocabulary

LMS = ("source_lm_model", "source_lm_alpha", "lm_pool", "lm_pool_alpha")
ALLOWED = ("allowed_scripts", "allowed_tokens", "allowed_text", "allowed_price", "grammar", "grammar_price")


READERS = {"flexctc_beam": read_flexctc, "alsd_pp": read_alsd, "aes_pp": read_aes}
SOURCED = tuple(READERS)


def any_options(strategy, beam):
    return READERS[strategy](OmegaConf.create({"strategy": strategy, "beam": beam}))


def options(**beam):
    return any_options("flexctc_beam", beam)


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    monkeypatch.setattr(nemo_logging, "warning", lambda message, *args, **kwargs: messages.append(message))
    return messages


@pytest.mark.parametrize("strategy", SOURCED)
def test_structured_defaults_of_nemo_equal_missing_keys(strategy):
    structured = CTCDecodingConfig if strategy == "flexctc_beam" else RNNTDecodingConfig
    cfg = OmegaConf.structured(structured(strategy=strategy))
    result = READERS[strategy](cfg)
    for key in ("beam_size", "beam_beta", "beam_threshold", "score_norm"):
        if hasattr(result.search, key) and key in cfg.beam:
            assert getattr(result.search, key) == cfg.beam[key]
    assert result.return_best
    assert result.fusion.lm is None
    assert result.fusion.boosting.is_empty
    assert result == any_options(strategy, {})


OWN_KEYS = {
    "flexctc_beam": {"beam_beta": 0.5, "beam_threshold": 14.0, "merge": "prefix"},
    "alsd_pp": {"max_symbols": 7},
    "aes_pp": {"maes_num_steps": 3, "maes_expansion_beta": 1, "maes_expansion_gamma": 2.0},
}
TRANSDUCER_KEYS = {
    "score_norm": False, "softmax_temperature": 1.25, "blank_lm_score_mode": "no_score", "pruning_mode": "early",
}  # fmt: skip


@pytest.mark.parametrize("strategy", SOURCED)
def test_beam_keys_reach_the_options(assets, strategy):
    lm = str(assets / "lm" / "tok3.arpa")
    search = {"beam_size": 16, "n_best": 3, "backend": "cpu", "threads": 2, **OWN_KEYS[strategy]}
    search |= {} if strategy == "flexctc_beam" else TRANSDUCER_KEYS
    tree = {"key_phrases_list": ["acme"], "context_score": 2.0, "ignore_case": True, "segmentations": 3}
    fusion = {"ngram_lm_model": lm, "ngram_lm_alpha": 0.7, "lm_encoding": "nemo", "boosting_tree_alpha": 1.5}
    result = any_options(strategy, {**search, **fusion, "boosting_tree": tree, "return_best_hypothesis": False})
    assert {key: getattr(result.search, key) for key in search} == search
    assert not result.return_best
    assert (str(result.fusion.lm), result.fusion.lm_weight, result.fusion.lm_encoding) == (lm, 0.7, "nemo")
    assert result.fusion.boosting_weight == 1.5
    assert {key: getattr(result.fusion.boosting, key) for key in tree} == tree | {"key_phrases_list": ("acme",)}


def test_n_best_is_the_beam_and_deprecated_keys_win_as_in_nemo(assets, warnings):
    assert options(beam_size=6, return_best_hypothesis=False).search.n_best == 6
    assert options(beam_size=6, return_best_hypothesis=False, n_best=2).search.n_best == 2
    assert options(beam_size=6).search.n_best == 1
    old, new = str(assets / "lm" / "tok3.arpa"), str(assets / "lm" / "tok6.arpa")
    result = options(beam_alpha=0.25, ngram_lm_alpha=0.75, kenlm_path=old, ngram_lm_model=new)
    assert (str(result.fusion.lm), result.fusion.lm_weight) == (old, 0.25)
    assert len(warnings) == 2


class Merge(enum.Enum):
    PREFIX = "prefix"
    MAX = "max"


@pytest.mark.parametrize(
    ("strategy", "key", "spellings"),
    [
        ("flexctc_beam", "merge", ["prefix", "PREFIX", "Prefix", Merge.PREFIX]),
        ("alsd_pp", "blank_lm_score_mode", ["no_score", "NO_SCORE", BlankLMScoreMode.NO_SCORE]),
        ("alsd_pp", "pruning_mode", ["early", "EARLY", PruningMode.EARLY]),
    ],
)
def test_enums_are_read_by_name_value_and_member(strategy, key, spellings):
    for spelling in spellings:
        assert getattr(any_options(strategy, {key: spelling}).search, key) == spellings[0]


def test_weight_without_effect_is_warned_of(assets, warnings):
    options()
    options(ngram_lm_alpha=0.0)
    assert options(ngram_lm_alpha=None).fusion.lm_weight == 0.0
    for name in READERS:
        any_options(name, load_preset(name).beam)
    assert not warnings
    options(ngram_lm_alpha=0.6)
    assert warnings == ["`beam.ngram_lm_alpha` is 0.6, but has no effect: `beam.ngram_lm_model` names no LM."]
    options(boosting_tree={"key_phrases_list": ["acme"]})
    assert "boosting_tree_alpha" in warnings[1]


@pytest.mark.parametrize("strategy", SOURCED)
def test_lm_pool_is_loaded_with_its_weights(assets, strategy, warnings):
    files = {"small": str(assets / "lm" / "tok3.arpa"), "large": str(assets / "lm" / "tok6.arpa")}
    beam = {"ngram_lm_alpha": 0.6, "lm_pool": files, "lm_pool_alpha": {"large": 0.3}}
    fusion = load_fusion(any_options(strategy, beam).fusion, 128, None)
    assert [lm.name for lm in fusion.lm_pool.values()] == list(files.values())
    assert [fusion.lm_weight_of(name) for name in files] == [0.6, 0.3]
    again = load_fusion(any_options(strategy, beam).fusion, 128, None)
    assert again.lm_pool["small"] is fusion.lm_pool["small"]
    assert again.token_lms[0] is fusion.token_lms[0]
    assert not warnings
    own = any_options(strategy, {**beam, "ngram_lm_alpha": None, "lm_pool_alpha": {"large": 0.3, "small": 0.5}})
    assert own.fusion.lm_pool_weights == {"large": 0.3, "small": 0.5}


@pytest.mark.parametrize("strategy", SOURCED)
def test_source_lm_is_loaded_with_its_weight(assets, strategy):
    lm, source = str(assets / "lm" / "tok6.arpa"), str(assets / "lm" / "tok3.arpa")
    beam = {"ngram_lm_model": lm, "ngram_lm_alpha": 0.6, "source_lm_model": source, "source_lm_alpha": 0.2}
    fusion = any_options(strategy, beam).fusion
    assert (str(fusion.source_lm), fusion.source_lm_weight) == (source, 0.2)
    loaded = load_fusion(fusion, 128, None)
    assert (loaded.source_lm.name, loaded.source_lm_weight) == (source, 0.2)
    tokens = [3, 17, 90, 4]
    expected = 0.6 * loaded.lm.score(tokens) - 0.2 * loaded.source_lm.score(tokens)
    assert 0.6 * loaded.token_lm.score(tokens) == pytest.approx(expected, abs=1e-4)
    assert load_fusion(any_options(strategy, beam).fusion, 128, None).token_lm is loaded.token_lm
    assert load_fusion(any_options(strategy, beam | {"source_lm_alpha": 0.0}).fusion, 128, None).token_lm is loaded.lm


def test_a_source_lm_of_another_tokenizer_is_named(assets):
    lm = assets / "lm" / "tok3.arpa"
    fusion = FusionOptions(lm, 0.6, "auto", BoostingConfig(), 0.0, lm, 0.2)
    with pytest.raises(ValueError, match=rf"{lm} has token ids up to .* expected 0 \.\. 19"):
        load_fusion(fusion, 20, None)


PIECES = Vocabulary(("▁the", "▁да", "7", "é"), "bpe")


@pytest.mark.parametrize("strategy", SOURCED)
def test_allowed_tokens_are_loaded_with_their_price(tmp_path, strategy):
    text = tmp_path / "text.txt"
    text.write_text("да\n\n")
    beam = {"allowed_scripts": "Latin", "allowed_tokens": ["▁да"], "allowed_price": 2}
    found = load_fusion(any_options(strategy, beam).fusion, 4, PIECES)
    assert found.allowed == AllowedTokens((True,) * 4, 2)
    found = load_fusion(any_options(strategy, {"allowed_text": str(text)}).fusion, 4, PIECES)
    assert found.allowed == AllowedTokens((False, True, True, False))
    assert load_fusion(any_options(strategy, {"allowed_price": 2}).fusion, 4, PIECES).allowed is None


def test_grammar_is_loaded_with_its_price(tmp_path):
    sentences = tmp_path / "s.txt"
    sentences.write_text("the\n\nthe да\n")
    found = [
        load_fusion(any_options("aes_pp", {"grammar": source, "grammar_price": 2}).fusion, 4, PIECES).grammar
        for source in (["the", "the да"], str(sentences))
    ]
    assert len({grammar.automaton.fingerprint for grammar in found}) == 1
    assert [found[0].accepts(tokens, 9) for tokens in ([0], [0, 1], [1])] == [True, True, False]
    assert load_fusion(any_options("aes_pp", {}).fusion, 4, PIECES).grammar is None
    sentences.write_text("#JSGF V1.0;\npublic <s> = the [да];\n")
    with pytest.raises(ValueError, match=r"beam\.grammar is '#JSGF V1.0;', expected a list of sentences, without"):
        load_fusion(any_options("aes_pp", {"grammar": str(sentences)}).fusion, 4, PIECES)


def test_valid_keys_are_those_of_nemo_and_ours():
    nemo = OmegaConf.to_container(OmegaConf.structured(CTCDecodingConfig()))["beam"]
    own = ("confidence_map", "merge", "n_best", "backend", "threads", "lm_encoding")
    assert set(FLEXCTC.valid) == {*nemo, *LMS, *ALLOWED, *own}
    assert {each.name for each in fields(BoostingConfig)} == {
        *nemo["boosting_tree"], "segmentations", "ignore_case", "refund", "overlapping", "whole_words",
        "ac_threshold", "bpe_mode", "var_bpe_scoring_temp", "var_bpe_penalize_subsplits", "phrase_share",
    }  # fmt: skip


def transducer_options(strategy="alsd_pp", **beam):
    return any_options(strategy, beam)


def test_defaults_equal_those_of_nemos_batched_searches():
    nemo = OmegaConf.structured(BeamRNNTInferConfig(beam_size=4))
    alsd, aes = transducer_options().search, transducer_options("aes_pp").search
    assert alsd.max_symbols == nemo.max_symbols_per_step
    assert aes.maes_num_steps == nemo.maes_num_steps
    assert aes.maes_expansion_beta == nemo.maes_expansion_beta
    assert aes.maes_expansion_gamma == nemo.maes_expansion_gamma


def test_null_enums_and_max_symbols_have_the_defaults_of_nemo():
    search = transducer_options(pruning_mode=None, blank_lm_score_mode=None).search
    assert (search.pruning_mode, search.blank_lm_score_mode) == ("late", "lm_weighted_full")
    assert transducer_options(max_symbols_per_step=5).search.max_symbols == 5
    assert transducer_options(max_symbols=5).search.max_symbols == 5
    assert transducer_options(max_symbols=5, max_symbols_per_step=5).search.max_symbols == 5
    assert transducer_options(max_symbols=None, max_symbols_per_step=None).search.max_symbols == 10


def test_null_allow_cuda_graphs_has_the_default_of_nemo(monkeypatch):
    """NeMo 3.0 has true; where it has null, too, it is as the search has it."""
    assert transducer_options(allow_cuda_graphs=None).search.allow_cuda_graphs is True
    nemos = section.nemo_defaults("rnnt", "beam") | {"allow_cuda_graphs": None}
    monkeypatch.setattr(section, "nemo_defaults", lambda family, name: nemos)
    assert transducer_options().search.allow_cuda_graphs is ALSDConfig.allow_cuda_graphs
    assert transducer_options(allow_cuda_graphs=False).search.allow_cuda_graphs is False


@pytest.mark.parametrize("strategy", SOURCED[1:])
def test_valid_keys_of_transducers_lack_those_without_effect(strategy):
    nemo = OmegaConf.to_container(OmegaConf.structured(RNNTDecodingConfig))["beam"]
    section = TRANSDUCERS[strategy]
    own = ("beam_beta", "confidence_map", "n_best", "backend", "threads", "lm_encoding")
    known = {*nemo, *section.undeclared, *LMS, *ALLOWED, *own}
    assert set(section.valid) == known - set(section.unused)
    assert set(section.unused) <= known
    for key, what in section.unused.items():
        assert key not in nemo or nemo[key] in what.neutral
