"""Results in NeMo's form; the vocabulary as NeMo's tokenizers have it, and what is loaded for it."""

import copy
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCBPEDecoding
from nemo.collections.asr.parts.utils import transcribe_utils
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis
from nemo.collections.common.tokenizers.aggregate_tokenizer import AggregateTokenizer
from omegaconf import OmegaConf

from nemo_gpu_decoding import register, unregister, utterance_requests
from nemo_gpu_decoding.nemo_plugin.hypotheses import NBestList, TimedNBestList, from_labels
from nemo_gpu_decoding.nemo_plugin.infer import nemo_vocabulary
from tests.nemo_plugin.test_word_graph_files import WordPieces
from tests.nemo_plugin.usage import texts_of

pytestmark = pytest.mark.slow

BLANK = 5


@pytest.mark.parametrize(
    ("labels", "tokens", "frames", "repeats"),
    [
        ([5, 1, 1, 5, 1, 2, 2, 5], [1, 1, 2], [1, 4, 5], [2, 1, 2]),
        ([0, 0, 0], [0], [0], [3]),
        ([5, 5], [], [], []),
        ([], [], [], []),
        ([3], [3], [0], [1]),
    ],
)
def test_labels_collapse_to_tokens_and_times(labels, tokens, frames, repeats):
    hypothesis = from_labels(np.array(labels, np.int64), BLANK)
    assert hypothesis.y_sequence.tolist() == tokens
    assert hypothesis.timestamp == hypothesis.token_frames == frames
    assert hypothesis.token_repeats == repeats
    assert hypothesis.length == len(labels)


def hypothesis(text, score=0.0, **fields):
    return Hypothesis(score=score, y_sequence=[], text=text, **fields)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda n_best: pickle.loads(pickle.dumps(n_best))])
def test_n_best_lists_survive_copies(duplicate):
    n_best = TimedNBestList([hypothesis("a", timestamp={"word": [{"end": 1}]})])
    n_best.y_sequence = "log-probs"
    other = duplicate(n_best)
    assert type(other) is TimedNBestList
    assert (other.text, other.y_sequence, other.timestamp) == ("a", "log-probs", {"word": [{"end": 1}]})


def test_a_timed_n_best_list_shows_the_entries_of_all_its_hypotheses():
    first, second = {"word": "a"}, {"word": "b"}
    n_best = TimedNBestList(
        hypothesis(entry["word"], timestamp={"timestep": [1], "word": [entry]}) for entry in (first, second)
    )
    assert isinstance(n_best, Hypothesis)
    for entry in n_best.timestamp["word"]:  # as NeMo does to add seconds
        entry["start"] = 0.08
    assert first["start"] == second["start"] == 0.08
    assert "timestep" not in n_best.timestamp


def test_sentencepiece_ids_are_those_of_the_models_tokenizer(ctc_model):
    tokenizer = ctc_model.tokenizer
    vocabulary = nemo_vocabulary(SimpleNamespace(tokenizer=tokenizer))
    assert len(vocabulary) == 128
    assert vocabulary.kind == "bpe"
    ids = tokenizer.text_to_ids("the budget of teresa")
    assert vocabulary.tokenize("the budget of teresa") == ids
    assert vocabulary.text(ids) == tokenizer.ids_to_text(ids)
    assert vocabulary == nemo_vocabulary(SimpleNamespace(tokenizer=tokenizer))  # and so found in caches


@pytest.fixture
def aggregate(ctc_model):
    return AggregateTokenizer({"en": ctc_model.tokenizer, "es": ctc_model.tokenizer})


def test_aggregates_take_the_language_of_a_phrase(ctc_model, aggregate):
    vocabulary = nemo_vocabulary(SimpleNamespace(tokenizer=aggregate))
    assert len(vocabulary) == 256
    ids = ctc_model.tokenizer.text_to_ids("page")
    assert vocabulary.tokenize("page", language="en") == ids
    assert vocabulary.tokenize("page", language="es") == [128 + i for i in ids]
    assert vocabulary == nemo_vocabulary(SimpleNamespace(tokenizer=aggregate))


def test_phrases_of_a_language_are_boosted_in_its_tokens(ctc_model, aggregate):
    beam = {"boosting_tree": {"key_phrase_items_list": [{"phrase": "t", "lang": "es"}]}, "boosting_tree_alpha": 9.0}
    decoding = CTCBPEDecoding({"strategy": "flexctc_beam", "beam": beam}, aggregate)
    ids = [language_start + ctc_model.tokenizer.text_to_ids("t")[0] for language_start in (0, 128)]
    log_probs = torch.full((1, 1, 257), -20.0)
    log_probs[0, 0, ids] = torch.tensor(np.log([0.6, 0.4]), dtype=torch.float32)
    (hypothesis,) = decoding.decoding(decoder_output=log_probs, decoder_lengths=torch.tensor([1]))[0]
    assert hypothesis.y_sequence.tolist() == ids[1:]


def test_words_of_word_pieces_and_characters_are_joined():
    vocabulary = nemo_vocabulary(SimpleNamespace(tokenizer=WordPieces()))
    assert vocabulary.kind == "wpe"
    assert vocabulary.tokenize("page two") == [1, 2, 3]
    assert vocabulary.text([1, 2, 3]) == "page two"
    vocabulary = nemo_vocabulary(SimpleNamespace(labels_map={0: "a", 1: "b", 2: " "}))
    assert vocabulary.tokenize("ab a") == [0, 1, 2, 0]
    assert vocabulary.text([1, 2, 0]) == "b a"


