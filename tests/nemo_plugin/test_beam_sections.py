"""NeMo's `beam` section to the options of each strategy: strict, and as NeMo understands it."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import enum
from dataclasses import fields

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

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
from nemo_gpu_decoding.search.transducer.config import ALSDConfig
from nemo_gpu_decoding.vocabulary import Vocabulary

LMS = ("source_lm_model", "source_lm_alpha", "lm_pool", "lm_pool_alpha")
ALLOWED = ("allowed_scripts", "allowed_tokens", "allowed_text", "allowed_price", "grammar", "grammar_price")


# ---------------------------------------------------------------------------------- flexctc_beam
def options(top=None, **beam):
    return read_flexctc(OmegaConf.create({"strategy": "flexctc_beam", "beam": beam, **(top or {})}))


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    monkeypatch.setattr(nemo_logging, "warning", lambda message, *args, **kwargs: messages.append(message))
    return messages


def test_nemos_structured_defaults_pass_and_are_those_of_keys_that_are_left_out():
    cfg = OmegaConf.structured(CTCDecodingConfig(strategy="flexctc_beam"))
    result = read_flexctc(cfg)
    assert result.search.beam_size == cfg.beam.beam_size
    assert result.search.beam_beta == cfg.beam.beam_beta
    assert result.search.beam_threshold == cfg.beam.beam_threshold
    assert result.return_best
    assert result.fusion.lm_path is None
    assert result.fusion.boosting.is_empty
    assert result == read_flexctc(OmegaConf.create({"strategy": "flexctc_beam"}))


def test_nemos_and_our_keys_arrive(assets):
    lm = str(assets / "lm" / "tok3.arpa")
    result = options(
        beam_size=16, beam_beta=0.5, beam_threshold=14, return_best_hypothesis=False, n_best=3,
        merge="prefix", backend="cpu", threads=2, ngram_lm_model=lm, ngram_lm_alpha=0.7,
        lm_encoding="nemo", boosting_tree_alpha=1.5,
        boosting_tree={"key_phrases_list": ["acme"], "context_score": 2.0, "ignore_case": True,
                       "segmentations": 3, "refund": "full"},
    )  # fmt: skip
    search = result.search
    assert (search.beam_size, search.beam_beta, search.beam_threshold) == (16, 0.5, 14.0)
    assert (search.n_best, search.merge, search.backend, search.threads) == (3, "prefix", "cpu", 2)
    assert (str(result.fusion.lm_path), result.fusion.lm_weight, result.fusion.lm_encoding) == (lm, 0.7, "nemo")
    assert result.fusion.boosting_weight == 1.5
    assert result.fusion.boosting.key_phrases_list == ("acme",)
    assert (result.fusion.boosting.context_score, result.fusion.boosting.segmentations) == (2.0, 3)
    assert result.fusion.boosting.ignore_case


@pytest.mark.parametrize(
    ("beam", "named"),
    [
        ({"beam_sise": 4}, ["beam.beam_sise", "did you mean 'beam_size'", "ngram_lm_alpha", "merge"]),
        ({"xyz": 4}, ["beam.xyz", "valid keys"]),
        ({"boosting_tree": {"key_phrase_list": ["a"]}}, ["beam.boosting_tree.key_phrase_list"]),
        ({"flashlight_cfg": {"lexicon_path": "x"}}, ["beam.flashlight_cfg.lexicon_path", "flashlight"]),
        ({"pyctcdecode_cfg": {"hotwords": ["a"]}}, ["beam.pyctcdecode_cfg.hotwords", "pyctcdecode"]),
        ({"pyctcdecode_cfg": {"hotword": ["a"]}}, ["beam.pyctcdecode_cfg.hotword", "hotwords"]),
        ({"search_type": "flashlight"}, ["beam.search_type", "flashlight"]),
        ({"beam_size": 0}, ["beam.beam_size is 0"]),
        ({"beam_size": 2.5}, ["beam.beam_size is 2.5"]),
        ({"beam_size": "???"}, ["beam.beam_size is '???'"]),
        ({"beam_beta": "much"}, ["beam.beam_beta is 'much'"]),
        ({"merge": "min"}, ["beam.merge is 'min'", "prefix"]),
        ({"threads": -1}, ["beam.threads is -1"]),
        ({"lm_encoding": "utf7"}, ["beam.lm_encoding is 'utf7'", "pieces"]),
        ({"n_best": 3}, ["beam.n_best is 3", "return_best_hypothesis"]),
        ({"n_best": 9, "return_best_hypothesis": False}, ["beam.n_best is 9"]),
        ({"return_best_hypothesis": "no"}, ["beam.return_best_hypothesis is 'no'"]),
        ({"allow_cuda_graphs": 3}, ["beam.allow_cuda_graphs is 3"]),
        ({"ngram_lm_alpha": -0.5}, ["beam.ngram_lm_alpha is -0.5"]),
        ({"boosting_tree_alpha": float("nan")}, ["beam.boosting_tree_alpha is nan"]),
        ({"boosting_tree": {"ignore_case": 1}}, ["beam.boosting_tree.ignore_case is 1"]),
        ({"boosting_tree": {"refund": "some"}}, ["beam.boosting_tree.refund is 'some'"]),
        ({"boosting_tree": {"context_score": -1.0}}, ["beam.boosting_tree.context_score is -1.0"]),
        ({"ngram_lm_model": 3}, ["beam.ngram_lm_model is 3"]),
        ({"merge": "prefix", "preserve_alignments": True}, ["preserve_alignments", "beam.merge"]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_named(beam, named):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        options(**beam)
    for text in named:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("beam", "key"),
    [
        ({"ngram_lm_model": "nowhere.arpa"}, "beam.ngram_lm_model"),
        ({"kenlm_path": "nowhere.arpa"}, "beam.ngram_lm_model"),
        ({"ngram_lm_model": __file__, "source_lm_model": "nowhere", "source_lm_alpha": 0.2}, "beam.source_lm_model"),
        ({"boosting_tree": {"key_phrases_file": "nowhere.txt"}}, "beam.boosting_tree.key_phrases_file"),
        ({"boosting_tree": {"model_path": "nowhere.nemo"}}, "beam.boosting_tree.model_path"),
    ],
)
def test_missing_files_are_reported_when_the_decoding_is_made(beam, key):
    with pytest.raises(FileNotFoundError, match=key):
        options(**beam)


def test_n_best_is_the_beam_and_deprecated_keys_win_as_in_nemo(assets, warnings):
    assert options(beam_size=6, return_best_hypothesis=False).search.n_best == 6
    assert options(beam_size=6, return_best_hypothesis=False, n_best=2).search.n_best == 2
    assert options(beam_size=6).search.n_best == 1
    old, new = str(assets / "lm" / "tok3.arpa"), str(assets / "lm" / "tok6.arpa")
    result = options(beam_alpha=0.25, ngram_lm_alpha=0.75, kenlm_path=old, ngram_lm_model=new)
    assert (str(result.fusion.lm_path), result.fusion.lm_weight) == (old, 0.25)
    assert len(warnings) == 2


class Merge(enum.Enum):
    PREFIX = "prefix"
    MAX = "max"


@pytest.mark.parametrize("spelling", ["prefix", "PREFIX", Merge.PREFIX, "Prefix"])
def test_enums_by_name_value_and_member(spelling):
    assert options(merge=spelling).search.merge == "prefix"


def test_weights_that_are_missing_or_have_no_effect(assets, warnings):
    options()
    options(ngram_lm_alpha=0.0)
    assert options(ngram_lm_alpha=None).fusion.lm_weight == 0.0
    assert not warnings
    options(ngram_lm_alpha=0.7)
    assert warnings == ["`beam.ngram_lm_alpha` is 0.7, but has no effect: `beam.ngram_lm_model` names no LM."]
    options(boosting_tree={"key_phrases_list": ["acme"]})
    assert "boosting_tree_alpha" in warnings[1]
    with pytest.raises(ValueError, match=r"beam\.ngram_lm_alpha is not set"):
        options(ngram_lm_model=str(assets / "lm" / "tok3.arpa"), ngram_lm_alpha=None)


SOURCED = ("flexctc_beam", "alsd_pp", "aes_pp")


def any_options(strategy, beam):
    read = {"flexctc_beam": read_flexctc, "alsd_pp": read_alsd, "aes_pp": read_aes}[strategy]
    return read(OmegaConf.create({"strategy": strategy, "beam": beam}))


@pytest.mark.parametrize("strategy", SOURCED)
def test_named_lms_and_their_weights_arrive(assets, strategy, warnings):
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


@pytest.mark.parametrize(
    ("beam", "message"),
    [
        ({"lm_pool": ["a.arpa"]}, r"beam.lm_pool is \['a.arpa'\], expected a mapping from names"),
        ({"lm_pool": {"a": "nowhere"}}, "beam.lm_pool.a is 'nowhere', which is no file"),
        ({"lm_pool": {"a": 3}}, "beam.lm_pool.a is 3, expected the path of a file"),
        ({"lm_pool": {"none": __file__}}, "beam.lm_pool is 'none', expected names of LMs: .* not 'none'"),
        ({"lm_pool_alpha": {"a": 0.3}}, "beam.lm_pool_alpha is 'a', expected names of LMs in lm_pool: it is empty"),
        ({"lm_pool": {"a": __file__}, "lm_pool_alpha": {"a": 0}}, r"beam.lm_pool_alpha\[a\] is 0.0, expected .* > 0"),
        ({"lm_pool": {"a": __file__}, "ngram_lm_alpha": None}, "ngram_lm_alpha is not set, .* weight of beam.lm_pool"),
    ],
)
def test_wrong_named_lms_are_refused(beam, message):
    for strategy in SOURCED:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            any_options(strategy, beam)


@pytest.mark.parametrize("strategy", SOURCED)
def test_a_source_lm_and_its_weight_arrive(assets, strategy):
    lm, source = str(assets / "lm" / "tok6.arpa"), str(assets / "lm" / "tok3.arpa")
    beam = {"ngram_lm_model": lm, "ngram_lm_alpha": 0.6, "source_lm_model": source, "source_lm_alpha": 0.2}
    fusion = any_options(strategy, beam).fusion
    assert (str(fusion.source_lm_path), fusion.source_lm_weight) == (source, 0.2)
    loaded = load_fusion(fusion, 128, None)
    assert (loaded.source_lm.name, loaded.source_lm_weight) == (source, 0.2)
    tokens = [3, 17, 90, 4]
    expected = 0.6 * loaded.lm.score(tokens) - 0.2 * loaded.source_lm.score(tokens)
    assert 0.6 * loaded.token_lm.score(tokens) == pytest.approx(expected, abs=1e-4)
    assert load_fusion(any_options(strategy, beam).fusion, 128, None).token_lm is loaded.token_lm
    off = load_fusion(any_options(strategy, beam | {"source_lm_alpha": 0.0}).fusion, 128, None)
    assert off.token_lm is loaded.lm


@pytest.mark.parametrize("strategy", SOURCED)
@pytest.mark.parametrize(
    ("beam", "message"),
    [
        ({"source_lm_alpha": None}, r"beam\.source_lm_alpha is not set, expected the weight of beam\.source_lm_model"),
        ({"source_lm_alpha": -0.1}, r"beam\.source_lm_alpha is -0\.1"),
        ({"source_lm_alpha": "some"}, r"beam\.source_lm_alpha is 'some'"),
        ({"ngram_lm_model": None}, r"beam\.ngram_lm_model is None, expected the LM from which source_lm_model"),
        ({"source_lm_model": None}, r"beam\.source_lm_model is None with source_lm_alpha 0\.2"),
        ({"ngram_lm_alpha": 0.0}, r"beam\.ngram_lm_alpha is 0\.0 with source_lm_alpha 0\.2, expected a number > 0"),
        ({"source_lm_model": 3}, r"beam\.source_lm_model is 3"),
    ],
)
def test_an_incomplete_density_ratio_is_named(assets, strategy, beam, message):
    lm = str(assets / "lm" / "tok3.arpa")
    given = {"ngram_lm_model": lm, "ngram_lm_alpha": 0.6, "source_lm_model": lm, "source_lm_alpha": 0.2}
    with pytest.raises(ValueError, match=message):
        any_options(strategy, given | beam)


def test_a_source_lm_of_another_tokenizer_is_named(assets):
    lm = str(assets / "lm" / "tok3.arpa")
    fusion = FusionOptions(None, 0.0, "auto", BoostingConfig(), 0.0, assets / "lm" / "tok3.arpa", 0.2)
    with pytest.raises(ValueError, match=rf"{lm} has token ids up to .* expected 0 \.\. 19"):
        load_fusion(fusion, 20, None)


PIECES = Vocabulary(("▁the", "▁да", "7", "é"), "bpe")


@pytest.mark.parametrize("strategy", SOURCED)
def test_allowed_tokens_and_their_price_arrive(tmp_path, strategy):
    text = tmp_path / "text.txt"
    text.write_text("да\n\n")
    beam = {"allowed_scripts": "Latin", "allowed_tokens": ["▁да"], "allowed_price": 2}
    found = load_fusion(any_options(strategy, beam).fusion, 4, PIECES)
    assert found.allowed == AllowedTokens((True,) * 4, 2)
    found = load_fusion(any_options(strategy, {"allowed_text": str(text)}).fusion, 4, PIECES)
    assert found.allowed == AllowedTokens((False, True, True, False))
    assert load_fusion(any_options(strategy, {"allowed_price": 2}).fusion, 4, PIECES).allowed is None


@pytest.mark.parametrize(
    ("beam", "message"),
    [
        ({"allowed_scripts": [3]}, r"beam\.allowed_scripts is \[3\], expected a list of texts"),
        ({"allowed_scripts": ["Latn"]}, r"beam\.allowed_scripts is 'Latn', expected scripts .* CYRILLIC, LATIN"),
        ({"allowed_tokens": ["x"]}, r"beam\.allowed_tokens is 'x', expected pieces"),
        ({"allowed_price": -1}, r"beam\.allowed_price is -1"),
        ({"allowed_price": None}, r"beam\.allowed_price is None"),
    ],
)
def test_wrong_allowed_tokens_are_named(beam, message):
    with pytest.raises(ValueError, match=message):
        load_fusion(any_options("alsd_pp", beam).fusion, 4, PIECES)


def test_a_grammar_and_its_price_arrive(tmp_path):
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


@pytest.mark.parametrize(
    ("beam", "message"),
    [
        ({"grammar": ["the x"]}, r"beam\.grammar is \['the x'\] \(grammar: 'x' has the character"),
        ({"grammar": ["the", ""]}, r"beam\.grammar is '', expected sentences"),
        ({"grammar": ["the"], "grammar_price": 0}, r"beam\.grammar_price is 0"),
        ({"grammar": 3}, r"beam\.grammar is 3"),
        (
            {"grammar": ["the"], "boosting_tree": {"key_phrases_list": ["the"]}, "boosting_tree_alpha": 1.0},
            r"beam\.grammar is \['the'\], expected null with boosting_tree",
        ),
    ],
)
def test_wrong_grammars_are_named(beam, message):
    with pytest.raises(ValueError, match=message):
        load_fusion(any_options("alsd_pp", beam).fusion, 4, PIECES)


def test_keys_beside_the_section():
    """All of NeMo's are fine, and count; ours are sent into the section."""
    structured = OmegaConf.to_container(OmegaConf.structured(CTCDecodingConfig()))
    structured["strategy"] = "flexctc_beam"
    read_flexctc(OmegaConf.create(structured))
    with pytest.raises(ValueError, match="preserve_alignments"):
        options(top={"preserve_alignments": True}, merge="prefix")
    for section_of, read in ((FLEXCTC, options), (TRANSDUCERS["alsd_pp"], transducer_options)):
        for key in section_of.added:
            with pytest.raises(ValueError, match=rf"beam\.{key}"):
                read(top={key: "auto"})


