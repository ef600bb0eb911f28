"""Rows: verified before they are timed, written, printed; the table of all rows; the checks."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cases as cases_module
from benchmarks import run as run_module
from benchmarks.cases import NO_TDT, ONE_FUSION, Case, Check, Line, make_cases
from benchmarks.options import STRATEGIES, BenchOptions
from benchmarks.ours import flexctc_beam
from benchmarks.peers.base import Hypothesis, Peer, Ready, Setting
from benchmarks.run import run
from benchmarks.tasks import Weights
from benchmarks.verify import Errors, beside, classify, compare, lm_scores
from nemo_gpu_decoding import pack_arpa_in_memory
from nemo_gpu_decoding.metrics import word_errors
from tests.assets import ASSETS, CTC_MODEL, ROOT

pytestmark = pytest.mark.slow
pytest.importorskip("kaldialign")

KEYS = {
    "strategy", "peer", "task", "networks", "part", "batch", "params", "peer_params", "verified",
    "verified_by", "seconds", "ratio", "repetitions", "timing", "rtfx", "wer", "ter", "fscore", "skipped",
    "roofline",
}  # fmt: skip
WITH_LM = Setting(4, lm=True)
TWIN = Peer("twin", flexctc_beam, multithreaded=True)  # our decoder under another name
ABSENT = Peer("absent", flexctc_beam, ("a_module_that_nobody_has",))


def changed(change):
    """Our decoder, but `change` is made to its paths and hypotheses."""

    def prepare(options, task, setting):
        ready = flexctc_beam(options, task, setting)
        decode = ready.decoder.decode

        def decode_changed(*batch):
            return [replace(nbest, paths=tuple(map(change, nbest.paths))) for nbest in decode(*batch)]

        return ready._replace(
            run=decode_changed,
            hypotheses=lambda *batch: [
                [Hypothesis(path.tokens.tolist(), path.score) for path in nbest] for nbest in decode_changed(*batch)
            ],
            decoder=SimpleNamespace(decode=decode_changed),
        )

    return prepare


def first_token_only(path):
    return replace(path, tokens=path.tokens[:1], frames=path.frames[:1], repeats=path.repeats[:1])


def perfect(options, task, setting):
    """Knows the references: no decoder is better."""
    return Ready(lambda *batch: task.texts, list)


@pytest.fixture
def measured(tiny_task, tiny_options, monkeypatch):
    """Measure one case, with our decoder or one that stands in for it."""

    def measure(peer, check, ours=flexctc_beam, setting=WITH_LM):
        monkeypatch.setitem(run_module.OURS, "flexctc_beam", ours)
        setup = run_module.Setup(tiny_options, run_module.find_hardware("cpu", 1))
        return run_module.BatchBench(setup, tiny_task, None).measure(Case(tiny_task, peer, setting, setting, check))

    return measure


def test_an_equal_decoder_is_verified(measured):
    row = measured(TWIN, Check.EQUAL)
    assert row["verified"] is True
    assert row["verified_by"].startswith("equal hypotheses and scores: 2 of 2, scores differ by at most 0.0")
    assert "the peer's utterances decoded alone; scores recomputed: 2 of 2" in row["verified_by"]
    assert set(row) == KEYS | {"graphs"}
    shown = {"beam_size": 4, "lm": True, "boosting": False, "phrases": 0, "threads": 1}
    assert row["params"] == row["peer_params"] == shown
    assert row["ratio"] == pytest.approx(row["seconds"]["peer"] / row["seconds"]["ours"])
    assert row["ratio"] == pytest.approx(1, abs=0.9)  # it is itself
    assert row["seconds"]["ours"] == row["timing"]["ours"]["cpu"]["median"]
    json.dumps(row)


@pytest.mark.parametrize(
    ("change", "check", "seen"),
    [
        (first_token_only, Check.EQUAL, "scores recomputed: 0 of 2 agree"),
        (lambda path: replace(path, score=path.score + 1), Check.EQUAL, "0, 2 better of 2"),
        (lambda path: replace(path, score=path.score + 1), Check.SCORES, "largest difference 1.0e+00"),
    ],
)
def test_a_wrong_decoder_is_not_verified(measured, change, check, seen):
    row = measured(TWIN, check, changed(change))
    assert row["verified"] is False
    assert seen in row["verified_by"]


def test_compare_verifies_ties(tiny_task, tiny_options):
    """Two tokens, equally likely in every frame: either may come first."""
    log_probs = torch.full((1, 1, 33), -30.0)
    log_probs[0, 0, [3, 7]] = -0.7
    task = replace(tiny_task, inputs=log_probs, lengths=torch.tensor([1]), texts=["x"], tokens=[[3]])
    ours = flexctc_beam(tiny_options, task, Setting(4))

    def other(*batch):
        ((found, *_),) = ours.hypotheses(*batch)
        return [[Hypothesis([10 - found.labels[0]], found.score)]]

    verdict = compare(Check.EQUAL, task, ours._replace(hypotheses=other), ours)
    assert verdict.verified
    assert "0, 1 tied of 1" in verdict.how


@pytest.mark.parametrize(
    ("listed", "ours", "kind"),
    [
        ([([1], -2.0)], ([1], -2.0), "equal"),
        ([([1], -2.0)], ([1], -1.0), "better"),
        ([([1], -2.0)], ([1], -3.0), "worse"),
        ([([1], -2.0)], ([1], float("nan")), "worse"),
        ([([1], -2.0)], ([2], -2.0), "tied"),
        ([([1], -2.0)], ([2], -1.0), "better"),
        ([([], -float("inf"))], ([2], -1.0), "better"),  # Kaldi found nothing
        ([([1], -2.0), ([2, 2], -3.0)], ([2, 2], -3.0), "tied"),  # per token both are at -1
        ([([1], -2.0), ([2, 2], -3.0)], ([2, 2], -2.9), "better"),  # not the score that it has
        ([([1], -2.0), ([2], -2.5)], ([2], -2.5), "worse"),
        ([([1], -2.0), ([2], -2.5)], ([3], -2.0), "worse"),  # of several it is none
    ],
)
def test_classify_names_equal_tied_and_worse_hypotheses(listed, ours, kind):
    assert classify([Hypothesis(*h) for h in listed], Hypothesis(*ours), 1e-3, per_token=True)[0] == kind


@pytest.mark.parametrize(("gain", "holds"), [(0.0, True), (0.5, True), (-0.5, False)])
@pytest.mark.parametrize("check", [Check.COSTS, Check.WORDS])
def test_compare_does_not_verify_worse_costs(check, gain, holds):
    def fixed(*scores):
        return Ready(None, None, lambda *batch: [[Hypothesis([1], score)] for score in scores])

    task = SimpleNamespace(inputs=None, lengths=None, transducer=None)
    assert compare(check, task, fixed(-4.0, -5.0), fixed(-4.0 + gain, -5.0)).verified is holds


@pytest.mark.parametrize("rounded", [True, False])
def test_compare_allows_rounding_of_networks_only_where_they_round(rounded):
    """A batch of another size is another matrix product on a GPU."""

    def hypotheses(inputs, lengths):
        return [[Hypothesis([1], -4.0 - 1e-5 * (len(inputs) > 1))] for _ in inputs]

    task = SimpleNamespace(inputs=torch.zeros(2, 3, 4), lengths=torch.tensor([3, 3]), transducer="rnnt")
    ours = Ready(None, None, hypotheses)
    assert compare(Check.ALONE, task, ours, ours, rounded=rounded).verified is rounded


def test_lm_scores_does_not_verify_other_lms(tmp_path):
    lm = pack_arpa_in_memory(ASSETS / "lm" / "word3.arpa")
    score = -lm.score(["no such word"])

    def found(lm_score, notes=()):
        best = SimpleNamespace(parts=SimpleNamespace(lm=lm_score), words=(SimpleNamespace(text="no such word"),))
        return SimpleNamespace(best=best, notes=notes)

    cut_off = found(score + 3.0, ("no hypothesis has reached a final state of the graph; ...",))
    assert lm_scores(lm, [found(score)]).verified
    verdict = lm_scores(lm, [found(score), cut_off, found(score)])
    assert verdict.verified
    assert verdict.how == "LM scores of 2 of 2 texts off by at most 1e-02; 1 more end within a word"
    assert not lm_scores(lm, [found(score), found(score + 0.1)]).verified
    assert not lm_scores(lm, [found(score), found(float("nan"))]).verified
    assert not lm_scores(lm, [found(score), cut_off]).verified
    limited = lm_scores(lm, [found(score), found(score - 0.1)], limited=True)
    assert (limited.verified, limited.how.partition("1e-02")[2]) == (True, ", 1 found by dearer paths")
    assert not lm_scores(lm, [found(score), found(score - 0.1)]).verified
    assert not lm_scores(lm, [found(score), found(score + 0.1)], limited=True).verified
    assert not lm_scores(lm, []).verified


def test_word_errors_are_compared(measured, tiny_task):
    row = measured(Peer("perfect", perfect), Check.WER, changed(first_token_only))
    assert row["verified"] is False
    assert row["wer"]["peer"] == 0
    assert row["ter"]["peer"] is None  # it gave words
    texts = [tiny_task.vocabulary.text(tokens[:1]) for tokens in tiny_task.tokens]
    assert row["wer"]["ours"] == pytest.approx(100 * word_errors(tiny_task.texts, texts).wer, abs=15)
    for check in (Check.WER, Check.ABOUT):
        assert measured(TWIN, check)["verified"] is True
        assert measured(Peer("perfect", perfect), check, changed(first_token_only))["verified"] is False


def test_a_peer_that_fails_gives_the_reason_and_our_own_failures_are_raised(measured):
    def prepare(options, task, setting):
        raise RuntimeError("no kernel image is available")

    row = measured(Peer("broken", prepare), Check.WER)
    assert row["skipped"] == "broken does not work here: RuntimeError: no kernel image is available"
    with pytest.raises(RuntimeError, match="no kernel image"):
        measured(Peer("flexctc_beam", prepare), Check.WER)


# ---------------------------------------------------------------------------------------- the table
def listed(options, tasks=None):
    tasks = tasks or [SimpleNamespace(
        lm="lm", word_lm="lm", lexicon={"a": (1,)}, transducer=None, kind=None, weights=Weights(),
    )]  # fmt: skip
    return list(make_cases(options, tasks))


GRAPH_BEAMS = (10, 13, 17, 25)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"beams": [4]},
         [("nemo", 4, False, 0), ("nemo", 4, True, 0), ("nemo", 4, True, 200), ("nemo_greedy", 0, False, 0),
          ("flashlight", 4, True, 0), ("pyctcdecode", 4, True, 0), ("pyctcdecode", 4, True, 200),
          ("self", 4, True, 10)]),
        ({"peers": ["greedy_fusion"], "beams": [8], "many_phrases": 0},
         [("greedy_fusion", 0, lm, phrases) for phrases in (0, 200) for lm in (False, True)]),
        ({"peers": ["word_graph"], "many_phrases": 0}, [("compact", 25, True, 0), ("normal", 25, True, 0)]),
        ({"strategy": "cuda_wfst"}, [("kaldi_decoder", beam, True, 0) for beam in GRAPH_BEAMS]),
        ({"strategy": "cuda_wfst", "peers": ["topologies"]},
         [(name, beam, True, 0) for name in ("normal", "minimal") for beam in GRAPH_BEAMS]),
        ({"strategy": "paged_biglm", "peers": ["eager"]},
         [*(("eager", beam, True, 0) for beam in GRAPH_BEAMS), *[("self", 25, True, 0)] * 2]),
        ({"device": "cuda", "batches": [1, 8], "beams": [4]},
         [(peer, 0 if peer == "nemo_greedy" else 4, phrases > 0 and peer == "nemo", phrases * (peer == "nemo"))
          for _ in range(4) for peer in ("nemo", "nemo_greedy") for phrases in (0, 200)]),
    ],
)  # fmt: skip
def test_run_has_a_row_per_peer_and_beam(options, expected):
    cases = listed(BenchOptions(**options))
    found = [(c.peer.name if c.peer else "self", c.theirs.beam_size, c.theirs.lm, c.theirs.phrases) for c in cases]
    assert found == expected


def test_batches_on_a_cpu_have_rows_with_and_without_the_encoder():
    options = BenchOptions(strategy="alsd_pp", peers=["greedy_fusion"], batches=[1, 2], end_to_end=True, phrases=0)
    parts = dict.fromkeys((case.batch, case.part) for case in listed(options))
    assert list(parts) == [(size, part) for size in (1, 2) for part in ("decoder", "end to end")]
    assert {case.batch for case in listed(BenchOptions())} == {None}


def test_unbatched_rows_are_those_of_nemo():
    tasks = [
        SimpleNamespace(lm="lm", word_lm="lm", lexicon={}, transducer=None, kind=kind, weights=Weights())
        for kind in ("rnnt", "tdt")
    ]
    cases = listed(BenchOptions(strategy="alsd_pp", peers=["unbatched"], beams=[8]), tasks)
    assert [(c.peer.name, c.skipped) for c in cases] == [
        ("nemo_alsd_unbatched", None), ("nemo_alsd_unbatched", "NeMo has no alsd for TDT"),
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_default_runs_are_timed_for_less_than_two_minutes(strategy):
    options = BenchOptions(strategy=strategy)
    assert len(listed(options)) * len(options.tasks) * options.pair_seconds < 120


def test_errors_have_the_f_score_of_the_phrases(tiny_task):
    said = tiny_task.texts[0].split()[0]
    errors = Errors.of(tiny_task, tiny_task.texts, [said])
    assert (errors.wer, errors.fscore) == (0.0, 1.0)
    assert Errors.of(tiny_task, [""] * len(tiny_task.texts), [said]).fscore == 0.0
    assert Errors.of(tiny_task, tiny_task.texts) == Errors(0.0, None)  # words have no token errors
    assert Errors.of(tiny_task, tiny_task.tokens) == Errors(0.0, 0.0)


def test_skipped_rows_have_a_reason():
    task = SimpleNamespace(lm=None, word_lm=None, lexicon={}, transducer=None, kind=None, weights=Weights())
    reasons = {case.skipped for case in listed(BenchOptions(), [task])}
    assert {"no lm= given", "no lm=, word_lm= given", "no lm=, lexicon= given", None} <= reasons
    assert {c.skipped for c in listed(BenchOptions(strategy="cuda_wfst"), [task])} == {"no word_lm= given"}
    task.kind, task.lm, task.lexicon = "tdt", "lm", {"a": (1,)}
    cases = listed(BenchOptions(strategy="aes_pp", beams=[4]), [task])
    assert [case.skipped for case in cases] == [NO_TDT, None]
    task.kind = "rnnt"
    cases = listed(BenchOptions(strategy="aes_pp", beams=[4]), [task])
    assert [case.skipped for case in cases] == [None, None, ONE_FUSION, None, None]


# ------------------------------------------------------------------------------------------ whole runs
@pytest.fixture
def few(monkeypatch):
    lines = (Line("flexctc_beam", "nemo", TWIN, Check.EQUAL), Line("flexctc_beam", "nemo", ABSENT, Check.WER))
    monkeypatch.setattr(cases_module, "TABLE", lines)


def test_a_run_prints_a_table_and_writes_header_and_rows(tmp_path, tiny_options, few, capsys):
    out = tmp_path / "r.json"
    rows = run(replace(tiny_options, peers=["nemo"], out=str(out), note="a test"))
    written = json.loads(out.read_text())
    assert written.pop("rows") == rows
    assert {"device", "cpu", "versions", "commit", "date", "threads", "clock", "tasks", "options"} <= set(written)
    assert written["options"]["note"] == "a test"
    assert written["versions"]["torch"] == torch.__version__.split("+")[0] or torch.__version__
    printed = capsys.readouterr()
    assert f"flexctc_beam on {written['device']}" in printed.out
    assert "twin" in printed.out
    assert "a_module_that_nobody_has not installed" in printed.out

    assert str(tmp_path) not in out.read_text()  # no folder of this machine gets into a result
    draw = [sys.executable, str(ROOT / "docs" / "results" / "records.py"), "plot", str(out), str(tmp_path / "r.png")]
    subprocess.run(draw, check=True)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_cut_off_keeps_its_rows(tmp_path, tiny_options, few, monkeypatch):
    measure = run_module.BatchBench.measure

    def cut_off(self, case):
        if case.peer is TWIN:
            return measure(self, case._replace(peer=ABSENT))
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module.BatchBench, "measure", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run(replace(tiny_options, peers=["nemo"], out=str(tmp_path)))
    (path,) = tmp_path.iterdir()  # out may be a folder
    assert path.name.startswith("flexctc_beam-")
    assert [row["peer"] for row in json.loads(path.read_text())["rows"]] == ["absent"]


def test_beside_counts_same_better_and_worse():
    def results(*paths):
        return [SimpleNamespace(best=SimpleNamespace(text=text, score=score)) for text, score in paths]

    static = results(("a", -1.0), ("b", -1.0), ("c", -1.0), ("d", -1.0))
    ours = results(("a", -1.5), ("x", -0.5), ("y", -1.5), ("z", -1.0))
    assert beside(static, ours) == {"same": 1, "better": 1, "worse": 2}


@pytest.mark.nemo
def test_run_with_a_model_and_a_manifest(tiny_options):
    pytest.importorskip("nemo.collections.asr")
    rows = run(replace(
        tiny_options, peers=["nemo"], model=str(CTC_MODEL),
        manifest=str(ASSETS / "speech" / "test.json"),
        lm=str(ASSETS / "lm" / "tok3.arpa"), word_lm=str(ASSETS / "lm" / "word3.arpa"), phrases=8,
    ))  # fmt: skip
    assert len(rows) == 4
    assert [row["verified_by"] for row in rows if not row["verified"]] == []
    assert all(row["wer"]["ours"] < 60 for row in rows)
