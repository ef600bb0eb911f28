"""What every strategy keeps behind NeMo's interfaces, timestamps included."""

import copy
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import soundfile
import torch
from lightning.pytorch import Trainer
from nemo.collections.asr.metrics.wer import word_error_rate
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis
from nemo.collections.common.parts.optional_cuda_graphs import WithOptionalCudaGraphs

from nemo_gpu_decoding import Phrase, Request, cache, register, unregister, utterance_requests
from nemo_gpu_decoding.fusion.context_graph import token_scores
from nemo_gpu_decoding.fusion.phrases import WrittenRequest
from nemo_gpu_decoding.nemo_plugin import infer
from nemo_gpu_decoding.nemo_plugin.requests import infer_of, request_of
from nemo_gpu_decoding.nemo_plugin.transducer import TransducerInfer
from tests.nemo_plugin.conftest import emissions_of
from tests.nemo_plugin.usage import (
    CONFIDENCE,
    EVERY_CASE,
    GREEDY,
    decoded,
    predicted,
    texts,
    transcribed,
    write_manifest,
)
from tests.oracles.ngram import class_bonus

pytestmark = pytest.mark.slow

OVER_TOKENS = ["flexctc_beam", "alsd_pp-rnnt", "aes_pp-tdt"]


def test_transcribe_accepts_paths_arrays_tensors_and_manifests(case, files, utterances, tmp_path):
    case.use()
    by_path = case.texts(files, batch_size=4)
    arrays = [soundfile.read(file, dtype="float32")[0] for file in files]
    assert case.texts(arrays, batch_size=4) == by_path
    assert case.texts([torch.from_numpy(array) for array in arrays], batch_size=2) == by_path
    assert case.texts(write_manifest(tmp_path / "manifest.json", utterances), batch_size=3) == by_path
    assert case.texts(files[0]) == by_path[:1]
    assert case.texts(files, batch_size=1) == by_path
    assert case.texts(files[:3], num_workers=2) == by_path[:3]


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
def test_lm_lowers_the_word_error_rate(case, many_utterances, encoded_by):
    inputs = (encoded_by if case.is_transducer else emissions_of)(case.model, many_utterances)
    references = [utterance["text"] for utterance in many_utterances]

    def rate(cfg):
        return word_error_rate(texts(decoded(case.model, cfg, inputs)), references)

    with_lm, greedy = rate(case.cfg(**case.lm)), rate(GREEDY)
    assert with_lm < (0.6 if case.has_words else 0.9) * greedy
    assert case.has_words or with_lm < rate(case.cfg())


