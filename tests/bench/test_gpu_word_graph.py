"""Word graphs on a GPU, with the emulator in its place: beside Riva's decoder and Kaldi's, and live."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from nemo_gpu_decoding.bench.gpu import run as gpu_run
from nemo_gpu_decoding.bench.gpu.cases import DECODER, END_TO_END, make_gpu_cases
from nemo_gpu_decoding.bench.gpu.place import HostClock, Place
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.kaldi_decoder import KaldiDecoder
from nemo_gpu_decoding.bench.peers.riva import RivaDecoder
from nemo_gpu_decoding.bench.run import run
from nemo_gpu_decoding.bench.stream import run as stream_run
from nemo_gpu_decoding.bench.word_graph.settings import graph_setting
from nemo_gpu_decoding.bench.word_graph.sources import word_graph_task
from nemo_gpu_decoding.search.flexctc_beam import cuda_engine as flexctc_cuda_engine
from nemo_gpu_decoding.search.word_graph import kernel_abi
from tests.cuda_emulator.fixtures import emulated_runtime

pytest.importorskip("kaldialign")
kaldifst = pytest.importorskip("kaldifst")
__all__ = ["emulated_runtime"]

PLACE = Place(torch.device("cpu"), "Emulated GPU", HostClock(), copy_buffer_bytes=1 << 20)


@pytest.fixture
def options(tiny_options):
    return replace(
        tiny_options, strategy="cuda_wfst", device="cuda", graph_beams=[12], graph_sentences=300,
        batches=[1, 2], check_utterances=2, end_to_end=False, encoder_layers=1, encoder_width=16,
        max_active=300, peers=["riva", "kaldi_decoder"],
    )  # fmt: skip


@pytest.fixture(autouse=True)
def on_the_emulator(emulated_runtime, monkeypatch):
    for module in (gpu_run, stream_run):
        monkeypatch.setattr(module, "find_place", lambda device: PLACE)
    for name, size in {"THREADS": 32, "CANDIDATES": 256, "LEAST_GROUPS": 64}.items():
        monkeypatch.setattr(kernel_abi, name, size)
    for name in ("THREADS", "FINISH_THREADS"):
        monkeypatch.setattr(flexctc_cuda_engine, name, 32)


class Found(NamedTuple):
    """A hypothesis as riva-asrlib-decoder gives it."""

    words: list[int]


class FakeRiva:
    """Stands in for its decoder: the same arguments, the same files, Kaldi's search."""

    def __init__(self, config, tlg, words, columns):
        self.config, self.columns = config, columns
        self._fst = kaldifst.StdVectorFst.read(tlg)
        with open(words, encoding="utf-8") as file:
            self.words = [line.split("\t")[0] for line in file]

    def decode_nbest(self, log_probs, lengths):
        from kaldi_decoder import DecodableCtc, FasterDecoder, FasterDecoderOptions

        assert log_probs.is_contiguous()
        assert (lengths.dtype, lengths.device.type) == (torch.int64, "cpu")
        online = self.config.online_opts
        search = FasterDecoderOptions(
            beam=online.decoder_opts.default_beam,
            max_active=online.decoder_opts.max_active,
            min_active=0,
        )
        found = []
        for frames, length in zip(log_probs.numpy(), lengths.tolist(), strict=True):
            decoder = FasterDecoder(self._fst, search)
            decoder.decode(DecodableCtc(frames[:length].copy()))
            _, path = decoder.get_best_path()
            found.append([Found(list(kaldifst.get_linear_symbol_sequence(path)[2]))])
        return found


def fake_config():
    online = types.SimpleNamespace(
        decoder_opts=types.SimpleNamespace(), lattice_postprocessor_opts=types.SimpleNamespace()
    )
    return types.SimpleNamespace(online_opts=online)


