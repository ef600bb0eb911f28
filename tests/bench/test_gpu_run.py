"""A run on a GPU, with the emulator in its place: all but the GPU's own speed is as there."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from nemo_gpu_decoding.bench.cases import Case, Check
from nemo_gpu_decoding.bench.gpu import run as run_module
from nemo_gpu_decoding.bench.gpu.cases import DECODER, END_TO_END, GPUCase, make_gpu_cases
from nemo_gpu_decoding.bench.gpu.place import HostClock, Place
from nemo_gpu_decoding.bench.gpu.run import run_on_gpu
from nemo_gpu_decoding.bench.gpu.verify import identical
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.base import Setting
from nemo_gpu_decoding.bench.strategies import STRATEGIES, FlexCTC
from nemo_gpu_decoding.search.flexctc_beam import cuda_engine
from tests.assets import ASSETS, CTC_MODEL
from tests.cuda_emulator.fixtures import emulated_runtime

pytest.importorskip("kaldialign")
__all__ = ["emulated_runtime"]

PLACE = Place(torch.device("cpu"), "Emulated GPU", HostClock(), copy_buffer_bytes=1 << 20)
WITH_LM = Setting(4, lm=True)


class Twin(FlexCTC):
    """Our decoder under another name."""

    name = "twin"


class Impostor(FlexCTC):
    """Right on the CPU; what it finds on the GPU has another score."""

    def paths(self, log_probs, lengths):
        found = super().paths(log_probs, lengths)
        if self.backend == "cpu":
            return found
        return [replace(path, score=path.score + 1e-3) for path in found]


class FirstTokenOnly(FlexCTC):
    """Equally wrong on both."""

    def paths(self, log_probs, lengths):
        return [
            replace(path, tokens=path.tokens[:1], frames=path.frames[:1], repeats=path.repeats[:1])
            for path in super().paths(log_probs, lengths)
        ]


@pytest.fixture
def options(tiny_options):
    return replace(
        tiny_options, device="cuda", batches=[1, 2], check_utterances=2, encoder_layers=1,
        encoder_width=16,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def on_the_emulator(emulated_runtime, monkeypatch):
    monkeypatch.setattr(cuda_engine, "THREADS", 32)
    monkeypatch.setattr(cuda_engine, "FINISH_THREADS", 32)


@pytest.fixture
def measured(options, monkeypatch):
    """Rows of some cases."""

    def measure(*cases, ours=FlexCTC, **changes):
        monkeypatch.setitem(STRATEGIES, "flexctc_beam", ours)
        monkeypatch.setattr(run_module, "make_gpu_cases", lambda options: iter(cases))
        return run_on_gpu(replace(options, **changes), PLACE)

    return measure


def case(part=DECODER, batch=2, check=Check.EQUAL, setting=WITH_LM, peer=Twin):
    return GPUCase(part, batch, Case(peer, setting, setting, check, 1000.0, ("lm",)))


def test_a_row_says_all(measured, emulated_runtime, capsys):
    first, second = measured(case(batch=1), case(batch=2), end_to_end=False)
    assert emulated_runtime.launches > 0
    assert first["verified"]
    assert first["verified_by"].endswith("decoded alone; GPU = CPU to the bit: 1 of 1")
    assert second["verified_by"].endswith("GPU = CPU to the bit: 2 of 2")
    assert (first["part"], first["batch"], second["batch"]) == ("decoder", 1, 2)
    assert first["ratio"] == pytest.approx(first["seconds"]["peer"] / first["seconds"]["ours"])
    assert first["met"] is False
    assert second["roofline"]["bytes"] > first["roofline"]["bytes"] > 0
    assert second["roofline"]["bytes"] % (33 * 4) == 0  # V + 1 numbers of 4 bytes per frame
    json.dumps([first, second])
    printed = capsys.readouterr().out
    assert "flexctc_beam on Emulated GPU" in printed
    assert "x roofline" in printed


def test_a_gpu_that_finds_something_else_is_not_verified(measured):
    (row,) = measured(case(), ours=Impostor, end_to_end=False)
    assert row["verified"] is False
    assert row["verified_by"].endswith("GPU = CPU to the bit: 0 of 2")


def test_a_decoder_that_is_wrong_on_both_is_not_verified(measured):
    (row,) = measured(case(), ours=FirstTokenOnly, end_to_end=False)
    assert row["verified"] is False
    assert row["verified_by"].startswith("equal hypotheses: 0 of 2")
    assert row["verified_by"].endswith("GPU = CPU to the bit: 2 of 2")


def test_decoders_are_made_anew_for_every_batch_size(measured, monkeypatch):
    prepared = []
    prepare = Twin.prepare
    monkeypatch.setattr(
        Twin, "prepare", lambda self, *given: prepared.append(given) or prepare(self, *given)
    )
    measured(case(batch=1), case(batch=1), case(batch=2), end_to_end=False)
    assert len(prepared) == 3  # one for each batch size, and one that decodes utterances alone


def test_word_errors_are_those_of_the_batch(measured):
    (row,) = measured(case(check=Check.WER), end_to_end=False)
    assert row["verified"]
    assert row["verified_by"].startswith("WER ours <= WER peer")


def test_batches_need_utterances(options):
    with pytest.raises(ValueError, match="batches holds 2, expected at most 1, the utterances"):
        run_on_gpu(replace(options, utterances=1), PLACE)


def test_rows_and_header_are_written(measured, tmp_path):
    plot = tmp_path / "gpu.png"
    measured(case(batch=1), case(batch=2), out=str(tmp_path), plot=str(plot), end_to_end=False)
    (path,) = tmp_path.glob("*.json")
    assert path.name.startswith("flexctc_beam-emulated-gpu-")
    written = json.loads(path.read_text())
    assert written["device"] == "Emulated GPU"
    assert written["copy_bandwidth"] > 0
    assert [row["batch"] for row in written["rows"]] == [1, 2]
    assert str(tmp_path) not in path.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.nemo
def test_everything_beside_nemo(options, tmp_path):
    """Both parts, both peers, with and without LM and phrases; an encoder with random weights."""
    pytest.importorskip("nemo.collections.asr")
    out, plot = tmp_path / "r.json", tmp_path / "r.png"
    rows = run_on_gpu(replace(options, peers=["nemo"], out=str(out), plot=str(plot)), PLACE)
    assert [(row["part"], row["batch"], row["peer"], row["params"]["phrases"]) for row in rows] == [
        (part, batch, peer, phrases)
        for batch in (1, 2)
        for part in (DECODER, END_TO_END)
        for peer in ("nemo", "nemo_greedy")
        for phrases in (0, 4)
    ]
    assert [row["verified_by"] for row in rows if not row["verified"]] == []
    assert all((row["roofline"] is None) == (row["part"] == END_TO_END) for row in rows)
    header = json.loads(out.read_text())
    assert header["encoder"] == "FastConformer, 1 layers x 16, bfloat16, random weights"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.nemo
def test_a_model_and_its_speech(options):
    pytest.importorskip("nemo.collections.asr")
    changes = {
        "peers": ["nemo"], "model": str(CTC_MODEL), "manifest": str(ASSETS / "speech" / "test.json"),
        "lm": str(ASSETS / "lm" / "tok3.arpa"), "word_lm": str(ASSETS / "lm" / "word3.arpa"),
        "utterances": 2, "batches": [2], "phrases": 8,
    }  # fmt: skip
    rows = run_on_gpu(replace(options, **changes), PLACE)
    assert len(rows) == 8
    assert [row["verified_by"] for row in rows if not row["verified"]] == []
    assert all(row["wer"]["ours"] < 60 for row in rows)


def test_the_default_run_has_every_row_that_is_promised():
    options = BenchOptions(device="cuda", beams=[4, 16, 64])
    cases = list(make_gpu_cases(options))
    assert {c.batch for c in cases} == {1, 8, 32, 128}
    for part in (DECODER, END_TO_END):
        for batch in options.batches:
            found = [
                (c.case.peer.name, c.case.ours.beam_size, c.case.ours.lm, c.case.ours.phrases)
                for c in cases
                if (c.part, c.batch) == (part, batch)
            ]
            assert found == [
                (peer, beam, phrases > 0, phrases)
                for peer in ("nemo", "nemo_greedy")
                for phrases in (0, 200)
                for beam in (4, 16, 64)
            ]
    promised = [(c.part, c.batch, c.case.peer.name, c.case.target) for c in cases if c.case.target]
    assert promised == [
        (DECODER, 32, "nemo", 20.0),
        (END_TO_END, 32, "nemo_greedy", pytest.approx(0.990, abs=1e-3)),
    ]


def test_other_peers_are_said_to_stay_on_the_cpu(options, capsys):
    peers = ["flashlight", "pyctcdecode"]
    assert run_on_gpu(replace(options, peers=peers, end_to_end=False), PLACE) == []
    assert "no row on a GPU for flashlight, pyctcdecode, see device=cpu" in capsys.readouterr().err


def test_paths_are_compared_to_the_bit(options, tiny_task):
    decoder = FlexCTC(options)
    decoder.prepare(tiny_task, WITH_LM)
    first, second = (decoder.paths(tiny_task.log_probs, tiny_task.lengths)[0] for _ in range(2))
    assert identical(first, second)
    assert not identical(first, replace(second, score=second.score + 1e-6))
    assert not identical(first, replace(second, tokens=second.tokens[:-1]))
    assert not identical(first, replace(second, alignment=second.tokens))