@pytest.mark.parametrize("case", ["flexctc_beam", "cuda_wfst"], indirect=True)
@pytest.mark.parametrize("best", [True, False])
def test_labels_are_collapsed_as_by_greedy_decoding(case, best):
    """Cache-aware streaming passes labels on: there is nothing to search."""
    labels = case.inputs[0].argmax(-1), case.inputs[1]
    case.model.change_decoding_strategy(GREEDY, verbose=False)
    greedy = texts(predicted(case.model.decoding, labels))
    case.use(return_best_hypothesis=best)
    found = predicted(case.model.decoding, labels)
    assert texts(found if best else [n_best[0] for n_best in found]) == greedy


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
@pytest.mark.parametrize("return_hypotheses", [True, False])
def test_transcribe_returns_n_best_lists(case, files, return_hypotheses):
    results = transcribed(case.model, case.cfg(**case.several), files, return_hypotheses=return_hypotheses)
    assert len(results) == len(files)
    for n_best in results:
        assert isinstance(n_best, list)
        assert not isinstance(n_best, Hypothesis)  # NeMo's scripts tell n-best results by that
        assert (3 if case.strategy == "flexctc_beam" else 2) <= len(n_best) <= 3
        scores = [hypothesis.score for hypothesis in n_best]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(hypothesis.y_sequence.tolist()) for hypothesis in n_best}) == len(n_best)
        assert len({hypothesis.text for hypothesis in n_best}) == len(n_best)
        assert (n_best.text, n_best.score) == (n_best[0].text, n_best[0].score)
    if return_hypotheses and not case.is_transducer:  # NeMo leaves the log-probs there
        assert results[0].y_sequence.ndim == 2
        assert results[0].alignments is results[0].y_sequence


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
@pytest.mark.parametrize("timestamps", [False, True])
def test_utterance_without_frames_has_an_empty_text(case, timestamps):
    case.use({"compute_timestamps": timestamps, "confidence_cfg": {"preserve_word_confidence": True}})
    values, lengths = case.inputs[0].clone(), case.inputs[1].clone()
    lengths[1] = 0
    found = predicted(case.model.decoding, (values, lengths))
    assert (found[1].text, found[1].word_confidence) == ("", [])
    assert all(hypothesis.text for b, hypothesis in enumerate(found) if b != 1)


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
def test_nan_changes_only_its_utterance(case):
    expected, nan = texts(case.decode()), float("nan")
    values, lengths = case.inputs
    padded = torch.nn.functional.pad(values, (0, 2) if case.is_transducer else (0, 0, 0, 2), value=nan)
    for b, length in enumerate(lengths.tolist()):
        case.frames(padded, b)[length:] = nan
    assert texts(predicted(case.model.decoding, (padded, lengths))) == expected
    case.frames(padded, 0)[1] = nan
    name = "encoder_output" if case.is_transducer else "log_probs"
    found = predicted(case.model.decoding, (padded, lengths))
    assert texts(found) == ["", *expected[1:]]
    assert f"{name}[0, 1, 0] is nan" in found[0].error
    assert not any(hypothesis.error for hypothesis in found[1:])


@pytest.mark.parametrize("return_best_hypothesis", [True, False])
def test_validation_reports_the_wer_of_the_strategy(case, utterances, files, tmp_path, return_best_hypothesis):
    case.use(return_best_hypothesis=return_best_hypothesis, **case.lm)
    expected = word_error_rate(case.texts(files, batch_size=6), [utterance["text"] for utterance in utterances])
    case.model.wer.log_prediction = True  # reads `.text` of n-best lists, too
    manifest = write_manifest(tmp_path / "manifest.json", utterances)
    data = {"manifest_filepath": manifest, "sample_rate": 16000, "batch_size": 6, "shuffle": False}
    case.model.setup_validation_data(data)
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    (metrics,) = trainer.validate(case.model, verbose=False)
    assert metrics["val_wer"] == pytest.approx(expected)


def test_hooks_of_training_and_validation_switch_the_graphs_of_transducers(case):
    case.use()
    assert isinstance(case.infer, WithOptionalCudaGraphs)
    switched = isinstance(case.infer, TransducerInfer)
    case.infer.maybe_enable_cuda_graphs()  # a validation before has switched them off
    assert case.infer.maybe_enable_cuda_graphs() is False
    case.model.on_train_epoch_start()
    search = case.infer.decoder()  # created in the training epoch, from which it has no graphs
    assert not switched or not search._shared.graphs.allowed
    assert case.infer.disable_cuda_graphs() is False
    assert case.infer.maybe_enable_cuda_graphs() is switched
    assert not switched or search._shared.graphs.allowed
    assert case.infer.disable_cuda_graphs() is switched
    case.model.on_validation_epoch_start()
    assert not switched or search._shared.graphs.allowed


def test_cuda_graphs_that_are_off_stay_off_when_the_strategy_changes(case, files):
    case.use()
    switched = case.model.disable_cuda_graphs()
    case.texts(files[:1], timestamps=True)
    case.use(beam_size=4)
    assert case.infer.disable_cuda_graphs() is False
    assert case.infer.maybe_enable_cuda_graphs() is switched
    case.use()
    assert case.infer.disable_cuda_graphs() is switched


