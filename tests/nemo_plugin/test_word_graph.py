"""cuda_wfst and paged_biglm in NeMo's CTC models: transcription, words, lattices, both LMs."""

from dataclasses import replace

import numpy as np
import pytest

from nemo_gpu_decoding import BoostingConfig, utterance_requests
from nemo_gpu_decoding.fusion.boosting import Phrase
from nemo_gpu_decoding.graph import load
from nemo_gpu_decoding.graph.build import build_graph
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.store import save_graph
from nemo_gpu_decoding.graph.unknown_words import NEW_WORDS
from nemo_gpu_decoding.graph.word_boosting import configured_phrases, word_boosting, words_of
from nemo_gpu_decoding.lm.pack import pack_arpa
from nemo_gpu_decoding.metrics import phrase_score, word_errors
from nemo_gpu_decoding.nemo_plugin import word_graph
from nemo_gpu_decoding.nemo_plugin.adapters import written_words
from nemo_gpu_decoding.search.word_graph.result import GraphWord, minimum_bayes_risk
from tests.assets import speech
from tests.nemo_plugin.conftest import emissions_of
from tests.nemo_plugin.usage import decoded, predicted, texts, transcribed, write_without_unknown

pytest.importorskip("kaldifst")
pytestmark = pytest.mark.slow


@pytest.fixture
def cfg(assets):
    def config(top=None, **wfst):
        lm = {"arpa_lm_path": str(assets / "lm" / "word3.arpa"), "beam_width": 16.0}
        return {"strategy": "cuda_wfst", "wfst": {**lm, **wfst}, **(top or {})}

    return config


@pytest.fixture(scope="module")
def names(assets):
    """Words that the LM does not list; some are spoken in the test set."""
    return (assets / "phrases.txt").read_text().split()


@pytest.fixture(scope="module")
def named_utterances(names):
    return [row for row in speech() if set(row["text"].split()) & set(names)][:15]


@pytest.fixture(scope="module")
def named_emissions(shared_ctc_model, named_utterances):
    return emissions_of(shared_ctc_model, named_utterances)


def test_graph_is_built_once_at_the_change_of_the_strategy(ctc_model, cfg, files, graph_cache, monkeypatch):
    made = []
    monkeypatch.setattr(load, "build_graph", lambda *a, **k: made.append(a) or build_graph(*a, **k))
    before = set(graph_cache.glob("*.graph"))
    ctc_model.change_decoding_strategy(cfg(segmentations=2), verbose=False)
    assert len(made) == 1
    ctc_model.transcribe(files[:2], batch_size=1, verbose=False)
    first = ctc_model.decoding.decoding
    ctc_model.transcribe(files[:1], timestamps=True, verbose=False)  # makes a new decoding object
    assert ctc_model.decoding.decoding is not first
    assert ctc_model.decoding.decoding.decoder().graph is first.decoder().graph
    assert len(made) == 1
    assert len(set(graph_cache.glob("*.graph")) - before) == 1


def test_mbr_mode_gives_the_text_of_least_risk(ctc_model, cfg, emissions, monkeypatch):
    found = decoded(ctc_model, cfg(decoding_mode="mbr", posterior_paths=5), emissions)
    plain = ctc_model.decoding.decoding.decoder().decode(*emissions)
    assert texts(found) == [minimum_bayes_risk(nbest.paths).text for nbest in plain]
    assert all(0 <= word.posterior <= 1 for hypothesis in found for word in hypothesis.words)
    # of such clear speech it is the best path; that others would be returned just as well:
    monkeypatch.setattr(word_graph, "minimum_bayes_risk", lambda paths: paths[-1])
    found = ctc_model.decoding.ctc_decoder_predictions_tensor(*emissions, return_hypotheses=True)
    assert texts(found) == [nbest.paths[-1].text for nbest in plain]
    assert texts(found) != [nbest.best.text for nbest in plain]


def test_best_path_of_the_lattice_is_the_hypothesis(ctc_model, cfg, emissions):
    found = decoded(ctc_model, cfg(decoding_mode="lattice"), emissions)
    assert texts(found) == texts(decoded(ctc_model, cfg(), emissions))
    for hypothesis in found:
        lattice = hypothesis.lattice
        (cost,) = lattice.n_best(1).ends["cost"]
        assert cost == pytest.approx(-hypothesis.score, abs=1e-3)
        assert set(hypothesis.text.split()) <= {lattice.graph.words[row[3]] for row in lattice.arcs() if row[3]}


