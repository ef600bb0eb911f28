"""NeMo's `wfst` section, with cuda_wfst and paged_biglm: every key is used or refused by its name."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

from dataclasses import fields

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

from nemo.collections.asr.parts.submodules import ctc_beam_decoding
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from omegaconf import OmegaConf

from nemo_gpu_decoding.graph.lexicon import OpenVocabulary
from nemo_gpu_decoding.graph.load import GraphOptions
from nemo_gpu_decoding.nemo_plugin import section, word_graph_sections
from nemo_gpu_decoding.nemo_plugin.word_graph_sections import (
    COUNTERPARTS,
    LARGE_LM,
    PAGED_BIGLM,
    read_cuda_wfst,
    read_paged_biglm,
)
from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig, WFSTConfig


@pytest.fixture
def arpa(assets):
    return assets / "lm" / "word3.arpa"


@pytest.fixture
def read(arpa):
    def options(cfg=None, **wfst):
        wfst = {"arpa_lm_path": str(arpa), **wfst}
        return read_cuda_wfst(OmegaConf.create({"strategy": "cuda_wfst", "wfst": wfst, **(cfg or {})}))

    return options


def test_nemos_defaults(read, arpa):
    options = read()
    assert options.search == WFSTConfig(beam=10.0, lattice_beam=10.0)
    assert options.graph == GraphOptions(ready_made=None, arpa=arpa)
    assert (options.return_best, options.n_best, options.decoding_mode) == (True, 1, "nbest")
    assert options.fusion.boosting.is_empty
    cfg = OmegaConf.structured(CTCDecodingConfig(strategy="wfst"))  # as NeMo's scripts pass it
    cfg.wfst.search_type = "cuda_wfst"
    cfg.wfst.arpa_lm_path = str(arpa)
    assert read_cuda_wfst(cfg) == options


def test_every_search_key_arrives(read):
    options = read(
        beam_width=14, lm_weight=0.7, max_active=500, acoustic_scale=2.0, lattice_beam=5.0, threads=3,
        backend="cpu", return_best_hypothesis=False, beam_size=6, posterior_paths=30,
    )  # fmt: skip
    assert options.search == WFSTConfig(
        beam=14.0, max_active=500, acoustic_scale=2.0, lattice_beam=5.0, threads=3,
        backend="cpu", n_best=30,
    )  # fmt: skip
    assert (options.fusion.lm_weight, options.return_best, options.n_best) == (0.7, False, 6)


def test_every_graph_key_arrives(read, arpa, tmp_path):
    words = tmp_path / "names.txt"
    words.write_text("acme\n")
    graph = read(
        topology="default", open_vocabulary_decoding=True, unknown_word_cost=1.0,
        unknown_piece_cost=3.0, segmentations=4, added_words=str(words), source_lang="en",
        wfst_lm_path=str(tmp_path / "kept.graph"),
    ).graph  # fmt: skip
    assert graph == GraphOptions(
        ready_made=None, arpa=arpa, keep_at=tmp_path / "kept.graph", topology="default",
        open_vocabulary=OpenVocabulary(1.0, 3.0), segmentations=4, added_words=words, source_lang="en",
    )  # fmt: skip
    assert read(added_words=["acme", "gdansk"]).graph.added_words == ("acme", "gdansk")


@pytest.mark.parametrize(
    ("wfst", "n_best", "kept", "lattice"),
    [
        ({"beam_size": 7}, 1, 1, False),  # one hypothesis is asked for: nothing is kept for others
        ({"beam_size": 7, "return_best_hypothesis": False}, 7, 20, False),
        ({"n_best": 3, "return_best_hypothesis": False}, 3, 20, False),
        ({"n_best": 70, "return_best_hypothesis": False}, 70, 70, False),
        ({"beam_size": 1, "return_best_hypothesis": False}, 1, 1, False),
        ({"decoding_mode": "mbr"}, 1, 20, False),
        ({"decoding_mode": "mbr", "return_best_hypothesis": False}, 1, 20, False),
        ({"decoding_mode": "LATTICE", "posterior_paths": 5}, 1, 5, True),
    ],
)
def test_decoding_modes_and_n_best(read, wfst, n_best, kept, lattice):
    options = read(**wfst)
    assert (options.n_best, options.search.n_best, options.search.lattice) == (n_best, kept, lattice)


@pytest.mark.parametrize(("best", "n_best"), [(False, 4), (True, 1)])
def test_scripts_ask_for_n_best_lists_in_the_beam_section(read, best, n_best):
    """`extract_nbest=true` of transcribe_speech.py, whatever the strategy."""
    cfg = OmegaConf.structured(CTCDecodingConfig())
    cfg.beam.return_best_hypothesis = best
    options = read({"beam": cfg.beam}, beam_size=4, return_best_hypothesis=True)
    assert (options.return_best, options.n_best) == (n_best == 1, n_best)


@pytest.mark.parametrize(
    ("wfst", "backend"), [({}, "auto"), ({"device": "cpu"}, "cpu"), ({"backend": "cuda"}, "cuda")]
)
def test_device_is_nemos_word_for_the_backend(read, wfst, backend):
    assert read(**wfst).search.backend == backend


def test_boosting_as_in_the_beam_section(read, assets):
    file = str(assets / "phrases.txt")
    options = read(boosting_tree={"key_phrases_file": file, "context_score": 2.0}, boosting_tree_alpha=3)
    assert options.fusion.boosting.key_phrases_file == file
    assert (options.fusion.boosting.context_score, options.fusion.boosting_weight) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("wfst", "message"),
    [
        ({"beam_widht": 3.0}, r"unknown key 'wfst\.beam_widht' \(did you mean 'beam_width'\?\)"),
        ({"beam_width": 0}, r"wfst\.beam_width is 0, expected a finite number > 0"),
        ({"beam_width": "wide"}, r"wfst\.beam_width is 'wide', expected a finite number"),
        ({"beam_size": 2.5}, r"wfst\.beam_size is 2\.5"),
        ({"posterior_paths": True}, r"wfst\.posterior_paths is True"),
        ({"n_best": 3}, r"wfst\.n_best is 3, but wfst\.return_best_hypothesis is true"),
        (
            {"n_best": 3, "return_best_hypothesis": False, "decoding_mode": "mbr"},
            r"wfst\.n_best is 3 with decoding_mode mbr",
        ),
        ({"decoding_mode": "best"}, r"wfst\.decoding_mode is 'best', expected one of nbest, mbr"),
        ({"search_type": "flexctc_beam"}, r"wfst\.search_type is 'flexctc_beam'"),
        ({"device": "cuda:1"}, r"wfst\.device is 'cuda:1'"),
        ({"device": "cpu", "backend": "cuda"}, r"wfst\.device is 'cpu', but wfst\.backend is 'cuda'"),
        ({"topology": "compcat"}, r"wfst\.topology is 'compcat'"),
        ({"topology": "graph"}, r"wfst\.topology is 'graph', which is for ready-made"),
        ({"open_vocabulary_decoding": "yes"}, r"wfst\.open_vocabulary_decoding is 'yes'"),
        ({"unknown_word_cost": 1.0}, r"wfst\.unknown_word_cost is 1\.0, which needs"),
        ({"unknown_piece_cost": -1.0, "open_vocabulary_decoding": True}, r"wfst\.unknown_piece_cost is -1\.0"),
        ({"segmentations": 0}, r"wfst\.segmentations is 0"),
        ({"added_words": {"acme": 1}}, r"wfst\.added_words is \{'acme': 1\}"),
        ({"words_path": "words.txt"}, r"wfst\.words_path is set, which belongs to an OpenFst file"),
        ({"compute_timestamps": 1}, r"wfst\.compute_timestamps is 1"),
        ({"boosting_tree": {"key_phrase": ["a"]}}, r"unknown key 'wfst\.boosting_tree\.key_phrase'"),
        (
            {"boosting_tree": {"key_phrases_list": ["a"], "segmentations": 2}},
            r"wfst\.boosting_tree\.segmentations is 2.*see wfst\.segmentations",
        ),
        (
            {"boosting_tree": {"key_phrases_list": ["a"], "whole_words": False}},
            r"wfst\.boosting_tree\.whole_words is False",
        ),
        (
            {"boosting_tree": {"key_phrases_list": ["a"], "overlapping": False}},
            r"wfst\.boosting_tree\.overlapping is False.*it pays for every phrase",
        ),
    ],
)
def test_bad_keys_are_named(read, wfst, message):
    with pytest.raises(ValueError, match=message):
        read(**wfst)


def test_no_lm_at_all(read):
    with pytest.raises(ValueError, match=r"wfst\.arpa_lm_path and wfst\.wfst_lm_path are not set"):
        read(arpa_lm_path=None)
    with pytest.raises(ValueError, match=r"wfst\.arpa_lm_path and wfst\.wfst_lm_path are not set"):
        read_cuda_wfst(OmegaConf.create({"strategy": "cuda_wfst"}))


@pytest.mark.parametrize(
    ("wfst", "message"),
    [
        ({"arpa_lm_path": "/nowhere/file"}, r"wfst\.arpa_lm_path is '/nowhere/file'"),
        ({"added_words": "/nowhere/file"}, r"wfst\.added_words is '/nowhere/file'"),
        ({"arpa_lm_path": None, "wfst_lm_path": "/nowhere/TLG.fst"}, r"wfst\.wfst_lm_path is '/nowhere/TLG\.fst'"),
        ({"wfst_lm_path": "/nowhere/TLG.fst"}, r"can be kept there if the name ends in \.graph"),
    ],
)
def test_files_that_do_not_exist(read, wfst, message):
    with pytest.raises(FileNotFoundError, match=message):
        read(**wfst)


@pytest.mark.parametrize("key", ["large_lm_path", "small_lm_path"])
def test_paged_files_that_do_not_exist(read_paged, key, lms):
    graph = {"arpa_lm_path": None, "wfst_lm_path": str(lms / "small.graph")}
    with pytest.raises(FileNotFoundError, match=rf"wfst\.{key} is '/nowhere/lm'"):
        read_paged(**{**graph, key: "/nowhere/lm"})


def test_what_shapes_a_graph_is_refused_for_a_ready_made_one(read, tmp_path):
    graph = tmp_path / "kept.graph"
    graph.write_bytes(b"")
    assert read(arpa_lm_path=None, wfst_lm_path=str(graph)).graph.ready_made == graph
    with pytest.raises(ValueError, match=r"wfst\.segmentations is 3, which has no effect on a ready"):
        read(arpa_lm_path=None, wfst_lm_path=str(graph), segmentations=3)


def test_an_existing_graph_wins_over_the_lm_with_a_warning_as_in_nemo(read, tmp_path, monkeypatch):
    graph = tmp_path / "kept.graph"
    graph.write_bytes(b"")
    messages = []
    monkeypatch.setattr(word_graph_sections.logging, "warning", messages.append)
    options = read(wfst_lm_path=str(graph), segmentations=3).graph
    assert (options.ready_made, options.arpa) == (graph, None)
    (message,) = messages
    assert "wfst.arpa_lm_path" in message
    assert "wfst.segmentations" in message


def test_our_keys_do_not_stand_beside_the_section_nor_in_that_of_another_strategy(read, read_paged):
    with pytest.raises(ValueError, match=r"expected inside: wfst\.max_active"):
        read({"max_active": 10})
    with pytest.raises(ValueError, match=r"expected inside: wfst\.large_lm_path"):
        read_paged({"large_lm_path": "large.packed"})
    with pytest.raises(ValueError, match=r"unknown key 'wfst\.large_lm_path'"):
        read(large_lm_path="large.packed")


# ------------------------------------------------------------------------------------ Riva and k2
@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        *((key, rf"set wfst\.{ours} instead") for key, ours in COUNTERPARTS.items()),
        ("riva_decoding_cfg.num_channels", "remove it"),
    ],
)
def test_options_of_other_decoders_are_refused_with_what_to_do_instead(read, key, remedy):
    wfst = OmegaConf.create({})
    OmegaConf.update(wfst, key, 3, force_add=True)
    with pytest.raises(ValueError, match=rf"wfst\.{key} is 3.*{remedy}"):
        read(**OmegaConf.to_container(wfst))


def test_rivas_defaults_say_nothing(read, monkeypatch):
    """Where riva-asrlib-decoder is installed, NeMo's config carries all of its options; so does a
    config of NeMo 2.7 those of k2."""
    assert read(k2_decoding_cfg=section.K2_DEFAULTS) == read()
    riva = {"online_opts": {"decoder_opts": {"max_active": 10000}, "max_batch_size": 800}}
    nemos = section.nemo_defaults("ctc", "wfst") | {"riva_decoding_cfg": riva}
    monkeypatch.setattr(section, "nemo_defaults", lambda family, name: nemos)
    assert read().search == WFSTConfig(beam=10.0, lattice_beam=10.0)
    changed = {"online_opts": {"decoder_opts": {"max_active": 5}, "max_batch_size": 800}}
    with pytest.raises(ValueError, match=r"set wfst\.max_active instead"):
        read(riva_decoding_cfg=changed)


def test_all_of_nemos_keys_are_known():
    """A key that a later NeMo adds shows here: it has to be mapped or refused."""
    nemos = set(OmegaConf.structured(ctc_beam_decoding.WfstCTCInferConfig(beam_size=4)))
    assert nemos - {"k2_decoding_cfg"} == {  # of NeMo 2.7
        "beam_size", "search_type", "return_best_hypothesis", "preserve_alignments",
        "compute_timestamps", "decoding_mode", "open_vocabulary_decoding", "beam_width", "lm_weight",
        "device", "arpa_lm_path", "wfst_lm_path", "riva_decoding_cfg",
    }  # fmt: skip


# ----------------------------------------------------------------------------------- paged_biglm
@pytest.fixture
def lms(tmp_path):
    for name in ("small.arpa", "large.packed", "small.graph"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture
def read_paged(lms):
    def options(cfg=None, **wfst):
        paths = {"arpa_lm_path": lms / "small.arpa", "large_lm_path": lms / "large.packed"}
        wfst = {**{key: str(path) for key, path in paths.items()}, **wfst}
        cfg = {"strategy": "paged_biglm", "wfst": wfst, **(cfg or {})}
        return read_paged_biglm(OmegaConf.create(cfg))

    return options


def test_defaults(read_paged, lms):
    options = read_paged()
    assert options.search == PagedBigLMConfig(beam=10.0, lattice_beam=10.0)
    assert (options.large, options.small) == (lms / "large.packed", lms / "small.arpa")
    assert options.graph.arpa == lms / "small.arpa"


def test_paged_every_search_key_arrives(read_paged):
    options = read_paged(
        beam_width=14, lm_weight=0.7, max_active=500, decoding_mode="lattice", large_lm_weight=0.8,
        composition="LAZY", group_size=4, difference="never", placement="paged", cache_mb=7,
    )  # fmt: skip
    assert options.search == PagedBigLMConfig(
        beam=14.0, lattice_beam=14.0, max_active=500, n_best=20, lattice=True,
        large_lm_weight=0.8, group_size=4, difference="never", placement="paged", cache_mb=7,
    )  # fmt: skip
    assert options.fusion.lm_weight == 0.7
    assert read_paged(composition="let").search.composition == "let"


def test_every_option_of_the_search_has_a_key():
    own = {field.name for field in fields(PagedBigLMConfig)} - {field.name for field in fields(WFSTConfig)}
    keys = set(PAGED_BIGLM.valid) - set(section.nemo_defaults("ctc", "wfst"))
    assert own <= keys - LARGE_LM.keys()


def test_a_ready_made_graph_comes_with_its_lm(read_paged, lms):
    graph = {"wfst_lm_path": str(lms / "small.graph")}
    options = read_paged(**graph, arpa_lm_path=None, small_lm_path=str(lms / "large.packed"))
    assert (options.graph.ready_made, options.small) == (lms / "small.graph", lms / "large.packed")
    assert read_paged(**graph).small == lms / "small.arpa"
    with pytest.raises(ValueError, match=r"wfst\.small_lm_path is not set, expected the LM that the gr"):
        read_paged(**graph, arpa_lm_path=None)


@pytest.mark.parametrize(
    ("wfst", "message"),
    [
        ({"large_lm": "x"}, r"unknown key 'wfst\.large_lm' \(did you mean 'large_lm_\w+'\?\)"),
        ({"large_lm_path": None}, r"wfst\.large_lm_path is not set, expected the large LM"),
        ({"arpa_lm_path": None}, r"wfst\.arpa_lm_path and wfst\.wfst_lm_path are not set"),
        ({"small_lm_path": "x"}, r"wfst\.small_lm_path and wfst\.arpa_lm_path are both set"),
        ({"large_lm_weight": -1}, r"wfst\.large_lm_weight is -1, expected a finite number >= 0"),
        ({"composition": "static"}, r"wfst\.composition is 'static', expected one of lazy, let"),
        ({"search_type": "cuda_wfst"}, r"wfst\.search_type is 'cuda_wfst'"),
        ({"k2_decoding_cfg": {"search_beam": 3}}, r"no effect with 'paged_biglm'; set wfst\.beam_width"),
    ],
)
def test_paged_bad_keys_are_named(read_paged, wfst, message):
    with pytest.raises(ValueError, match=message):
        read_paged(**wfst)


@pytest.mark.parametrize("strategy", ["cuda_wfst", "paged_biglm"])
def test_a_script_that_fills_beam_alone_is_told_which_ones_name_a_word_lm(strategy):
    """What eval_beamsearch_ngram_ctc.py makes of kenlm_model_file=lm.arpa."""
    cfg = OmegaConf.create({"strategy": strategy, "beam": {"ngram_lm_model": "lm.arpa"}, "wfst": {"beam_width": 10.0}})
    read = {"cuda_wfst": read_cuda_wfst, "paged_biglm": read_paged_biglm}[strategy]
    with pytest.raises(ValueError, match=r"is 'lm\.arpa', .* transcribe_speech\.py .*arpa_lm_path=words"):
        read(cfg)