def test_threads_that_transcribe_wait_for_each_other(case, files):
    case.use()
    expected = case.texts(files[:2])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: case.texts(files[:2], timestamps=n % 2 == 0), range(12)))
    assert found == [expected] * 12


def test_model_is_restored_without_the_files_that_its_strategy_names(case, files, tmp_path):
    phrases, options = tmp_path / "phrases.txt", {**case.options, **case.lm}
    phrases.write_text("gdansk\n")
    section = {"boosting_tree": {"key_phrases_file": str(phrases)}, "boosting_tree_alpha": 1.0}
    for key in [key for key, value in options.items() if isinstance(value, str) and os.path.isfile(value)]:
        section[key] = str(shutil.copy(options[key], tmp_path / key))
    case.use(**{**case.lm, **section})
    saved = str(tmp_path / "model.nemo")
    case.model.save_to(saved)
    for file in [phrases, *(tmp_path / key for key in section if (tmp_path / key).is_file())]:
        file.rename(tmp_path / "away")
        other = type(case.model).restore_from(saved, map_location="cpu").eval()
        for call in (lambda: other.transcribe(files[:1], verbose=False), lambda: infer_of(other)):  # noqa: B023
            with pytest.raises((ValueError, OSError), match=str(file)):
                call()
        other.change_decoding_strategy(GREEDY, verbose=False)
        assert other.transcribe(files[:1], verbose=False)[0].text
        (tmp_path / "away").rename(file)


def test_decoding_and_results_can_be_copied(case):
    expected = case.decode(**case.lm)
    other = copy.deepcopy(case.model.decoding)
    assert type(other) is type(case.model.decoding)
    assert texts(predicted(other, case.inputs)) == texts(expected)
    for hypothesis in expected:
        again = pickle.loads(pickle.dumps(hypothesis))
        assert again.text == hypothesis.text
        assert torch.equal(again.y_sequence, hypothesis.y_sequence)


def test_saved_model_keeps_the_strategy(case, files, tmp_path):
    expected = texts(transcribed(case.model, case.cfg(**case.lm, **case.phrases("gdansk"), **case.own), files[:2]))
    case.model.save_to(str(tmp_path / "model.nemo"))
    other = type(case.model).restore_from(str(tmp_path / "model.nemo"), map_location="cpu").eval()
    assert other.cfg.decoding.strategy == case.strategy
    assert other.decoding.decoding.options == case.infer.options
    assert texts(other.transcribe(files[:2], verbose=False)) == expected


def test_decoding_made_before_unregister_keeps_working(case):
    expected = texts(case.decode())
    unregister()
    try:
        assert texts(predicted(case.model.decoding, case.inputs)) == expected
    finally:
        register()


@pytest.mark.parametrize("case", OVER_TOKENS, indirect=True)
def test_wrong_lm_or_phrase_is_refused_by_change_decoding_strategy(case, tmp_path):
    before, wrong = case.infer, tmp_path / "wrong.arpa"
    wrong.write_text("\\data\\\nngram 1=2\n\n\\1-grams:\n-1\t<s>\n-1\tword\n\n\\end\\\n")
    for section in (case.phrases("Ω"), {"ngram_lm_model": str(wrong), "ngram_lm_alpha": 1.0}):
        with pytest.raises(ValueError, match=r"Ω|wrong\.arpa"):
            case.use(**section)
        assert case.infer is before


@pytest.mark.parametrize("case", OVER_TOKENS, indirect=True)
def test_lm_and_phrases_are_loaded_once(case, files, monkeypatch):
    cache._entries.clear()
    calls = []
    original = infer.load_ngram_lm
    monkeypatch.setattr(infer, "load_ngram_lm", lambda *a, **k: calls.append(a) or original(*a, **k))
    case.use(**case.phrases("graham"), **case.lm)
    first = case.infer.decoder().fusion
    case.model.transcribe(files[:2], batch_size=1, verbose=False)
    assert len(calls) == 1
    for timestamps in (None, True):  # with timestamps NeMo makes a new decoding object for CTC
        case.model.change_decoding_strategy(case.model.cfg.decoding, verbose=False)
        case.model.transcribe(files[:1], timestamps=timestamps, verbose=False)
        later = case.infer.decoder().fusion
        assert later.lm is first.lm
        assert later.boosting is first.boosting


