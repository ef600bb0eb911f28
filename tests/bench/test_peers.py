"""Every peer that is installed reads clear emissions, and says so when it is not installed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nemo_gpu_decoding.bench.ours import OURS, flexctc_beam
from nemo_gpu_decoding.bench.peers.base import Peer, Setting, alone, collapse
from nemo_gpu_decoding.bench.peers.nemo import BEAM_BATCH, GREEDY_BATCH
from nemo_gpu_decoding.bench.peers.text import FLASHLIGHT, PYCTCDECODE
from nemo_gpu_decoding.bench.tasks import Task
from nemo_gpu_decoding.bench.verify import Errors

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
    return replace(tiny_task, inputs=log_probs, lengths=lengths)


@pytest.mark.parametrize(
    ("peer", "setting"),
    [
        pytest.param(GREEDY_BATCH, Setting(0), **NEMO),
        pytest.param(BEAM_BATCH, Setting(4), **NEMO),
        pytest.param(BEAM_BATCH, Setting(4, lm=True, phrases=4), **NEMO),
        (FLASHLIGHT, Setting(4)),
        (FLASHLIGHT, Setting(4, lm=True)),
        (PYCTCDECODE, Setting(4)),
        (PYCTCDECODE, Setting(4, lm=True, phrases=4)),
        (Peer("flexctc_beam", OURS["flexctc_beam"]), Setting(4, lm=True, phrases=4)),
    ],
)
def test_a_peer_reads_clear_emissions(peer, setting, clear_task, tiny_options):
    if peer.unavailable():
        pytest.skip(peer.unavailable())
    ready = peer.prepare(tiny_options, clear_task, setting)
    outputs = ready.read(ready.run(clear_task.inputs, clear_task.lengths))
    assert Errors.of(clear_task, outputs).wer == 0


def test_utterances_alone_are_decoded_without_their_padding(clear_task, tiny_options):
    ready = flexctc_beam(tiny_options, clear_task, Setting(4))
    padded = clear_task.inputs.clone()
    padded[0, int(clear_task.lengths[0]) :] = float("nan")
    found = alone(ready.hypotheses, (padded, clear_task.lengths))
    assert found == ready.hypotheses(clear_task.inputs, clear_task.lengths)


def test_a_part_that_is_missing_is_said_to_be(monkeypatch):
    peer = FLASHLIGHT._replace(needs=("torch.no_such_part",))
    assert peer.unavailable() == f"torch.no_such_part not installed: {peer.install}"
    assert (
        FLASHLIGHT._replace(needs=("no_parent.of_this",)).unavailable().startswith("no_parent.of_this")
    )


def test_collapse_merges_repeats_and_drops_blanks():
    assert collapse([9, 1, 1, 9, 1, 2, 2, 9], blank_id=9) == [1, 1, 2]
    assert collapse([], blank_id=9) == []
