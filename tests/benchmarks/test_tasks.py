"""Options, and the tasks that they name: peaked, hard, the user's files."""

import gzip
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.options import BenchOptions
from benchmarks.ours import OURS
from benchmarks.peers.base import Peer, Setting, collapse
from benchmarks.peers.nemo import BEAM_BATCH, GREEDY_BATCH
from benchmarks.peers.text import FLASHLIGHT, PYCTCDECODE
from benchmarks.sources import make_tasks
from benchmarks.verify import Errors

pytestmark = pytest.mark.slow


# ------------------------------------------------------------------------------------------ options
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "nonsense"}, "strategy is 'nonsense', expected one of flexctc_beam, "),
        ({"tasks": []}, "tasks holds nothing, expected any of peaked, hard"),
        ({"beams": [0]}, "beams is"),
        ({"max_frames": 10}, "max_frames is 10"),
        ({"weights": {"lm_wait": 1.0}}, "weights is 'lm_wait', expected one of lm_weight, "),
        ({"pair_seconds": float("inf")}, "pair_seconds is inf"),
        ({"group_sizes": [-1]}, r"group_sizes is \[-1\], expected integers >= 0"),
        ({"weights": {"small_share": 2.0}}, r"weights.small_share is 2.0, expected a number in \(0, 1\]"),
        ({"lm": "x.arpa"}, "lm is 'x.arpa' without data="),
        ({"strategy": "aes_pp", "data": "x.npz"}, "data is 'x.npz' with strategy=aes_pp, expected model="),
        ({"device": "gpu"}, "device is 'gpu', expected cpu, cuda or cuda:N"),
        ({"encoder_width": 12}, "encoder_width is 12, expected a multiple of 8"),
        ({"model": "m.nemo", "tokenizer": "t"}, "tokenizer is 't' with model="),
        ({"out": "nowhere/r.json"}, "out is 'nowhere/r.json'"),
        ({"chunk_ms": 0.0}, "chunk_ms is 0.0, expected a finite number > 0"),
        ({"mode": "scale"}, "strategy is 'flexctc_beam', expected paged_biglm with mode=scale"),
        ({"mode": "scale", "strategy": "paged_biglm", "data": "x.npz"}, "data is 'x.npz' with mode=scale"),
    ],
)
def test_bad_values_name_the_option(changes, message):
    with pytest.raises(ValueError, match=message):
        BenchOptions(**changes)


# ------------------------------------------------------------------------------------------- peaked
def test_made_task_has_its_shapes_and_is_repeatable(tiny_task, tiny_options):
    assert tiny_task.inputs.shape == (2, int(tiny_task.lengths.max()), 33)
    assert all(20 <= length <= 40 for length in tiny_task.lengths)
    for row, length in zip(tiny_task.inputs, tiny_task.lengths, strict=True):
        assert torch.allclose(row[:length].logsumexp(-1), torch.zeros(int(length)), atol=1e-4)
        assert (row[length:, -1] == 0).all()  # padded frames say blank
    assert [tiny_task.vocabulary.text(tokens) for tokens in tiny_task.tokens] == tiny_task.texts
    (again,) = make_tasks(tiny_options)
    assert torch.equal(again.inputs, tiny_task.inputs)
    assert again.texts == tiny_task.texts
    assert make_tasks(replace(tiny_options, seed=2))[0].texts != tiny_task.texts


def greedy(task):
    return [
        collapse(row[:length].argmax(-1).tolist(), task.vocab_size)
        for row, length in zip(task.inputs, task.lengths, strict=True)
    ]


@pytest.mark.parametrize("strategy", ["alsd_pp", "aes_pp"])
@pytest.mark.parametrize("task", ["peaked", "hard"])
def test_made_transducer_tasks_have_few_errors(tiny_options, task, strategy):
    options = replace(tiny_options, encoder_width=64, prediction_width=64, strategy=strategy, tasks=[task])
    for found, kind in zip(make_tasks(options), ("rnnt", "tdt"), strict=True):
        assert (found.kind, found.name) == (kind, f"{task}-{kind}")
        ours = OURS[strategy](options, found, Setting(4, lm=True))
        outputs = ours.read(ours.run(found.inputs, found.lengths))
        assert Errors.of(found, outputs).ter < (40 if task == "peaked" else 60)
        assert found.first(1).inputs.shape == (1, int(found.lengths[0]), 64 if task == "peaked" else 128)