def test_request_replaces_the_phrases_of_the_config(case, files):
    plain = texts(transcribed(case.model, case.cfg(), files[:1]))
    boosted = texts(transcribed(case.model, case.cfg(**case.phrases("graam")), files[:1]))
    assert plain[0].endswith("graham")
    assert boosted[0].endswith("carla graam")
    for nothing in ([], ["budget"], Request(boosting_weight=0.0)):
        with utterance_requests(case.model, [nothing]):
            assert case.texts(files[:1])[0].endswith("graham")
    with utterance_requests(case.model, [None]):
        assert case.texts(files[:1]) == boosted


def test_phrases_without_a_weight_earn_the_bonuses_of_their_tokens(case):
    case.use()
    word, tree = "budget", {"key_phrases_list": ["budget"]}
    tokens = case.infer.vocabulary().tokenize(word)
    expected = token_scores(len(tokens), 1.0, 2.0, False).sum()

    def bonus(boosting):
        return boosting.score([case.infer.decoder().graph.word_ids[word]] if case.has_words else tokens)

    for given in ({}, {"boosting_tree_alpha": None}):
        case.use(boosting_tree=tree, **given)
        fusion = case.infer.decoder().fusion
        assert fusion.boosting_weight == 1.0  # of one phrase
        assert bonus(fusion.boosting) == pytest.approx(expected)
    case.use(**case.phrases(word))
    fusion = case.infer.decoder().fusion
    assert fusion.boosting_weight == case.phrase_weight
    assert bonus(fusion.boosting) == pytest.approx(1.0 if case.has_words else expected)
    case.use(boosting_tree=tree, boosting_tree_alpha=0.0)
    assert case.infer.decoder().fusion.boosting is None
    request = request_of(case.infer, WrittenRequest(phrases=(word,)))
    assert request.boosting_weight == 1.0
    assert bonus(request.boosting) == pytest.approx(expected)
    if case.lm:  # over tokens
        case.use(boosting_tree=tree | {"phrase_share": 0.2}, **case.lm)
        fusion = case.infer.decoder().fusion
        expected = class_bonus(fusion.lm, tokens, 0.2, 1)
        request = request_of(case.infer, WrittenRequest(phrases=(word,)))
        assert fusion.boosting_weight == request.boosting_weight == 1.0
        assert bonus(fusion.boosting) == bonus(request.boosting) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
