"""paged_biglm through NeMo's doors, beyond `test_all_strategies.py`: as good as the large LM's graph."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")
pytest.importorskip("kaldifst")

from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from omegaconf import OmegaConf

from nemo_gpu_decoding.graph.store import save_graph
from nemo_gpu_decoding.lm.pack import pack_arpa
from nemo_gpu_decoding.metrics import word_errors
from nemo_gpu_decoding.nemo_plugin.word_graph import PagedInfer
from nemo_gpu_decoding.search.word_graph.composition.decoder import PagedBigLM
from tests.nemo_plugin.paged_models import write_without_unknown
from tests.nemo_plugin.usage import decoded, texts, transcribed


@pytest.fixture
def cfg(small_word_lm, packed_word_lm):
    def config(top=None, **wfst):
        lms = {
            "arpa_lm_path": str(small_word_lm),
            "large_lm_path": str(packed_word_lm),
            "beam_width": 20.0,
        }
        return {"strategy": "paged_biglm", "wfst": {**lms, **wfst}, **(top or {})}

    return config


@pytest.fixture
def static():
    """cuda_wfst in the graph of one LM."""

    def config(lm, **wfst):
        wfst = {"arpa_lm_path": str(lm), "beam_width": 20.0, **wfst}
        return {"strategy": "cuda_wfst", "wfst": wfst}

    return config


# ------------------------------------------------------------------------------------------ texts


def test_words_are_those_of_the_large_lms_graph_and_fewer_are_wrong(
    ctc_model, cfg, static, small_word_lm, word_lm, many_utterances
):
    references = [utterance["text"] for utterance in many_utterances]
    files = [utterance["audio_filepath"] for utterance in many_utterances]
    with_small = texts(transcribed(ctc_model, static(small_word_lm), files, batch_size=10))
    with_large = transcribed(ctc_model, static(word_lm), files, batch_size=10, return_hypotheses=True)
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
def test_ways_to_search_do_not_change_the_words(ctc_model, cfg, static, word_lm, emissions, wfst):
    same = {"topology": wfst["topology"]} if "topology" in wfst else {}
    expected = texts(decoded(ctc_model, static(word_lm, **same), emissions))
    assert texts(decoded(ctc_model, cfg(**wfst), emissions)) == expected


def test_weight_zero_leaves_the_small_lm(ctc_model, cfg, static, small_word_lm, emissions):
    expected = decoded(ctc_model, static(small_word_lm, lm_weight=0.5), emissions)
    found = decoded(ctc_model, cfg(large_lm_weight=0.0, lm_weight=0.5), emissions)
    assert texts(found) == texts(expected) != texts(decoded(ctc_model, cfg(lm_weight=0.5), emissions))


def test_lms_in_either_form_and_a_ready_made_graph(
    ctc_model, cfg, emissions, small_word_lm, word_lm, tmp_path
):
    expected = texts(decoded(ctc_model, cfg(), emissions))
    assert texts(decoded(ctc_model, cfg(large_lm_path=str(word_lm)), emissions)) == expected
    save_graph(ctc_model.decoding.decoding.decoder().graph, tmp_path / "small.graph")
    pack_arpa(small_word_lm, tmp_path / "small.packed")
    graph = {"arpa_lm_path": None, "wfst_lm_path": str(tmp_path / "small.graph")}
    for form in (small_word_lm, tmp_path / "small.packed"):
        assert texts(decoded(ctc_model, cfg(small_lm_path=str(form), **graph), emissions)) == expected


def test_nemos_name_of_the_strategy_with_ours_as_search_type(ctc_model, cfg, emissions):
    expected = texts(decoded(ctc_model, cfg(), emissions))
    structured = OmegaConf.structured(CTCDecodingConfig(strategy="wfst"))
    for key, value in {"search_type": "paged_biglm", **cfg()["wfst"]}.items():
        OmegaConf.update(structured, f"wfst.{key}", value, force_add=True)  # as Hydra's `+key=value`
    assert texts(decoded(ctc_model, structured, emissions)) == expected
    assert isinstance(ctc_model.decoding.decoding, PagedInfer)


def test_the_ctc_head_of_a_hybrid_model(hybrid_model, cfg, static, word_lm, files):
    found = []
    for config in (static(word_lm), cfg()):
        hybrid_model.change_decoding_strategy(config, decoder_type="ctc", verbose=False)
        found.append(texts(hybrid_model.transcribe(files[:2], verbose=False)))
    assert found[0] == found[1]


# ------------------------------------------------------------------ what cuda_wfst's results have


def test_hypotheses_say_what_the_search_did(ctc_model, cfg, emissions):
    lazy, eager = (
        [h.work for h in decoded(ctc_model, cfg(composition=name), emissions)]
        for name in ("lazy", "eager")
    )
    for own, other, frames in zip(lazy, eager, emissions[1].tolist(), strict=True):
        assert own.frames == other.frames == frames
        assert 0 < own.look_ups < other.look_ups
    several = decoded(ctc_model, cfg(return_best_hypothesis=False, beam_size=3), emissions)
    assert [[h.work.look_ups for h in found] for found in several] == [
        [work.look_ups] * len(found) for work, found in zip(lazy, several, strict=True)
    ]


def test_times_and_confidence(ctc_model, cfg, files):
    confidence = {"confidence_cfg": {"preserve_word_confidence": True}}
    for hypothesis in transcribed(ctc_model, cfg(confidence), files, timestamps=True):
        words = hypothesis.timestamp["word"]
        assert [entry["word"] for entry in words] == hypothesis.text.split()
        assert len(hypothesis.word_confidence) == len(words)
        for entry, word in zip(words, hypothesis.words, strict=True):
            assert (entry["start_offset"], entry["end_offset"]) == (word.start_frame, word.end_frame)
    assert isinstance(ctc_model.decoding.decoding.decoder(), PagedBigLM)


def test_n_best_lists_are_those_of_the_large_lms_graph(ctc_model, cfg, static, word_lm, emissions):
    several = {"return_best_hypothesis": False, "beam_size": 3}
    expected = decoded(ctc_model, static(word_lm, **several), emissions)
    for found, others in zip(decoded(ctc_model, cfg(**several), emissions), expected, strict=True):
        assert texts(found) == texts(others)
        scores = [hypothesis.score for hypothesis in found]
        assert scores == pytest.approx([hypothesis.score for hypothesis in others], abs=2e-3)


@pytest.mark.parametrize("mode", ["mbr", "lattice"])
def test_decoding_modes(ctc_model, cfg, static, word_lm, emissions, mode):
    expected = decoded(ctc_model, static(word_lm, decoding_mode=mode), emissions)
    found = decoded(ctc_model, cfg(decoding_mode=mode), emissions)
    assert texts(found) == texts(expected)
    for hypothesis in found if mode == "lattice" else []:
        (best,) = hypothesis.lattice.n_best(1)
        assert best.cost == pytest.approx(-hypothesis.score, abs=2e-3)


# --------------------------------------------------------------------------------------- boosting


@pytest.mark.parametrize("has_unknown", [True, False])
def test_words_of_phrases_that_no_lm_has(
    ctc_model, cfg, static, small_word_lm, word_lm, emissions, tmp_path, has_unknown
):
    """They are added to the small LM; the large one takes them for <unk>, which is as likely."""
    lm = small_word_lm if has_unknown else write_without_unknown(small_word_lm, tmp_path / "closed.arpa")
    phrases = {"boosting_tree": {"key_phrases_list": ["graam"]}, "boosting_tree_alpha": 8.0}
    expected = decoded(ctc_model, static(word_lm, **phrases), emissions)
    found = decoded(ctc_model, cfg(arpa_lm_path=str(lm), **phrases), emissions)
    assert texts(found) == texts(expected)
    assert found[0].text.endswith("carla graam")
    assert found[0].score == pytest.approx(expected[0].score, abs=2e-3)


def test_a_graph_with_added_words_needs_the_small_lm_as_arpa(
    ctc_model, cfg, emissions, small_word_lm, tmp_path
):
    expected = texts(decoded(ctc_model, cfg(added_words=["graam"]), emissions))
    save_graph(ctc_model.decoding.decoding.decoder().graph, tmp_path / "small.graph")
    pack_arpa(small_word_lm, tmp_path / "small.packed")
    graph = {"arpa_lm_path": None, "wfst_lm_path": str(tmp_path / "small.graph")}
    assert (
        texts(decoded(ctc_model, cfg(small_lm_path=str(small_word_lm), **graph), emissions)) == expected
    )
    with pytest.raises(ValueError, match=r"small_lm_path is .* not all words of the graph.*'graam'"):
        decoded(ctc_model, cfg(small_lm_path=str(tmp_path / "small.packed"), **graph), emissions)
