"""alsd_pp and aes_pp in NeMo's transducers: transcription, timestamps, and utterances that go on."""

import copy
import pickle

import numpy as np
import pytest
import torch
from nemo.collections.asr.metrics.wer import word_error_rate
from nemo.collections.asr.parts.submodules.rnnt_beam_decoding import BeamRNNTInferConfig
from nemo.collections.asr.parts.submodules.rnnt_decoding import RNNTDecoding
from nemo.collections.asr.parts.utils.asr_confidence_utils import ConfidenceMethodConfig
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis
from omegaconf import OmegaConf, open_dict

from nemo_gpu_decoding import utterance_requests
from nemo_gpu_decoding.nemo_plugin.streaming.stream_state import RECENT_BATCHES
from tests.nemo_plugin.usage import CONFIDENCE, CONFIDENCE_METHODS, decoded, predicted, transcribed

pytestmark = pytest.mark.slow

STRATEGIES = ["alsd_pp", "aes_pp"]
PEERS = {"alsd_pp": "malsd_batch", "aes_pp": "maes_batch"}


def use(model, strategy="alsd_pp", cfg=None, **beam):
    model.change_decoding_strategy(
        {"strategy": strategy, "beam": {"beam_size": 4, **beam}, **(cfg or {})}, verbose=False
    )


@pytest.fixture
def encoded(transducer, encoded_by, utterances):
    """Encoder output and lengths of the test utterances."""
    return encoded_by(transducer, utterances)


def lm_options(assets, weight=0.3):
    return {"ngram_lm_model": str(assets / "lm" / "tok3.arpa"), "ngram_lm_alpha": weight}


def decode(model, encoded, partial=None):
    return predicted(model.decoding, encoded, partial_hypotheses=partial)


def one_by_one(model, encoded):
    """As `decode`, each utterance alone and without padding."""
    rows = zip(encoded[0], encoded[1].tolist(), strict=True)
    return [decode(model, (row[None, :, :n], torch.tensor([n])))[0] for row, n in rows]


def wer(texts, utterances):
    return word_error_rate(texts, [utterance["text"] for utterance in utterances])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("beam_size", [2, 4])
@pytest.mark.parametrize("fusion", ["plain", "lm"])
def test_results_equal_those_of_nemo_for_utterances_alone(transducer, encoded, assets, strategy, beam_size, fusion):
    if strategy == "aes_pp" and transducer.decoding.durations:
        pytest.skip("NeMo's maes_batch is for RNN-T only")
    beam = {"beam_size": beam_size, **(lm_options(assets) if fusion == "lm" else {})}
    use(transducer, PEERS[strategy], **beam)
    nemo = one_by_one(transducer, encoded)
    use(transducer, strategy, **beam)
    for a, b in zip(nemo, decode(transducer, encoded), strict=True):
        assert a.text == b.text
        if strategy == "aes_pp":  # maes_batch lets hypotheses out of a frame without a blank
            assert a.score > b.score - 1e-3
            continue
        assert a.score == pytest.approx(b.score, abs=1e-3)
        if b.token_duration and a.token_duration is None:  # NeMo 2.7 gives the frames of tokens' ends
            assert list(a.timestamp) == np.add(b.timestamp, b.token_duration).tolist()
            continue
        assert list(a.timestamp) == b.timestamp
        if b.token_duration is not None:
            assert list(a.token_duration) == b.token_duration


@pytest.mark.parametrize(
    ("nemos", "ours", "from_the_grid"),
    [
        ("beam", "alsd_pp", {"maes_prefix_alpha": 0, "maes_expansion_gamma": 0}),
        ("maes", "alsd_pp", {"maes_prefix_alpha": 2, "maes_expansion_gamma": 2.3}),
        ("maes", "aes_pp", {"maes_prefix_alpha": 1, "maes_expansion_gamma": 4.0}),
    ],
)
def test_steps_of_eval_beamsearch_ngram_transducer_work(
    transducer, encoded_by, many_utterances, assets, nemos, ours, from_the_grid
):
    decoding = OmegaConf.structured(BeamRNNTInferConfig(beam_size=128))
    decoding.search_type = ours
    beam = {"beam_size": 4, "ngram_lm_alpha": 0.3, "hat_ilm_weight": 0.0 * False, **from_the_grid}
    found = {}
    for lm in (None, str(assets / "lm" / "tok3.arpa")):
        transducer.change_decoding_strategy(None, verbose=False)
        decoding = OmegaConf.merge(decoding, beam)
        decoding.return_best_hypothesis = False
        decoding.ngram_lm_model = lm
        decoding.hat_subtract_ilm = False
        with open_dict(transducer.cfg.decoding):
            transducer.cfg.decoding.strategy = nemos
            transducer.cfg.decoding.beam = decoding
        transducer.change_decoding_strategy(transducer.cfg.decoding, verbose=False)
        beams = decode(transducer, encoded_by(transducer, many_utterances))
        assert any(len(candidates) > 1 for candidates in beams)
        assert all(isinstance(c.score, float) for candidates in beams for c in candidates)
        found[lm] = wer([candidates[0].text for candidates in beams], many_utterances)
    without, with_lm = found.values()
    assert with_lm < without