@pytest.mark.parametrize("batch_size", [1, 2, 6])
def test_request_boosts_its_utterance_alone(case, files, batch_size):
    plain, weight = (texts(transcribed(case.model, case.cfg(**case.added("graam")), files)), case.phrase_weight)
    with utterance_requests(case.model, [["graam"], *[None] * 5], boosting_weight=weight):
        boosted = case.texts(files, batch_size=batch_size)
    assert boosted[0] == plain[0].replace("graham", "graam") != plain[0]
    assert boosted[1:] == plain[1:]
    with utterance_requests(case.model, [None, ["graam"], *[None] * 4], boosting_weight=weight):
        assert case.texts(files, batch_size=batch_size)[0] == plain[0]


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
def test_aliases_are_written_as_their_phrase(case, files):
    top = {"confidence_cfg": {**CONFIDENCE, "aggregation": "min"}}
    (plain,) = transcribed(case.model, case.cfg(top, **case.phrases("carla graam")), files[:1], timestamps=True)
    item = {"phrase": "K\u20ac-9", "lang": "en", "aliases": ["carla graam"]}
    options = {**case.phrases(), "boosting_tree": {"key_phrase_items_list": [item]}}
    (found,) = transcribed(case.model, case.cfg(top, **options), files[:1], timestamps=True)
    assert plain.text.endswith(" carla graam")
    assert found.text == plain.text.replace("carla graam", "K\u20ac-9")
    assert (found.score, found.y_sequence.tolist()) == (plain.score, plain.y_sequence.tolist())
    *before, carla, graam = plain.timestamp["word"]
    ends = {key: graam[key] for key in ("end_offset", "end")}
    assert found.timestamp["word"] == [*before, {**carla, **ends, "word": "K\u20ac-9"}]
    assert found.timestamp["segment"][-1]["segment"].endswith("K\u20ac-9")
    confidence = list(plain.word_confidence)
    assert list(found.word_confidence) == [*confidence[:-2], min(confidence[-2:])]
    (n_best,) = transcribed(case.model, case.cfg(**options, **case.several), files[:1])
    assert n_best[0].text == found.text
    assert len({hypothesis.text for hypothesis in n_best}) == len(n_best)
    case.use(**case.added("graam"))
    phrase = Phrase("K\u20ac-9", aliases=("carla graam",))
    with utterance_requests(case.model, [[phrase], None], boosting_weight=case.phrase_weight):
        own, other = case.texts(files[:2])
    assert own == found.text
    assert "K\u20ac" not in other


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
def test_phrases_below_the_threshold_are_withdrawn(case, files):
    options = case.phrases("graam", "budget")
    (boosted,) = transcribed(case.model, case.cfg(**options), files[:1], return_hypotheses=True)
    (graam,) = [phrase for phrase in boosted.phrases if phrase.text == "graam"]
    assert 0 < graam.evidence < 0.9
    assert (graam.start_frame, graam.end_token) == (boosted.token_frames[graam.first_token], len(boosted.token_frames))
    plain = texts(transcribed(case.model, case.cfg(**case.added("graam", "budget")), files[:1]))
    for threshold, kept in ((0.9 * graam.evidence, True), (0.9, False)):
        tree = {**options["boosting_tree"], "ac_threshold": threshold}
        (found,) = transcribed(case.model, case.cfg(**options | {"boosting_tree": tree}), files[:1])
        assert found.text.endswith("graam") == kept
        assert found.text == (boosted.text if kept else plain[0])


def test_request_changes_the_lm_weight_of_its_utterance_alone(case, files):
    def found():
        return [(hypothesis.text, hypothesis.score) for hypothesis in case.model.transcribe(files, verbose=False)]

    no_lm = case.cfg(**case.lm | ({} if case.has_words else {"ngram_lm_model": None}))
    plain = texts(transcribed(case.model, no_lm, files))
    case.use(**case.lm)
    fused = found()
    with utterance_requests(case.model, [Request(lm_weight=0.0)] * 6):
        without = found()
    with utterance_requests(case.model, [None, Request(lm_weight=0.0), *[None] * 4]):
        assert found() == [fused[0], without[1], *fused[2:]]
    assert all(a != b for a, b in zip(fused, without, strict=True))
    if not case.has_words:
        assert [text for text, _ in without] == plain


def test_lm_of_a_request_is_used(case, files):
    if case.has_words:
        case.use()
        with (
            pytest.raises(ValueError, match="'news', expected None: the LM of a word graph"),
            utterance_requests(case.model, [Request(lm="news")] * 6),
        ):
            case.texts(files)
        return

    def found(lms=(None,) * 6):
        with utterance_requests(case.model, [lm and Request(lm=lm) for lm in lms]):
            return [(hypothesis.text, hypothesis.score) for hypothesis in case.model.transcribe(files, verbose=False)]

    without = {key: value for key, value in case.lm.items() if key != "ngram_lm_model"}
    case.use(**without)
    plain = found()
    case.use(**case.lm)
    fused = found()
    case.use(**without, lm_pool={"news": case.lm["ngram_lm_model"]})
    assert found() == plain
    assert found(["news", "none", None, "news", "news", None]) == [
        own[i] for i, own in enumerate((fused, plain, plain, fused, fused, plain))
    ]
    with pytest.raises(ValueError, match="lm is 'law', expected one of news, none"):
        found(["law", *[None] * 5])


