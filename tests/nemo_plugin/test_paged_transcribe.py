"""paged_biglm through NeMo's own doors: transcribe, n-best, times, confidence, requests, hybrids."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")
pytest.importorskip("kaldifst")

from nemo.collections.asr.models import EncDecCTCModelBPE
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from omegaconf import OmegaConf

from nemo_gpu_decoding import Request, utterance_requests
from nemo_gpu_decoding.graph import build
from nemo_gpu_decoding.graph.store import save_graph
from nemo_gpu_decoding.lm.pack import pack_arpa
from nemo_gpu_decoding.metrics import word_errors
from nemo_gpu_decoding.nemo_plugin.paged import PagedInfer
from nemo_gpu_decoding.search.paged_biglm.decoder import PagedBigLM
from tests.nemo_plugin.paged_models import write_lower_orders, write_without_unknown


@pytest.fixture(scope="module", autouse=True)
def graph_cache(tmp_path_factory):
    """Graphs of these tests are not left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("graphs")
        patch.setattr(build, "graph_cache_folder", lambda: folder)
        yield folder


@pytest.fixture(scope="module")
def large(assets):
    return assets / "lm" / "word3.arpa"


@pytest.fixture(scope="module")
def small(large, tmp_path_factory):
    """The 1-grams of the large LM."""
    return write_lower_orders(large, tmp_path_factory.mktemp("lm") / "word1.arpa", most=1)


@pytest.fixture(scope="module")
def packed(large, tmp_path_factory):
    path = tmp_path_factory.mktemp("lm") / "word3.packed"
    pack_arpa(large, path)
    return path


@pytest.fixture
def cfg(small, packed):
    def config(top=None, **wfst):
        lms = {"arpa_lm_path": str(small), "big_lm_path": str(packed), "beam_width": 20.0}
        return {"strategy": "paged_biglm", "wfst": {**lms, **wfst}, **(top or {})}

    return config


@pytest.fixture
def static():
    """cuda_wfst in the graph of one LM."""

    def config(lm, **wfst):
        wfst = {"arpa_lm_path": str(lm), "beam_width": 20.0, **wfst}
        return {"strategy": "cuda_wfst", "wfst": wfst}

    return config


def decode(model, cfg, emissions):
    """What the model's decoding object makes of stored log-probs."""
    model.change_decoding_strategy(cfg, verbose=False)
    return model.decoding.ctc_decoder_predictions_tensor(*emissions, return_hypotheses=True)


def texts(hypotheses):
    return [hypothesis.text for hypothesis in hypotheses]


def transcribed(model, cfg, files, **kwargs):
    model.change_decoding_strategy(cfg, verbose=False)
    return model.transcribe(files, verbose=False, **kwargs)


# ------------------------------------------------------------------------------------------ texts


def test_words_are_those_of_the_large_lms_graph_and_fewer_are_wrong(
    ctc_model, cfg, static, small, large, many_utterances
):
    references = [utterance["text"] for utterance in many_utterances]
    files = [utterance["audio_filepath"] for utterance in many_utterances]
    with_small = texts(transcribed(ctc_model, static(small), files, batch_size=10))
    with_large = transcribed(ctc_model, static(large), files, batch_size=10, return_hypotheses=True)
    ours = transcribed(ctc_model, cfg(), files, batch_size=10, return_hypotheses=True)
    assert texts(ours) == texts(with_large)
    for own, other in zip(ours, with_large, strict=True):
        assert own.score == pytest.approx(other.score, abs=2e-3)
        assert own.score_parts.lm == pytest.approx(other.score_parts.lm, abs=2e-3)
    assert word_errors(references, texts(ours)).total < word_errors(references, with_small).total


@pytest.mark.parametrize(
    "wfst",
    [
        {"composition": "eager"}, {"difference": "never"}, {"topology": "minimal"},
        {"group_size": 50}, {"placement": "paged", "cache_mb": 1},
    ],
    ids=str,
)  # fmt: skip
def test_ways_to_search_do_not_change_the_words(ctc_model, cfg, static, large, emissions, wfst):
    same = {"topology": wfst["topology"]} if "topology" in wfst else {}
    expected = texts(decode(ctc_model, static(large, **same), emissions))
    assert texts(decode(ctc_model, cfg(**wfst), emissions)) == expected


def test_weight_zero_leaves_the_small_lm(ctc_model, cfg, static, small, emissions):
    expected = decode(ctc_model, static(small, lm_weight=0.5), emissions)
    found = decode(ctc_model, cfg(big_lm_weight=0.0, lm_weight=0.5), emissions)
    assert texts(found) == texts(expected) != texts(decode(ctc_model, cfg(lm_weight=0.5), emissions))


def test_lms_in_either_form_and_a_ready_made_graph(ctc_model, cfg, emissions, small, large, tmp_path):
    expected = texts(decode(ctc_model, cfg(), emissions))
    assert texts(decode(ctc_model, cfg(big_lm_path=str(large)), emissions)) == expected
    save_graph(ctc_model.decoding.decoding.decoder().graph, tmp_path / "small.graph")
    pack_arpa(small, tmp_path / "small.packed")
    graph = {"arpa_lm_path": None, "wfst_lm_path": str(tmp_path / "small.graph")}
    for form in (small, tmp_path / "small.packed"):
        assert texts(decode(ctc_model, cfg(small_lm_path=str(form), **graph), emissions)) == expected


