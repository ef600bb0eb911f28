"""Streams through NeMo's `partial_hypotheses`: whatever the chunks, the result is that of the whole."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import copy
import pickle

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

import torch
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis

from nemo_gpu_decoding import utterance_requests
from nemo_gpu_decoding.nemo_plugin.continuation import RECENT_BATCHES


def use(model, strategy="alsd_pp", top=None, **beam):
    cfg = {"strategy": strategy, "beam": {"beam_size": 4, **beam}, **(top or {})}
    model.change_decoding_strategy(cfg, verbose=False)


def decode(model, encoder_output, lengths, partial=None):
    return model.decoding.rnnt_decoder_predictions_tensor(
        encoder_output, lengths, return_hypotheses=True, partial_hypotheses=partial
    )


def in_chunks(model, encoded, size):
    """The hypotheses after the last chunk, and the texts after each."""
    encoder_output, lengths = encoded
    hypotheses, seen = None, []
    for begin in range(0, encoder_output.shape[2], size):
        chunk = encoder_output[:, :, begin : begin + size]
        counts = (lengths - begin).clamp(0, chunk.shape[2])
        hypotheses = decode(model, chunk, counts, hypotheses)
        seen.append([best_of(h).text for h in hypotheses])
    return hypotheses, seen


def best_of(result):
    return result[0] if isinstance(result, list) else result


def summary(hypothesis):
    return (
        hypothesis.text, hypothesis.score, hypothesis.y_sequence.tolist(), hypothesis.timestamp,
        hypothesis.token_duration, int(hypothesis.length),
    )  # fmt: skip


@pytest.fixture
def lm(assets):
    return {"ngram_lm_model": str(assets / "lm" / "tok3.arpa"), "ngram_lm_alpha": 0.3}


@pytest.mark.parametrize("strategy", ["alsd_pp", "aes_pp"])
@pytest.mark.parametrize("size", [1, 7, 30])
def test_chunks_give_the_result_of_the_whole(transducer, encoded_by, utterances, strategy, size, lm):
    boosting = {"boosting_tree": {"key_phrases_list": ["graham"]}, "boosting_tree_alpha": 0.5}
    use(transducer, strategy, **lm, **boosting)
    encoded = encoded_by(transducer, utterances)
    whole = decode(transducer, *encoded)
    hypotheses, seen = in_chunks(transducer, encoded, size)
    assert [summary(h) for h in hypotheses] == [summary(h) for h in whole]
    assert seen[0] != seen[-1]  # texts grow


def test_times_confidence_and_alignments_of_streams(transducer, encoded_by, utterances):
    top = {"compute_timestamps": True, "confidence_cfg": {"preserve_word_confidence": True}}
    use(transducer, top=top, preserve_alignments=True)
    encoded = encoded_by(transducer, utterances)
    whole = decode(transducer, *encoded)
    hypotheses, _ = in_chunks(transducer, encoded, 11)
    for a, b in zip(whole, hypotheses, strict=True):
        assert a.timestamp == b.timestamp
        assert a.word_confidence == pytest.approx(b.word_confidence, abs=1e-4)
        assert len(a.alignments) == len(b.alignments)


def test_n_best_lists_can_be_continued(transducer, encoded_by, utterances):
    use(transducer, return_best_hypothesis=False)
    encoded = encoded_by(transducer, utterances)
    whole = decode(transducer, *encoded)
    hypotheses, _ = in_chunks(transducer, encoded, 13)
    for a, b in zip(whole, hypotheses, strict=True):
        assert [summary(h) for h in a] == [summary(h) for h in b]


def test_streams_may_come_and_go_and_change_places(transducer, encoded_by, utterances):
    use(transducer)
    encoder_output, lengths = encoded_by(transducer, utterances)
    whole = decode(transducer, encoder_output, lengths)
    half = lengths // 2

    def chunk(rows, begins, ends):
        size = max(int(end - begin) for begin, end in zip(begins, ends, strict=True))
        parts = torch.zeros(len(rows), encoder_output.shape[1], size)
        for i, (row, begin, end) in enumerate(zip(rows, begins, ends, strict=True)):
            parts[i, :, : end - begin] = encoder_output[row, :, begin:end]
        counts = torch.tensor([int(e - b) for b, e in zip(begins, ends, strict=True)])
        return parts, counts

    first = decode(transducer, *chunk([0, 1, 2], [0, 0, 0], half[:3]))
    # the third goes on, the fourth begins, the first goes on, in this order
    second = decode(
        transducer,
        *chunk([2, 3, 0], [half[2], 0, half[0]], [lengths[2], half[3], lengths[0]]),
        [first[2], None, first[0]],
    )
    third = decode(
        transducer,
        *chunk([1, 3], [half[1], half[3]], [lengths[1], lengths[3]]),
        [first[1], second[1]],
    )
    finished = [second[2], third[0], second[0], third[1]]
    assert [summary(h) for h in finished] == [summary(h) for h in whole[:4]]


def test_a_chunk_without_frames_changes_nothing(transducer, encoded_by, utterances):
    use(transducer)
    encoder_output, lengths = encoded_by(transducer, utterances)
    before = decode(transducer, encoder_output, lengths)
    after = decode(transducer, encoder_output, torch.zeros_like(lengths), before)
    assert [summary(h) for h in after] == [summary(h) for h in before]


def test_an_empty_hypothesis_begins_an_utterance(transducer, encoded_by, utterances):
    use(transducer)
    encoded = encoded_by(transducer, utterances)
    whole = decode(transducer, *encoded)
    partial = [Hypothesis(score=0.0, y_sequence=[]), *[None] * 5]
    assert [summary(h) for h in decode(transducer, *encoded, partial)] == [summary(h) for h in whole]


def test_requests_count_where_an_utterance_begins(transducer, encoded_by, utterances):
    use(transducer, beam_size=8)
    encoder_output, lengths = encoded_by(transducer, utterances)
    with utterance_requests(transducer, [["graam"], *[None] * 5], boosting_weight=1.0):
        hypotheses, _ = in_chunks(transducer, (encoder_output, lengths), 20)
    assert hypotheses[0].text.endswith("graam")


def test_copies_of_hypotheses_can_be_continued_once(transducer, encoded_by, utterances):
    use(transducer)
    encoder_output, lengths = encoded_by(transducer, utterances)
    whole = decode(transducer, encoder_output, lengths)
    first = decode(transducer, encoder_output[:, :, :9], lengths.clamp(max=9))
    rest = encoder_output[:, :, 9:], lengths - 9
    result = decode(transducer, *rest, copy.deepcopy(first))
    assert [summary(h) for h in result] == [summary(h) for h in whole]
    with pytest.raises(ValueError, match=r"partial_hypotheses\[0\] was continued before"):
        decode(transducer, *rest, first)


def test_states_of_utterances_that_are_not_continued_are_released(transducer, encoded_by, utterances):
    use(transducer)
    encoder_output, _ = encoded_by(transducer, utterances)
    chunk = encoder_output[:1, :, :5], torch.tensor([5])
    first = decode(transducer, *chunk)
    kept = decode(transducer, *chunk, decode(transducer, *chunk))
    for _ in range(RECENT_BATCHES):
        decode(transducer, *chunk)
    assert first[0].dec_state.batch is None
    with pytest.raises(ValueError, match=r"partial_hypotheses\[0\] cannot be continued.*released"):
        decode(transducer, *chunk, first)
    assert decode(transducer, *chunk, kept)[0].length == 15


def test_what_cannot_be_continued_is_named(transducer, encoded_by, utterances):
    encoder_output, _ = encoded_by(transducer, utterances)
    chunk = encoder_output[:1, :, :9], torch.tensor([9])
    greedy = decode(transducer, *chunk)
    use(transducer)
    with pytest.raises(ValueError, match=r"partial_hypotheses\[0\] is of another decoder"):
        decode(transducer, *chunk, greedy)
    with pytest.raises(ValueError, match="partial_hypotheses has 2 entries, expected 1"):
        decode(transducer, *chunk, [None, None])
    pickled = pickle.loads(pickle.dumps(decode(transducer, *chunk)))
    with pytest.raises(ValueError, match="pickled"):
        decode(transducer, *chunk, pickled)


def test_a_biasing_request_is_not_ignored(transducer, encoded_by, utterances):
    pytest.importorskip("nemo.collections.asr.parts.context_biasing.biasing_multi_model")
    from nemo.collections.asr.parts.context_biasing.biasing_multi_model import BiasingRequestItemConfig
    from nemo.collections.asr.parts.context_biasing.boosting_graph_batched import (
        BoostingTreeModelConfig,
    )

    use(transducer)
    wish = BiasingRequestItemConfig(
        boosting_model_cfg=BoostingTreeModelConfig(key_phrases_list=["graam"]), boosting_model_alpha=1.0
    )
    partial = [Hypothesis.empty_with_biasing_cfg(wish), *[None] * 5]
    with pytest.raises(ValueError, match="utterance_requests"):
        decode(transducer, *encoded_by(transducer, utterances), partial)