@pytest.fixture
def riva(monkeypatch):
    """riva-asrlib-decoder as far as it is used."""
    pytest.importorskip("kaldi_decoder")
    module = types.ModuleType("riva.asrlib.decoder.python_decoder")
    module.BatchedMappedDecoderCuda, module.BatchedMappedDecoderCudaConfig = FakeRiva, fake_config
    for name in ("riva", "riva.asrlib", "riva.asrlib.decoder"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(RivaDecoder, "available", lambda self: None)


# ---------------------------------------------------------------------------------------- the rows


def test_rows_beside_kaldi_and_a_riva_that_cannot_be_had(
    options, tmp_path, emulated_runtime, monkeypatch, capsys
):
    pytest.importorskip("kaldi_decoder")
    monkeypatch.setitem(sys.modules, "riva", None)  # not found, even if it is installed
    out, plot = tmp_path / "r.json", tmp_path / "r.png"
    rows = run(replace(options, out=str(out), plot=str(plot), probes=True))
    assert [(row["batch"], row["peer"]) for row in rows] == [
        (batch, peer) for batch in (1, 2) for peer in ("riva", "kaldi_decoder")
    ]
    for row in rows[::2]:
        assert row["skipped"].startswith("riva not installed: pip install riva-asrlib-decoder")
        assert "up to 7 times the throughput" in row["skipped"]
        assert row["verified"] is False
    for row, count in zip(rows[1::2], (1, 2), strict=True):
        assert row["verified"], row["verified_by"]
        assert row["verified_by"].startswith("equal words and costs: 2 of 2")
        assert row["verified_by"].endswith(f"GPU = CPU to the bit: {count} of {count}")
        assert row["roofline"]["bytes"] > 0
        assert row["graph"]["ngrams"] > 1000
        assert row["wer"]["ours"] == row["wer"]["peer"]
    assert emulated_runtime.launches > 0
    written = json.loads(out.read_text())
    assert written["device"] == "Emulated GPU"
    assert "probes" not in written  # they are about flexctc_beam
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "cuda_wfst on Emulated GPU" in capsys.readouterr().out


def test_rows_beside_riva(options, riva):
    (row,) = run(replace(options, batches=[2], peers=["riva"]))
    assert row["verified"], row["verified_by"]
    assert row["verified_by"].startswith("WER ours about WER peer")
    assert row["skipped"] is None
    assert row["wer"]["peer"] < 50


def test_riva_gets_what_we_search(options, riva):
    task, setting = word_graph_task(options), graph_setting(options, 12)
    theirs, kaldi = RivaDecoder(options), KaldiDecoder(options)
    for decoder in (theirs, kaldi):
        decoder.prepare(task, setting)
    given = theirs.decode(task.log_probs, task.lengths), kaldi.decode(task.log_probs, task.lengths)
    assert given[0] == given[1]
    assert theirs._search.columns == task.vocab_size + 1
    assert theirs._search.words[0] == "<eps>"
    assert theirs._search.config.online_opts.max_batch_size == len(task.texts)


def test_another_package_of_riva_is_not_its_decoder(options, monkeypatch):
    package = types.ModuleType("riva")
    package.__path__, package.__spec__ = [], types.SimpleNamespace(submodule_search_locations=[])
    monkeypatch.setitem(sys.modules, "riva", package)
    assert RivaDecoder(options).available().startswith("riva.asrlib not installed: pip install")


@pytest.mark.nemo
def test_behind_an_encoder(options):
    pytest.importorskip("nemo.collections.asr")
    (row,) = run(replace(options, batches=[2], peers=["nemo"], end_to_end=True))
    assert (row["part"], row["peer"], row["roofline"]) == (END_TO_END, "nemo_greedy", None)
    assert row["verified_by"].startswith("WER ours <= WER peer")
    assert row["verified"], row["verified_by"]


def test_the_default_run_has_every_row_that_is_promised():
    options = BenchOptions(strategy="cuda_wfst", device="cuda")
    cases = list(make_gpu_cases(options))
    assert [(c.part, c.batch, c.case.peer.name, c.case.ours.beam_size) for c in cases] == [
        (part, batch, peer, beam)
        for batch in (1, 8, 32, 128)
        for part, peer in ((DECODER, "riva"), (DECODER, "kaldi_decoder"), (END_TO_END, "nemo_greedy"))
        for beam in (10, 13, 17, 25)
    ]
    promised = [(c.batch, c.case.peer.name, c.case.target) for c in cases if c.case.target]
    assert promised == [(128, "riva", 5.0)] * 4


# ------------------------------------------------------------------------------------ live streams


@pytest.mark.parametrize("strategy", ["cuda_wfst", "flexctc_beam"])
def test_live_streams(options, strategy, tmp_path, monkeypatch, emulated_runtime, capsys):
    monkeypatch.setattr(stream_run, "WARM_UP", 1)
    monkeypatch.setattr(stream_run, "ALONE", 2)
    out, plot = tmp_path / "r.json", tmp_path / "r.png"
    live = replace(
        options, strategy=strategy, mode="stream", streams=[3], stream_seconds=1.5, out=str(out),
        plot=str(plot),
    )  # fmt: skip
    rows = run(live)
    assert [(row["streams"], row["texts"]) for row in rows] == [(3, "none"), (3, "own")]
    assert [row["verified_by"] for row in rows if not row["verified"]] == []
    assert emulated_runtime.launches > 0
    written = json.loads(out.read_text())
    assert written["device"] == "Emulated GPU"
    assert "wall seconds" in written["clock"]
    assert f"{strategy} on Emulated GPU" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
