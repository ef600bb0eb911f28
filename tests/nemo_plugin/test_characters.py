"""Models over characters: words with times and confidence, subtitles in scripts without spaces."""

import json

import numpy as np
import pytest
import soundfile
import torch

from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.words import words_of

models = pytest.importorskip("nemo.collections.asr.models")
from omegaconf import OmegaConf  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.nemo]
LATIN, KANA = list(" abcdefghijklmnopqrstuvwxyz'.,"), list("あいうえおかきくけこさしすせそたちつてと東京都日本語。")
MIXED = [" ", *KANA]


@pytest.fixture(scope="module", params=[LATIN, KANA, MIXED], ids=["Latin", "kana", "kana with spaces"])
def model(request, tmp_path_factory):
    """A small CTC model with random weights, and 20 s of noise."""
    letters, folder, module = request.param, tmp_path_factory.mktemp("model"), "nemo.collections.asr.modules."
    layer = {
        "filters": 32,
        "repeat": 1,
        "kernel": [11],
        "stride": [8],
        "dilation": [1],
        "dropout": 0.0,
        "residual": False,
    }
    sound = {"features": 16, "dither": 0.0, "pad_to": 0, "window_stride": 0.01, "window_size": 0.02}
    encoder = {"feat_in": 16, "conv_mask": True, "jasper": [layer], "activation": "relu"}
    decoder = {"feat_in": 32, "num_classes": len(letters), "vocabulary": letters}
    config = {
        "sample_rate": 16000, "labels": letters,
        "preprocessor": {"_target_": f"{module}AudioToMelSpectrogramPreprocessor", **sound},
        "encoder": {"_target_": f"{module}ConvASREncoder", **encoder},
        "decoder": {"_target_": f"{module}ConvASRDecoder", **decoder},
    }  # fmt: skip
    torch.manual_seed(0)
    made = models.EncDecCTCModel(cfg=OmegaConf.create(config))
    made.decoder.decoder_layers[0].weight.data *= 3
    made.save_to(f"{folder}/m.nemo")
    soundfile.write(folder / "a.wav", 0.1 * np.random.default_rng(0).normal(size=320000), 16000)
    return folder


@pytest.mark.parametrize("options", [[], ["n_best=2"], ["strategy=greedy_batch"], ["segment_seconds=6"]])
def test_words_have_times_and_confidence(options, model, tmp_path):
    out = tmp_path / "o.jsonl"
    arguments = [f"model={model}/m.nemo", f"audio={model}/a.wav", f"out={out}", "subtitles=srt,tsv"]
    assert main(["transcribe", *arguments, *options]) == 0
    row = json.loads(out.read_text())
    assert row["pred_text"]
    assert [word["word"] for word in row["words"]] == words_of(row["pred_text"])
    assert all(0 <= word["raw_confidence"] <= 1 and word["start"] <= word["end"] for word in row["words"])
    assert all(word.keys() == {"word", "start", "end", "raw_confidence"} for word in row["words"])
    cues = [line.split("\t") for line in (tmp_path / "a.tsv").read_text().splitlines()[1:]]
    letters = set(row["pred_text"]) - {" "}
    assert max(len(text) for _, _, text in cues) <= (42 if letters <= set(LATIN) else 20)
    assert max(int(end) - int(start) for start, end, _ in cues) <= 7000
    assert "".join(text for _, _, text in cues).replace(" ", "") == row["pred_text"].replace(" ", "")
    assert all(text[0] != "。" for _, _, text in cues[1:])
