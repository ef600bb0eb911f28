"""The cells of phrase boosting: lists of phrases, choices on dev, and one row."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import boosting_cells as cells
from nemo_gpu_decoding.cli.options import parse_options
from tests.assets import ASSETS


def options(*given):
    return parse_options(cells.CellOptions, given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["sets=[lj]"], "needs folder=FOLDER"),
        (["sets=[cities]"], "sets holds cities, expected any of shipped, lj, digits"),
        (["heads=[LSTM]"], "heads holds LSTM, expected any of CTC, CTC"),
    ],
)
def test_sets_and_heads_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        options(*given)


def test_phrase_lists_of_the_shipped_set(tmp_path):
    files = cells.Files("shipped", options("distractors=50"), str(tmp_path))
    listed = (ASSETS / "phrases.txt").read_text().split()
    lists = files.lists
    assert lists["dev"] == lists["test"] == listed
    texts = [json.loads(line)["text"].split() for line in (ASSETS / "speech" / "test.json").read_text().splitlines()]
    spoken = {word for text in texts for word in text}
    assert lists["test-wrong"] == [name for name in listed if name not in spoken]
    assert len(lists["test-wrong"]) == 16
    many = lists["test-many"]
    assert many[:18] == [name for name in listed if name in spoken]
    assert len(set(many)) == 68
    assert not spoken & set(many[18:])
    assert many == cells.Files("shipped", options("distractors=50"), str(tmp_path)).lists["test-many"]


def counts(errors, false=0, fscore=0.5):
    return {"errors": errors, "false": false, "fscore": fscore}


class FakeCell(cells.Cell):
    """Counts of each way on dev, in place of decodings."""

    def __init__(self, kind, on_dev):
        super().__init__("fake", kind, None, {}, SimpleNamespace())
        self._on_dev, self.asked = on_dev, []

    def _decode(self, way, phrases):
        self.asked.append((way, phrases, self.lm_weight))
        return self._on_dev(way, self.lm_weight)


def test_measure_takes_the_weights_that_are_best_on_dev():
    def on_dev(way, lm_weight):
        if way.weight is None:
            return counts(10 if lm_weight == 0.6 else 11)
        if way.name == "nemo":
            return counts(5, false=1)
        if way.ac_threshold:
            return counts(6 if (way.weight, way.ac_threshold) == (1.5, 0.1) else 9)
        return counts(5, false=2 if way.weight > 0.5 else 1)

    cell = FakeCell(cells.HEADS["CTC + LM"], on_dev)
    row = cells.measure(cell, [0.03, 0.1])
    assert row["lm_weight"] == 0.6
    chosen = {name: found["way"] for name, found in row["results"].items()}
    assert chosen["default"] == {"name": "default", "weight": 0.5, "ac_threshold": 0.0}
    assert chosen["nemo"]["weight"] == 0.5
    assert (chosen["threshold"]["weight"], chosen["threshold"]["ac_threshold"]) == (1.5, 0.1)
    assert chosen["tuned"] == chosen["threshold"]  # 6 errors; the others have 5, and a false phrase that counts 2
    assert [gate["ac_threshold"] for gate in row["gate"]] == [0.0, 0.03, 0.1]
    asked = [key for key in cell.asked if key[0].name != cells.UNWEIGHTED]
    assert {way.weight for way, _, _ in asked if way.weight} == {0.5, 1.0, 1.5}
    keys = [(way.name == "nemo", *way[1:], phrases, weight) for way, phrases, weight in asked]
    assert len(keys) == len(set(keys))  # no decoding is repeated


def test_measure_leaves_out_nemo_refunds_for_word_graphs():
    row = cells.measure(FakeCell(cells.HEADS["word graphs"], lambda way, weight: counts(1)), [0.03])
    assert list(row["results"]) == ["none", "default", "threshold", "tuned"]


@pytest.mark.slow
@pytest.mark.nemo
def test_boosting_cells_smoke_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("nemo.collections.asr")
    out = tmp_path / "cells.json"
    arguments = ["heads=[CTC]", "thresholds=0.03", "distractors=20", f"out={out}"]
    monkeypatch.setattr("sys.argv", ["boosting_cells", *arguments])
    assert cells.main() == 0
    (row,) = json.loads(out.read_text())["rows"]
    plain, boosted = (row["results"][name]["test"] for name in ("none", "default"))
    assert boosted["errors"] < plain["errors"]
    assert boosted["found"] > plain["found"] == 0
    assert row["results"]["default"]["test-wrong"]["found"] == 0
    default = next(point for point in row["curve"] if point["factor"] == 1)
    assert default["test"]["found"] > 0
    assert row["curve"][-1]["test"]["found"] >= default["test"]["found"] > row["curve"][0]["test"]["found"]
    assert "shipped  CTC" in capsys.readouterr().out