BLANK = 128


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
@pytest.mark.parametrize("where", ["beside the section", "in the section"])
def test_compute_timestamps_in_the_config_gives_timestamps(case, where):
    flag = {"compute_timestamps": True}
    for hypothesis in case.decode(flag) if where.startswith("beside") else case.decode(**flag):
        assert " ".join(entry["word"] for entry in hypothesis.timestamp["word"]) == hypothesis.text


def test_timestamps_and_confidence_are_given_only_on_request(case, files):
    for hypothesis in case.decode():
        assert len(hypothesis.timestamp) == len(hypothesis.y_sequence)
        assert (hypothesis.frame_confidence, hypothesis.token_confidence) == (None, None)
        assert hypothesis.non_blank_frame_confidence == []
    transcribed(case.model, case.cfg(), files[:1], timestamps=True)
    (hypothesis,) = case.model.transcribe(files[:1], timestamps=False, verbose=False)
    assert isinstance(hypothesis.text, str)


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
@pytest.mark.parametrize("exclude_blank", [True, False])
def test_n_best_lists_have_timestamps_and_confidence(case, files, exclude_blank):
    top = {"confidence_cfg": {**CONFIDENCE, "exclude_blank": exclude_blank}}
    single = {key: value for key, value in case.several.items() if key not in ("return_best_hypothesis", "n_best")}
    best_only = transcribed(case.model, case.cfg(top, **single), files, timestamps=True)
    several = transcribed(case.model, case.cfg(top, **case.several), files, timestamps=True)
    for n_best, best in zip(several, best_only, strict=True):
        assert len(n_best) > 1
        assert (n_best[0].text, n_best[0].word_confidence) == (best.text, best.word_confidence)
        assert n_best[0].timestamp["word"] == best.timestamp["word"]
        for hypothesis in n_best:
            words = hypothesis.timestamp["word"]
            assert " ".join(entry["word"] for entry in words) == hypothesis.text
            assert all(0 <= entry["start"] <= entry["end"] for entry in words)
            assert len(hypothesis.word_confidence) == len(words)
            assert len(hypothesis.token_confidence) == len(hypothesis.y_sequence)
            assert all(0.0 <= value <= 1.0 for value in hypothesis.word_confidence)


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
def test_results_do_not_depend_on_alignments(case):
    plain = case.decode()
    aligned = case.decode({"preserve_alignments": True})
    assert [(h.text, h.score) for h in plain] == [(h.text, h.score) for h in aligned]
    assert all(hypothesis.alignments is None for hypothesis in plain)
    assert all(hypothesis.alignments is not None for hypothesis in aligned)


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
def test_alignments_of_n_best_lists_spell_their_tokens(case):
    found = case.decode({"preserve_alignments": True}, **case.several)
    for n_best, length in zip(found, case.inputs[1].tolist(), strict=True):
        # a graph's topology may let a token follow itself without a blank, and alternatives do
        for hypothesis in n_best[:1] if case.has_words else n_best:
            assert labels_of(case, hypothesis, length) == hypothesis.y_sequence.tolist()


def labels_of(case, hypothesis, length):
    """The tokens that an alignment says; checks how it treats frames."""
    if case.is_transducer:
        if not case.model.decoding.durations:  # a blank ends every frame of an RNN-T
            assert len(hypothesis.alignments) == length
            assert all(int(frame[-1][1]) == BLANK for frame in hypothesis.alignments)
        labels = [int(label) for frame in hypothesis.alignments for _, label in frame]
        return [label for label in labels if label != BLANK]
    log_probs, labels = hypothesis.alignments
    assert log_probs.shape == (length, BLANK + 1)
    runs = torch.unique_consecutive(labels)
    return runs[runs != BLANK].tolist()