def test_tdt_model_without_durations_is_an_error(tdt_model):
    cfg = {"strategy": "alsd_pp", "model_type": "tdt"}
    vocabulary = [str(i) for i in range(128)]
    with pytest.raises(ValueError, match="durations has 0 entries, expected 5"):
        RNNTDecoding(OmegaConf.create(cfg), tdt_model.decoder, tdt_model.joint, vocabulary)


def test_character_models_are_boosted(hybrid_model, encoded_by, utterances):
    letters = [chr(ord("A") + i) for i in range(129) if chr(ord("A") + i) != "|"]  # a space for some
    beam = {"boosting_tree": {"key_phrases_list": [letters[5]]}, "boosting_tree_alpha": 40.0}
    for strategy in STRATEGIES:
        decoding = RNNTDecoding(
            OmegaConf.create({"strategy": strategy, "beam": beam, "compute_timestamps": True}),
            hybrid_model.decoder,
            hybrid_model.joint,
            letters,
        )
        for hypothesis in decoding.rnnt_decoder_predictions_tensor(
            *encoded_by(hybrid_model, utterances), return_hypotheses=True
        ):
            assert letters[5] in hypothesis.text
            assert hypothesis.text == "".join(letters[i] for i in hypothesis.y_sequence.tolist())


BLANK = 128


def ours(strategy="alsd_pp", top=None, **beam):
    return {"strategy": strategy, "beam": {"beam_size": 4, **beam}, **(top or {})}


def greedy(**top):
    return {"strategy": "greedy_batch", **top}


def equal_alignments(greedy_hypotheses, our_hypotheses):
    """Pairs of hypotheses with equal texts and frames; there are some, else a test would say nothing."""
    pairs = [
        (a, b)
        for a, b in zip(greedy_hypotheses, our_hypotheses, strict=True)
        if a.text == b.text and frames_of(a) == frames_of(b)
    ]
    assert len(pairs) >= 2
    return pairs