# ----------- Phrases and weights per utterance through transcribe: who gets what, and what is refused
def use(model, assets=None, **beam):
    if assets:
        beam["ngram_lm_model"] = str(assets / "lm" / "tok3.arpa")
        beam["ngram_lm_alpha"] = 0.7
    cfg = {"strategy": "flexctc_beam", "beam": {"beam_size": 8, "beam_beta": 0.0, **beam}}
    model.change_decoding_strategy(cfg, verbose=False)


def test_requests_reach_the_decoder_that_timestamps_make(ctc_model, files):
    use(ctc_model)
    with utterance_requests(ctc_model, [["graam"]], boosting_weight=1.0):
        (hypothesis,) = ctc_model.transcribe(files[:1], timestamps=True, verbose=False)
    assert hypothesis.timestamp["word"][-1]["word"] == "graam"


def test_wrong_number_of_requests_is_an_error_without_after_effects(ctc_model, files):
    use(ctc_model)
    plain = texts_of(ctc_model, files[:1])
    with utterance_requests(ctc_model, [[]]):  # where there are no phrases at all
        assert texts_of(ctc_model, files[:1]) == plain
    with (
        pytest.raises(ValueError, match="requests has 2 entries, but after 0 utterances 4 more"),
        utterance_requests(ctc_model, [None, None]),
    ):
        texts_of(ctc_model, files[:4])
    with (
        pytest.raises(ValueError, match="requests has 3 entries, but 2 utterances"),
        utterance_requests(ctc_model, [None] * 3),
    ):
        texts_of(ctc_model, files[:2])
    with (
        pytest.raises(ValueError, match="0 utterances"),
        utterance_requests(ctc_model, [["graam"]], boosting_weight=1),
    ):
        pass
    assert texts_of(ctc_model, files[:1]) == plain
    with pytest.raises(KeyError), utterance_requests(ctc_model, [None]):
        raise KeyError  # leftovers hide no error


def test_requests_hold_for_one_model_in_one_thread(ctc_model, hybrid_model, files, emissions):
    use(ctc_model)
    cfg = {"strategy": "flexctc_beam", "beam": {"beam_size": 8, "beam_beta": 0.0}}
    hybrid_model.change_decoding_strategy(cfg, decoder_type="ctc", verbose=False)
    with utterance_requests(ctc_model, [None]):
        texts_of(hybrid_model, files[:2])
        texts_of(ctc_model, files[:1])
    use(ctc_model)
    decode = ctc_model.decoding.ctc_decoder_predictions_tensor
    pool = ThreadPoolExecutor(1)
    with utterance_requests(ctc_model, [["graam"], *[None] * 5], boosting_weight=1.0), pool:
        seen = pool.submit(lambda: [h.text for h in decode(*emissions)]).result()
        own = [h.text for h in decode(*emissions)]
    assert "graham" in seen[0]
    assert "graam" in own[0]


@pytest.mark.parametrize(
    ("requests", "message"), [(["graam"], "phrases is 'graam'"), ([["graam"]], "boosting_weight is 0")]
)
def test_wrong_requests_are_named(ctc_model, requests, message):
    use(ctc_model)
    weight = 0.0 if "weight" in message else 1.0
    with pytest.raises(ValueError, match=message), utterance_requests(ctc_model, requests, boosting_weight=weight):
        pass


def test_a_model_with_another_strategy_is_an_error(ctc_model, hybrid_model):
    for model in (ctc_model, hybrid_model):
        with (
            pytest.raises(ValueError, match="strategy 'greedy_batch', expected flexctc_beam"),
            utterance_requests(model, [None]),
        ):
            pass


@pytest.mark.parametrize("kind", [list, NBestList])
def test_sorted_n_best_lists_go_back_to_their_utterances(tmp_path, kind):
    durations = [2.0, 5.0, 1.0, 3.0]
    manifest = tmp_path / "manifest.json"
    manifest.write_text("".join(f'{{"duration": {seconds}}}\n' for seconds in durations))
    by_length = sorted(durations, reverse=True)
    register()

    def restored(transcripts):
        return transcribe_utils.restore_transcription_order(str(manifest), transcripts)

    beams = [kind([seconds, -seconds]) for seconds in by_length]
    assert restored(beams) == [[seconds, -seconds] for seconds in durations]
    assert restored(by_length) == durations
    pair = restored((by_length, by_length))  # best and all, as `transcribe` once returned them
    assert [list(of_all) for of_all in pair] == [durations, durations]
    (tmp_path / "unsorted.json").write_text("{}\n")
    assert transcribe_utils.restore_transcription_order(str(tmp_path / "unsorted.json"), []) == []
    unregister()
    try:
        with pytest.raises(IndexError):
            restored(beams)
    finally:
        register()


def test_timed_n_best_lists_are_written_with_the_times_of_the_best(tmp_path):
    (tmp_path / "in.json").write_text("{}\n")
    cfg = OmegaConf.create({
        "append_pred": False, "audio_dir": None, "dataset_manifest": str(tmp_path / "in.json"),
        "output_filename": str(tmp_path / "out.json"), "decoding": {"beam": {"return_best_hypothesis": False}},
    })  # fmt: skip
    times = {"start_offset": 1, "end_offset": 2, "start": 0.08, "end": 0.16}
    beam = [hypothesis(text, score=-1.0, timestamp={"word": [{"word": text, **times}]}) for text in "ab"]
    register()
    transcribe_utils.write_transcription([TimedNBestList(beam)], cfg, "model", timestamps=True)
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["pred_text"], written["beams"]) == ("a", [["a", -1.0], ["b", -1.0]])
    assert written["word"] == [{"word": "a", **times}]
