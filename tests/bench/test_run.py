from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from nemo_gpu_decoding.bench import run as run_module
from nemo_gpu_decoding.bench.cases import Case, Check, make_cases
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.base import Hypothesis, Output, Peer, Setting
from nemo_gpu_decoding.bench.peers.flashlight import Flashlight
from nemo_gpu_decoding.bench.run import measure_case, run
from nemo_gpu_decoding.bench.strategies import STRATEGIES, FlexCTC
from nemo_gpu_decoding.bench.verify import Errors, verify
from nemo_gpu_decoding.metrics import word_errors

pytest.importorskip("kaldialign")

KEYS = {
    "strategy", "peer", "params", "peer_params", "verified", "verified_by", "seconds", "ratio", "target",
    "met", "repetitions", "timing", "rtfx", "wer", "ter", "skipped",
}  # fmt: skip
WITH_LM = Setting(4, lm=True)


class Twin(FlexCTC):
    """Our decoder under another name: what it returns must be found equal."""

    name = "twin"


class FirstTokenOnly(FlexCTC):
    """A deliberately wrong decoder, which claims the scores of right results."""

    def paths(self, log_probs, lengths):
        return [
            replace(path, tokens=path.tokens[:1], frames=path.frames[:1], repeats=path.repeats[:1])
            for path in super().paths(log_probs, lengths)
        ]


class WrongScores(FlexCTC):
    def paths(self, log_probs, lengths):
        return [replace(path, score=path.score + 1) for path in super().paths(log_probs, lengths)]


class Perfect(Peer):
    """Knows the references: no decoder is better."""

    name = "perfect"

    def prepare(self, task, setting: Setting) -> None:
        self._texts = task.texts

    def decode(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Output]:
        return list(self._texts)


class Absent(Perfect):
    name = "absent"
    needs = ("a_module_that_nobody_has",)


@pytest.fixture
def measured(tiny_task, tiny_options, monkeypatch):
    """Measure one case, with our decoder or one that stands in for it."""

    def measure(peer, ours, check, setting=WITH_LM):
        monkeypatch.setitem(STRATEGIES, "flexctc_beam", ours)
        return measure_case(Case(peer, setting, setting, check, target=1000.0), tiny_task, tiny_options)

    return measure


def test_an_equal_decoder_is_verified(measured):
    row = measured(Twin, FlexCTC, Check.EQUAL)
    assert row["verified"] is True
    assert row["verified_by"] == "equal hypotheses: 2 of 2, the peer's utterances decoded alone"
    assert set(row) == KEYS
    assert row["params"] == {"beam_size": 4, "lm": True, "boosting": False, "phrases": 0, "threads": 1}
    assert row["ratio"] == pytest.approx(row["seconds"]["peer"] / row["seconds"]["ours"])
    assert row["ratio"] == pytest.approx(1, abs=0.9)  # it is itself
    assert row["seconds"]["ours"] == row["timing"]["ours"]["cpu"]["median"]
    assert row["met"] is False  # nobody is 1000 times faster than himself
    json.dumps(row)


def test_a_wrong_decoder_is_not_verified(measured):
    row = measured(Twin, FirstTokenOnly, Check.EQUAL)
    assert row["verified"] is False
    assert row["verified_by"].startswith("equal hypotheses: 0 of 2")


def test_a_tie_is_as_good_as_equality(tiny_task, tiny_options):
    """Two tokens, equally likely in every frame: either may come first."""
    log_probs = torch.full((1, 1, 33), -30.0)
    log_probs[0, 0, [3, 7]] = -0.7
    task = replace(tiny_task, log_probs=log_probs, lengths=torch.tensor([1]), texts=["x"], tokens=[[3]])

    class PrefersTheOther(FlexCTC):
        def hypotheses(self, log_probs, lengths):
            (found,) = super().hypotheses(log_probs, lengths)
            return [Hypothesis([10 - found.tokens[0]], found.score)]

    theirs, ours = PrefersTheOther(tiny_options), FlexCTC(tiny_options)
    for decoder in (theirs, ours):
        decoder.prepare(task, Setting(4))
    verdict = verify(Check.EQUAL, task, theirs, ours, (Errors(0, 0), Errors(0, 0)))
    assert verdict.verified
    assert "0 and 1 tied in score of 1" in verdict.how


def test_worse_word_errors_are_not_verified(measured, tiny_task):
    row = measured(Perfect, FirstTokenOnly, Check.WER)
    assert row["verified"] is False
    assert row["wer"]["peer"] == 0
    assert row["ter"]["peer"] is None  # it gave words
    texts = [tiny_task.vocabulary.text(tokens[:1]) for tokens in tiny_task.tokens]
    assert row["wer"]["ours"] == pytest.approx(100 * word_errors(tiny_task.texts, texts).wer, abs=15)


