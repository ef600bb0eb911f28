"""Rows of paged_biglm: the small LM that is pruned, both peers, the counters."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from nemo_gpu_decoding.bench.estimate import write_witten_bell
from nemo_gpu_decoding.bench.large_lm.cases import make_large_lm_cases
from nemo_gpu_decoding.bench.large_lm.prune import write_pruned
from nemo_gpu_decoding.bench.large_lm.strategies import EagerSearch, SmallLMSearch
from nemo_gpu_decoding.bench.large_lm.verify import equal_to_eager
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.run import run
from nemo_gpu_decoding.lm.arpa import read_arpa
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from tests.assets import ASSETS


def some_text(count):
    rng = np.random.default_rng(0)
    words = ["a", "b", "c", "d", "e", "f"]
    return [
        [words[i] for i in rng.choice(6, 7, p=[0.4, 0.3, 0.1, 0.1, 0.05, 0.05])] for _ in range(count)
    ]


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_pruned_lms_are_proper_and_parts_of_the_large_one(tmp_path, share):
    write_witten_bell(some_text(300), 3, tmp_path / "large.arpa")
    write_pruned(tmp_path / "large.arpa", tmp_path / "small.arpa", share)
    large, small = (pack_arpa_in_memory(tmp_path / f"{name}.arpa") for name in ("large", "small"))
    assert small.counts[0] == large.counts[0]
    words, pairs, _ = read_arpa(tmp_path / "large.arpa").orders
    likelier = int((pairs.log10_probs > words.log10_probs[pairs.symbols[:, 1]]).sum())
    wanted = int(share * sum(large.counts)) - small.counts[0]
    assert 0 < small.counts[1] == min(wanted, likelier) < len(pairs.symbols)
    labels = [label for label, word in enumerate(small.words) if word != "<s>"]
    words, pairs = read_arpa(tmp_path / "small.arpa").orders
    backed_off = words.log10_backoffs[pairs.symbols[:, 0]] + words.log10_probs[pairs.symbols[:, 1]]
    assert (pairs.log10_probs > backed_off).all()
    for state in range(small.num_states):
        costs = [small.advance(state, label)[0] for label in labels]
        assert np.exp(-np.array(costs)).sum() == pytest.approx(1.0, abs=1e-3)


def test_the_small_lm_that_is_shipped_is_pruned_from_the_large_one(tmp_path):
    write_pruned(ASSETS / "lm" / "word3.arpa", tmp_path / "small.arpa", 0.05)
    assert (tmp_path / "small.arpa").read_bytes() == (ASSETS / "lm" / "word_small.arpa").read_bytes()


def test_pruning_needs_2_grams(tmp_path):
    write_witten_bell(some_text(10), 1, tmp_path / "one.arpa")
    with pytest.raises(ValueError, match="has no 2-grams"):
        write_pruned(tmp_path / "one.arpa", tmp_path / "small.arpa", 0.5)


def test_rows_beside_small_lm_and_eager(tiny_options, tmp_path, monkeypatch, capsys):
    pytest.importorskip("kaldifst")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    changes = {"graph_beams": [30], "graph_sentences": 300, "small_share": 0.1, "pair_seconds": 0.1}
    peers, out = ["small_lm", "eager", "nemo"], str(tmp_path / "r.json")
    options = replace(tiny_options, strategy="paged_biglm", peers=peers, out=out, **changes)
    rows = run(options)
    assert [row["peer"] for row in rows] == ["small_lm", "eager"]
    assert "no row for nemo with strategy=paged_biglm" in capsys.readouterr().err
    assert rows[1]["verified"]
    for row in rows:
        assert row["ratio"] > 0
        assert row["lms"]["large"] > 5 * row["lms"]["small"]
    asked = {side: work["look_ups"] for side, work in rows[1]["work"].items()}
    assert 0 < asked["ours"] < asked["peer"] / 2
    assert json.loads((tmp_path / "r.json").read_text())["rows"][0]["work"] == rows[0]["work"]


def test_cases_follow_the_peers():
    options = BenchOptions(strategy="paged_biglm", peers=["eager"], graph_beams=[13, 17])
    assert [case.peer for case in make_large_lm_cases(options)] == [EagerSearch] * 2
    options = BenchOptions(strategy="paged_biglm", peers=["small_lm"], graph_beams=[13])
    assert [case.peer for case in make_large_lm_cases(options)] == [SmallLMSearch]


@pytest.mark.parametrize(("gain", "holds"), [(0.0, True), (0.5, True), (-0.5, False)])
def test_worse_costs_are_no_success(gain, holds):
    class Found:
        def __init__(self, score):
            self.score = score

    class Fixed:
        def __init__(self, scores):
            self.scores = scores

        def paths(self, inputs, lengths):
            return [Found(score) for score in self.scores]

    class Task:
        inputs = lengths = None

    verified, how = equal_to_eager(Task(), Fixed([-4.0, -5.0]), Fixed([-4.0 + gain, -5.0]))
    assert verified is holds
    assert how.endswith("of 2")


def test_bad_shares_are_named():
    with pytest.raises(ValueError, match=r"small_share is 0.0, expected a number in \(0, 1\]"):
        BenchOptions(small_share=0.0)
