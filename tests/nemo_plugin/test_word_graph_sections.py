"""NeMo's `wfst` section, with cuda_wfst and paged_biglm: every key is used or refused by its name."""

from dataclasses import fields

import pytest
from nemo.collections.asr.parts.submodules import ctc_beam_decoding
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from omegaconf import OmegaConf

from nemo_gpu_decoding.graph.lexicon import OpenVocabulary
from nemo_gpu_decoding.graph.load import GraphOptions
from nemo_gpu_decoding.nemo_plugin import section, word_graph_sections
from nemo_gpu_decoding.nemo_plugin.word_graph_sections import LARGE_LM, PAGED_BIGLM, read_cuda_wfst, read_paged_biglm
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


def test_wfst_defaults_equal_those_of_nemo(read, arpa):
    options = read()
    assert options.search == WFSTConfig(beam=10.0, lattice_beam=10.0)
    assert options.graph == GraphOptions(ready_made=None, arpa=arpa)
    assert (options.return_best, options.n_best, options.decoding_mode) == (True, 1, "nbest")
    assert options.fusion.boosting.is_empty
    cfg = OmegaConf.structured(CTCDecodingConfig(strategy="wfst"))  # as NeMo's scripts pass it
    cfg.wfst.search_type = "cuda_wfst"
    cfg.wfst.arpa_lm_path = str(arpa)
    assert read_cuda_wfst(cfg) == options


def test_wfst_search_keys_reach_the_config(read):
    options = read(
        beam_width=14, lm_weight=0.7, max_active=500, acoustic_scale=2.0, lattice_beam=5.0, threads=3,
        backend="cpu", return_best_hypothesis=False, beam_size=6, posterior_paths=30,
    )  # fmt: skip
    assert options.search == WFSTConfig(
        beam=14.0, max_active=500, acoustic_scale=2.0, lattice_beam=5.0, threads=3,
        backend="cpu", n_best=30,
    )  # fmt: skip
    assert (options.fusion.lm_weight, options.return_best, options.n_best) == (0.7, False, 6)


def test_wfst_graph_keys_reach_the_config(read, arpa, tmp_path):
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
def test_decoding_modes_set_lattice_and_n_best(read, wfst, n_best, kept, lattice):
    options = read(**wfst)
    assert (options.n_best, options.search.n_best, options.search.lattice) == (n_best, kept, lattice)


@pytest.mark.parametrize(("best", "n_best"), [(False, 4), (True, 1)])
def test_scripts_ask_for_n_best_lists_in_the_beam_section(read, best, n_best):
    """`extract_nbest=true` of transcribe_speech.py, whatever the strategy."""
    cfg = OmegaConf.structured(CTCDecodingConfig())
    cfg.beam.return_best_hypothesis = best
    options = read({"beam": cfg.beam}, beam_size=4, return_best_hypothesis=True)
    assert (options.return_best, options.n_best) == (n_best == 1, n_best)


@pytest.mark.parametrize(("wfst", "place"), [({}, "auto"), ({"device": "cpu"}, "cpu"), ({"backend": "cuda"}, "cuda")])
def test_wfst_device_sets_the_backend(read, wfst, place):
    assert read(**wfst).search.backend == place


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


def test_defaults_of_riva_and_k2_change_nothing(read, monkeypatch):
    """With riva-asrlib-decoder NeMo's config has all of its options; that of NeMo 2.7 has those of k2."""
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


def test_paged_biglm_section_defaults(read_paged, lms):
    options = read_paged()
    assert options.search == PagedBigLMConfig(beam=10.0, lattice_beam=10.0)
    assert (options.large, options.small) == (lms / "large.packed", lms / "small.arpa")
    assert options.graph.arpa == lms / "small.arpa"


def test_paged_biglm_search_keys_reach_the_config(read_paged):
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
    assert own <= set(PAGED_BIGLM.valid) - set(section.nemo_defaults("ctc", "wfst")) - LARGE_LM.keys()


def test_ready_made_graph_needs_its_lm(read_paged, lms):
    graph = {"wfst_lm_path": str(lms / "small.graph")}
    options = read_paged(**graph, arpa_lm_path=None, small_lm_path=str(lms / "large.packed"))
    assert (options.graph.ready_made, options.small) == (lms / "small.graph", lms / "large.packed")
    assert read_paged(**graph).small == lms / "small.arpa"