def test_the_valid_keys_are_nemos_and_ours():
    nemo = OmegaConf.to_container(OmegaConf.structured(CTCDecodingConfig()))["beam"]
    own = ("confidence_map", "merge", "n_best", "backend", "threads", "lm_encoding")
    assert set(FLEXCTC.valid) == {*nemo, *LMS, *ALLOWED, *own}
    assert {each.name for each in fields(BoostingConfig)} == {
        *nemo["boosting_tree"], "segmentations", "ignore_case", "refund", "overlapping", "whole_words",
        "ac_threshold", "bpe_mode", "var_bpe_scoring_temp", "var_bpe_penalize_subsplits",
    }  # fmt: skip


# ------------------------------------------------------------------------------ alsd_pp, aes_pp
READERS = {"alsd_pp": read_alsd, "aes_pp": read_aes}
STRATEGIES = list(READERS)


def transducer_options(strategy="alsd_pp", top=None, **beam):
    cfg = OmegaConf.create({"strategy": strategy, "beam": beam, **(top or {})})
    return READERS[strategy](cfg)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_transducers_nemos_structured_defaults_pass_and_are_taken_over(strategy):
    cfg = OmegaConf.structured(RNNTDecodingConfig(strategy=strategy))
    result = READERS[strategy](cfg)
    assert result.search.beam_size == cfg.beam.beam_size
    assert result.search.score_norm == cfg.beam.score_norm
    assert result.search.blank_lm_score_mode == "lm_weighted_full"
    assert result.search.pruning_mode == "late"
    assert result.return_best
    assert result.fusion.lm_path is None
    assert result.fusion.boosting.is_empty
    assert result == transducer_options(strategy)