def frames_of(hypothesis):
    stamps = hypothesis.timestamp
    return [int(frame) for frame in (stamps["timestep"] if isinstance(stamps, dict) else stamps)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_beam_of_one_has_texts_and_times_of_greedy(transducer, files, strategy):
    peer = transcribed(transducer, greedy(), files, timestamps=True)
    mine = transcribed(transducer, ours(strategy, beam_size=1), files, timestamps=True)
    assert sum(a.text != b.text for a, b in zip(peer, mine, strict=True)) <= 1
    if transducer.decoding.durations:  # greedy decoding of NeMo ends TDT tokens with the next frame
        return
    for a, b in equal_alignments(peer, mine):
        for level in ("char", "word", "segment"):
            assert a.timestamp[level] == b.timestamp[level]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_token_durations_are_those_of_timestamps(transducer, encoded, strategy):
    is_tdt = bool(transducer.decoding.durations)
    for hypothesis in decoded(transducer, ours(strategy, top={"compute_timestamps": True}), encoded):
        chars = hypothesis.timestamp["char"]
        if not is_tdt:
            assert hypothesis.token_duration is None
            assert all(entry["end_offset"] == entry["start_offset"] + 1 for entry in chars)
            continue
        ends = [entry["end_offset"] - entry["start_offset"] for entry in chars]
        assert ends == hypothesis.token_duration
        assert set(ends) <= {0, 1, 2, 3, 4}


@pytest.mark.parametrize("method", CONFIDENCE_METHODS, ids=lambda method: "-".join(map(str, method.values())))
@pytest.mark.parametrize("exclude_blank", [True, False])
def test_confidence_equals_that_of_greedy_where_alignments_do(transducer, encoded, method, exclude_blank):
    confidence = {
        **CONFIDENCE, "exclude_blank": exclude_blank, "method_cfg": ConfidenceMethodConfig(**method)
    }  # fmt: skip
    top = OmegaConf.to_container(OmegaConf.create({"confidence_cfg": confidence}))
    # without alignments NeMo's greedy fails for TDT here
    peer = decoded(transducer, greedy(preserve_alignments=True, **top), encoded)
    for a, b in equal_alignments(peer, decoded(transducer, ours(beam_size=1, top=top), encoded)):
        assert b.token_confidence == pytest.approx([float(value) for value in a.token_confidence], abs=1e-4)
        assert b.word_confidence == pytest.approx([float(value) for value in a.word_confidence], abs=1e-4)
        assert len(b.word_confidence) == len(b.text.split())


def test_confidence_of_durations_equals_that_of_greedy(tdt_model, encoded_by, utterances):
    top = {"confidence_cfg": {**CONFIDENCE, "exclude_blank": False, "tdt_include_duration": True}}
    encoded = encoded_by(tdt_model, utterances)
    peer = decoded(tdt_model, greedy(preserve_alignments=True, **top), encoded)
    for a, b in equal_alignments(peer, decoded(tdt_model, ours(beam_size=1, top=top), encoded)):
        assert b.token_confidence == pytest.approx([float(v) for v in a.token_confidence], abs=1e-4)
        assert all(len(pair) == 2 for frame in b.frame_confidence for pair in frame)


@pytest.mark.parametrize("where", ["beside beam", "in beam"])
def test_alignments_equal_those_of_greedy(transducer, encoded, where):
    flag = {"preserve_alignments": True}
    peer = decoded(transducer, greedy(**flag), encoded)
    cfg = ours(beam_size=1, top=flag) if where == "beside beam" else ours(beam_size=1, **flag)
    for a, b in equal_alignments(peer, decoded(transducer, cfg, encoded)):
        assert len(a.alignments) == len(b.alignments)
        for frame_a, frame_b in zip(a.alignments, b.alignments, strict=True):
            assert [int(label) for _, label in frame_a] == [int(label) for _, label in frame_b]
            for (logits_a, _), (log_probs_b, label) in zip(frame_a, frame_b, strict=True):
                log_probs = torch.log_softmax(logits_a[: BLANK + 1], dim=-1)
                assert torch.allclose(log_probs, log_probs_b[: BLANK + 1], atol=1e-3)
                assert label.dtype == torch.int64
                assert log_probs_b.device.type == "cpu"


def in_chunks(model, encoded, size):
    """The hypotheses after the last chunk, and the texts after each."""
    encoder_output, lengths = encoded
    hypotheses, seen = None, []
    for begin in range(0, encoder_output.shape[2], size):
        chunk = encoder_output[:, :, begin : begin + size]
        hypotheses = decode(model, (chunk, (lengths - begin).clamp(0, chunk.shape[2])), hypotheses)
        seen.append([best_of(h).text for h in hypotheses])
    return hypotheses, seen


def best_of(result):
    return result[0] if isinstance(result, list) else result


def summaries(hypotheses):
    return [(h.text, h.score, h.y_sequence.tolist(), h.timestamp, h.token_duration, int(h.length)) for h in hypotheses]


@pytest.mark.parametrize("strategy", ["alsd_pp", "aes_pp"])
@pytest.mark.parametrize("size", [1, 7, 30])
def test_results_of_continued_chunks_equal_those_of_the_whole(transducer, encoded, strategy, size, assets):
    boosting = {"boosting_tree": {"key_phrases_list": ["graham"]}, "boosting_tree_alpha": 0.5}
    use(transducer, strategy, **lm_options(assets), **boosting)
    whole = decode(transducer, encoded)
    hypotheses, seen = in_chunks(transducer, encoded, size)
    assert summaries(hypotheses) == summaries(whole)
    assert seen[0] != seen[-1]  # texts grow


def test_n_best_lists_of_continued_chunks_have_times_confidence_and_alignments(transducer, encoded):
    top = {"compute_timestamps": True, "confidence_cfg": {"preserve_word_confidence": True}}
    use(transducer, cfg=top, preserve_alignments=True, return_best_hypothesis=False)
    whole = decode(transducer, encoded)
    hypotheses, _ = in_chunks(transducer, encoded, 11)
    for a, b in zip(whole, hypotheses, strict=True):
        assert summaries(a) == summaries(b)
        for one, other in zip(a, b, strict=True):
            assert one.word_confidence == pytest.approx(other.word_confidence, abs=1e-4)
            assert len(one.alignments) == len(other.alignments)


def test_results_do_not_depend_on_other_continued_utterances(transducer, encoded):
    use(transducer)
    encoder_output, lengths = encoded
    whole = decode(transducer, (encoder_output, lengths))
    half = lengths // 2

    def chunk(rows, begins, ends):
        size = max(int(end - begin) for begin, end in zip(begins, ends, strict=True))
        parts = torch.zeros(len(rows), encoder_output.shape[1], size)
        for i, (row, begin, end) in enumerate(zip(rows, begins, ends, strict=True)):
            parts[i, :, : end - begin] = encoder_output[row, :, begin:end]
        return parts, torch.tensor([int(e - b) for b, e in zip(begins, ends, strict=True)])

    first = decode(transducer, chunk([0, 1, 2], [0, 0, 0], half[:3]))
    # the third goes on, the fourth begins, the first goes on, in this order
    second = decode(
        transducer,
        chunk([2, 3, 0], [half[2], 0, half[0]], [lengths[2], half[3], lengths[0]]),
        [first[2], None, first[0]],
    )
    third = decode(transducer, chunk([1, 3], [half[1], half[3]], [lengths[1], lengths[3]]), [first[1], second[1]])
    assert summaries([second[2], third[0], second[0], third[1]]) == summaries(whole[:4])


def test_empty_hypothesis_begins_an_utterance_and_empty_chunk_changes_nothing(transducer, encoded):
    use(transducer)
    encoder_output, lengths = encoded
    before = decode(transducer, (encoder_output, lengths))
    begun = decode(transducer, (encoder_output, lengths), [Hypothesis(score=0.0, y_sequence=[]), *[None] * 5])
    assert summaries(begun) == summaries(before)
    assert summaries(decode(transducer, (encoder_output, torch.zeros_like(lengths)), before)) == summaries(before)


def test_request_at_the_beginning_holds_for_the_utterance(transducer, encoded):
    use(transducer, beam_size=8)
    encoder_output, lengths = encoded
    with utterance_requests(transducer, [["graam"], *[None] * 5], boosting_weight=2.0):
        hypotheses, _ = in_chunks(transducer, (encoder_output, lengths), 20)
    assert hypotheses[0].text.endswith("graam")


def test_copied_hypotheses_can_be_continued_once(transducer, encoded):
    use(transducer)
    encoder_output, lengths = encoded
    whole = decode(transducer, (encoder_output, lengths))
    first = decode(transducer, (encoder_output[:, :, :9], lengths.clamp(max=9)))
    rest = encoder_output[:, :, 9:], lengths - 9
    assert summaries(decode(transducer, rest, copy.deepcopy(first))) == summaries(whole)
    with pytest.raises(ValueError, match=r"partial_hypotheses\[0\] was continued before"):
        decode(transducer, rest, first)


def test_states_that_are_not_continued_are_released(transducer, encoded):
    use(transducer)
    encoder_output, _ = encoded
    chunk = encoder_output[:1, :, :5], torch.tensor([5])
    first = decode(transducer, chunk)
    kept = decode(transducer, chunk, decode(transducer, chunk))
    for _ in range(RECENT_BATCHES):
        decode(transducer, chunk)
    assert first[0].dec_state.slot is None
    with pytest.raises(ValueError, match=r"partial_hypotheses\[0\] cannot be continued.*released"):
        decode(transducer, chunk, first)
    assert decode(transducer, chunk, kept)[0].length == 15


def test_partial_hypothesis_of_another_decoder_is_named(transducer, encoded):
    encoder_output, _ = encoded
    chunk = encoder_output[:1, :, :9], torch.tensor([9])
    greedy = decode(transducer, chunk)
    use(transducer)
    with pytest.raises(ValueError, match=r"partial_hypotheses\[0\] is of another decoder"):
        decode(transducer, chunk, greedy)
    with pytest.raises(ValueError, match="partial_hypotheses has 2 entries, expected 1"):
        decode(transducer, chunk, [None, None])
    pickled = pickle.loads(pickle.dumps(decode(transducer, chunk)))
    with pytest.raises(ValueError, match="pickled"):
        decode(transducer, chunk, pickled)


def test_biasing_request_boosts_its_utterance(transducer, encoded):
    pytest.importorskip("nemo.collections.asr.parts.context_biasing.biasing_multi_model")
    from nemo.collections.asr.parts.context_biasing.biasing_multi_model import BiasingRequestItemConfig
    from nemo.collections.asr.parts.context_biasing.boosting_graph_batched import BoostingTreeModelConfig

    use(transducer)
    plain = decode(transducer, encoded)
    phrases = BoostingTreeModelConfig(key_phrases_list=["zebra"])
    biasing = BiasingRequestItemConfig(boosting_model_cfg=phrases, boosting_model_alpha=30.0)
    boosted = decode(transducer, encoded, [Hypothesis.empty_with_biasing_cfg(biasing), *[None] * 5])
    assert "zebra" in boosted[0].text
    assert summaries(boosted[1:]) == summaries(plain[1:])
    biasing = BiasingRequestItemConfig(multi_model_id=3)
    with pytest.raises(ValueError, match="biasing_cfg holds a model that is compiled for NeMo's decoders"):
        decode(transducer, encoded, [Hypothesis.empty_with_biasing_cfg(biasing), *[None] * 5])
