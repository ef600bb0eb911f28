"""LMs and boosting trees against NeMo's own, state by state."""

import itertools
import json
import random
import re
from collections import Counter

import pytest

pytest.importorskip("nemo.collections.asr")
import numpy as np
import torch
from nemo.collections.asr.parts.context_biasing.boosting_graph_batched import (
    BoostingTreeModelConfig,
    GPUBoostingTreeModel,
)
from nemo.collections.asr.parts.submodules.ngram_lm import NGramGPULanguageModel
from nemo.collections.common.tokenizers import SentencePieceTokenizer

from benchmarks.sources import read_speech, speech_lexicon, speech_text, spelling_vocabulary
from nemo_gpu_decoding.fusion.boosting import BoostingConfig, build_boosting_tree, load_boosting_tree
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.fusion.ngram import load_ngram_lm
from nemo_gpu_decoding.metrics import PhraseScore, WordErrors, phrase_score, word_errors
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.assets import ASSETS, sentencepiece_processor
from tests.oracles.ngram import arpa_text

pytestmark = pytest.mark.nemo
VOCAB_SIZE = 128


@pytest.fixture(scope="module")
def tokenizer_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(sentencepiece_processor().serialized_model_proto())
    return path


def phrase_list(count):
    """Phrases of few letters, so that they share prefixes, overlap and nest."""
    draw = random.Random(0)
    words = ["".join(draw.choices("eatoins", k=draw.randint(1, 5))) for _ in range(count // 2)]
    return list(dict.fromkeys(" ".join(draw.choices(words, k=draw.randint(1, 3))) for _ in range(count)))


def assert_equal_walks(ours, nemo, *, final, walks=8, steps=20):
    """All weights of all labels in the states of random walks that keep to well-scored labels."""
    draw = random.Random(0)
    nemo_states = nemo.get_init_states(walks)
    states = [ours.start_state] * walks
    for _ in range(steps):
        with torch.no_grad():
            weights, targets = nemo.advance(nemo_states)
        for walk in range(walks):
            expected = weights[walk].numpy()
            pairs = [ours.advance(states[walk], label) for label in range(nemo.vocab_size)]
            np.testing.assert_array_equal(np.float32([weight for weight, _ in pairs]), expected)
            label = int(draw.choice(np.argsort(-expected)[:4]))
            states[walk], nemo_states[walk] = pairs[label][1], targets[walk, label]
        if final:
            ends = ours.arrays.states["final_weight"][states]
            np.testing.assert_array_equal(ends, nemo.get_final(nemo_states).detach().numpy())


@pytest.mark.parametrize("name", ["tok3.arpa", "tok6.arpa"])
@pytest.mark.parametrize("normalize_unk", [True, False])
def test_arpa_scores_equal_those_of_nemo_to_the_bit(name, normalize_unk):
    path = ASSETS / "lm" / name
    nemo = NGramGPULanguageModel.from_file(path, VOCAB_SIZE, normalize_unk=normalize_unk, use_triton=False)
    assert_equal_walks(load_ngram_lm(path, VOCAB_SIZE, normalize_unk=normalize_unk), nemo, final=True)


def test_saved_ngram_lm_scores_equal_those_of_nemo_to_the_bit(tmp_path):
    nemo = NGramGPULanguageModel.from_file(ASSETS / "lm" / "tok6.arpa", VOCAB_SIZE, use_triton=False)
    nemo.save_to(str(tmp_path / "lm.nemo"))
    assert_equal_walks(load_ngram_lm(tmp_path / "lm.nemo", VOCAB_SIZE), nemo, final=True)


def test_lm_without_a_suffix_is_read_where_nemo_fails(tmp_path):
    table = {(s,): (-1.0, -0.5) for s in ("<s>", "</s>", "d", "e", "f")}
    table |= {("d", "e"): (-0.5, -0.5), ("d", "e", "f"): (-0.25, 0.0)}  # "e f" is pruned
    path = tmp_path / "pruned.arpa"
    path.write_text(arpa_text(table))
    with pytest.raises(KeyError):
        NGramGPULanguageModel.from_file(path, 3, use_triton=False)
    assert load_ngram_lm(path, 3).score([0, 1, 2]) == pytest.approx(
        (-0.5 - 1.0 - 0.5 - 0.25 + -0.5 - 1.0) * np.log(10), abs=1e-5
    )


OPTIONS = [
    {},
    {"uniform_weights": True},
    {"score_per_phrase": 20.0},
    {"uniform_weights": True, "score_per_phrase": 5.0},
    {"context_score": 0.3, "depth_scaling": 1.0, "unk_score": -0.25, "score_per_phrase": 3.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_boosting_tree_with_nemo_refund_equals_that_of_nemo_to_the_bit(tokenizer_model, options):
    phrases = phrase_list(200)
    nemo = GPUBoostingTreeModel.from_config(
        BoostingTreeModelConfig(key_phrases_list=phrases, use_triton=False, **options),
        SentencePieceTokenizer(str(tokenizer_model)),
    )
    vocabulary = Vocabulary.from_sentencepiece(tokenizer_model)
    ours = build_boosting_tree(phrases, vocabulary, BoostingConfig(refund="nemo", **options))
    assert ours.num_states == nemo.num_states
    assert_equal_walks(ours, nemo, final=False)


def test_saved_boosting_tree_loads(tokenizer_model, tmp_path):
    path = str(tmp_path / "tree.nemo")
    nemo = GPUBoostingTreeModel.from_config(
        BoostingTreeModelConfig(model_path=path, key_phrases_list=phrase_list(50), use_triton=False),
        SentencePieceTokenizer(str(tokenizer_model)),
    )
    ours = load_boosting_tree(BoostingConfig(model_path=path), Vocabulary.from_sentencepiece(tokenizer_model))
    assert_equal_walks(ours, nemo, final=False)
    assert (ours.arrays.states["final_weight"] == 0).all()


def test_boosting_config_has_the_keys_and_defaults_of_nemo():
    nemo, ours = BoostingTreeModelConfig(), BoostingConfig()
    assert {key: getattr(ours, key, None) for key in vars(nemo)} == vars(nemo)
    own = "ac_threshold bpe_mode var_bpe_scoring_temp var_bpe_penalize_subsplits segmentations ignore_case refund"
    assert set(vars(ours)) - set(vars(nemo)) == {*own.split(), "overlapping", "whole_words", "phrase_share"}


def test_vocabulary_text_equals_that_of_the_nemo_tokenizer(tokenizer_model):
    tokenizer = SentencePieceTokenizer(str(tokenizer_model))
    vocabulary = Vocabulary(tuple(tokenizer.vocab), "bpe", encode=tokenizer.text_to_ids)
    draw = random.Random(0)
    for _ in range(200):
        ids = draw.choices(range(1, VOCAB_SIZE), k=draw.randrange(10))
        assert vocabulary.text(ids) == tokenizer.ids_to_text(ids)
    for line in (ASSETS / "phrases.txt").read_text().split("\n")[:20]:
        assert vocabulary.tokenize(line) == tokenizer.text_to_ids(re.sub(r"\s+", " ", line))


# -- phrases that overlap, on the shipped hard speech ----------------------------------------
def hard_speech_with(phrases: list[str], weight: float, **options) -> tuple[WordErrors, PhraseScore]:
    tensors, metadata = read_speech("emissions")
    references, vocabulary = json.loads(metadata["texts"]), spelling_vocabulary(*speech_lexicon())
    rows = tensors["log_probs"].float().split(tensors["lengths"].tolist())
    tree = build_boosting_tree(phrases, vocabulary, BoostingConfig(**options))
    decoder = FlexCTCBeam(
        len(vocabulary), len(vocabulary), FlexCTCConfig(beam_size=8), Fusion(boosting=tree, boosting_weight=weight)
    )
    found = decoder.decode(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), tensors["lengths"])
    texts = [vocabulary.text(nbest.best.tokens.tolist()) for nbest in found]
    return word_errors(references, texts), phrase_score(references, texts, phrases)


@pytest.mark.parametrize("length", [2, 3])
def test_phrases_insert_fewer_words_where_tokens_are_paid_once(length):
    """All pairs (or triples) of frequent words: every word more completes another phrase."""
    common = [word for word, _ in Counter(itertools.chain(*speech_text())).most_common(12 if length == 2 else 6)]
    phrases = [" ".join(words) for words in itertools.product(common, repeat=length)]
    every, every_phrase = hard_speech_with(phrases, 1.5, overlapping=True)
    once, once_phrase = hard_speech_with(phrases, 1.5)
    nemo, nemo_phrase = hard_speech_with(phrases, 1.5, refund="nemo")
    assert once.wer < nemo.wer < every.wer
    assert once.insertions < nemo.insertions < every.insertions
    assert once_phrase.false_positives < nemo_phrase.false_positives < every_phrase.false_positives
    assert once.insertions < every.insertions / 2


def test_phrases_that_cover_a_text_need_all_their_bonuses():
    """All pairs of words that follow each other in what was said: every right word completes another phrase."""
    texts = [text.split() for text in json.loads(read_speech("emissions")[1]["texts"])]
    phrases = list(dict.fromkeys(" ".join(pair) for words in texts for pair in itertools.pairwise(words)))
    every, every_phrase = hard_speech_with(phrases, 0.75, overlapping=True)
    once, once_phrase = hard_speech_with(phrases, 0.75)
    nemo, nemo_phrase = hard_speech_with(phrases, 0.75, refund="nemo")
    assert every.wer < nemo.wer < once.wer
    assert every_phrase.fscore > nemo_phrase.fscore > once_phrase.fscore
    assert every.wer < 0.5 * once.wer