def test_timestamps_have_the_times_of_the_search(ctc_model, cfg, files):
    for hypothesis in transcribed(ctc_model, cfg(), files, timestamps=True):
        stamps = hypothesis.timestamp
        assert [entry["word"] for entry in stamps["word"]] == hypothesis.text.split()
        assert [entry["segment"] for entry in stamps["segment"]] == [hypothesis.text]
        assert stamps["timestep"] == hypothesis.token_frames
        for level in ("char", "word", "segment"):
            ends = [0, *(entry["end_offset"] for entry in stamps[level])]
            for entry, end_before in zip(stamps[level], ends, strict=False):
                assert end_before <= entry["start_offset"] < entry["end_offset"] <= hypothesis.length
                assert entry["start"] == pytest.approx(0.08 * entry["start_offset"])
        for entry, word in zip(stamps["word"], hypothesis.words, strict=True):
            assert (entry["start_offset"], entry["end_offset"]) == (word.start_frame, word.end_frame)


@pytest.mark.parametrize("level", ["char", "word", "segment"])
def test_timestamps_have_the_level_that_is_asked_for(ctc_model, cfg, emissions, level):
    found = decoded(ctc_model, cfg({"compute_timestamps": True, "ctc_timestamp_type": level}), emissions)
    assert all(set(hypothesis.timestamp) == {"timestep", level} for hypothesis in found)
    with pytest.raises(ValueError, match="timestamp_type is 'line', expected char, word, segment or all"):
        decoded(ctc_model, cfg({"compute_timestamps": True, "ctc_timestamp_type": "line"}), emissions)


@pytest.mark.parametrize(("exclude_blank", "return_best"), [(True, False), (False, True)])
def test_confidence_of_a_word_is_that_of_its_tokens(ctc_model, cfg, emissions, exclude_blank, return_best):
    confidence = {"preserve_word_confidence": True, "exclude_blank": exclude_blank, "aggregation": "min"}
    top = {"confidence_cfg": confidence, "compute_timestamps": True}
    found = decoded(ctc_model, cfg(top, return_best_hypothesis=return_best), emissions)
    for hypothesis in found if return_best else [n_best[0] for n_best in found]:
        assert len(hypothesis.frame_confidence) == hypothesis.length
        assert len(hypothesis.token_confidence) == len(hypothesis.y_sequence)
        assert len(hypothesis.word_confidence) == len(hypothesis.text.split())
        for word, value in zip(hypothesis.words, hypothesis.word_confidence, strict=True):
            assert value == min(hypothesis.token_confidence[word.first_token : word.end_token])


def test_boosting_finds_names_that_the_lm_lacks(ctc_model, cfg, named_emissions, named_utterances, names, assets):
    references = [utterance["text"] for utterance in named_utterances]
    options = {"beam_width": 30.0, "lm_weight": 0.5}
    plain = texts(decoded(ctc_model, cfg(**options), named_emissions))
    boosting = {"boosting_tree": {"key_phrases_file": str(assets / "phrases.txt")}}
    options |= {**boosting, "boosting_tree_alpha": 30}
    boosted = texts(decoded(ctc_model, cfg(**options), named_emissions))
    assert phrase_score(references, plain, names).fscore == 0.0  # the LM does not list one of them
    assert phrase_score(references, boosted, names).fscore > 0.15
    assert word_errors(references, boosted).total < word_errors(references, plain).total


def test_request_for_new_words_of_an_older_graph_is_refused(ctc_model, cfg, files, tmp_path):
    ctc_model.change_decoding_strategy(cfg(boosting_tree_alpha=0.0), verbose=False)
    graph = ctc_model.decoding.decoding.decoder().graph
    report = {name: value for name, value in graph.report.items() if name != NEW_WORDS}
    save_graph(replace(graph, report=report), tmp_path / "old.graph")
    older = {"arpa_lm_path": None, "wfst_lm_path": str(tmp_path / "old.graph"), "boosting_tree_alpha": 0.0}
    ctc_model.change_decoding_strategy(cfg(**older), verbose=False)
    with (
        pytest.raises(ValueError, match=r"does not say where words that it lacks begin: build it anew"),
        utterance_requests(ctc_model, [["graam"]], boosting_weight=1.0),
    ):
        pass


def test_open_vocabulary_spells_words_that_the_lm_lacks(ctc_model, cfg, shared_ctc_model, many_utterances):
    many_emissions = emissions_of(shared_ctc_model, many_utterances)
    costs = {"unknown_word_cost": 0.0, "unknown_piece_cost": 0.0}
    closed = decoded(ctc_model, cfg(), many_emissions)
    words = set(ctc_model.decoding.decoding.decoder().graph.words)
    opened = decoded(ctc_model, cfg(open_vocabulary_decoding=True, **costs), many_emissions)
    assert {word for text in texts(closed) for word in text.split()} <= words
    assert any(word not in words for text in texts(opened) for word in text.split())
    assert not any("unk" in text or "▁" in text for text in texts(opened))


WORDS = ("<eps>", "new", "New", "york", "york's", "acme")
GRAPH = object.__new__(WordGraph)
vars(GRAPH).update(pieces=None, words=WORDS, word_ids={word: label for label, word in enumerate(WORDS)})


