"""The model that drifts into other languages, its lock and its preset."""

import math

import pytest

from benchmarks import drift
from nemo_gpu_decoding.presets import load_preset
from tests.assets import ROOT

FOLDER = ROOT / "assets" / "drift"


def test_words_are_foreign_if_another_language_has_a_closer_one():
    text = drift.Text(FOLDER)
    assert text.languages == ["en", "fr", "es"]
    assert text.foreign_share(["le the mayre maire childre"], "fr") == 40.0  # the, childre
    assert text.foreign_share(["le the"], "en") == 50.0
    assert text.foreign_share([""], "fr") == 0.0


def test_the_preset_has_lock_and_density_ratio():
    beam = load_preset(str(FOLDER / "french.yaml")).beam
    assert 0 < beam.source_lm_alpha < beam.ngram_lm_alpha
    assert 0 < beam.allowed_price < math.inf


@pytest.mark.slow
def test_lock_and_density_ratio_keep_to_the_language(monkeypatch, capsys):
    options = "heads=[TDT] lm_weights=[0.8] ratios=[0.5] prices=[4] rounds=1"
    monkeypatch.setattr("sys.argv", ["drift", *options.split()])
    assert drift.main() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("TDT drift")]
    foreign = {row[2]: float(row[-4]) for row in rows}
    wer = {row[2]: float(row[-3]) for row in rows}
    assert foreign["greedy"] >= 9.0
    assert foreign["lock,"] <= 2.0
    assert wer["lock,"] < 0.5 * wer["greedy"]
