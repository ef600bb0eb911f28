"""The demo keeps what it promises."""

import json
import re
import sys
from collections import Counter

import pytest

from nemo_gpu_decoding.cli.dev_set import DevSet
from nemo_gpu_decoding.metrics import PhraseWords
from tests.assets import ROOT, load_script

demo = load_script(ROOT / "scripts" / "demo.py")
Row, differences = demo.Row, demo.differences

STRATEGIES = {"ctc": "flexctc_beam", "rnnt": "alsd_pp", "tdt": "alsd_pp"}
WORD_GRAPH = ["cuda_wfst + LM", "cuda_wfst + LM + phrases"]
TWO_LMS = [f"paged_biglm + {lms}" for lms in ("small LM", "large LM", "large LM + phrases")]


@pytest.fixture
def run(monkeypatch):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
        return demo.main()

    return call


@pytest.mark.slow
@pytest.mark.nemo
def test_each_step_of_the_demo_helps(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "REPEATS", 1)  # the test reads no times
    pytest.importorskip("nemo.collections.asr")
    pytest.importorskip("kaldifst")
    out = tmp_path / "build" / "demo.json"
    plot = tmp_path / "build" / "demo.png"
    assert run(f"out={out}", f"plot={plot}", "show=60") == 0
    assert plot.stat().st_size > 10_000
    rows = json.loads(out.read_text())
    assert all(set(row) == {"model", "decoder", "wer", "fscore", "seconds"} for row in rows)
    assert all(row["seconds"] > 0 for row in rows)
    printed = capsys.readouterr().out
    for model, strategy in STRATEGIES.items():
        own = [row for row in rows if row["model"] == model]
        decoders = ["greedy", strategy, f"{strategy} + LM", f"{strategy} + LM + phrases"]
        more = {"ctc": WORD_GRAPH + TWO_LMS, "tdt": [f"{strategy} + LM + aliases"]}.get(model, [])
        assert [row["decoder"] for row in own] == decoders + more
        greedy, plain, with_lm, with_phrases, *others = own
        assert 0.1 < greedy["wer"] < 0.2
        assert plain["wer"] <= greedy["wer"]
        assert with_lm["wer"] < 0.8 * plain["wer"]
        assert with_phrases["wer"] < 0.75 * with_lm["wer"]
        assert max(greedy["fscore"], plain["fscore"], with_lm["fscore"]) < 0.15
        assert with_phrases["fscore"] >= 0.7
        if model == "ctc":
            assert with_lm["wer"] < 2 / 3 * greedy["wer"]
            words, boosted, small, large, large_boosted = others
            assert words["wer"] < 0.6 * min(greedy["wer"], plain["wer"])
            assert large["wer"] < 0.9 * small["wer"] < 0.7 * greedy["wer"]
            for row, without in ((boosted, words), (large_boosted, large)):
                assert row["wer"] < 0.75 * without["wer"]
                assert row["fscore"] >= 0.7 > without["fscore"] + 0.5
        if model == "tdt":  # the weight of the aliases is the default
            assert others[0]["wer"] < with_phrases["wer"]
            assert others[0]["fscore"] > with_phrases["fscore"]
        assert all(f"\n{decoder}" in printed for decoder in decoders)
    assert "reference" in printed
    check_the_live_stream(printed)
    check_the_example_of_the_docs(printed)
    check_the_record(rows)


def check_the_live_stream(printed):
    """Transcripts on the way to the text that the speech has."""
    lines = re.findall(r"^ +([\d.]+) s  (partial|final) +(.*)$", printed, re.M)
    texts = [text for _, _, text in lines]
    assert [kind for _, kind, _ in lines] == ["partial"] * (len(lines) - 1) + ["final"]
    assert len(set(texts[:-1])) > 4
    assert texts[-1].startswith("page two of the contract mentions teresa and")
    assert [float(seconds) for seconds, _, _ in lines] == sorted(float(seconds) for seconds, _, _ in lines)


def check_the_example_of_the_docs(printed):
    """The utterance that docs/index.md begins with."""
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    printed = re.sub(r"\*\*\* | \*\*\*", "", printed)  # words that a transcript lacks
    for label, decoder in (
        ("reference", "reference"), ("greedy", "greedy"), ("+ LM + phrases", "flexctc_beam + LM + phrases")
    ):  # fmt: skip
        (text,) = re.findall(rf"^\| {re.escape(label)} \| (chapter.*) \|$", page, re.M)
        assert re.search(rf"^ +{re.escape(decoder)} +{text}$", printed, re.M), label


def check_the_record(rows):
    """The tables of README and docs have this record. Sums of floats may change a word on other machines."""
    record = json.loads((ROOT / "docs" / "results" / "demo.json").read_text(encoding="utf-8"))
    assert [(row["model"], row["decoder"]) for row in rows] == [(row["model"], row["decoder"]) for row in record]
    for row, recorded in zip(rows, record, strict=True):
        assert row["wer"] == pytest.approx(recorded["wer"], abs=0.005)
        assert row["fscore"] == pytest.approx(recorded["fscore"], abs=0.03)


def test_wrong_and_lacking_words_are_red_and_phrases_green():
    shown = demo.coloured("call miss san jose now", "call mister san jose", PhraseWords.of(["san jose", "call me"]))
    assert shown.plain == "call mister san jose ***"
    assert [(shown.plain[span.start : span.end], span.style) for span in shown.spans] == [
        ("mister", "red"), ("san", "green"), ("jose", "green"), ("***", "red"),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.nemo
def test_speech_is_encoded_once_and_searched_a_few_times(run, capsys, monkeypatch):
    pytest.importorskip("nemo.collections.asr")
    steps, encode, decode = Counter(), demo.encode, DevSet.decode
    monkeypatch.setattr(demo, "encode", lambda *args: steps.update(["encode"]) or encode(*args))
    monkeypatch.setattr(DevSet, "decode", lambda *args: steps.update(["decode"]) or decode(*args))
    assert run("models=[tdt]", "utterances=2", "beam_size=2") == 0
    assert re.search(r"\ntdt: 2 utterances, \d+ s of speech", capsys.readouterr().out)
    # what a demo of minutes can be made of, whatever the machine: speech is encoded once, searched a few times
    assert steps == {"encode": 1, "decode": 4 * demo.REPEATS}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data=nowhere", "expected the folder assets/self of the source tree"),
        ("models=[cct]", "models is ['cct'], expected any of ctc, rnnt, tdt"),
    ],
)
def test_wrong_option_is_named(run, capsys, argument, message):
    assert run(argument) == 2
    assert message in capsys.readouterr().err
