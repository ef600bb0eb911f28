"""Every peer that is installed reads clear emissions, and says so when it is not installed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nemo_gpu_decoding.bench.peers import flashlight as flashlight_module
from nemo_gpu_decoding.bench.peers.base import Setting, collapse
from nemo_gpu_decoding.bench.peers.flashlight import Flashlight
from nemo_gpu_decoding.bench.peers.nemo import NemoBeam, NemoGreedy
from nemo_gpu_decoding.bench.peers.pyctcdecode import PyCTCDecode
from nemo_gpu_decoding.bench.strategies import FlexCTC
from nemo_gpu_decoding.bench.task import Task
from nemo_gpu_decoding.bench.verify import Check, Errors, verify

NEMO = {"marks": pytest.mark.nemo}


@pytest.fixture
def clear_task(tiny_task: Task) -> Task:
    """The tiny task spoken without any doubt: token, blank, token, blank ..."""
    length = 2 * max(map(len, tiny_task.tokens))
    log_probs = torch.full((2, length, 33), -20.0)
    log_probs[:, :, 32] = -1e-6
    for row, tokens in zip(log_probs, tiny_task.tokens, strict=True):
        for i, token in enumerate(tokens):
            row[2 * i, 32] = -20.0
            row[2 * i, token] = -1e-6
    lengths = torch.tensor([2 * len(tokens) for tokens in tiny_task.tokens])
    return replace(tiny_task, log_probs=log_probs, lengths=lengths)


@pytest.mark.parametrize(
    ("peer_class", "setting"),
    [
        pytest.param(NemoGreedy, Setting(0), **NEMO),
        pytest.param(NemoBeam, Setting(4), **NEMO),
        pytest.param(NemoBeam, Setting(4, lm=True, phrases=4), **NEMO),
        (Flashlight, Setting(4)),
        (Flashlight, Setting(4, lm=True)),
        (PyCTCDecode, Setting(4)),
        (PyCTCDecode, Setting(4, lm=True, phrases=4)),
        (FlexCTC, Setting(4, lm=True, phrases=4)),
    ],
)
def test_a_peer_reads_clear_emissions(peer_class, setting, clear_task, tiny_options):
    peer = peer_class(tiny_options)
    if peer.available():
        pytest.skip(peer.available())
    peer.prepare(clear_task, setting)
    together = peer.decode(clear_task.log_probs, clear_task.lengths)
    assert Errors.of(clear_task, together).wer == 0


@pytest.mark.nemo
@pytest.mark.parametrize("setting", [Setting(4), Setting(4, lm=True), Setting(4, lm=True, phrases=4)])
def test_our_hypotheses_are_those_of_nemo(setting, tiny_task, tiny_options):
    pytest.importorskip("nemo.collections.asr")
    theirs, ours = NemoBeam(tiny_options), FlexCTC(tiny_options)
    for decoder in (theirs, ours):
        decoder.prepare(tiny_task, setting)
    verdict = verify(Check.EQUAL, tiny_task, theirs, ours, (Errors(0, 0), Errors(0, 0)))
    assert verdict.verified, verdict.how


def test_utterances_alone_are_decoded_without_their_padding(clear_task, tiny_options):
    peer = FlexCTC(tiny_options)
    peer.prepare(clear_task, Setting(4))
    padded = clear_task.log_probs.clone()
    padded[0, int(clear_task.lengths[0]) :] = float("nan")
    alone = peer.hypotheses_alone(padded, clear_task.lengths)
    assert alone == peer.hypotheses(clear_task.log_probs, clear_task.lengths)


def test_flashlight_says_why_it_is_not_there(monkeypatch, tiny_options):
    def fail(name):
        raise ImportError("no module of that name")

    monkeypatch.setattr(flashlight_module.importlib, "import_module", fail)
    assert "no module of that name: pip install" in Flashlight(tiny_options).available()


def test_collapse_merges_repeats_and_drops_blanks():
    assert collapse([9, 1, 1, 9, 1, 2, 2, 9], blank_id=9) == [1, 1, 2]
    assert collapse([], blank_id=9) == []