def test_our_defaults_are_those_of_nemos_batched_searches():
    nemo = OmegaConf.structured(BeamRNNTInferConfig(beam_size=4))
    alsd, aes = transducer_options().search, transducer_options("aes_pp").search
    assert alsd.max_symbols == nemo.max_symbols_per_step
    assert aes.maes_num_steps == nemo.maes_num_steps
    assert aes.maes_expansion_beta == nemo.maes_expansion_beta
    assert aes.maes_expansion_gamma == nemo.maes_expansion_gamma


def test_transducers_nemos_and_our_keys_arrive(assets):
    lm = str(assets / "lm" / "tok3.arpa")
    shared = {
        "beam_size": 6, "score_norm": False, "softmax_temperature": 1.25, "n_best": 3,
        "return_best_hypothesis": False, "blank_lm_score_mode": "no_score", "pruning_mode": "early",
        "backend": "cpu", "threads": 2, "ngram_lm_model": lm, "ngram_lm_alpha": 0.4,
        "lm_encoding": "nemo", "boosting_tree": {"key_phrases_list": ["acme"]},
        "boosting_tree_alpha": 1.5,
    }  # fmt: skip
    for result in (
        transducer_options(**shared, max_symbols=7),
        transducer_options("aes_pp", **shared, maes_num_steps=3, maes_expansion_beta=1, maes_expansion_gamma=2),
    ):
        search = result.search
        assert (search.beam_size, search.score_norm, search.softmax_temperature) == (6, False, 1.25)
        assert (search.blank_lm_score_mode, search.pruning_mode) == ("no_score", "early")
        assert (search.n_best, search.backend, search.threads) == (3, "cpu", 2)
        assert not result.return_best
        assert (str(result.fusion.lm_path), result.fusion.lm_weight) == (lm, 0.4)
        assert result.fusion.boosting.key_phrases_list == ("acme",)
        assert result.fusion.boosting_weight == 1.5
        if hasattr(search, "max_symbols"):
            assert search.max_symbols == 7
        else:
            assert (search.maes_num_steps, search.maes_expansion_beta) == (3, 1)
            assert search.maes_expansion_gamma == 2.0


