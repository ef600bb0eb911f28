"""NeMo's `beam` section to options of alsd_pp and aes_pp: strict, and as NeMo understands it."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

from nemo.collections.asr.parts.submodules.rnnt_beam_decoding import BeamRNNTInferConfig
from nemo.collections.asr.parts.submodules.rnnt_decoding import RNNTDecodingConfig
from nemo.collections.asr.parts.utils.batched_beam_decoding_utils import BlankLMScoreMode, PruningMode
from omegaconf import OmegaConf

from nemo_gpu_decoding.nemo_plugin.transducer_config import (
    OWN_KEYS,
    UNDECLARED_KEYS,
    UNUSED,
    read_transducer_options,
    transducer_beam_keys,
)

STRATEGIES = ["alsd_pp", "aes_pp"]


def options(strategy="alsd_pp", top=None, **beam):
    cfg = OmegaConf.create({"strategy": strategy, "beam": beam, **(top or {})})
    return read_transducer_options(cfg, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nemos_structured_defaults_pass_and_are_taken_over(strategy):
    cfg = OmegaConf.structured(RNNTDecodingConfig(strategy=strategy))
    result = read_transducer_options(cfg, strategy)
    assert result.search.beam_size == cfg.beam.beam_size
    assert result.search.score_norm == cfg.beam.score_norm
    assert result.search.blank_lm_score_mode == "lm_weighted_full"
    assert result.search.pruning_mode == "late"
    assert result.return_best
    assert result.fusion.lm_path is None
    assert result.fusion.boosting.is_empty
    assert result == options(strategy)


def test_our_defaults_are_those_of_nemos_batched_searches():
    nemo = OmegaConf.structured(BeamRNNTInferConfig(beam_size=4))
    alsd, aes = options().search, options("aes_pp").search
    assert alsd.max_symbols == nemo.max_symbols_per_step
    assert aes.maes_num_steps == nemo.maes_num_steps
    assert aes.maes_expansion_beta == nemo.maes_expansion_beta
    assert aes.maes_expansion_gamma == nemo.maes_expansion_gamma


def test_nemos_and_our_keys_arrive(assets):
    lm = str(assets / "lm" / "tok3.arpa")
    shared = {
        "beam_size": 6, "score_norm": False, "softmax_temperature": 1.25, "n_best": 3,
        "return_best_hypothesis": False, "blank_lm_score_mode": "no_score", "pruning_mode": "early",
        "backend": "cpu", "threads": 2, "ngram_lm_model": lm, "ngram_lm_alpha": 0.4,
        "lm_encoding": "nemo", "boosting_tree": {"key_phrases_list": ["acme"]},
        "boosting_tree_alpha": 1.5,
    }  # fmt: skip
    for result in (
        options(**shared, max_symbols=7),
        options("aes_pp", **shared, maes_num_steps=3, maes_expansion_beta=1, maes_expansion_gamma=2),
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
    ("beam", "named"),
    [
        ({"beam_sise": 4}, ["beam.beam_sise", "did you mean 'beam_size'", "ngram_lm_alpha", "n_best"]),
        ({"merge": "max"}, ["beam.merge", "valid keys"]),
        ({"beam_beta": 1.0}, ["beam.beam_beta"]),
        ({"boosting_tree": {"key_phrase_list": ["a"]}}, ["beam.boosting_tree.key_phrase_list"]),
        ({"alsd_max_target_len": 1.5}, ["beam.alsd_max_target_len", "1.5", "alsd_pp", "max_symbols"]),
        ({"maes_prefix_alpha": 2}, ["beam.maes_prefix_alpha", "default 1"]),
        ({"maes_num_steps": 3}, ["beam.maes_num_steps", "alsd_pp"]),
        ({"maes_expansion_gamma": 3.0}, ["beam.maes_expansion_gamma", "alsd_pp"]),
        ({"language_model": {"a": 1}}, ["beam.language_model"]),
        ({"hat_subtract_ilm": True}, ["beam.hat_subtract_ilm"]),
        ({"hat_ilm_weight": 0.1}, ["beam.hat_ilm_weight"]),
        ({"tsd_max_sym_exp": 3}, ["beam.tsd_max_sym_exp"]),
        ({"search_type": "aes_pp"}, ["beam.search_type", "aes_pp", "alsd_pp"]),
        ({"beam_size": 0}, ["beam.beam_size is 0"]),
        ({"beam_size": "???"}, ["beam.beam_size is '???'"]),
        ({"max_symbols": 0}, ["beam.max_symbols is 0"]),
        ({"max_symbols": 5, "max_symbols_per_step": 6}, ["beam.max_symbols is 5", "per_step is 6"]),
        ({"score_norm": 1}, ["beam.score_norm is 1"]),
        ({"softmax_temperature": 0}, ["beam.softmax_temperature is 0"]),
        ({"softmax_temperature": "warm"}, ["beam.softmax_temperature is 'warm'"]),
        ({"blank_lm_score_mode": "full"}, ["beam.blank_lm_score_mode is 'full'", "no_score"]),
        ({"pruning_mode": "never"}, ["beam.pruning_mode is 'never'", "late"]),
        ({"backend": "tpu"}, ["beam.backend is 'tpu'"]),
        ({"threads": -1}, ["beam.threads is -1"]),
        ({"lm_encoding": "utf7"}, ["beam.lm_encoding is 'utf7'"]),
        ({"n_best": 3}, ["beam.n_best is 3", "return_best_hypothesis"]),
        ({"n_best": 9, "return_best_hypothesis": False}, ["beam.n_best is 9"]),
        ({"allow_cuda_graphs": 3}, ["beam.allow_cuda_graphs is 3"]),
        ({"compute_timestamps": "no"}, ["beam.compute_timestamps is 'no'"]),
        ({"ngram_lm_alpha": -0.5}, ["beam.ngram_lm_alpha is -0.5"]),
        ({"boosting_tree": {"context_score": -1.0}}, ["beam.boosting_tree.context_score is -1.0"]),
    ],
)
def test_what_cannot_work_is_named(beam, named):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        options(**beam)
    for text in named:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("beam", "named"),
    [
        ({"max_symbols": 5}, ["beam.max_symbols", "aes_pp", "maes_num_steps"]),
        ({"max_symbols_per_step": 5}, ["beam.max_symbols_per_step", "aes_pp"]),
        ({"maes_prefix_alpha": 2}, ["beam.maes_prefix_alpha", "aes_pp"]),
        ({"maes_num_steps": 0}, ["beam.maes_num_steps is 0"]),
        ({"maes_expansion_beta": -1}, ["beam.maes_expansion_beta is -1"]),
        ({"maes_expansion_gamma": 0}, ["beam.maes_expansion_gamma is 0"]),
        ({"search_type": "alsd_pp"}, ["beam.search_type", "aes_pp"]),
    ],
)
def test_what_cannot_work_with_aes_pp_is_named(beam, named):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        options("aes_pp", **beam)
    for text in named:
        assert text in str(error.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_beam_section_of_nemos_model_configs_passes(strategy):
    beam = {
        "beam_size": 2, "return_best_hypothesis": False, "score_norm": True,
        "tsd_max_sym_exp": 50, "alsd_max_target_len": 2.0,
    }  # fmt: skip
    assert options(strategy, **beam).search.n_best == 2


def test_both_of_nemos_names_for_the_most_symbols():
    assert options(max_symbols_per_step=5).search.max_symbols == 5
    assert options(max_symbols=5).search.max_symbols == 5
    assert options(max_symbols=5, max_symbols_per_step=5).search.max_symbols == 5
    assert options(max_symbols=None, max_symbols_per_step=None).search.max_symbols == 10
    with pytest.raises(ValueError, match="max_symbols is 10"):
        options(max_symbols=10, max_symbols_per_step=5)


@pytest.mark.parametrize("spelling", ["no_score", "NO_SCORE", BlankLMScoreMode.NO_SCORE])
def test_blank_scoring_by_name_value_and_member(spelling):
    assert options(blank_lm_score_mode=spelling).search.blank_lm_score_mode == "no_score"


@pytest.mark.parametrize("spelling", ["early", "EARLY", PruningMode.EARLY])
def test_pruning_by_name_value_and_member(spelling):
    assert options(pruning_mode=spelling).search.pruning_mode == "early"


def test_enums_left_empty_have_nemos_defaults():
    search = options(pruning_mode=None, blank_lm_score_mode=None).search
    assert (search.pruning_mode, search.blank_lm_score_mode) == ("late", "lm_weighted_full")


@pytest.mark.parametrize("key", OWN_KEYS)
def test_our_keys_beside_the_section_are_sent_into_it(key):
    with pytest.raises(ValueError, match=rf"beam\.{key}"):
        options(top={key: "auto"})


def test_multi_blank_models_are_refused():
    with pytest.raises(ValueError, match=r"big_blank_durations is \[2, 4\]"):
        options(top={"big_blank_durations": [2, 4]})


@pytest.mark.parametrize(
    ("beam", "key"),
    [
        ({"ngram_lm_model": "nowhere.arpa"}, "beam.ngram_lm_model"),
        ({"boosting_tree": {"key_phrases_file": "nowhere.txt"}}, "beam.boosting_tree.key_phrases_file"),
    ],
)
def test_missing_files_are_reported_when_the_decoding_is_made(beam, key):
    with pytest.raises(FileNotFoundError, match=key):
        options(**beam)


def test_an_lm_without_weight_is_an_error(assets):
    with pytest.raises(ValueError, match=r"beam\.ngram_lm_alpha is not set"):
        options(ngram_lm_model=str(assets / "lm" / "tok3.arpa"), ngram_lm_alpha=None)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_valid_keys_are_nemos_and_ours_but_for_those_without_effect(strategy):
    nemo = OmegaConf.to_container(OmegaConf.structured(RNNTDecodingConfig))["beam"]
    known = {*nemo, *UNDECLARED_KEYS, *OWN_KEYS}
    assert set(transducer_beam_keys(strategy)["beam"]) == known - set(UNUSED[strategy])
    assert set(UNUSED[strategy]) <= known


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nemos_defaults_of_unused_keys_are_among_those_that_say_nothing(strategy):
    nemo = OmegaConf.to_container(OmegaConf.structured(RNNTDecodingConfig))["beam"]
    for key, neutral in UNUSED[strategy].items():
        assert key not in nemo or nemo[key] in neutral