def test_equal_word_errors_are_verified(measured):
    assert measured(Twin, FlexCTC, Check.WER)["verified"] is True


@pytest.mark.parametrize("setting", [Setting(4), WITH_LM, Setting(4, lm=True, phrases=4)])
def test_scores_are_recomputed(measured, setting):
    assert measured(None, FlexCTC, Check.SCORES, setting)["verified"] is True


def test_wrong_scores_are_not_verified(measured):
    row = measured(None, WrongScores, Check.SCORES)
    assert row["verified"] is False
    assert "largest difference 1.0e+00" in row["verified_by"]


def test_a_peer_that_is_not_installed_gives_the_reason(measured):
    row = measured(Absent, FlexCTC, Check.WER)
    assert "a_module_that_nobody_has not installed: pip install" in row["skipped"]
    assert row["verified"] is False
    assert row["ratio"] is None
    assert set(row) == KEYS


def test_a_case_without_its_lm_gives_the_reason(tiny_task, tiny_options):
    case = Case(Twin, WITH_LM, WITH_LM, Check.EQUAL, needs=("lm", "word_lm"))
    row = measure_case(case, replace(tiny_task, word_lm=None), tiny_options)
    assert row["skipped"] == "no word_lm= given"


def test_peers_without_threads_are_said_to_use_one(tiny_task, tiny_options, monkeypatch):
    monkeypatch.setattr(Flashlight, "available", lambda self: "not now")
    setting = Setting(4, threads=8)
    row = measure_case(Case(Flashlight, setting, setting, Check.WER), tiny_task, tiny_options)
    assert (row["params"]["threads"], row["peer_params"]["threads"]) == (8, 1)


def test_a_run_prints_a_table_and_writes_header_and_rows(tmp_path, tiny_options, capsys, monkeypatch):
    few = [
        Case(Twin, WITH_LM, WITH_LM, Check.EQUAL, 0.01),
        Case(Absent, WITH_LM, WITH_LM, Check.WER),
    ]
    monkeypatch.setattr(run_module, "make_cases", lambda options: iter(few))
    out, plot = tmp_path / "r.json", tmp_path / "r.png"
    rows = run(replace(tiny_options, out=str(out), plot=str(plot)))
    written = json.loads(out.read_text())
    assert written.pop("rows") == rows
    assert {"device", "cpu", "versions", "date", "threads", "ratio", "task", "options"} <= set(written)
    assert written["versions"]["torch"] == torch.__version__.split("+")[0] or torch.__version__
    assert plot.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "twin" in printed
    assert "a_module_that_nobody_has not installed" in printed


def test_a_run_that_is_cut_off_keeps_its_rows(tmp_path, tiny_options, monkeypatch):
    def cut_off(options):
        yield Case(Absent, WITH_LM, WITH_LM, Check.WER)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "make_cases", cut_off)
    out = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        run(replace(tiny_options, out=str(out)))
    assert [row["peer"] for row in json.loads(out.read_text())["rows"]] == ["absent"]


def test_out_may_be_a_folder(tmp_path, tiny_options, monkeypatch):
    monkeypatch.setattr(run_module, "make_cases", lambda options: iter(()))
    run(replace(tiny_options, out=str(tmp_path)))
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("flexctc_beam-")
    assert path.suffix == ".json"


def test_no_folder_of_this_machine_gets_into_a_result(tmp_path, tiny_options, monkeypatch):
    monkeypatch.setattr(run_module, "make_cases", lambda options: iter(()))
    out = tmp_path / "r.json"
    run(replace(tiny_options, out=str(out)))
    assert str(tmp_path) not in out.read_text()


def test_the_default_run_has_every_row_that_is_promised():
    cases = [
        (
            case.peer.name if case.peer else "self",
            case.theirs.beam_size,
            case.theirs.lm,
            case.theirs.phrases,
        )
        for case in make_cases(BenchOptions())
    ]
    expected = [("nemo", k, lm, n) for lm, n in ((False, 0), (True, 0), (True, 200)) for k in (4, 8, 16)]
    expected += [("nemo_greedy", 0, False, 0)]
    expected += [("flashlight", k, True, 0) for k in (4, 8, 16)]
    expected += [("pyctcdecode", k, True, n) for n in (0, 200) for k in (4, 8, 16)]
    expected += [("self", 16, True, 10)]
    assert cases == expected
