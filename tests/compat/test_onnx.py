"""ONNX exports of the shipped checkpoints, decoded as NeMo's own networks are."""

import copy
import shutil

import numpy as np
import pytest
import torch

from nemo_gpu_decoding import ALSDConfig, ALSDPlusPlus, FlexCTCBeam, FlexCTCConfig
from nemo_gpu_decoding.compat.features import log_mel
from nemo_gpu_decoding.compat.onnx import OnnxCTC, OnnxTransducer
from nemo_gpu_decoding.metrics import word_errors
from tests.compat.conftest import DURATIONS, searched, tokens

pytest.importorskip("onnxruntime")
pytest.importorskip("nemo")
pytestmark = [pytest.mark.slow, pytest.mark.nemo]


class Exported:
    """A checkpoint, and its exports as NeMo and as the scripts of sherpa-onnx write them."""

    def __init__(self, checkpoint, folder):
        self.kind, self.folder, self.model = checkpoint.kind, folder, checkpoint.model
        self._nemo(folder / "nemo")
        self._sherpa(folder / "sherpa", folder / "int8")

    def _nemo(self, folder):
        folder.mkdir()
        self._tokens(folder / "vocab.txt")
        self.model.export(str(folder / "model.onnx"))

    def _sherpa(self, folder, quantized):
        from onnxruntime.quantization import QuantType, quantize_dynamic

        folder.mkdir()
        quantized.mkdir()
        self._tokens(folder / "tokens.txt")
        shutil.copy(folder / "tokens.txt", quantized)
        parts = {"encoder": self.model.encoder, "decoder": self.model.decoder, "joiner": self.model.joint}
        for name, part in parts.items():
            part.export(str(folder / f"{name}.onnx"))
            weight_type = QuantType.QUInt8 if name == "encoder" else QuantType.QInt8
            quantize_dynamic(folder / f"{name}.onnx", quantized / f"{name}.int8.onnx", weight_type=weight_type)

    def ctc(self, folder):
        self.model.set_export_config({"decoder_type": "ctc"})
        folder.mkdir()
        self._tokens(folder / "tokens.txt")
        self.model.export(str(folder / "model.onnx"))
        return folder

    def _tokens(self, path):
        lines = [f"{piece} {i}\n" for i, piece in enumerate([*self.model.joint.vocabulary, "<blk>"])]
        path.write_text("".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory):
    return Exported(checkpoint, tmp_path_factory.mktemp(checkpoint.kind))


def test_features_are_those_of_nemo(exported, speech):
    for samples, _ in speech[:5]:
        with torch.inference_mode():
            expected, lengths = exported.model.preprocessor(
                input_signal=torch.from_numpy(samples)[None], length=torch.tensor([len(samples)])
            )
        torch.testing.assert_close(log_mel(samples), expected[0, :, : int(lengths[0])], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["nemo", "sherpa"])
def test_hypotheses_of_onnx_exports_equal_those_of_nemo(exported, features, found, layout):
    networks = OnnxTransducer(exported.folder / layout)
    encoded = networks.encode(features)
    assert networks.durations == DURATIONS[exported.kind]
    assert searched(networks, encoded) == found


def test_int8_is_nearly_as_good(exported, features, found, speech):
    networks = OnnxTransducer(exported.folder / "int8")
    results = ALSDPlusPlus(networks, ALSDConfig(beam_size=4)).decode(networks.encode(features))
    rates = [
        word_errors([text for _, text in speech], [networks.vocabulary.text(one) for one in hypotheses]).wer
        for hypotheses in (tokens(results), found["alsd"])
    ]
    assert rates[0] <= rates[1] + 0.02


def test_ctc_export_decodes_like_nemo(exported, checkpoint, features, tmp_path):
    if exported.kind == "tdt":
        pytest.skip("the heads are alike")
    model = OnnxCTC(exported.ctc(tmp_path / "ctc"))
    expected = checkpoint.ctc_log_probs(features[:20])
    log_probs = model.log_probs(features[:20])
    for ours, theirs in zip(log_probs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    size = len(model.vocabulary)
    decoder = FlexCTCBeam(size, size, FlexCTCConfig(beam_size=8))
    assert tokens(decoder.decode(log_probs)) == tokens(decoder.decode(expected))


def test_durations_and_quantization_can_be_named(exported, tmp_path):
    shutil.copytree(exported.folder / "sherpa", tmp_path, dirs_exist_ok=True)
    for file in (exported.folder / "int8").glob("*.onnx"):
        shutil.copy(file, tmp_path)
    assert not OnnxTransducer(tmp_path)._joint.is_alone
    assert OnnxTransducer(tmp_path, quantization="int8")._joint.is_alone
    if exported.kind == "tdt":
        assert OnnxTransducer(tmp_path, durations=[1, 2, 4, 8, 16]).durations == (1, 2, 4, 8, 16)
        with pytest.raises(ValueError, match="networks give 134 columns, expected 130"):
            ALSDPlusPlus(OnnxTransducer(tmp_path, durations=[1]))


def test_missing_parts_are_named(exported, tmp_path):
    source = exported.folder / "sherpa"
    with pytest.raises(FileNotFoundError, match=r"has no tokens.txt or vocab.txt; its files: \[\]"):
        OnnxTransducer(tmp_path / "none")
    shutil.copy(source / "tokens.txt", tmp_path)
    shutil.copy(source / "encoder.onnx", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no file such as decoder\.onnx"):
        OnnxTransducer(tmp_path)
    shutil.copy(source / "encoder.onnx", tmp_path / "my-encoder.onnx")
    with pytest.raises(ValueError, match=r"has encoder\.onnx, my-encoder\.onnx, expected one"):
        OnnxTransducer(tmp_path)
    (tmp_path / "tokens.txt").write_text("a 0\nb 1\n")
    with pytest.raises(ValueError, match=r"tokens.txt ends with \['b 1'\], expected the blank"):
        OnnxTransducer(tmp_path)


def test_bad_features_and_samples_are_named(exported):
    networks = OnnxTransducer(exported.folder / "nemo")
    with pytest.raises(ValueError, match=r"features has shape \(1, 80, 40\), expected \[features, frames\]"):
        networks.encode([np.zeros((1, 80, 40), np.float32)])
    with pytest.raises(ValueError, match=r"samples has shape \(2, 1600\), expected \[n\] of one channel"):
        log_mel(np.zeros((2, 1600)))


def test_frames_that_an_encoder_adds_are_cut(exported):
    networks = copy.copy(OnnxTransducer(exported.folder / "nemo"))
    networks._encoder = lambda features, frames: (np.ones((1, 4, int(frames[0]) + 7), np.float32), frames.numpy() // 8)
    assert [tuple(one.shape) for one in networks.encode([torch.zeros(80, 160)])] == [(20, 4)]