# --------------------------------------------------------------------------------------------- hard
def test_hard_task_has_errors_that_an_lm_reduces(tiny_options, whole_speech_text):
    options = replace(tiny_options, tasks=["hard"], utterances=20)
    (task,) = make_tasks(options)
    assert len(task.texts) == 20
    assert task.inputs.shape == (20, int(task.lengths.max()), 129)
    assert 100 < task.audio_seconds < 110
    entropy = -(task.inputs[0].exp() * task.inputs[0]).sum(-1)[: task.lengths[0]]
    assert entropy.mean() > 0.5  # peaked posteriors have hardly any
    ours = OURS["flexctc_beam"](options, task, Setting(16, lm=True))
    wer = (Errors.of(task, greedy(task)).wer, Errors.of(task, ours.read(ours.run(task.inputs, task.lengths))).wer)
    assert wer[0] == pytest.approx(51.4, abs=0.5)
    assert wer[1] < 45


# -------------------------------------------------------------------------------------------- files
@pytest.fixture
def files(tmp_path, tiny_task):
    """The tiny task as files, in the forms that `python -m benchmarks` takes."""
    longest = max(map(len, tiny_task.tokens))
    np.savez(
        tmp_path / "task.npz",
        log_probs=tiny_task.inputs.numpy(),
        lengths=tiny_task.lengths.numpy(),
        tokens=np.array([row + [-1] * (longest - len(row)) for row in tiny_task.tokens]),
        texts=np.array(tiny_task.texts),
        frame_seconds=0.08,
    )
    pieces = tiny_task.vocabulary.pieces
    (tmp_path / "pieces.txt").write_text("\n".join(pieces) + "\n")
    lexicon = [f"{w}\t{' '.join(pieces[t] for t in ids)}" for w, ids in tiny_task.lexicon.items()]
    (tmp_path / "lexicon.txt").write_text("\n".join(lexicon) + "\n")
    (tmp_path / "tok.arpa.gz").write_bytes(gzip.compress(tiny_task.lm.read_bytes()))
    return tmp_path


def of_files(files, **changes):
    names = {"data": "task.npz", "tokenizer": "pieces.txt", "lexicon": "lexicon.txt", "lm": "tok.arpa.gz"}
    return BenchOptions(**({key: str(files / name) for key, name in names.items()} | changes))


def test_task_from_files_equals_the_task(files, tiny_task):
    (task,) = make_tasks(of_files(files))
    assert torch.equal(task.inputs, tiny_task.inputs)
    assert (task.texts, task.tokens) == (tiny_task.texts, tiny_task.tokens)
    assert task.vocabulary.pieces == tiny_task.vocabulary.pieces
    assert task.lexicon == tiny_task.lexicon
    assert task.lm.read_bytes() == tiny_task.lm.read_bytes()  # unpacked
    assert task.word_lm is None


def test_files_that_do_not_fit_are_errors(files):
    with pytest.raises(ValueError, match="tokenizer is None"):
        make_tasks(of_files(files, tokenizer=None))
    with pytest.raises(ValueError, match="phrases need lexicon"):
        make_tasks(of_files(files, lexicon=None))[0].phrases(3)
    (files / "lexicon.txt").write_text("word\t▁xyzzy\n")
    with pytest.raises(ValueError, match=r"lexicon.txt: the word 'word' is spelled with '▁xyzzy'"):
        make_tasks(of_files(files))
    (files / "pieces.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match="tokenizer has 2 pieces, expected 32"):
        make_tasks(of_files(files))
    np.savez(files / "task.npz", log_probs=np.zeros((1, 2, 33)))
    with pytest.raises(ValueError, match="lacks the arrays frame_seconds, lengths, texts, tokens"):
        make_tasks(of_files(files))


# ----------- Every peer that is installed reads clear emissions, and says so when it is not installed
NEMO = {"marks": pytest.mark.nemo}


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
def test_peers_decode_clear_emissions(peer, setting, tiny_task, tiny_options):
    if peer.unavailable():
        pytest.skip(peer.unavailable())
    log_probs, lengths = torch.full((2, 2 * max(map(len, tiny_task.tokens)), 33), -20.0), []
    log_probs[:, :, 32] = -1e-6
    for row, tokens in zip(log_probs, tiny_task.tokens, strict=True):  # token, blank, token, blank ...
        lengths.append(2 * len(tokens))
        for i, token in enumerate(tokens):
            row[2 * i, 32] = -20.0
            row[2 * i, token] = -1e-6
    task = replace(tiny_task, inputs=log_probs, lengths=torch.tensor(lengths))
    ready = peer.prepare(tiny_options, task, setting)
    assert Errors.of(task, ready.read(ready.run(task.inputs, task.lengths))).wer == 0
