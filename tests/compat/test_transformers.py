"""Models of Hugging Face transformers, with random and with our own weights, decoded by this package."""

import json
import re
import sys

import numpy as np
import pytest
import torch

from nemo_gpu_decoding import ALSDConfig, ALSDPlusPlus, FlexCTCBeam, FlexCTCConfig, Request, build_boosting_tree
from nemo_gpu_decoding.compat.pyctcdecode import build_ctcdecoder
from nemo_gpu_decoding.compat.transformers import (
    parakeet_inputs,
    parakeet_networks,
    provide_pyctcdecode,
    tokenizer_vocabulary,
)
from nemo_gpu_decoding.metrics import word_errors
from nemo_gpu_decoding.search.alternatives import timed_words
from tests.assets import ASSETS, ROOT
from tests.compat.conftest import searched, tokens
from tests.compat.converted import converted, processor_of
from tests.contract.subject import VOCAB
from tests.contract.tiny_models import WIDTH, normal, parakeet

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
VOCABULARY = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefgh"]
KINDS = "ctc", "rnnt", "tdt"
WORD_LM = ASSETS / "lm" / "word3.arpa"


# ------------------------------------------------------------------ wav2vec2, random weights
@pytest.fixture(scope="module")
def wav2vec2(tmp_path_factory):
    """A tiny model, its tokenizer and its feature extractor."""
    path = tmp_path_factory.mktemp("wav2vec2") / "vocab.json"
    path.write_text(json.dumps({symbol: i for i, symbol in enumerate(VOCABULARY)}))
    torch.manual_seed(3)
    config = transformers.Wav2Vec2Config(
        vocab_size=len(VOCABULARY), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=(16, 16), conv_stride=(20, 16), conv_kernel=(20, 16), num_feat_extract_layers=2, pad_token_id=0,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(path), bos_token="<s>", eos_token="</s>")
    return transformers.Wav2Vec2ForCTC(config).eval(), tokenizer, transformers.Wav2Vec2FeatureExtractor()


def run_snippet(marker, name, folder, audio, **replaced):
    """Run the block of the page about transformers that has a marker, with a model in a folder."""
    page = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.S) if marker in block)
    for old, new in {name: repr(str(folder)), **replaced}.items():
        assert old in code
        code = code.replace(old, new)
    exec(code, {"audio": audio[0], "other": audio[1]})


def noise(*seconds):
    return [np.random.default_rng(i).standard_normal(int(16000 * n)).astype(np.float32) for i, n in enumerate(seconds)]


def test_a_pipeline_decodes_with_offsets_and_hotwords(wav2vec2):
    model, tokenizer, extractor = wav2vec2
    recognizer = transformers.AutomaticSpeechRecognitionPipeline(
        model=model, tokenizer=tokenizer, feature_extractor=extractor, decoder=build_ctcdecoder(VOCABULARY)
    )
    audio = noise(1, 1)
    plain = recognizer(audio, batch_size=2, return_timestamps="word", decoder_kwargs={"beam_width": 8})
    alone = [recognizer(one, return_timestamps="word", decoder_kwargs={"beam_width": 8}) for one in audio]
    assert [found["text"] for found in plain] == [found["text"] for found in alone]
    for found in plain:
        assert [chunk["text"] for chunk in found["chunks"]] == found["text"].split()
        times = [time for chunk in found["chunks"] for time in chunk["timestamp"]]
        assert times == sorted(times)
        assert times[-1] <= 1.01
    ours = recognizer(audio[0], decoder_kwargs={"hotwords": ["ab"], "hotword_weight": 60.0, "token_min_logp": -50.0})
    assert "ab" in ours["text"].split()


