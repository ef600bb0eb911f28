"""Models of Hugging Face transformers with random weights, decoded by this package."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from nemo_gpu_decoding import ALSDConfig, ALSDPlusPlus
from nemo_gpu_decoding.compat.parakeet import parakeet_networks
from nemo_gpu_decoding.compat.pyctcdecode import build_ctcdecoder

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
VOCABULARY = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefgh"]


@pytest.fixture(scope="module")
def recognizer(tmp_path_factory):
    """A tiny wav2vec2, and the pipeline of its model, tokenizer and feature extractor with a decoder."""
    path = tmp_path_factory.mktemp("wav2vec2") / "vocab.json"
    path.write_text(json.dumps({symbol: i for i, symbol in enumerate(VOCABULARY)}))
    torch.manual_seed(3)
    config = transformers.Wav2Vec2Config(
        vocab_size=len(VOCABULARY), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=(16, 16), conv_stride=(20, 16), conv_kernel=(20, 16), num_feat_extract_layers=2, pad_token_id=0,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    return transformers.AutomaticSpeechRecognitionPipeline(
        model=transformers.Wav2Vec2ForCTC(config).eval(),
        tokenizer=transformers.Wav2Vec2CTCTokenizer(str(path)),
        feature_extractor=transformers.Wav2Vec2FeatureExtractor(),
        decoder=build_ctcdecoder(VOCABULARY),
    )


def test_a_pipeline_decodes_with_offsets_and_hotwords(recognizer):
    audio = [np.random.default_rng(seed).standard_normal(16000).astype(np.float32) for seed in (1, 2)]
    plain = recognizer(audio, batch_size=2, return_timestamps="word", decoder_kwargs={"beam_width": 8})
    alone = [recognizer(one, return_timestamps="word", decoder_kwargs={"beam_width": 8}) for one in audio]
    assert [found["text"] for found in plain] == [found["text"] for found in alone]
    for found in plain:
        assert [chunk["text"] for chunk in found["chunks"]] == found["text"].split()
        times = [time for chunk in found["chunks"] for time in chunk["timestamp"]]
        assert times == sorted(times)
        assert times[-1] <= 1.01
    boosted = recognizer(
        audio[0], decoder_kwargs={"hotwords": ["ab"], "hotword_weight": 60.0, "token_min_logp": -50.0}
    )
    assert "ab" in boosted["text"].split()


@pytest.mark.parametrize("kind", ["RNNT", "TDT"])
def test_parakeet_transducers(kind):
    torch.manual_seed(5)
    encoder = transformers.ParakeetEncoderConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_mel_bins=80,
        subsampling_conv_channels=8, conv_kernel_size=9,
    )  # fmt: skip
    config = getattr(transformers, f"Parakeet{kind}Config")(
        vocab_size=12, blank_token_id=11, decoder_hidden_size=16, num_decoder_layers=1, encoder_config=encoder
    )
    model = getattr(transformers, f"ParakeetFor{kind}")(config).eval()
    networks = parakeet_networks(model)
    with torch.no_grad():
        encoded = model.get_audio_features(torch.randn(2, 80, 80))
        logits = model(encoder_outputs=encoded, decoder_input_ids=torch.full((2, 1), config.blank_token_id)).logits
        frames = networks.project_encoder(encoded.last_hidden_state.flatten(0, 1))
        first, _ = networks.start()
        ours = networks.join(frames, first.expand(len(frames), -1))
        torch.testing.assert_close(ours, logits.flatten(0, 1), atol=1e-5, rtol=1e-4)
        results = ALSDPlusPlus(networks, ALSDConfig(beam_size=4)).decode(encoded.last_hidden_state)
    assert len(results) == 2
    assert all(0 <= token < config.blank_token_id for nbest in results for token in nbest.best.tokens)
