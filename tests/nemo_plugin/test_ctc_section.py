"""From NeMo's `beam` section to options: strict, and as NeMo understands it."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import enum

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from nemo.utils import logging as nemo_logging
from omegaconf import OmegaConf

from nemo_gpu_decoding.nemo_plugin.ctc_config import OWN_KEYS, ctc_beam_keys, read_ctc_options


def options(top=None, **beam):
    return read_ctc_options(OmegaConf.create({"strategy": "flexctc_beam", "beam": beam, **(top or {})}))


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    monkeypatch.setattr(
        nemo_logging, "warning", lambda message, *args, **kwargs: messages.append(message)
    )
    return messages


def test_nemos_structured_defaults_pass_and_are_taken_over():
    cfg = OmegaConf.structured(CTCDecodingConfig(strategy="flexctc_beam"))
    result = read_ctc_options(cfg)
    assert result.search.beam_size == cfg.beam.beam_size
    assert result.search.beam_beta == cfg.beam.beam_beta
    assert result.search.beam_threshold == cfg.beam.beam_threshold
    assert result.return_best
    assert result.fusion.lm_path is None
    assert result.fusion.boosting.is_empty


def test_keys_that_are_left_out_have_the_values_that_change_decoding_strategy_gives_them():
    assert read_ctc_options(OmegaConf.create({"strategy": "flexctc_beam"})) == read_ctc_options(
        OmegaConf.structured(CTCDecodingConfig(strategy="flexctc_beam"))
    )


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
    assert (str(result.fusion.lm_path), result.fusion.lm_weight, result.fusion.lm_encoding) == (
        lm,
        0.7,
        "nemo",
    )
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
        ({"beam_threshold": -1.0}, ["beam.beam_threshold is -1.0"]),
        ({"merge": "min"}, ["beam.merge is 'min'", "prefix"]),
        ({"backend": "tpu"}, ["beam.backend is 'tpu'", "cpu"]),
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


@pytest.mark.parametrize("key", OWN_KEYS)
def test_our_keys_beside_the_section_are_sent_into_it(key):
    with pytest.raises(ValueError, match=rf"beam\.{key}"):
        options(top={key: "auto"})


@pytest.mark.parametrize(
    ("beam", "key"),
    [
        ({"ngram_lm_model": "nowhere.arpa"}, "beam.ngram_lm_model"),
        ({"kenlm_path": "nowhere.arpa"}, "beam.ngram_lm_model"),
        ({"boosting_tree": {"key_phrases_file": "nowhere.txt"}}, "beam.boosting_tree.key_phrases_file"),
        ({"boosting_tree": {"model_path": "nowhere.nemo"}}, "beam.boosting_tree.model_path"),
    ],
)
def test_missing_files_are_reported_when_the_decoding_is_made(beam, key):
    with pytest.raises(FileNotFoundError, match=key):
        options(**beam)


def test_deprecated_keys_win_as_in_nemo(assets, warnings):
    old, new = str(assets / "lm" / "tok3.arpa"), str(assets / "lm" / "tok6.arpa")
    result = options(beam_alpha=0.25, ngram_lm_alpha=0.75, kenlm_path=old, ngram_lm_model=new)
    assert (str(result.fusion.lm_path), result.fusion.lm_weight) == (old, 0.25)
    assert len(warnings) == 2


def test_n_best_is_the_beam_unless_given():
    assert options(beam_size=6, return_best_hypothesis=False).search.n_best == 6
    assert options(beam_size=6, return_best_hypothesis=False, n_best=2).search.n_best == 2
    assert options(beam_size=6).search.n_best == 1


class Merge(enum.Enum):
    PREFIX = "prefix"
    MAX = "max"


@pytest.mark.parametrize("spelling", ["prefix", "PREFIX", Merge.PREFIX, "Prefix"])
def test_enums_by_name_value_and_member(spelling):
    assert options(merge=spelling).search.merge == "prefix"


def test_a_weight_of_zero_says_that_phrases_have_no_effect(warnings):
    options(boosting_tree={"key_phrases_list": ["acme"]})
    assert "boosting_tree_alpha" in warnings[0]


def test_an_lm_without_weight_is_an_error(assets):
    with pytest.raises(ValueError, match=r"beam\.ngram_lm_alpha is not set"):
        options(ngram_lm_model=str(assets / "lm" / "tok3.arpa"), ngram_lm_alpha=None)


def test_a_weight_without_an_lm_may_be_missing():
    assert options(ngram_lm_alpha=None).fusion.lm_weight == 0.0


def test_top_level_keys_of_nemo_are_fine():
    structured = OmegaConf.to_container(OmegaConf.structured(CTCDecodingConfig()))
    structured["strategy"] = "flexctc_beam"
    read_ctc_options(OmegaConf.create(structured))


def test_preserve_alignments_beside_the_section_counts_too():
    with pytest.raises(ValueError, match="preserve_alignments"):
        options(top={"preserve_alignments": True}, merge="prefix")


def test_the_valid_keys_are_nemos_and_ours():
    keys = ctc_beam_keys()
    nemo = OmegaConf.to_container(OmegaConf.structured(CTCDecodingConfig()))["beam"]
    assert set(keys["beam"]) == {*nemo, *OWN_KEYS}
    assert set(keys["beam.boosting_tree"]) == {
        *nemo["boosting_tree"], "segmentations", "ignore_case", "refund", "whole_words",
    }  # fmt: skip