@pytest.mark.parametrize(
    ("strategy", "beam", "named"),
    [
        ("alsd_pp", {"merge": "max"}, ["beam.merge", "valid keys"]),
        ("alsd_pp", {"beam_beta": "much"}, ["beam.beam_beta is 'much'"]),
        ("alsd_pp", {"alsd_max_target_len": 1.5}, ["beam.alsd_max_target_len", "1.5", "alsd_pp", "max_symbols"]),
        ("alsd_pp", {"maes_prefix_alpha": 3}, ["beam.maes_prefix_alpha", "default 1"]),
        ("alsd_pp", {"maes_num_steps": 3}, ["beam.maes_num_steps", "alsd_pp"]),
        ("alsd_pp", {"maes_expansion_gamma": 3.0}, ["beam.maes_expansion_gamma", "alsd_pp"]),
        ("alsd_pp", {"language_model": {"a": 1}}, ["beam.language_model"]),
        ("alsd_pp", {"hat_subtract_ilm": True}, ["beam.hat_subtract_ilm"]),
        ("alsd_pp", {"hat_ilm_weight": 0.1}, ["beam.hat_ilm_weight"]),
        ("alsd_pp", {"tsd_max_sym_exp": 3}, ["beam.tsd_max_sym_exp"]),
        ("alsd_pp", {"search_type": "aes_pp"}, ["beam.search_type", "aes_pp", "alsd_pp"]),
        ("alsd_pp", {"max_symbols": 0}, ["beam.max_symbols is 0"]),
        ("alsd_pp", {"max_symbols": 5, "max_symbols_per_step": 6}, ["beam.max_symbols is 5", "per_step is 6"]),
        ("alsd_pp", {"score_norm": 1}, ["beam.score_norm is 1"]),
        ("alsd_pp", {"softmax_temperature": 0}, ["beam.softmax_temperature is 0"]),
        ("alsd_pp", {"blank_lm_score_mode": "full"}, ["beam.blank_lm_score_mode is 'full'", "no_score"]),
        ("alsd_pp", {"pruning_mode": "never"}, ["beam.pruning_mode is 'never'", "late"]),
        ("alsd_pp", {"compute_timestamps": "no"}, ["beam.compute_timestamps is 'no'"]),
        ("aes_pp", {"max_symbols": 5}, ["beam.max_symbols", "aes_pp", "maes_num_steps"]),
        ("aes_pp", {"max_symbols_per_step": 5}, ["beam.max_symbols_per_step", "aes_pp"]),
        ("aes_pp", {"maes_prefix_alpha": 3}, ["beam.maes_prefix_alpha", "aes_pp"]),
        (
            "aes_pp",
            {"maes_expansion_gamma": 0},
            ["maes_expansion_gamma is 0", "writes 0 unless decoding_strategy=maes"],
        ),
        ("aes_pp", {"search_type": "alsd_pp"}, ["beam.search_type", "aes_pp"]),
    ],
)
def test_transducers_what_cannot_work_is_named(strategy, beam, named):
    """What all strategies share is named as above."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        transducer_options(strategy, **beam)
    for text in named:
        assert text in str(error.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_beam_section_of_nemos_model_configs_passes(strategy):
    beam = {
        "beam_size": 2, "return_best_hypothesis": False, "score_norm": True,
        "tsd_max_sym_exp": 50, "alsd_max_target_len": 2.0,
    }  # fmt: skip
    assert transducer_options(strategy, **beam).search.n_best == 2


@pytest.mark.parametrize(
    ("key", "spellings"),
    [
        ("blank_lm_score_mode", ["no_score", "NO_SCORE", BlankLMScoreMode.NO_SCORE]),
        ("pruning_mode", ["early", "EARLY", PruningMode.EARLY]),
    ],
)
def test_enums_of_nemo_by_name_value_and_member(key, spellings):
    for spelling in spellings:
        assert getattr(transducer_options(**{key: spelling}).search, key) == spellings[0]


def test_enums_and_the_most_symbols_left_empty_have_nemos_defaults():
    search = transducer_options(pruning_mode=None, blank_lm_score_mode=None).search
    assert (search.pruning_mode, search.blank_lm_score_mode) == ("late", "lm_weighted_full")
    assert transducer_options(max_symbols_per_step=5).search.max_symbols == 5
    assert transducer_options(max_symbols=5).search.max_symbols == 5
    assert transducer_options(max_symbols=5, max_symbols_per_step=5).search.max_symbols == 5
    assert transducer_options(max_symbols=None, max_symbols_per_step=None).search.max_symbols == 10
    with pytest.raises(ValueError, match="max_symbols is 10"):
        transducer_options(max_symbols=10, max_symbols_per_step=5)


def test_cuda_graphs_left_empty_are_as_nemo_has_them(monkeypatch):
    """NeMo 3.0 has true; where it has null, too, it is as the search has it."""
    assert transducer_options(allow_cuda_graphs=None).search.allow_cuda_graphs is True
    nemos = section.nemo_defaults("rnnt", "beam") | {"allow_cuda_graphs": None}
    monkeypatch.setattr(section, "nemo_defaults", lambda family, name: nemos)
    assert transducer_options().search.allow_cuda_graphs is ALSDConfig.allow_cuda_graphs
    assert transducer_options(allow_cuda_graphs=False).search.allow_cuda_graphs is False


def test_multi_blank_models_are_refused():
    with pytest.raises(ValueError, match=r"big_blank_durations is \[2, 4\]"):
        transducer_options(top={"big_blank_durations": [2, 4]})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_valid_keys_are_nemos_and_ours_but_for_those_without_effect(strategy):
    """NeMo's defaults of these say nothing."""
    nemo = OmegaConf.to_container(OmegaConf.structured(RNNTDecodingConfig))["beam"]
    section = TRANSDUCERS[strategy]
    own = ("beam_beta", "confidence_map", "n_best", "backend", "threads", "lm_encoding")
    known = {*nemo, *section.undeclared, *LMS, *ALLOWED, *own}
    assert set(section.valid) == known - set(section.unused)
    assert set(section.unused) <= known
    for key, what in section.unused.items():
        assert key not in nemo or nemo[key] in what.neutral