def bonus(text, phrases, **options):
    """What an utterance of some words earns in all."""
    phrases = [p if isinstance(p, Phrase) else Phrase(p) for p in phrases]
    automaton = word_boosting(phrases, BoostingConfig(**options), GRAPH, name="phrases")
    return automaton.score([GRAPH.word_ids[word] for word in text.split()], final=True)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("acme", {}, 1.0),
        ("acme", {"context_score": 3.0}, 3.0),
        ("new york", {}, 1.0 + 2.0 + np.log(2)),  # NeMo's formula, a word for a token
        ("new york", {"depth_scaling": 1.0}, 1.0 + 1.0 + np.log(2)),
        ("new york", {"uniform_weights": True}, 2.0),
        ("new york", {"score_per_phrase": 5.0}, 5.0),
        ("new acme", {"score_per_phrase": 5.0}, 5.0),  # "new" alone earns nothing
        ("new", {}, 0.0),
        ("york", {}, 0.0),
    ],
)
def test_bonus_of_a_phrase_follows_the_options(text, options, expected):
    assert bonus(text, ["acme", "new york"], **options) == pytest.approx(expected, abs=1e-5)


def test_bonus_of_a_phrase_follows_weight_and_letter_case():
    assert bonus("acme york", [Phrase("acme", 2.5), Phrase("york", 0.0)]) == pytest.approx(2.5)
    with pytest.raises(ValueError, match="phrases has no phrase with a bonus other than 0"):
        bonus("york", [Phrase("york", 0.0)])
    assert bonus("acme", [Phrase("acme", 1.0), Phrase("acme", 3.0)]) == pytest.approx(3.0)
    for text in ("new york", "New york"):
        assert bonus(text, ["NEW York"], ignore_case=True, uniform_weights=True) == pytest.approx(2.0)
    assert bonus("new york", ["NEW York"], uniform_weights=True) == pytest.approx(2.0)  # the graph lacks this case
    with pytest.raises(ValueError, match=r"the graph has not all words of 'new Cork'; wfst\.added"):
        bonus("new york", ["NEW Cork"])


def test_phrases_of_a_config_come_from_one_source(tmp_path):
    file = tmp_path / "names.txt"
    file.write_text("new  york\t2\nacme\n")
    from_file = configured_phrases(BoostingConfig(key_phrases_file=str(file)))
    assert from_file == [Phrase("new york", 2.0), Phrase("acme")]
    assert words_of(from_file) == ["new", "york", "acme"]
    items = [{"phrase": "acme", "lang": "en", "weight": 3.0}]
    lists = configured_phrases(BoostingConfig(key_phrases_list=["new"], key_phrase_items_list=items))
    assert lists == [Phrase("new"), Phrase("acme", 3.0, "en")]
    with pytest.raises(ValueError, match="expected one source"):
        configured_phrases(BoostingConfig(key_phrases_file=str(file), key_phrases_list=["new"]))


def words_at(*texts):
    """Words of two frames and one token each."""
    return [GraphWord(text, 1, 3 * n, 3 * n + 2, n, n + 1) for n, text in enumerate(texts)]


def test_punctuation_is_written_after_its_word():
    said = words_at("so", ",", "yes", "!", "?")
    assert written_words(said, {",", "!", "?"}) == [GraphWord("so,", 1, 0, 2, 0, 2), GraphWord("yes!?", 1, 6, 8, 2, 5)]
    assert [word.text for word in written_words(words_at("so", ","), ())] == ["so", ","]
    assert [word.text for word in written_words(words_at("-", "so"), {"-"})] == ["-", "so"]


@pytest.fixture
def paged_cfg(small_word_lm, packed_word_lm):
    def config(top=None, **wfst):
        lms = {"arpa_lm_path": str(small_word_lm), "large_lm_path": str(packed_word_lm), "beam_width": 20.0}
        return {"strategy": "paged_biglm", "wfst": {**lms, **wfst}, **(top or {})}

    return config


