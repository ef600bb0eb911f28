"""Phrases and weights per utterance through transcribe: who gets what, and what is refused."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import threading

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

from nemo_gpu_decoding import utterance_requests


def use(model, assets=None, **beam):
    if assets:
        beam["ngram_lm_model"] = str(assets / "lm" / "tok3.arpa")
        beam["ngram_lm_alpha"] = 0.7
    cfg = {"strategy": "flexctc_beam", "beam": {"beam_size": 8, "beam_beta": 0.0, **beam}}
    model.change_decoding_strategy(cfg, verbose=False)


def texts(model, files, **kwargs):
    return [result.text for result in model.transcribe(files, verbose=False, **kwargs)]


def test_an_empty_list_where_there_are_no_phrases_at_all(ctc_model, files):
    use(ctc_model)
    plain = texts(ctc_model, files[:1])
    with utterance_requests(ctc_model, [[]]):
        assert texts(ctc_model, files[:1]) == plain


def test_timestamps_make_a_new_decoder_which_finds_them_too(ctc_model, files):
    use(ctc_model)
    with utterance_requests(ctc_model, [["graam"]], boosting_weight=1.0):
        (hypothesis,) = ctc_model.transcribe(files[:1], timestamps=True, verbose=False)
    assert hypothesis.timestamp["word"][-1]["word"] == "graam"


def test_hybrid_models(hybrid_model, files):
    cfg = {"strategy": "flexctc_beam", "beam": {"beam_size": 8, "beam_beta": 0.0}}
    hybrid_model.change_decoding_strategy(cfg, decoder_type="ctc", verbose=False)
    plain = texts(hybrid_model, files[:2])
    with utterance_requests(hybrid_model, [["twoo"], None], boosting_weight=3.0):
        boosted = texts(hybrid_model, files[:2])
    assert boosted[0] != plain[0]
    assert boosted[1] == plain[1]


def test_too_few_and_too_many_are_errors(ctc_model, files):
    use(ctc_model)
    with (
        pytest.raises(ValueError, match="requests has 2 entries, but after 0 utterances 4 more"),
        utterance_requests(ctc_model, [None, None]),
    ):
        texts(ctc_model, files[:4])
    with (
        pytest.raises(ValueError, match="requests has 3 entries, but 2 utterances"),
        utterance_requests(ctc_model, [None] * 3),
    ):
        texts(ctc_model, files[:2])


def test_an_error_inside_is_not_hidden_by_leftovers(ctc_model):
    use(ctc_model)
    with pytest.raises(KeyError), utterance_requests(ctc_model, [None]):
        raise KeyError


def test_after_the_block_nothing_is_left(ctc_model, files):
    use(ctc_model)
    plain = texts(ctc_model, files[:1])
    with (
        pytest.raises(ValueError, match="0 utterances"),
        utterance_requests(ctc_model, [["graam"]], boosting_weight=1),
    ):
        pass
    assert texts(ctc_model, files[:1]) == plain


def test_other_models_inside_the_block_are_not_concerned(ctc_model, hybrid_model, files):
    use(ctc_model)
    cfg = {"strategy": "flexctc_beam", "beam": {"beam_size": 8, "beam_beta": 0.0}}
    hybrid_model.change_decoding_strategy(cfg, decoder_type="ctc", verbose=False)
    with utterance_requests(ctc_model, [None]):
        texts(hybrid_model, files[:2])
        texts(ctc_model, files[:1])


def test_threads_do_not_see_each_others_requests(ctc_model, emissions):
    use(ctc_model)
    decode = ctc_model.decoding.ctc_decoder_predictions_tensor
    seen = []
    with utterance_requests(ctc_model, [["graam"], *[None] * 5], boosting_weight=1.0):
        thread = threading.Thread(target=lambda: seen.extend(h.text for h in decode(*emissions)))
        thread.start()
        thread.join()
        own = [h.text for h in decode(*emissions)]
    assert "graham" in seen[0]
    assert "graam" in own[0]


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (["graam"], "requests holds 'graam'"),
        ([["graam"]], "boosting_weight is 0"),
        ([["gr€am"]], "€"),
    ],
)
def test_wrong_requests_are_named(ctc_model, requests, message):
    use(ctc_model)
    weight = None if "weight" in message else 1.0
    with (
        pytest.raises(ValueError, match=message),
        utterance_requests(ctc_model, requests, boosting_weight=weight),
    ):
        pass


def test_a_model_with_another_strategy_is_an_error(ctc_model, hybrid_model):
    for model in (ctc_model, hybrid_model):
        with (
            pytest.raises(ValueError, match="strategy 'greedy_batch', expected flexctc_beam"),
            utterance_requests(model, [None]),
        ):
            pass


# ------------------------------------------------------------------------------------ transducers


def use_transducer(model, strategy="alsd_pp", **beam):
    cfg = {"strategy": strategy, "beam": {"beam_size": 8, **beam}}
    model.change_decoding_strategy(cfg, verbose=False)


def test_requests_are_for_the_head_that_decodes(hybrid_model, files):
    use_transducer(hybrid_model)
    with (
        pytest.raises(ValueError, match="2 entries, but 1 utter"),
        utterance_requests(hybrid_model, [None, None]),
    ):
        texts(hybrid_model, files[:1])
    ctc = {"strategy": "greedy_batch"}
    hybrid_model.change_decoding_strategy(ctc, decoder_type="ctc", verbose=False)
    with (
        pytest.raises(ValueError, match="strategy 'greedy_batch'"),
        utterance_requests(hybrid_model, [None]),
    ):
        pass