@pytest.fixture
def saved(wav2vec2, monkeypatch, tmp_path):
    """A repository of a model with an LM, made without pyctcdecode and kenlm."""
    for name in "pyctcdecode", "pyctcdecode.alphabet", "pyctcdecode.constants", "kenlm":
        monkeypatch.setitem(sys.modules, name, None)
    provide_pyctcdecode()
    model, tokenizer, extractor = wav2vec2
    lm = tmp_path / "lm.arpa"
    words = ["<s>", "</s>", "<unk>", "abba", "bad", "cabbage"]
    lm.write_text("\\data\\\nngram 1=6\n\n\\1-grams:\n" + "".join(f"-0.8\t{word}\n" for word in words) + "\n\\end\\\n")
    decoder = build_ctcdecoder(VOCABULARY, str(lm), unigrams=words[3:])
    processor = transformers.Wav2Vec2ProcessorWithLM(extractor, tokenizer, decoder)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    # as on the hub, where this file names the class
    (folder / "processor_config.json").unlink()
    settings = {**extractor.to_dict(), "processor_class": "Wav2Vec2ProcessorWithLM"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def test_processor_with_an_lm_decodes(wav2vec2, saved):
    processor = transformers.Wav2Vec2ProcessorWithLM.from_pretrained(saved)
    inputs = processor(noise(1, 0.6), sampling_rate=16000, return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = wav2vec2[0](**inputs).logits.numpy()
    logits[1, 30:] = -100.0  # transformers' value for padding
    found = processor.batch_decode(logits, pool=False, output_word_offsets=True, beam_width=8)
    for text, words, frames, row in zip(found.text, found.word_offsets, (50, 30), logits, strict=True):
        one = processor.decode(row[:frames], output_word_offsets=True, beam_width=8)
        assert (one.text, one.word_offsets) == (text, words)
        assert [word["word"] for word in words] == text.split()
        assert all(0 <= word["start_offset"] < word["end_offset"] <= frames for word in words)
    plain = processor.decode(logits[0], beam_width=8, n_best=3)
    assert plain.lm_score == sorted(plain.lm_score, reverse=True)
    boosted = processor.decode(logits[0], hotwords=["cabbage"], hotword_weight=60.0, token_min_logp=-50.0)
    assert "cabbage" in boosted.text.split()
    assert "cabbage" not in plain.text[0].split()


def test_pipeline_of_a_repository_with_an_lm_decodes(saved):
    recognizer = transformers.pipeline("automatic-speech-recognition", model=str(saved))
    assert recognizer.type == "ctc_with_lm"
    assert recognizer.decoder.__class__.__module__ == "nemo_gpu_decoding.compat.pyctcdecode"
    assert recognizer(noise(1)[0], return_timestamps="word")["chunks"]


def test_snippets_about_processors_run(wav2vec2, saved, capsys):
    run_snippet(
        "Wav2Vec2ProcessorWithLM.from", '"patrickvonplaten/wav2vec2-base-100h-with-4-gram"', saved, noise(1, 0.6),
        castellano="cabbage",
    )  # fmt: skip
    batch, one = capsys.readouterr().out.split("Wav2Vec2DecoderWithLMOutput")[1:]
    assert "start_offset" in batch
    assert "start_offset" not in one


# ------------------------------------------------------------------ Parakeet, random weights
@pytest.mark.parametrize("kind", ["rnnt", "tdt"])
def test_networks_are_those_of_the_model(kind):
    model = parakeet(kind)
    networks = parakeet_networks(model)
    texts = torch.tensor([[VOCAB, 3, 4], [VOCAB, 0, 0]])
    with torch.no_grad():
        encoded = model.get_audio_features(normal(2, 80, 80, seed=5))
        expected = model(encoder_outputs=encoded, decoder_input_ids=texts[:, :1]).logits
        frames = networks.project_encoder(encoded.last_hidden_state.flatten(0, 1))
        prediction, state = networks.start()
        found = networks.join(frames, prediction.expand(len(frames), -1))
        torch.testing.assert_close(found, expected.flatten(0, 1), atol=1e-4, rtol=1e-4)
        predictions, state = networks.predict(texts[:, 1], tuple(part.expand(2, -1, -1) for part in state))
        predictions, _ = networks.predict(texts[:, 2], state)
        torch.testing.assert_close(predictions, model.decoder(texts)[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_frames_of_padding_do_not_count(kind):
    model = parakeet(kind)
    features, lengths = normal(3, 96, 80, seed=5), torch.tensor([96, 33, 64])
    mask = torch.arange(96) < lengths[:, None]
    inputs, frames = parakeet_inputs(model, input_features=features, attention_mask=mask)
    assert frames.tolist() == [12, 5, 8]
    assert inputs.shape == (3, 12, VOCAB + 1 if kind == "ctc" else WIDTH)
    for one, row, length in zip(features, inputs, lengths.tolist(), strict=True):
        alone, none = parakeet_inputs(model, input_features=one[None, :length])
        assert none is None
        torch.testing.assert_close(row[: alone.shape[1]], alone[0], atol=1e-4, rtol=1e-4)


def test_a_model_whose_blank_is_elsewhere_is_named():
    with pytest.raises(ValueError, match=r"config.blank_token_id is 3, expected the last of the model's tokens: 12"):
        parakeet_networks(parakeet("tdt", blank_token_id=3))
    with pytest.raises(ValueError, match=r"config.pad_token_id is 0, expected the last of the model's tokens: 12"):
        parakeet_inputs(parakeet("ctc", pad_token_id=0), input_features=normal(1, 80, 80, seed=5))
    with pytest.raises(ValueError, match=r"model is 'ParakeetForCTC', expected ParakeetForRNNT or ParakeetForTDT"):
        parakeet_networks(parakeet("ctc"))


# ------------------------------------------------------------------ our weights
class Twin:
    def __init__(self, checkpoint, kind):
        self.model, self.processor = converted(checkpoint.model, kind), processor_of(checkpoint.model)
        self.vocabulary = tokenizer_vocabulary(self.processor.tokenizer, self.model.config.vocab_size - 1)

    def inputs(self, audio):
        return parakeet_inputs(self.model, **self.processor(audio, sampling_rate=16000))

    def batches(self, speech):
        audio = [samples for samples, _ in speech]
        return [self.inputs(audio[i : i + 10]) for i in range(0, len(audio), 10)]


@pytest.fixture(scope="module")
def twin(checkpoint):
    return Twin(checkpoint, checkpoint.kind)


@pytest.fixture(scope="module")
def ctc(checkpoint):
    return Twin(checkpoint, "ctc")


@pytest.mark.nemo
def test_no_hypothesis_of_a_transducer_differs(twin, found, speech):
    """`found` is what NeMo's networks give; ONNX exports are compared with the same in test_onnx.py."""
    networks = parakeet_networks(twin.model)
    batches = [searched(networks, *batch) for batch in twin.batches(speech)]
    assert {name: [text for batch in batches for text in batch[name]] for name in found} == found


@pytest.mark.nemo
def test_no_hypothesis_of_a_ctc_model_differs(ctc, checkpoint, features, speech):
    decoder = FlexCTCBeam(128, 128, FlexCTCConfig(beam_size=8, backend="cpu"))
    batches = [text for batch in ctc.batches(speech) for text in tokens(decoder.decode(*batch))]
    assert batches == tokens(decoder.decode(checkpoint.ctc_log_probs(features)))


@pytest.mark.nemo
def test_phrases_of_one_utterance_and_times_of_words(twin, checkpoint, speech):
    audio, text = [samples for samples, _ in speech[:2]], speech[1][1]
    tree = build_boosting_tree(["quay"], twin.vocabulary)
    decoder = ALSDPlusPlus(parakeet_networks(twin.model), ALSDConfig(beam_size=8))
    inputs, lengths = twin.inputs(audio)
    plain = decoder.decode(inputs, lengths)
    boosted = decoder.decode(inputs, lengths, [Request(tree, 20.0), None])
    assert "quay" in twin.vocabulary.text(boosted[0].best.tokens)
    assert boosted[1].best.score == plain[1].best.score
    words = timed_words(plain[1].best, twin.vocabulary)
    assert " ".join(word.text for word in words) == twin.vocabulary.text(plain[1].best.tokens)
    assert twin.vocabulary.tokenize(text) == checkpoint.model.tokenizer.text_to_ids(text)
    edges = [edge for word in words for edge in word[1:]]
    assert 0 <= edges[0] < edges[-1] <= lengths[1]


@pytest.mark.nemo
def test_snippets_about_parakeet_run(twin, speech, tmp_path, capsys):
    twin.model.save_pretrained(tmp_path)
    twin.processor.save_pretrained(tmp_path)
    audio, name = [samples for samples, _ in speech[:2]], '"nvidia/parakeet-tdt-0.6b-v3"'
    run_snippet("AutoProcessor", name, tmp_path, audio, ParakeetForTDT=type(twin.model).__name__)
    printed = capsys.readouterr().out
    second = ALSDPlusPlus(parakeet_networks(twin.model), ALSDConfig(beam_size=8)).decode(*twin.inputs(audio))[1]
    assert f"\n{twin.vocabulary.text(second.best.tokens)} [" in printed


@pytest.mark.nemo
def test_the_pipeline_with_our_weights_and_a_word_lm(ctc, speech):
    tokenizer, extractor = ctc.processor.tokenizer, ctc.processor.feature_extractor
    decoder = build_ctcdecoder(tokenizer.convert_ids_to_tokens(range(129)), str(WORD_LM))
    # the stride keeps the frames of padding out
    audio = [{"raw": samples, "sampling_rate": 16000, "stride": (0, 0)} for samples, _ in speech[:20]]
    options = {"model": ctc.model, "tokenizer": tokenizer, "feature_extractor": extractor}
    greedy = transformers.AutomaticSpeechRecognitionPipeline(**options)([dict(one) for one in audio], batch_size=5)
    recognizer = transformers.AutomaticSpeechRecognitionPipeline(**options, decoder=decoder)
    found = recognizer(
        [dict(one) for one in audio], batch_size=5, return_timestamps="word", decoder_kwargs={"token_min_logp": -8.0}
    )
    found, texts = list(found), [text for _, text in speech[:20]]
    rates = [word_errors(texts, [one["text"] for one in outputs]).wer for outputs in (found, greedy)]
    assert rates[0] < 0.5 * rates[1]
    for one, given in zip(found, audio, strict=True):
        assert [chunk["text"] for chunk in one["chunks"]] == one["text"].split()
        assert 0 < one["chunks"][-1]["timestamp"][1] <= len(given["raw"]) / 16000 + 0.08


@pytest.mark.nemo
def test_a_vocabulary_larger_than_the_tokenizer_is_named(ctc):
    with pytest.raises(ValueError, match=r"size is 140, expected at most the tokenizer's 129 tokens"):
        tokenizer_vocabulary(ctc.processor.tokenizer, 140)