@pytest.mark.parametrize(
    ("paged", "both"),
    [
        ({"composition": "let"}, {}), ({"difference": "never"}, {}), ({"group_size": 50}, {}),
        ({"placement": "paged", "cache_mb": 1}, {}), ({}, {"topology": "minimal"}), ({}, {"decoding_mode": "mbr"}),
        ({}, {"decoding_mode": "lattice"}), ({}, {"return_best_hypothesis": False, "beam_size": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_results_equal_those_of_the_large_lms_graph(ctc_model, paged_cfg, cfg, emissions, paged, both):
    expected = decoded(ctc_model, cfg(beam_width=20.0, **both), emissions)
    found = decoded(ctc_model, paged_cfg(**paged, **both), emissions)
    if "beam_size" in both:
        expected, found = ([hypothesis for n_best in lists for hypothesis in n_best] for lists in (expected, found))
    assert texts(found) == texts(expected)
    scores = [hypothesis.score for hypothesis in found]
    assert scores == pytest.approx([hypothesis.score for hypothesis in expected], abs=2e-3)
    for hypothesis in found if both.get("decoding_mode") == "lattice" else []:
        (cost,) = hypothesis.lattice.n_best(1).ends["cost"]
        assert cost == pytest.approx(-hypothesis.score, abs=2e-3)


def test_packed_lm_and_ready_graph_give_equal_texts(ctc_model, paged_cfg, emissions, small_word_lm, word_lm, tmp_path):
    expected = texts(decoded(ctc_model, paged_cfg(), emissions))
    assert texts(decoded(ctc_model, paged_cfg(large_lm_path=str(word_lm)), emissions)) == expected
    save_graph(ctc_model.decoding.decoding.decoder().graph, tmp_path / "small.graph")
    pack_arpa(small_word_lm, tmp_path / "small.packed")
    graph = {"arpa_lm_path": None, "wfst_lm_path": str(tmp_path / "small.graph")}
    for form in (small_word_lm, tmp_path / "small.packed"):
        assert texts(decoded(ctc_model, paged_cfg(small_lm_path=str(form), **graph), emissions)) == expected


def test_hypotheses_have_the_work_of_the_search(ctc_model, paged_cfg, emissions):
    works = [h.work for h in decoded(ctc_model, paged_cfg(), emissions)]
    for work, frames in zip(works, emissions[1].tolist(), strict=True):
        assert work.frames == frames
        assert 0 < work.query_hits < work.look_ups
    several = decoded(ctc_model, paged_cfg(return_best_hypothesis=False, beam_size=3), emissions)
    for work, found in zip(works, several, strict=True):
        (look_ups,) = {hypothesis.work.look_ups for hypothesis in found}
        assert look_ups >= work.look_ups  # the best path alone needs no dominated LM contexts


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("composition", ["", "lazy", "let"])
def test_requests_find_names_that_the_graph_lacks(
    ctc_model, cfg, paged_cfg, named_emissions, named_utterances, names, composition, is_open
):
    """And that both LMs lack. The decoder alone finds none of them."""
    options = {"beam_width": 30.0, "lm_weight": 0.5, "boosting_tree_alpha": 30.0, "open_vocabulary_decoding": is_open}
    config = paged_cfg(composition=composition, **options) if composition else cfg(**options)
    references = [utterance["text"] for utterance in named_utterances]
    plain = texts(decoded(ctc_model, config, named_emissions))
    graph = ctc_model.decoding.decoding.decoder().graph
    lacking = [name for name in names if name not in graph.word_ids]
    with utterance_requests(ctc_model, [lacking] * len(references)):
        boosted = texts(predicted(ctc_model.decoding, named_emissions))
    assert phrase_score(references, plain, lacking).fscore == 0.0
    assert phrase_score(references, boosted, lacking).fscore > 0.15


@pytest.mark.parametrize("has_unknown", [True, False])
def test_phrases_with_words_that_no_lm_has_are_found(
    ctc_model, paged_cfg, cfg, small_word_lm, emissions, tmp_path, has_unknown
):
    """They are added to the small LM; the large one takes them for <unk>, which is as likely."""
    lm = small_word_lm if has_unknown else write_without_unknown(small_word_lm, tmp_path / "closed.arpa")
    phrases = {"boosting_tree": {"key_phrases_list": ["graam"]}, "boosting_tree_alpha": 8.0}
    expected = decoded(ctc_model, cfg(beam_width=20.0, **phrases), emissions)
    found = decoded(ctc_model, paged_cfg(arpa_lm_path=str(lm), **phrases), emissions)
    assert texts(found) == texts(expected)
    assert found[0].text.endswith("carla graam")
    assert found[0].score == pytest.approx(expected[0].score, abs=2e-3)


def test_graph_with_added_words_needs_the_small_lm_as_arpa(ctc_model, paged_cfg, emissions, small_word_lm, tmp_path):
    expected = texts(decoded(ctc_model, paged_cfg(added_words=["graam"]), emissions))
    save_graph(ctc_model.decoding.decoding.decoder().graph, tmp_path / "small.graph")
    pack_arpa(small_word_lm, tmp_path / "small.packed")
    graph = {"arpa_lm_path": None, "wfst_lm_path": str(tmp_path / "small.graph")}
    assert texts(decoded(ctc_model, paged_cfg(small_lm_path=str(small_word_lm), **graph), emissions)) == expected
    with pytest.raises(ValueError, match=r"small_lm_path is .* not all words of the graph.*'graam'"):
        decoded(ctc_model, paged_cfg(small_lm_path=str(tmp_path / "small.packed"), **graph), emissions)
