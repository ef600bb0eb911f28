"""Words in scripts without spaces: random models over kana, characters and pieces, with every strategy."""

import itertools

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.lm.estimate import estimate_ngram_lm, write_arpa
from nemo_gpu_decoding.words import words_of
from tests.random_models import random_log_probs

nemo = pytest.importorskip("nemo.collections.asr")
from nemo.collections.asr.modules import RNNTDecoder, RNNTJoint  # noqa: E402
from nemo.collections.asr.parts.submodules import ctc_decoding, rnnt_decoding  # noqa: E402
from nemo.collections.common.tokenizers import SentencePieceTokenizer  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.nemo]
KANA = list("あいうえおかきく東京日本語、。")
CONFIDENCE = {"preserve_word_confidence": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Pieces of SentencePiece over random kana."""
    import sentencepiece

    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("tokenizer")
    lines = ["".join(rng.choice(KANA, 12)) for _ in range(300)]
    options = {"vocab_size": 40, "model_type": "bpe", "character_coverage": 1.0}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_prefix=f"{folder}/m", **options)
    tokenizer = SentencePieceTokenizer(f"{folder}/m.model")
    tokenizer.tokenizer.vocab_size = tokenizer.vocab_size  # as NeMo's models do
    return tokenizer


def config(strategy, section, **options):
    return OmegaConf.create(
        {"strategy": strategy, section: options, "compute_timestamps": True, "confidence_cfg": CONFIDENCE}
    )


def ctc(strategy, tokenizer, section="beam", **options):
    cfg = config(strategy, section, **options)
    if tokenizer is None:
        return ctc_decoding.CTCDecoding(cfg, vocabulary=KANA), len(KANA)
    return ctc_decoding.CTCBPEDecoding(cfg, tokenizer=tokenizer), tokenizer.vocab_size


def decoded(decoding, size):
    log_probs = random_log_probs(2, 40, size + 1, seed=1, sharpness=4.0)
    return decoding.ctc_decoder_predictions_tensor(log_probs, torch.tensor([40, 31]), return_hypotheses=True)


def decoded_by_transducer(strategy, tokenizer, durations=()):
    torch.manual_seed(3)
    names = KANA if tokenizer is None else [*tokenizer.tokenizer.id_to_piece(list(range(tokenizer.vocab_size)))]
    decoder = RNNTDecoder({"pred_hidden": 8, "pred_rnn_layers": 1}, vocab_size=len(names)).eval()
    sizes = {"encoder_hidden": 8, "pred_hidden": 8, "joint_hidden": 8, "activation": "relu"}
    joint = RNNTJoint(sizes, len(names), vocabulary=names, num_extra_outputs=len(durations)).eval()
    joint.joint_net[-1].weight.data *= 6
    cfg = config(strategy, "beam", beam_size=4)
    if durations:
        cfg.update(model_type="tdt", durations=list(durations))
    cfg = OmegaConf.merge(OmegaConf.structured(rnnt_decoding.RNNTDecodingConfig), cfg)
    if tokenizer is None:
        decoding = rnnt_decoding.RNNTDecoding(cfg, decoder, joint, vocabulary=KANA)
    else:
        decoding = rnnt_decoding.RNNTBPEDecoding(cfg, decoder, joint, tokenizer=tokenizer)
    encoded = torch.randn(2, 8, 30, generator=torch.Generator().manual_seed(0)) * 3
    with torch.inference_mode():
        return decoding.rnnt_decoder_predictions_tensor(encoded, torch.tensor([30, 21]), return_hypotheses=True)


def check(hypothesis):
    """Its words are characters or pieces in their order, with times and confidence; they spell the text."""
    words = hypothesis.timestamp["word"]
    texts = [word["word"] for word in words]
    assert len(words) > 4
    assert "".join(texts).replace(" ", "") == hypothesis.text.replace(" ", "")  # a random piece may begin with a space
    assert len(hypothesis.word_confidence) == len(words)
    assert all(0 <= confidence <= 1 for confidence in hypothesis.word_confidence)
    assert all(word["start_offset"] <= word["end_offset"] for word in words)
    assert all(a["start_offset"] <= b["start_offset"] for a, b in itertools.pairwise(words))
    assert all(len(words_of(text)) <= 4 for text in texts)
    return texts


@pytest.mark.parametrize("kind", ["characters", "pieces"])
def test_words_of_a_ctc_model(kind, tokenizer):
    for hypothesis in decoded(*ctc("flexctc_beam", tokenizer if kind == "pieces" else None, beam_size=4)):
        texts = check(hypothesis)
        if kind == "characters":
            assert texts == words_of(hypothesis.text)


@pytest.mark.parametrize("strategy", ["alsd_pp", "aes_pp"])
@pytest.mark.parametrize("kind", ["characters", "pieces"])
@pytest.mark.parametrize("durations", [(), (0, 1, 2, 4)], ids=["RNN-T", "TDT"])
def test_words_of_a_transducer(strategy, kind, durations, tokenizer):
    for hypothesis in decoded_by_transducer(strategy, tokenizer if kind == "pieces" else None, durations):
        check(hypothesis)


@pytest.mark.parametrize("strategy", ["cuda_wfst", "paged_biglm"])
def test_words_of_a_graph_are_those_of_its_lm(strategy, tmp_path):
    rng, lm = np.random.default_rng(0), tmp_path / "lm.arpa"
    listed = ["".join(rng.choice(KANA[:13], n)) for n in (1, 1, 1, 2, 2, 3)]
    write_arpa(estimate_ngram_lm([rng.choice(listed, 6).tolist() for _ in range(50)], order=2), lm)
    graph = {"arpa_lm_path": str(lm)}
    if strategy == "paged_biglm":
        graph["large_lm_path"] = str(lm)
    for hypothesis in decoded(*ctc(strategy, None, "wfst", **graph)):
        check(hypothesis)
        assert {word["word"] for word in hypothesis.timestamp["word"]} <= set(listed)


@pytest.mark.parametrize("level", ["char", "word", "segment", "all"])
def test_levels_of_timestamps_are_those_that_are_asked_for(level):
    decoding, size = ctc("flexctc_beam", None, beam_size=2)
    decoding.cfg.ctc_timestamp_type = level
    (first, _) = decoded(decoding, size)
    levels = {"char", "word", "segment"} if level == "all" else {level}
    assert first.timestamp.keys() == {"timestep", *levels}


def test_word_alternatives_are_those_of_characters():
    decoding, size = ctc("flexctc_beam", None, beam_size=8, return_best_hypothesis=False)
    for n_best in decoded(decoding, size):
        places = n_best[0].word_alternatives
        texts = check(n_best[0])
        assert [place.word_index for place in places if place.word_index is not None] == list(range(len(texts)))
        chosen = [{option.word for option in places[n].alternatives} for n in range(len(places))]
        assert all(len(words_of(word)) <= 1 for options in chosen for word in options)


def test_phrases_are_boosted_and_found_with_their_times():
    plain, _ = decoded(*ctc("flexctc_beam", None, beam_size=8))
    start = plain.text.index("、") if "、" in plain.text else 2
    phrase = plain.text[start + 1 : start + 4]
    tree = {"key_phrases_list": [phrase, "語語語語"]}
    found, _ = decoded(*ctc("flexctc_beam", None, beam_size=8, boosting_tree=tree, boosting_tree_alpha=1.0))
    assert phrase in found.text
    (first, *_) = found.phrases
    assert first.text == phrase
    assert found.text[first.first_token : first.end_token] == phrase
    assert first.start_frame == found.token_frames[first.first_token]