def test_nemos_name_of_the_strategy_with_ours_as_search_type(ctc_model, cfg, emissions):
    expected = texts(decode(ctc_model, cfg(), emissions))
    structured = OmegaConf.structured(CTCDecodingConfig(strategy="wfst"))
    for key, value in {"search_type": "paged_biglm", **cfg()["wfst"]}.items():
        OmegaConf.update(structured, f"wfst.{key}", value, force_add=True)  # as Hydra's `+key=value`
    assert texts(decode(ctc_model, structured, emissions)) == expected
    assert isinstance(ctc_model.decoding.decoding, PagedInfer)


def test_the_ctc_head_of_a_hybrid_model(hybrid_model, cfg, static, large, files):
    found = []
    for config in (static(large), cfg()):
        hybrid_model.change_decoding_strategy(config, decoder_type="ctc", verbose=False)
        found.append(texts(hybrid_model.transcribe(files[:2], verbose=False)))
    assert found[0] == found[1]


def test_the_strategy_comes_back_with_a_saved_model(ctc_model, cfg, files, tmp_path):
    expected = texts(transcribed(ctc_model, cfg(group_size=8, big_lm_weight=0.9), files[:2]))
    ctc_model.save_to(str(tmp_path / "model.nemo"))
    model = EncDecCTCModelBPE.restore_from(str(tmp_path / "model.nemo"), map_location="cpu").eval()
    assert isinstance(model.decoding.decoding, PagedInfer)
    assert model.decoding.decoding.options == ctc_model.decoding.decoding.options
    assert texts(model.transcribe(files[:2], verbose=False)) == expected


# ------------------------------------------------------------------ what cuda_wfst's results have


def test_times_and_confidence(ctc_model, cfg, files):
    confidence = {"confidence_cfg": {"preserve_word_confidence": True}}
    for hypothesis in transcribed(ctc_model, cfg(confidence), files, timestamps=True):
        words = hypothesis.timestamp["word"]
        assert [entry["word"] for entry in words] == hypothesis.text.split()
        assert len(hypothesis.word_confidence) == len(words)
        for entry, word in zip(words, hypothesis.words, strict=True):
            assert (entry["start_offset"], entry["end_offset"]) == (word.start_frame, word.end_frame)
    assert isinstance(ctc_model.decoding.decoding.decoder(), PagedBigLM)


def test_n_best_lists_are_those_of_the_large_lms_graph(ctc_model, cfg, static, large, emissions):
    several = {"return_best_hypothesis": False, "beam_size": 3}
    expected = decode(ctc_model, static(large, **several), emissions)
    for found, others in zip(decode(ctc_model, cfg(**several), emissions), expected, strict=True):
        assert texts(found) == texts(others)
        scores = [hypothesis.score for hypothesis in found]
        assert scores == pytest.approx([hypothesis.score for hypothesis in others], abs=2e-3)


@pytest.mark.parametrize("mode", ["mbr", "lattice"])
def test_decoding_modes(ctc_model, cfg, static, large, emissions, mode):
    expected = decode(ctc_model, static(large, decoding_mode=mode), emissions)
    found = decode(ctc_model, cfg(decoding_mode=mode), emissions)
    assert texts(found) == texts(expected)
    for hypothesis in found if mode == "lattice" else []:
        (best,) = hypothesis.lattice.n_best(1)
        assert best.cost == pytest.approx(-hypothesis.score, abs=2e-3)


# --------------------------------------------------------------------------------------- boosting


@pytest.mark.parametrize("has_unknown", [True, False])
def test_words_of_phrases_that_no_lm_has(
    ctc_model, cfg, static, small, large, emissions, tmp_path, has_unknown
):
    """They are added to the small LM; the large one takes them for <unk>, which is as likely."""
    lm = small if has_unknown else write_without_unknown(small, tmp_path / "closed.arpa")
    phrases = {"boosting_tree": {"key_phrases_list": ["graam"]}, "boosting_tree_alpha": 8.0}
    expected = decode(ctc_model, static(large, **phrases), emissions)
    found = decode(ctc_model, cfg(arpa_lm_path=str(lm), **phrases), emissions)
    assert texts(found) == texts(expected)
    assert found[0].text.endswith("carla graam")
    assert found[0].score == pytest.approx(expected[0].score, abs=2e-3)


def test_a_graph_with_added_words_needs_the_small_lm_as_arpa(ctc_model, cfg, emissions, small, tmp_path):
    expected = texts(decode(ctc_model, cfg(added_words=["graam"]), emissions))
    save_graph(ctc_model.decoding.decoding.decoder().graph, tmp_path / "small.graph")
    pack_arpa(small, tmp_path / "small.packed")
    graph = {"arpa_lm_path": None, "wfst_lm_path": str(tmp_path / "small.graph")}
    assert texts(decode(ctc_model, cfg(small_lm_path=str(small), **graph), emissions)) == expected
    with pytest.raises(ValueError, match=r"small_lm_path is .* not all words of the graph.*'graam'"):
        decode(ctc_model, cfg(small_lm_path=str(tmp_path / "small.packed"), **graph), emissions)


def test_requests_concern_their_utterance_only(ctc_model, cfg, files):
    plain = texts(transcribed(ctc_model, cfg(added_words=["graam"]), files))
    with utterance_requests(ctc_model, [["graam"], *[None] * 5], boosting_weight=8.0):
        boosted = texts(ctc_model.transcribe(files, verbose=False))
    assert boosted[0] == plain[0].replace("graham", "graam") != plain[0]
    assert boosted[1:] == plain[1:]
    with utterance_requests(ctc_model, [None, Request(lm_weight=0.0), *[None] * 4]):
        unweighted = texts(ctc_model.transcribe(files, verbose=False))
    assert unweighted[:1] + unweighted[2:] == plain[:1] + plain[2:]
    assert unweighted[1] != plain[1]
